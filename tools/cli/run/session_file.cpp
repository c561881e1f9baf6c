#include "tools/cli/run/session_file.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

#include "sluice/error.hpp"
#include "sluice/step/page.hpp"
#include "tools/cli/link/profile_cache.hpp"
#include "tools/cli/text/message.hpp"
#include "tools/cli/text/progress_bar.hpp"
#include "tools/llama/file_digest.hpp"
#include "tools/llama/one_error.hpp"

namespace sluice::tools {
namespace {

namespace fs = std::filesystem;

/// Of all bytes of all files that keys and values depend on: configuration and weights.
std::string signature_of_model(const std::string& directory) {
  std::vector<fs::path> files;
  std::uint64_t total = 0, done = 0;
  for (const auto& entry : fs::directory_iterator(directory)) {
    const fs::path& path = entry.path();
    if (path.filename() != "config.json" && path.extension() != ".safetensors") continue;
    files.push_back(path);
    total += fs::file_size(path);
  }
  std::ranges::sort(files);
  const fs::path cache = cache_directory();
  const DigestCache digests(cache.empty() ? cache : cache / "digests");
  ProgressBar bar("digest of the weights, MiB");
  std::string text;
  for (const fs::path& file : files) {
    const std::uint64_t before = done;
    const std::string digest = digests.of(file, [&](std::uint64_t bytes) {
      done += bytes;
      bar.update(done / MiB, total / MiB);
    });
    done = before + fs::file_size(file);
    text += (text.empty() ? "" : ", ") + file.filename().string() + " " + digest;
  }
  // A model of hundreds of files has more names than a parked sequence may be given.
  return text.size() < KiB ? text : std::to_string(files.size()) + " files " + digest_of(text);
}

}  // namespace

std::string session_model(const RunOptions& options, const PolicySpec& policy, const PrefillSpec& prefill) {
  const std::string model = options.model.empty() ? "random " + options.random_weights
                                                  : as_one_error("look at the model's files",
                                                                 [&] { return signature_of_model(options.model); });
  return model + "; policy " + to_string(policy) + "; prefill " + to_text(prefill);
}

void require_room(const std::string& file, const EngineOptions& options, std::uint32_t tokens) {
  const fs::path parent = fs::absolute(file).parent_path();
  const auto refuse = [&](const std::string& why) { throw Error(Errc::io, "--session " + file + ": " + why); };
  if (::access(parent.c_str(), W_OK | X_OK) != 0)
    refuse("cannot write to " + parent.string() + ": " + std::strerror(errno) +
           "; choose a path in an existing directory that you may write to");
  const PageLayout layout{.head_dim = options.shape.head_dim, .dtype = options.kv_dtype};
  const std::uint64_t bytes =
      std::uint64_t{2} * layout.row_bytes() * options.shape.layers * options.shape.kv_heads * tokens;
  std::error_code unknown;
  const std::uintmax_t available = fs::space(parent, unknown).available;
  // A new file is whole before an old one goes.
  if (!unknown && available < bytes)
    refuse("takes " + std::to_string(bytes) + " bytes, and " + parent.string() + " has " + std::to_string(available) +
           " left; make room there, or choose a path on another file system");
}

std::optional<SequenceId> resume_session(sluice::Engine& engine, const std::string& file, const std::string& model,
                                         std::span<const int> prompt) {
  try {
    const SequenceId sequence = engine.resume(file, model);
    const auto known = std::min<std::size_t>(engine.tokens(sequence), prompt.size());
    engine.name_tokens(sequence, 0, prompt.first(known));  // As they are named already.
    engine.truncate(sequence, static_cast<std::uint32_t>(std::min(known, prompt.size() - 1)));
    return sequence;
  } catch (const Error& error) {
    if (error.code() == Errc::not_found) return std::nullopt;
    throw Error(error.code(), "--session " + file + " is not of this prompt and model: " + error.what() +
                                  "; give another file, or remove this one");
  }
}

void ParkedPrompt::prefill(std::span<const int> tokens, const Progress& progress) {
  session_.prefill(tokens.subspan(session_.tokens()), progress);
  engine_.name_tokens(session_.sequence(), 0, tokens);
  try {
    engine_.park(session_.sequence(), file_, model_);
  } catch (const Error& error) {  // What was read is still there to be answered, and said at once lest that fails, too.
    failed_ = true;
    say("error: --session " + file_ + " was not written: " + error.what());
  }
}

}  // namespace sluice::tools

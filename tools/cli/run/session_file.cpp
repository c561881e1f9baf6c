#include "tools/cli/run/session_file.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "cpu/machine/crc32c.hpp"
#include "sluice/error.hpp"
#include "tools/cli/text/message.hpp"
#include "tools/llama/one_error.hpp"

namespace sluice::tools {
namespace {

namespace fs = std::filesystem;

/// Size of a file, and a checksum of its beginning and its end.
std::string signature(const fs::path& path) {
  constexpr std::uint64_t kMost = 64 * KiB;
  const std::uint64_t size = fs::file_size(path);
  std::ifstream in(path, std::ios::binary);
  std::vector<char> bytes(2 * std::min(size, kMost));
  const auto half = static_cast<std::streamsize>(bytes.size() / 2);
  in.read(bytes.data(), half);
  in.seekg(static_cast<std::streamoff>(size) - half);
  in.read(bytes.data() + half, half);
  if (!in) throw Error(Errc::io, "cannot read " + path.string() + "; use a model that you may read");
  return path.filename().string() + " " + std::to_string(size) + " " +
         std::to_string(cpu::crc32c(std::as_bytes(std::span(bytes))));
}

std::string signature_of_model(const std::string& directory) {
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(directory)) {
    const fs::path& path = entry.path();
    if (path.filename() == "config.json" || path.extension() == ".safetensors") files.push_back(signature(path));
  }
  std::ranges::sort(files);
  std::string text;
  for (const std::string& file : files) text += (text.empty() ? "" : ", ") + file;
  // A model of hundreds of files has more names than a parked sequence may be given.
  const auto bytes = std::as_bytes(std::span(text));
  return text.size() < KiB ? text : std::to_string(files.size()) + " files " + std::to_string(cpu::crc32c(bytes));
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

// What an admission may share out, and what a request may ask for.
#include <algorithm>
#include <string>

#include "scheduler/admission/limits.hpp"
#include "scheduler/plan/layer_stacks.hpp"
#include "scheduler/plan/sequence_counts.hpp"
#include "sluice/engine.hpp"
#include "sluice/error.hpp"

namespace sluice {
namespace {

constexpr std::uint64_t kMostPages = std::uint64_t{1} << 32;
constexpr double kMostSlowdown = 1000.0;

std::string text(std::uint64_t number) { return std::to_string(number); }

void require(bool holds, const char* field, std::uint64_t value, const std::string& range) {
  if (holds) return;
  throw Error(Errc::invalid_argument,
              std::string("AdmissionOptions::") + field + " is " + text(value) + "; it must be " + range);
}

/// Pages of the longest sequence that there is room for.
std::uint64_t pages_in(const AdmissionOptions& options) {
  const std::uint64_t even = options.pages / (std::uint64_t{options.page_blocks} + options.window_blocks);
  if (even < options.window_pages) return even;
  const std::uint64_t whole = options.pages - options.window_blocks * options.window_pages;
  return options.page_blocks == 0 ? ~std::uint64_t{0} : whole / options.page_blocks;
}

void require_some(const char* field, std::uint32_t value) { require(value != 0, field, value, "at least 1"); }

}  // namespace

AdmissionOptions admission_options(const EngineOptions& options) {
  const AttentionShape& shape = options.shape;
  const PageLayout layout{.page_tokens = options.page_tokens,
                          .head_dim = shape.head_dim,
                          .dtype = options.kv_dtype,
                          .latent = shape.latent()};
  const scheduler::LayerStacks stacks(options);
  const std::uint64_t page_bytes = layout.page_bytes() * stacks.layers() * shape.kv_heads;
  if (page_bytes == 0 || options.host_bytes < page_bytes)
    throw Error(Errc::invalid_argument, "EngineOptions::host_bytes is " + text(options.host_bytes) +
                                            ", and one page of all layers and KV heads takes " + text(page_bytes) +
                                            "; set shape and page_tokens, and raise host_bytes");
  const Bucket& largest = options.largest;
  if (largest.decode_rows == 0 || largest.prefill_rows == 0 || largest.prefills == 0)
    throw Error(Errc::invalid_argument, "EngineOptions::largest has decode_rows " + text(largest.decode_rows) +
                                            ", prefill_rows " + text(largest.prefill_rows) + " and prefills " +
                                            text(largest.prefills) + "; requests need some of each");
  return {.decode_rows = options.largest.decode_rows,
          .prefill_rows = options.largest.prefill_rows,
          .prefills = options.largest.prefills,
          .sequences = options.sequences,
          .cpu_sequences = scheduler::cpu_sequences(options),
          .page_tokens = options.page_tokens,
          .max_tokens = options.largest.max_tokens,
          .pages = options.host_bytes / page_bytes,
          .page_blocks = stacks.count() - stacks.windowed_stacks(),
          .window_blocks = stacks.windowed_stacks(),
          .window_pages = stacks.windowed() ? stacks.most_kept() : 0,
          .window_resting_pages = stacks.least_kept()};
}

namespace scheduler {

AdmissionOptions resolved(const AdmissionOptions& options) {
  require_some("decode_rows", options.decode_rows);
  require_some("prefill_rows", options.prefill_rows);
  require_some("prefills", options.prefills);
  require_some("sequences", options.sequences);
  require_some("page_tokens", options.page_tokens);
  require(options.pages >= 1 && options.pages <= kMostPages, "pages", options.pages, "in [1, 2^32]");
  if (options.slowdown != 0.0 && !(options.slowdown >= 1.0 && options.slowdown <= kMostSlowdown))
    throw Error(Errc::invalid_argument, "AdmissionOptions::slowdown is " + std::to_string(options.slowdown) +
                                            "; it must be 0, or in [1, 1000]");
  require(options.page_blocks != 0 || options.window_blocks != 0, "page_blocks", options.page_blocks,
          "at least 1 where window_blocks is 0");
  AdmissionOptions resolved = options;
  const std::uint64_t longest = pages_in(options);
  const std::uint64_t room = longest >= kNone / options.page_tokens ? kNone : longest * options.page_tokens;
  if (options.max_tokens == 0 || options.max_tokens > room) resolved.max_tokens = static_cast<std::uint32_t>(room);
  return resolved;
}

MemoryNeed need_of(const AdmissionOptions& options, std::uint64_t tokens) noexcept {
  const std::uint64_t pages = div_up(tokens, options.page_tokens);
  MemoryNeed need{.pages = options.page_blocks * pages + options.window_blocks * std::min(pages, options.window_pages)};
  if (options.near_pages == 0) return need;
  const std::uint64_t most = options.near_pages_per_sequence;
  need.near_pages = most == 0 ? pages : std::min(pages, most);
  return need;
}

void require_can_run(const AdmissionOptions& options, const AdmissionRequest& request) {
  const std::string name = "request " + text(request.id.value);
  if (request.prompt_tokens == 0)
    throw Error(Errc::invalid_argument, name + " has no prompt tokens; give it one at least");
  const auto refuse = [&](const std::string& why) { throw Error(Errc::out_of_capacity, name + " " + why); };
  const std::uint64_t tokens = last_tokens(request);
  const std::string wants = "needs room for " + text(tokens) + " tokens (" + text(request.prompt_tokens) +
                            " of its prompt, " + text(request.max_new_tokens) + " new ones)";
  if (tokens > options.max_tokens)
    refuse(wants + ", and a sequence may have " + text(options.max_tokens) +
           "; ask for fewer new tokens, or raise AdmissionOptions::pages and max_tokens");
  const MemoryNeed need = need_of(options, tokens);
  if (options.near_pages != 0 && need.near_pages > options.near_pages)
    refuse(wants + ", which take " + text(need.near_pages) + " near pages, and AdmissionOptions::near_pages is " +
           text(options.near_pages) + "; raise it, or bound near_pages_per_sequence");
  if (request.on_cpu && options.cpu_sequences == 0)
    refuse("has a policy that chooses on the CPU, and AdmissionOptions::cpu_sequences is 0; raise it");
}

}  // namespace scheduler
}  // namespace sluice

// Requests whose sequences keep only the newest pages of layers with windows: what an Admission lets in has room.
#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include "scheduler/plan/layer_stacks.hpp"
#include "sluice/admission.hpp"
#include "sluice/engine_options.hpp"
#include "tests/scheduler/admission_support.hpp"
#include "tests/scheduler/naive_admission.hpp"
#include "tests/support/random.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::admission;

namespace {

EngineOptions draw_options(Random& random) {
  EngineOptions options{.shape = {.layers = 3, .q_heads = 2, .kv_heads = 1, .head_dim = 64}};
  options.page_tokens = 8u << random.below(3);
  const std::uint32_t window = 1 + random.below(300), other = 1 + random.below(40);
  options.windows = {random.below(3) == 0 ? other : 0, window, random.below(2) == 0 ? 0 : other};
  options.window_slack = random.below(80);
  options.largest = {.decode_rows = 6, .prefill_rows = 1 + random.below(200), .prefills = 3, .max_tokens = 1200};
  options.in_flight = 1;
  options.import_rows = 1;
  options.sequences = 6;
  const PageLayout layout{.page_tokens = options.page_tokens, .head_dim = 64, .dtype = options.kv_dtype};
  const scheduler::LayerStacks stacks(options);
  const auto longest = static_cast<std::uint32_t>(stacks.blocks(div_up(1200, options.page_tokens)));
  options.host_bytes = layout.page_bytes() * stacks.layers() * (longest + random.below(3 * longest));
  return options;
}

/// A caller with an engine that holds what an engine with these options would hold.
class Host {
 public:
  /// `shared`: tokens of whole pages with which the prompts of all begin.
  Host(std::uint64_t seed, const EngineOptions& options, std::uint32_t shared)
      : options_(options), stacks_(options), admission_(admission_options(options)), shared_(shared) {
    Random random(seed);
    for (std::uint64_t id = 1; id <= 10; ++id)
      admission_.submit(
          {.id = RequestId{id}, .prompt_tokens = 400 + random.below(600), .max_new_tokens = 1 + random.below(200)});
  }

  /// The most that ran at once.
  std::size_t run(bool says_held) {
    std::size_t most = 0;
    while (admission_.use().waiting + admission_.use().running != 0) {
      const AdmissionChanges changes = admission_.admit(says_held ? std::optional(held({})) : std::nullopt);
      for (const RequestId id : changes.preempt) tokens_.erase(id.value);
      for (const RequestId id : changes.admit) {
        tokens_[id.value] = shared_;
        if (shared_ != 0) admission_.begun(id, shared_);
      }
      std::map<std::uint64_t, std::uint32_t> coming;
      for (const TurnItem& item : admission_.next()) coming[item.request.value] = item.tokens;
      law(held(coming) <= admission_.options().pages, "a forward that was planned has no room");
      most = std::max(most, tokens_.size());
      for (const auto& [id, count] : coming) tokens_[id] += count;
      for (const RequestId id : admission_.complete()) tokens_.erase(id.value);
    }
    return most;
  }

 private:
  /// Blocks that are held once these tokens are planned; what windows have passed is let go of when they are finished.
  std::uint64_t held(const std::map<std::uint64_t, std::uint32_t>& coming) const {
    std::set<std::tuple<std::uint64_t, std::uint32_t, std::uint32_t>> blocks;
    for (const auto& [id, tokens] : tokens_) {
      const auto more = coming.find(id);
      const std::uint64_t end = div_up(tokens + (more == coming.end() ? 0 : more->second), options_.page_tokens);
      for (std::uint32_t stack = 0; stack < stacks_.count(); ++stack) {
        for (std::uint32_t page = stacks_.windowed(stack) ? stacks_.passed_pages(tokens) : 0; page < end; ++page)
          blocks.insert({page < shared_ / options_.page_tokens ? 0 : id, stack, page});
      }
    }
    return blocks.size();
  }

  const EngineOptions& options_;
  scheduler::LayerStacks stacks_;
  Admission admission_;
  std::uint32_t shared_;
  std::map<std::uint64_t, std::uint32_t> tokens_;  ///< of those that run
};

}  // namespace

TEST_CASE("forwards of sequences with windows have room, shared pages counted or not", "[admission][windows]") {
  std::uint32_t more = 0;
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const EngineOptions options = draw_options(random);
    const std::uint32_t shared = seed % 2 == 0 ? 0 : random.below(400) / options.page_tokens * options.page_tokens;
    CAPTURE(options.page_tokens, options.windows, options.window_slack, options.largest.prefill_rows, shared);
    const std::size_t counted = Host(seed, options, shared).run(true);
    const std::size_t apart = Host(seed, options, shared).run(false);
    if (shared == 0) {
      REQUIRE(counted == apart);
    } else {
      more += counted > apart ? 1 : 0;
    }
  }
  REQUIRE(more > 10);
}

TEST_CASE("a page that takes more blocks than 32 bits count has no room, and nothing waits for it",
          "[admission][windows]") {
  for (const std::uint32_t window_blocks : {1u, 2u}) {  // With page_blocks 2^32 and one more.
    Admission admission({.pages = 5, .page_blocks = ~0u, .window_blocks = window_blocks, .window_pages = 10});
    check_fails([&] { submit(admission, 1, 1, 1); }, Errc::out_of_capacity, "a sequence may have 0");
  }
}

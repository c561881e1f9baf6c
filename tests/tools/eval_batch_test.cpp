// How many prompts `eval` keeps at once.
#include "tools/cli/eval/batch.hpp"

#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <vector>

#include "tests/support/catch.hpp"
#include "tools/llama/prompt_cache.hpp"

using namespace sluice;
using namespace sluice::tools;

namespace {

/// Llama-3.1-8B's: 256 KiB a token, and 128 MiB of queries of a prompt of 256 tokens or more.
constexpr AttentionShape kLarge{.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128};

/// How many tasks are read at once whose prompts have so many tokens.
std::size_t batch_of_prompts(const std::vector<std::size_t>& tokens) {
  std::vector<Task> tasks(tokens.size());
  for (std::size_t i = 0; i < tasks.size(); ++i) tasks[i].prompt.resize(tokens[i]);
  return batch_of(tasks, kLarge);
}

}  // namespace

TEST_CASE("as many prompts are kept as fit in a GiB, 16 at most and at least one") {
  CHECK(batch_of_prompts({}) == 0);
  CHECK(batch_of_prompts({1}) == 1);
  CHECK(batch_of_prompts(std::vector<std::size_t>(40, 8)) == 16);
  CHECK(batch_of_prompts({1536, 1536}) == 2);  // 512 MiB each.
  CHECK(batch_of_prompts({1536, 1537}) == 1);
  CHECK(batch_of_prompts({1, 131'072, 1}) == 1);
  CHECK(batch_of_prompts({131'072, 1}) == 1);
}

TEST_CASE("a prompt's size is known before it is read") {
  for (const std::size_t tokens : {1, 255, 256, 257, 1000}) {
    CAPTURE(tokens);
    std::vector<int> ids(tokens);
    std::iota(ids.begin(), ids.end(), 0);
    for (const std::uint32_t group : {1u, 3u, 7u}) {
      const AttentionShape shape{.layers = 3, .q_heads = 2 * group, .kv_heads = 2, .head_dim = 8};
      PromptCache cache;
      cache.start(shape, ids);
      CHECK(cache.bytes() == PromptCache::bytes_of(shape, tokens) + tokens * sizeof(int));
    }
  }
}

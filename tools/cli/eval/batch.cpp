#include "tools/cli/eval/batch.hpp"

#include <algorithm>
#include <cstdint>

#include "tools/llama/prompt_cache.hpp"

namespace sluice::tools {
namespace {

constexpr std::size_t kMostPrompts = 16;
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 30;

}  // namespace

std::size_t batch_of(std::span<const Task> tasks, const AttentionShape& shape) noexcept {
  const std::size_t most = std::min(kMostPrompts, tasks.size());
  std::uint64_t bytes = 0;
  for (std::size_t count = 0; count < most; ++count) {
    bytes += PromptCache::bytes_of(shape, tasks[count].prompt.size());
    if (bytes > kMostBytes) return std::max<std::size_t>(count, 1);
  }
  return most;
}

}  // namespace sluice::tools

#include <algorithm>
#include <functional>
#include <iterator>
#include <span>
#include <vector>

#include "cpu/stages/sharing.hpp"
#include "cpu/stages/stages.hpp"
#include "sluice/step/order_key.hpp"
#include "sluice/step/top_p.hpp"

namespace sluice::cpu {
namespace {

/// The least threshold from `threshold` on that no more than `most` keys reach.
std::uint32_t at_most(std::span<const std::uint32_t> keys, std::uint32_t threshold, std::uint32_t most) {
  if (keys.size() <= most) return threshold;
  thread_local std::vector<std::uint32_t> kept;
  kept.clear();
  std::copy_if(keys.begin(), keys.end(), std::back_inserter(kept), [&](std::uint32_t key) { return key >= threshold; });
  if (kept.size() <= most) return threshold;
  const auto first_left = kept.begin() + static_cast<std::ptrdiff_t>(most);
  std::nth_element(kept.begin(), first_left, kept.end(), std::greater<>());
  return *first_left + 1;  // No key is the largest number.
}

}  // namespace

std::uint32_t select_top_p(const Kernels& kernels, const TopPTask& task) {
  thread_local std::vector<std::uint32_t> keys;
  thread_local std::vector<float> weights;
  thread_local std::vector<float> capped;
  thread_local std::vector<Weighed> pool;
  const std::span<const float> values = task.values;
  const std::size_t end = std::min<std::size_t>(task.end, values.size());
  const std::size_t begin = std::min<std::size_t>(task.begin, end);
  keys.resize(values.size());
  std::transform(values.begin(), values.end(), keys.begin(), weighed_key);
  std::fill_n(task.mask, div_up(values.size(), 32), 0u);
  const auto best = std::max_element(keys.begin(), keys.end());
  if (best == keys.end() || *best == 0) return 0;

  std::uint32_t threshold = 1;
  if (task.p < 1.f) {
    weights.resize(values.size());
    const auto top = static_cast<std::size_t>(best - keys.begin());
    // Capped scores may be equal where keys are not: these order them.
    const AttentionShape shape{.softcap = task.softcap};
    capped.assign(values.begin(), values.end());
    for (std::size_t i = 0; i < capped.size() && task.softcap != 0.f; ++i) capped[i] = shape.capped(capped[i]);
    kernels.weigh(capped.data(), capped.size(), capped[top], weights.data());
    pool.clear();
    double anyway = 0.0;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (keys[i] == 0) continue;
      if (i < begin || i >= end) {
        anyway += static_cast<double>(weights[i]);
      } else {
        pool.push_back({.key = keys[i], .weight = weights[i]});
      }
    }
    threshold = pool.empty() ? kKeepNone : top_p_cut(pool, static_cast<double>(task.p), anyway);
  }
  threshold = at_most(std::span<const std::uint32_t>(keys).subspan(begin, end - begin), threshold, task.most);
  std::uint32_t kept = 0;
  for (std::size_t i = begin; i < end; ++i) {
    const std::uint32_t keep = keys[i] >= threshold ? 1u : 0u;
    task.mask[i / 32] |= keep << (i % 32);
    kept += keep;
  }
  return kept;
}

void top_p(const Host& host, std::span<const TopPTask> tasks) {
  std::uint64_t bytes = 0;
  for (const TopPTask& task : tasks) bytes += task.values.size_bytes();
  for_each_task(host.workers, tasks, bytes, [&kernels = host.kernels](const TopPTask& task) {
    const std::uint32_t kept = select_top_p(kernels, task);
    if (task.count != nullptr) *task.count = kept;
  });
}

}  // namespace sluice::cpu

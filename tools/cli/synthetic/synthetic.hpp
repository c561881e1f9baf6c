#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cpu/device/host_device.hpp"
#include "cpu/machine/host_pool.hpp"
#include "cpu/machine/topology.hpp"
#include "cpu/threads/workers.hpp"
#include "sluice/shape.hpp"
#include "sluice/step/page.hpp"

namespace sluice::tools {

enum class SyntheticPattern : std::uint8_t {
  structured,  ///< heavy tokens, slashes and locality, as long-context heads have
  uniform,     ///< q.k is noise, new in every step: no history tells anything, the worst case
};

struct SyntheticOptions {
  AttentionShape shape;  ///< `layers` is not read: this is one layer
  PageLayout layout;
  std::uint32_t tokens = 0;           ///< prompt length
  std::uint32_t steps = 0;            ///< decode steps, one token each
  std::uint32_t prompt_queries = 32;  ///< queries of the last prompt tokens
  /// Share of the persistent term's variance that the query heads of one group have in common: 0: each
  /// head has heavy tokens of its own, 1: all heads of a group want the same. [0, 1]
  double group_correlation = 0.5;
  std::uint64_t seed = 0;
  SyntheticPattern pattern = SyntheticPattern::structured;
  /// Attention sinks: share of each query's softmax that the first SyntheticLayer::kSinks tokens hold; the query heads
  /// take the list's shares in turn. Empty: the first tokens are like any other.
  std::vector<double> sinks = {};
  bool rounded = false;  ///< keys and values are numbers that fp8_e4m3 holds, so that storing them so changes none
};

/// Appends the runs that cover tokens [begin, end).
void append_runs(std::uint32_t begin, std::uint32_t end, std::uint32_t page_tokens, std::vector<PageRun>& runs);

/// @throws Error{Errc::invalid_argument} for a share beyond 0.999, or a context too short to have sinks.
void check_sinks(const SyntheticOptions& options);

/// One attention layer whose scores have the structure of long-context heads, as vectors in host memory:
///   score(t, j) = s * heavy[j] - c * log(end - j) + slashes(t - j) + noise(t, j)
/// heavy: unit variance, neighbours correlate by 0.5, s from 2 to 4.5 by KV head. The distance is counted from the
/// last step, so that it is a property of the key. slashes: a sum of rotary pairs with log-spaced frequencies and
/// phases of the query head's own, a function of t - j alone. noise: queries drift slowly (0.95 per step) through
/// directions that carry nothing else. Sinks: keys with a dimension of their own, in which every query, of prompt and
/// steps, asks for just as much as makes its share the one wanted. As in trained models their values are small, a tenth
/// of the others'.
///
/// Everything follows from `seed`, whatever the number of threads. Pages lie in a HostPool as a sequence leaves
/// them there: the heads' pages interleaved.
class SyntheticLayer {
 public:
  static constexpr std::uint32_t kSinks = 4;

  /// Built by all `builders`.
  /// @throws Error{Errc::out_of_capacity} if the machine lacks the memory.
  SyntheticLayer(const SyntheticOptions& options, const cpu::Topology& topology,
                 const std::shared_ptr<const cpu::Workers>& builders);

  [[nodiscard]] const SyntheticOptions& options() const noexcept { return options_; }
  [[nodiscard]] KvView view(std::uint32_t kv_head) const noexcept;
  /// Query of decode step `step`, whose own token is at position tokens + step: [group, head_dim].
  [[nodiscard]] const float* query(std::uint32_t kv_head, std::uint32_t step) const noexcept;
  /// Queries of the last prompt tokens: [prompt_queries, group, head_dim].
  [[nodiscard]] std::span<const float> prompt_queries(std::uint32_t kv_head) const noexcept;

 private:
  void write_pages(const cpu::Workers& builders);
  void write_page(std::uint32_t page);
  void write_queries();
  void write_head_queries(std::uint32_t head);
  /// Lets the sinks have their shares: reads every key once per query.
  void aim_queries(const cpu::Workers& builders);
  void key(std::uint32_t kv_head, std::uint32_t token, const float* rotation, float* out) const;

  [[nodiscard]] std::uint32_t noise_dims() const noexcept;

  SyntheticOptions options_;
  std::uint32_t own_dims_;         ///< heavy terms that belong to single query heads
  std::uint32_t pairs_;            ///< rotary pairs
  std::vector<double> frequency_;  ///< [pairs] radians per token
  cpu::HostDevice device_;
  std::unique_ptr<cpu::HostPool> pool_;
  std::vector<std::uint32_t> frames_;  ///< [kv_heads, pages]
  std::uint32_t pages_;
  std::vector<float> queries_;  ///< [kv_heads, prompt_queries + steps, group, head_dim]
};

}  // namespace sluice::tools

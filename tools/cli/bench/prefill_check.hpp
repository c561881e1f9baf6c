#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/cli/bench/prefill_layer.hpp"

namespace sluice::tools {

/// Attention of a few rows of a layer in float64, from its keys and values as they are in memory: first rows, last
/// rows, ends of blocks and some between, of query heads of the first and the last KV head.
class PrefillCheck {
 public:
  PrefillCheck(const PrefillLayer& layer, Device& device, Stream& stream, const cpu::Workers& builders);

  /// Makes sure that the pass's last attention is what it should be, over all keys or over those that its masks name.
  /// @throws Error{Errc::device} saying which row of `what` is wrong and by how much.
  void require(const PrefillPass& pass, const std::string& what) const;

 private:
  struct Sample {
    std::uint32_t token = 0;
    std::uint32_t q_head = 0;
    std::size_t kv = 0;    ///< index into kv_
    std::vector<float> q;  ///< [head_dim]
  };
  struct Row {
    std::vector<double> out;  ///< [head_dim]
    double lse = 0.0;
  };
  [[nodiscard]] Row attend(const Sample& sample, const std::vector<std::uint32_t>& mask) const;

  const PrefillLayer& layer_;
  const cpu::Workers& builders_;
  std::vector<std::vector<std::byte>> kv_;  ///< pages of the sampled KV heads
  std::vector<Sample> samples_;
};

}  // namespace sluice::tools

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "sluice/policy.hpp"

namespace sluice::scheduler {

/// Random directions whose signs make the hash: bits * tables rows [head_dim] of standard normal numbers, the bits of a
/// table one after the other.
class Projections {
 public:
  Projections(std::uint32_t head_dim, const LshOptions& options);
  [[nodiscard]] std::uint32_t count() const noexcept { return bits_ * tables_; }
  [[nodiscard]] std::uint32_t bits() const noexcept { return bits_; }
  [[nodiscard]] std::uint32_t tables() const noexcept { return tables_; }
  [[nodiscard]] const float* rows() const noexcept { return rows_.data(); }
  /// Hashes of `columns` vectors from their products with the rows, [count, columns], of which only the signs matter:
  /// the code of vector j in table t goes to codes[t * stride + j].
  void encode(const float* products, std::uint32_t columns, std::uint16_t* codes, std::uint64_t stride) const noexcept;

 private:
  std::uint32_t bits_;
  std::uint32_t tables_;
  std::vector<float> rows_;
};

/// One object for all layers and sequences that hash alike. Safe to call from several threads.
[[nodiscard]] std::shared_ptr<const Projections> shared_projections(std::uint32_t head_dim, const LshOptions& options);

}  // namespace sluice::scheduler

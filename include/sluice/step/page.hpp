#pragma once

#include <cstddef>
#include <cstdint>

#include "sluice/tensor.hpp"
#include "sluice/units.hpp"

namespace sluice {

/// How one page lies in memory: `page_tokens` consecutive tokens of one (sequence, layer, KV head), first the K rows
/// [page_tokens, head_dim], then the V rows [page_tokens, head_dim], and of a type with scales (see E4m3) then these,
/// float32 [page_tokens, 2]: of the token's K row, of its V row. Of latent attention there are K rows alone.
struct PageLayout {
  std::uint32_t page_tokens = 16;
  std::uint32_t head_dim = 0;
  DType dtype = DType::bf16;
  bool latent = false;  ///< a value is the beginning of its key, see AttentionShape::value_dim; not of a scaled type

  [[nodiscard]] constexpr std::uint64_t row_bytes() const noexcept { return std::uint64_t{head_dim} * bytes_of(dtype); }
  [[nodiscard]] constexpr std::uint64_t half_bytes() const noexcept { return row_bytes() * page_tokens; }
  /// From a token's K row to its V row.
  [[nodiscard]] constexpr std::uint64_t values_offset() const noexcept { return latent ? 0 : half_bytes(); }
  /// Of a token's rows, without scales.
  [[nodiscard]] constexpr std::uint64_t token_bytes() const noexcept { return (latent ? 1 : 2) * row_bytes(); }
  [[nodiscard]] constexpr bool scaled() const noexcept { return dtype == DType::fp8_e4m3; }
  /// Scales of one token.
  [[nodiscard]] constexpr std::uint64_t scale_bytes() const noexcept { return scaled() ? 2 * sizeof(float) : 0; }
  [[nodiscard]] constexpr std::uint64_t scales_offset() const noexcept { return token_bytes() * page_tokens; }
  [[nodiscard]] constexpr std::uint64_t page_bytes() const noexcept {
    return scales_offset() + page_tokens * scale_bytes();
  }
  /// How the same rows lie near: what has scales is unfolded there, without loss.
  [[nodiscard]] constexpr PageLayout near() const noexcept {
    PageLayout layout = *this;
    if (scaled()) layout.dtype = DType::bf16;
    return layout;
  }
  friend constexpr bool operator==(const PageLayout&, const PageLayout&) = default;
};

/// One (sequence, layer, KV head) as a kernel sees it. Logical page i lies at
/// `base + frames[i] * layout.page_bytes()`; kNone marks a page that is not in this memory.
/// `base` is host memory for far views and device memory for near views; `frames` is always host memory.
struct KvView {
  std::byte* base = nullptr;
  const std::uint32_t* frames = nullptr;  ///< [pages]
  PageLayout layout;

  [[nodiscard]] std::byte* page(std::uint64_t page) const noexcept { return base + frames[page] * layout.page_bytes(); }
  [[nodiscard]] std::byte* k_row(std::uint64_t token) const noexcept {
    return page(token / layout.page_tokens) + (token % layout.page_tokens) * layout.row_bytes();
  }
  [[nodiscard]] std::byte* v_row(std::uint64_t token) const noexcept { return k_row(token) + layout.values_offset(); }
  /// The token's scales: of K, of V. Of layouts that have some.
  [[nodiscard]] float* scales(std::uint64_t token) const noexcept {
    return reinterpret_cast<float*>(page(token / layout.page_tokens) + layout.scales_offset()) +
           2 * (token % layout.page_tokens);
  }
};

/// Consecutive rows [begin, end) of one logical page; the unit of page-granular selection.
struct PageRun {
  std::uint32_t page = 0;
  std::uint16_t begin = 0;
  std::uint16_t end = 0;  ///< exclusive, at most page_tokens

  [[nodiscard]] constexpr std::uint32_t tokens() const noexcept { return std::uint32_t{end} - begin; }
  friend constexpr bool operator==(const PageRun&, const PageRun&) = default;
};

}  // namespace sluice

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "sluice/step/page.hpp"

namespace sluice::cpu {

/// Writes the K row address of every token to `rows` and returns its end. The page is looked up once per page
/// rather than per token: the tokens are ascending, and a division costs as much as the rest.
inline const std::byte** list_rows(const KvView& kv, std::span<const std::uint32_t> tokens, const std::byte** rows) {
  const std::uint64_t row_bytes = kv.layout.row_bytes();
  std::uint64_t page_begin = 0;
  std::uint64_t page_end = 0;
  const std::byte* page = nullptr;
  for (const std::uint32_t token : tokens) {
    if (token < page_begin || token >= page_end) {
      const std::uint32_t index = token / kv.layout.page_tokens;
      page_begin = std::uint64_t{index} * kv.layout.page_tokens;
      page_end = page_begin + kv.layout.page_tokens;
      page = kv.page(index);
    }
    *rows++ = page + (token - page_begin) * row_bytes;
  }
  return rows;
}

/// The same for runs.
inline const std::byte** list_rows(const KvView& kv, std::span<const PageRun> runs, const std::byte** rows) {
  const std::uint64_t row_bytes = kv.layout.row_bytes();
  for (const PageRun& run : runs) {
    const std::byte* row = kv.page(run.page) + run.begin * row_bytes;
    for (std::uint32_t i = run.begin; i < run.end; ++i, row += row_bytes) *rows++ = row;
  }
  return rows;
}

/// Writes where every token's scales are, in pages that have some.
inline void list_scales(const KvView& kv, std::span<const std::uint32_t> tokens, const float** scales) {
  std::uint32_t page_begin = 0;
  std::uint32_t page_end = 0;
  const float* page = nullptr;
  for (const std::uint32_t token : tokens) {
    if (token < page_begin || token >= page_end) {
      page_begin = token / kv.layout.page_tokens * kv.layout.page_tokens;
      page_end = page_begin + kv.layout.page_tokens;
      page = kv.scales(page_begin);
    }
    *scales++ = page + std::size_t{2} * (token - page_begin);
  }
}
inline void list_scales(const KvView& kv, std::span<const PageRun> runs, const float** scales) {
  for (const PageRun& run : runs) {
    const float* scale = kv.scales(std::uint64_t{run.page} * kv.layout.page_tokens + run.begin);
    for (std::uint32_t i = run.begin; i < run.end; ++i, scale += 2) *scales++ = scale;
  }
}

}  // namespace sluice::cpu

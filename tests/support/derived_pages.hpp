#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "sluice/step/forward_memory.hpp"
#include "sluice/step/forward_verbs.hpp"
#include "tests/support/stages_under_test.hpp"

/// Digests and copies in codes of pages, as a forward's verb `derive` makes them of what no forward has written.
namespace sluice::test {

/// Pages, and where what is made of each of them goes: to its frame's place.
struct DerivedPages {
  KvView kv;
  std::uint32_t tokens = 0;
  std::byte* codes = nullptr;  ///< null: none
  std::uint32_t bits = kCodeBits;
  const float* mean = nullptr;   ///< as ForwardVerbs::derive has it
  std::byte* digests = nullptr;  ///< null: none
  DigestKind kind = DigestKind::box;
};

[[nodiscard]] inline std::vector<FarPage> far_pages(const DerivedPages& of) {
  std::vector<FarPage> pages;
  const std::uint32_t page_tokens = of.kv.layout.page_tokens;
  for (std::uint32_t first = 0; first < of.tokens; first += page_tokens)
    pages.push_back({.block = of.kv.frames[first / page_tokens], .rows = std::min(page_tokens, of.tokens - first)});
  return pages;
}

/// `pages`: those of `of`, memory that the device reads.
inline void derive(ForwardVerbs& verbs, const DerivedPages& of, std::span<const FarPage> pages, void* stream) {
  ForwardMemory memory{};
  memory.shape = {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = of.kv.layout.head_dim};
  memory.layout = of.kv.layout.near();
  memory.far_layout = of.kv.layout;
  memory.digest = of.kind;
  memory.code_bits = of.codes == nullptr ? 0 : of.bits;
  memory.far = of.kv.base;
  memory.codes = of.codes;
  memory.digests = of.digests;
  verbs.derive(memory, 0, pages, of.mean, stream);
}

inline void derive(StagesUnderTest& under_test, const DerivedPages& of) {
  const auto pages = under_test.copy_of(far_pages(of));
  Stream* const stream = under_test.stream();
  derive(under_test.forward_verbs(), of, pages, stream == nullptr ? nullptr : stream->native_handle());
}

}  // namespace sluice::test

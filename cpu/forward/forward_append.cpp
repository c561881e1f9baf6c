// How the new keys and values of a layer come in, and the queries of those that choose.
#include <algorithm>

#include "cpu/forward/forward_layer.hpp"
#include "cpu/threads/lent.hpp"
#include "sluice/page_rules.hpp"
#include "sluice/step/int4.hpp"
#include "sluice/step/partial.hpp"

namespace sluice::cpu {
namespace {

/// A row of K or V to its far page and, if there is one, its near page. `scale`: the far row's, if such rows have some.
void put_row(const Kernels& kernels, const ForwardMemory& m, const TensorView& in, std::uint32_t row,
             std::uint32_t head, std::byte* far, float* scale, std::byte* near) {
  float wide[kMaxHeadDim];
  kernels_for(kernels, in.dtype).widen(in.row(row, head), wide, m.shape.head_dim);
  write_row(kernels, m.far_layout, wide, far, scale);
  if (near != nullptr) copy_near(kernels, m, far, scale, near);
}

/// Queries of a prompt's last tokens, for the policies of the CPU.
void append_tail(const Kernels& kernels, const ForwardMemory& m, const ForwardLayer& layer, std::uint32_t r) {
  const std::uint32_t without = layer.k.tokens - layer.q.tokens;
  if (r < without) return;
  const std::uint64_t row = std::uint64_t{layer.layer} * m.tail_rows + m.tokens[r].tail;
  for (std::uint32_t h = 0; h < m.shape.q_heads; ++h) {
    kernels_for(kernels, layer.q.dtype)
        .widen(layer.q.row(r - without, h), m.tails + (row * m.shape.q_heads + h) * m.shape.head_dim, m.shape.head_dim);
  }
}

/// Copies of rows [first, first + rows) of a block.
void make_codes(const Kernels& kernels, const ForwardMemory& m, std::uint32_t plane, std::uint32_t block,
                std::uint32_t first, std::uint32_t rows, const float* mean) {
  if (!m.has_codes()) return;
  const CodeLayout copy = m.code_layout();
  const std::byte* const page = m.far_block(plane, block);
  std::byte* const codes = m.codes + m.far_page(plane, block) * copy.page_bytes();
  kernels_for(kernels, m.far_layout.dtype)
      .make_codes({.k = page + first * m.far_layout.row_bytes(),
                   .scales = scales_in(m.far_layout, page, first),
                   .copy = codes,
                   .first = first,
                   .mean = mean,
                   .rows = rows,
                   .layout = copy});
}

/// Of a full page, if there are digests.
void digest(const Kernels& kernels, const ForwardMemory& m, std::uint32_t plane, std::uint32_t block) {
  if (m.digests == nullptr) return;
  const std::byte* const page = m.far_block(plane, block);
  const ElementKernels& of = kernels_for(kernels, m.far_layout.dtype);
  (m.digest == DigestKind::box ? of.digest_box : of.digest_cuboid_mean)({.k = page,
                                                                         .scales = scales_in(m.far_layout, page),
                                                                         .out = m.digest_of(plane, block),
                                                                         .rows = m.layout.page_tokens,
                                                                         .head_dim = m.shape.head_dim});
}

/// The mean key for a token; null: 0. Of layers with windows nobody reads codes.
const float* key_mean_for(const Kernels& kernels, const ForwardMemory& m, const ForwardToken& token,
                          std::uint32_t plane) {
  if (m.window != 0 || token.position < m.layout.page_tokens) return nullptr;
  if (token.position == m.layout.page_tokens)
    renew_key_mean(kernels, m, {.list = token.list, .tokens = token.position}, plane);
  return m.key_mean_of(token.list, plane);
}

void append_token(const Kernels& kernels, const ForwardMemory& m, const ForwardLayer& layer, std::uint32_t r,
                  std::uint32_t head) {
  const std::uint32_t row = m.row_of(m.tokens[r].list, m.tokens[r].position);
  const std::uint32_t block = row / m.layout.page_tokens;
  const std::uint32_t at = row % m.layout.page_tokens;
  const std::uint32_t plane = m.plane(layer.layer, head);
  std::byte* const page = m.far_block(plane, block);
  std::byte* const far = page + at * m.far_layout.row_bytes();
  auto* const scales = const_cast<float*>(scales_in(m.far_layout, page, at));
  const std::uint32_t place = m.near_row_of(plane, row);
  std::byte* const near = place == kNone ? nullptr : m.near_key(plane, place);
  put_row(kernels, m, layer.k, r, head, far, scales, near);
  if (!m.shape.latent())
    put_row(kernels, m, layer.v, r, head, far + m.far_layout.half_bytes(), scales == nullptr ? nullptr : scales + 1,
            near == nullptr ? nullptr : near + m.layout.half_bytes());
  make_codes(kernels, m, plane, block, at, 1, key_mean_for(kernels, m, m.tokens[r], plane));
  if (at + 1 != m.layout.page_tokens) return;
  digest(kernels, m, plane, block);
}

}  // namespace

void derive(const Workers& workers, const Kernels& kernels, const ForwardMemory& m, std::uint32_t plane,
            std::span<const FarPage> pages, const float* mean) {
  const Lent<ForwardMemory> lent(workers, m);
  for_each_unit(workers, static_cast<std::uint32_t>(pages.size()), pages.size() * m.far_layout.half_bytes(),
                [all = lent.get(), &kernels, plane, pages, mean](std::uint32_t i) {
                  const FarPage page = pages[i];
                  make_codes(kernels, *all, plane, page.block, 0, page.rows, mean);
                  if (page.rows == all->layout.page_tokens) digest(kernels, *all, plane, page.block);
                });
}

void renew_key_mean(const Kernels& kernels, const ForwardMemory& m, const ForwardKeyMean& of, std::uint32_t plane) {
  if (!m.has_codes()) return;
  float* const mean = m.key_mean_of(of.list, plane);
  std::fill_n(mean, m.shape.head_dim, 0.f);
  if (of.tokens == 0) return;
  const std::uint32_t block = m.list_of(of.list)[0];
  if (of.tokens >= m.layout.page_tokens) key_mean(kernels, m.far_layout, m.far_block(plane, block), mean);
  make_codes(kernels, m, plane, block, 0, std::min(of.tokens, m.layout.page_tokens), mean);
}

void fill_out(const Kernels& kernels, const ForwardMemory& m, const ForwardLayer& layer, std::uint32_t at, float value,
              float lse) {
  float filled[kMaxHeadDim];
  std::fill_n(filled, m.shape.head_dim, value);
  for (std::uint32_t head = 0; head < layer.out.heads; ++head) {
    kernels_for(kernels, layer.out.dtype).narrow(filled, layer.out.row(at, head), m.shape.out_dim());
    if (layer.lse != nullptr) layer.lse[std::uint64_t{at} * layer.out.heads + head] = lse;
  }
}

void append(const Kernels& kernels, const ForwardMemory& m, const ForwardLayer& layer) {
  const bool attends = layer.out.tokens != 0;
  for (std::uint32_t r = 0; r < m.bucket.rows(); ++r) {
    const bool padding = runs(m) && m.tokens[r].list == kNone;
    if (attends && (padding || !runs(m)))
      fill_out(kernels, m, layer, r, padding ? 0.f : kNaN, padding ? kEmptyLse : kNaN);
    if (padding || !runs(m)) continue;
    for (std::uint32_t h = 0; h < m.layer_planes(); ++h) append_token(kernels, m, layer, r, h);
    if (m.tokens[r].tail != kNone) append_tail(kernels, m, layer, r);
  }
  if (attends && runs(m)) append_queries(kernels, m.teams(), layer);
}

}  // namespace sluice::cpu

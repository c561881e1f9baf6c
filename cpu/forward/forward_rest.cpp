// What a row leaves: how much it weighs to each query head, and the value that stands for it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/backend/verbs.hpp"
#include "cpu/forward/forward_layer.hpp"
#include "cpu/forward/forward_marks.hpp"
#include "sluice/partial.hpp"

namespace sluice::cpu {
namespace {

/// Natural log of the sum of exponentials of the scores of the row's tokens between sinks and recent ones that nobody
/// attends, which NaN and -infinity are no part of.
float weight_of(const Kernels& kernels, const AttentionShape& shape, const ForwardRow& row, const Marks& attended,
                const float* scores) {
  thread_local std::vector<float> left;
  left.assign(scores + row.sink_end, scores + row.recent_begin);
  attended.for_each([&](std::uint32_t token) {
    if (!row.in_window(token)) left[token - row.sink_end] = -std::numeric_limits<float>::infinity();
  });
  if (shape.softcap != 0.f) {
    for (float& score : left) {
      if (score != -std::numeric_limits<float>::infinity()) score = shape.capped(score);  // Else it would be a number.
    }
  }
  const float top = kernels.largest(left.data(), left.size());
  if (std::isinf(top)) return top;  // Of +infinity the sum is +infinity, too; else there is nothing.
  return top + static_cast<float>(std::log(kernels.mass(left.data(), left.size(), top)));
}

void put_value(const Kernels& kernels, const ForwardMemory& m, const ForwardRow& row, std::uint32_t plane,
               std::uint32_t index) {
  float* const out = m.rest_out_of(index);
  float mean[kMaxHeadDim];
  std::fill_n(out, m.shape.head_dim, 0.f);
  for (std::uint32_t i = 0; i < row.rest; ++i) {
    const std::uint32_t block = m.list_of(row.list)[row.rest_page(i, m.layout.page_tokens)];
    kernels_for(kernels, m.layout.dtype).widen(m.value_mean_of(plane, block), mean, m.shape.head_dim);
    for (std::uint32_t c = 0; c < m.shape.head_dim; ++c) out[c] += mean[c];
  }
  for (std::uint32_t c = 0; c < m.shape.head_dim; ++c) out[c] /= static_cast<float>(row.rest);
}

}  // namespace

void weigh_rests(const Workers& workers, const Kernels& kernels, const ForwardMemory& memory, std::uint32_t layer) {
  std::uint64_t scores = 0;
  for_each_head(memory, layer, [&](const ForwardRow& row, std::uint32_t, std::uint32_t) {
    if (row.rest != 0) scores += std::uint64_t{row.tokens} * memory.shape.group();
  });
  if (scores == 0) return;
  const std::uint32_t group = memory.shape.group();
  const Lent<ForwardMemory> lent(workers, memory);
  for_each_unit(workers, memory.bucket.decode_rows * memory.shape.kv_heads * group, scores * sizeof(float),
                [all = lent.get(), &kernels, layer, group](std::uint32_t i) {
                  const ForwardMemory& m = *all;
                  const std::uint32_t index = i / group, h = i % group;
                  const ForwardRow row = m.rows[index / m.shape.kv_heads].in(layer, m.window);
                  if (row.list == kNone || row.rest == 0) return;
                  const float* const own = m.scores + first_head(m, index) * m.score_room();
                  float* const mass = m.rest_mass_of(index) + 2 * h;  // In one part.
                  mass[0] =
                      weight_of(kernels, m.shape, row, marks_of(m, row, index), own + h * std::uint64_t{row.tokens});
                  mass[1] = mass[0] == kEmptyLse ? 0.f : 1.f;
                  if (h == 0) put_value(kernels, m, row, m.plane(layer, index % m.shape.kv_heads), index);
                });
}

}  // namespace sluice::cpu

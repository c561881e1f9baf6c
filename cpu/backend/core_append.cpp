// Verbs that bring tokens into pages, and rows to float32.

#include <cstring>

#include "cpu/backend/backend.hpp"
#include "cpu/backend/verbs.hpp"
#include "cpu/float16.hpp"

namespace sluice::cpu {
namespace {

/// A row of any length in any dtype to float32: whole units by the kernel, the rest one by one.
void widen_row(const Kernels& kernels, DType type, const std::byte* in, std::size_t count, float* out) {
  const std::size_t whole = count / kHeadDimUnit * kHeadDimUnit;
  kernels_for(kernels, type).widen(in, out, whole);
  for (std::size_t i = whole; i < count; ++i) {
    if (type == DType::f32) {
      std::memcpy(out + i, in + i * sizeof(float), sizeof(float));
      continue;
    }
    std::uint16_t bits = 0;
    std::memcpy(&bits, in + i * sizeof bits, sizeof bits);
    out[i] = type == DType::bf16 ? bf16_to_float(bits) : f16_to_float(bits);
  }
}

/// Rows of one half (K or V) of a page.
struct RowCopy {
  const std::byte* from = nullptr;
  std::uint64_t stride_bytes = 0;
  std::byte* to = nullptr;
  float* scales = nullptr;  ///< of the first row, every second one, or null
  std::uint32_t rows = 0;
};

void append_half(const Kernels& kernels, DType from_type, const PageLayout& layout, const RowCopy& copy) {
  float wide[kMaxHeadDim];
  for (std::uint32_t r = 0; r < copy.rows; ++r) {
    const std::byte* const from = copy.from + r * copy.stride_bytes;
    std::byte* const to = copy.to + r * layout.row_bytes();
    if (from_type == layout.dtype) {
      std::memcpy(to, from, layout.row_bytes());
    } else {
      kernels_for(kernels, from_type).widen(from, wide, layout.head_dim);
      write_row(kernels, layout, wide, to, copy.scales + (layout.scaled() ? 2 * r : 0));
    }
  }
}

}  // namespace

void Backend::append(std::span<const AppendTask> tasks, const PageLayout& layout, Stream*) {
  if (tasks.empty()) return;
  check("append", layout);
  for (const AppendTask& task : tasks) check_tensor_type("append", task.dtype);
  std::uint64_t rows = 0;
  for (const AppendTask& task : tasks) rows += task.count;
  for_each_task(workers_, tasks, rows * layout.token_bytes(), [&kernels = kernels_, layout](const AppendTask& task) {
    const std::uint64_t stride = task.token_stride * bytes_of(task.dtype);
    std::byte* const k = task.page + task.first_row * layout.row_bytes();
    const auto scales = const_cast<float*>(scales_in(layout, task.page, task.first_row));
    append_half(kernels, task.dtype, layout,
                {.from = task.k, .stride_bytes = stride, .to = k, .scales = scales, .rows = task.count});
    if (layout.latent) return;
    append_half(kernels, task.dtype, layout,
                {.from = task.v,
                 .stride_bytes = stride,
                 .to = k + layout.half_bytes(),
                 .scales = scales == nullptr ? nullptr : scales + 1,
                 .rows = task.count});
  });
}

void Backend::to_f32(std::span<const ToF32Task> tasks, Stream*) {
  for (const auto& [in, out] : tasks) {
    check_tensor_type("to_f32", in.dtype);
    const std::uint64_t row = std::uint64_t{in.heads} * in.head_dim;
    for_each_unit(workers_, in.tokens, in.tokens * row * sizeof(float),
                  [&kernels = kernels_, in = in, out = out, row](std::uint32_t token) {
                    for (std::uint32_t head = 0; head < in.heads; ++head) {
                      float* const to = out + token * row + std::uint64_t{head} * in.head_dim;
                      widen_row(kernels, in.dtype, in.row(token, head), in.head_dim, to);
                    }
                  });
  }
}

}  // namespace sluice::cpu

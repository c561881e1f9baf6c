#pragma once

#include "cpu/backend.hpp"
#include "cpu/host_pool.hpp"
#include "runtime/page_table.hpp"
#include "scheduler/layer_policy.hpp"

namespace sluice::runtime {

/// One KV head's pages in the host pool, as the kernels see them.
[[nodiscard]] inline KvView far_view(const cpu::HostPool& pool, const HeadPages& head) {
  return {.base = pool.base(), .frames = head.frames.data(), .layout = pool.layout()};
}

/// A policy's window on one KV head's keys and values.
class HostKv final : public scheduler::KvReader {
 public:
  HostKv(cpu::Backend& host, const AttentionShape& shape, const cpu::HostPool& pool, const HeadPages& head)
      : host_(host), shape_(shape), view_(far_view(pool, head)) {}

  void score(const float* q, std::span<const std::uint32_t> tokens, float* out) override {
    const ScoreTokensTask task{.q = q, .kv = view_, .tokens = tokens, .out = out};
    host_.score_tokens({&task, 1}, shape_, nullptr);
  }
  void key(std::uint32_t token, float* out) override { row(view_.k_row(token), out); }
  void value(std::uint32_t token, float* out) override { row(view_.v_row(token), out); }

 private:
  void row(const std::byte* data, float* out) {
    const TensorView one{.data = data,
                         .dtype = view_.layout.dtype,
                         .tokens = 1,
                         .heads = 1,
                         .head_dim = view_.layout.head_dim,
                         .token_stride = view_.layout.head_dim,
                         .head_stride = view_.layout.head_dim};
    host_.to_f32(one, out, nullptr);
  }

  cpu::Backend& host_;
  const AttentionShape& shape_;
  KvView view_;
};

}  // namespace sluice::runtime

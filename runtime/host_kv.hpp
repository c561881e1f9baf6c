#pragma once

#include <algorithm>

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
  /// Later estimates come from the 4-bit copies of the pool's frames, which the head's first `pages` pages have.
  void estimate_from(const std::byte* copies, std::uint32_t pages) noexcept {
    copies_ = copies;
    copied_tokens_ = pages * view_.layout.page_tokens;
  }
  void estimate(const float* q, std::span<const std::uint32_t> tokens, float* out) override {
    const auto copied = std::lower_bound(tokens.begin(), tokens.end(), copied_tokens_) - tokens.begin();
    const auto count = static_cast<std::size_t>(copied);
    if (count != 0) {
      host_.estimate_tokens(
          {.q = q, .copies = copies_, .frames = view_.frames, .tokens = tokens.first(count), .out = out}, shape_,
          view_.layout);
    }
    if (count != tokens.size()) score(q, tokens.subspan(count), out + count * shape_.group());
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
  const std::byte* copies_ = nullptr;
  std::uint32_t copied_tokens_ = 0;
};

}  // namespace sluice::runtime

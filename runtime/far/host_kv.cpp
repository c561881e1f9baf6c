#include "runtime/far/host_kv.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "cpu/stages/k_means.hpp"
#include "cpu/stages/rows.hpp"
#include "cpu/stages/score_tokens.hpp"
#include "sluice/units.hpp"

namespace sluice::runtime {

void HostKv::score(const float* q, std::span<const std::uint32_t> tokens, float* out) {
  constexpr std::size_t kRows = 512;  // Some ten microseconds of a thread, which many can share.
  const std::size_t pieces = div_up(tokens.size(), kRows);
  if (caller_.calls == nullptr || pieces < 2 || pieces > SharedCalls::kMostPieces) return score_some(q, tokens, out);
  each(static_cast<std::uint32_t>(pieces), [&](std::uint32_t i) {
    const std::size_t first = i * kRows;
    score_some(q, tokens.subspan(first, std::min(kRows, tokens.size() - first)), out + first * shape_.group());
  });
}

void HostKv::each(std::uint32_t count, const std::function<void(std::uint32_t)>& work) {
  if (caller_.calls == nullptr || count < 2) return KvReader::each(count, work);
  caller_.calls->run(caller_.caller, caller_.question, count, work);
}

void HostKv::score_some(const float* q, std::span<const std::uint32_t> tokens, float* out) {
  cpu::score_tokens(kernels_, {.q = q, .kv = view_, .tokens = tokens, .out = out}, shape_);
}

void HostKv::estimate(const float* q, std::span<const std::uint32_t> tokens, float* out) {
  const auto copied = std::lower_bound(tokens.begin(), tokens.end(), copied_tokens_) - tokens.begin();
  const auto count = static_cast<std::size_t>(copied);
  if (count != 0) copy_and_estimate(q, tokens.first(count), out);
  if (count != tokens.size()) score(q, tokens.subspan(count), out + count * shape_.group());
}

std::span<const std::uint32_t> HostKv::first_indices(std::uint32_t count) {
  if (indices_.size() < count) {
    indices_.resize(count);
    std::iota(indices_.begin(), indices_.end(), 0);
  }
  return std::span(indices_).first(count);
}

void HostKv::copy_and_estimate(const float* q, std::span<const std::uint32_t> tokens, float* out) {
  const PageLayout layout{.page_tokens = 256, .head_dim = view_.layout.head_dim, .dtype = view_.layout.dtype};
  // What is made of keys reads no values.
  page_.resize(layout.scaled() ? layout.page_bytes() : layout.half_bytes());
  copy_.resize(CodeLayout(layout).page_bytes());
  if (centred_ && mean_.empty()) {
    mean_.resize(shape_.head_dim);
    cpu::key_mean(kernels_, view_.layout, view_.page(0), mean_.data());
  }
  const float* const mean = centred_ ? mean_.data() : nullptr;
  static constexpr std::uint32_t kOnlyFrame = 0;
  for (std::size_t first = 0; first < tokens.size(); first += layout.page_tokens) {
    const auto some = tokens.subspan(first, std::min<std::size_t>(layout.page_tokens, tokens.size() - first));
    for (std::size_t i = 0; i < some.size(); ++i) {
      std::memcpy(page_.data() + i * layout.row_bytes(), view_.k_row(some[i]), layout.row_bytes());
      if (layout.scaled())
        std::memcpy(page_.data() + layout.scales_offset() + i * layout.scale_bytes(), view_.scales(some[i]),
                    layout.scale_bytes());
    }
    const auto count = static_cast<std::uint32_t>(some.size());
    cpu::kernels_for(kernels_, layout.dtype)
        .make_codes({.k = page_.data(),
                     .scales = cpu::scales_in(layout, page_.data()),
                     .copy = copy_.data(),
                     .mean = mean,
                     .rows = count,
                     .layout = CodeLayout(layout)});
    cpu::estimate_tokens(kernels_,
                         {.q = q,
                          .copies = copy_.data(),
                          .mean = mean,
                          .frames = &kOnlyFrame,
                          .tokens = first_indices(count),
                          .out = out + first * shape_.group()},
                         shape_, layout);
  }
}

namespace {

/// Calls rows(first token, tokens, out) for every page that [first, first + count) touches.
template <class Rows>
void for_each_page(const PageLayout& layout, std::uint32_t first, std::uint32_t count, float* out, const Rows& rows) {
  while (count != 0) {
    const std::uint32_t here = std::min(count, layout.page_tokens - first % layout.page_tokens);
    rows(first, here, out);
    first += here;
    count -= here;
    out += std::size_t{here} * layout.head_dim;
  }
}

}  // namespace

void HostKv::keys(std::uint32_t first, std::uint32_t count, float* out) {
  for_each_page(view_.layout, first, count, out,
                [this](std::uint32_t token, std::uint32_t here, float* to) { rows(Half::keys, token, here, to); });
}

void HostKv::cluster(const scheduler::ClusterRequest& request, float* centroids, std::uint32_t* assignment) {
  const ClusterTask task{.kv = view_,
                         .first = request.first,
                         .count = request.count,
                         .clusters = request.clusters,
                         .iterations = request.iterations,
                         .seed = request.seed,
                         .centroids = centroids,
                         .assignment = assignment};
  cpu::k_means(kernels_, task);
}

void HostKv::score_rows(const float* x, std::uint32_t columns, const float* rows, std::uint32_t count, float* out) {
  if (count == 0) return;
  // The rows as the keys of one long page; its values are not read.
  static constexpr std::uint32_t kOnlyFrame = 0;
  const KvView view{.base = reinterpret_cast<std::byte*>(const_cast<float*>(rows)),
                    .frames = &kOnlyFrame,
                    .layout = {.page_tokens = count, .head_dim = shape_.head_dim, .dtype = DType::f32}};
  const AttentionShape shape{.layers = 1, .q_heads = columns, .kv_heads = 1, .head_dim = shape_.head_dim};
  cpu::score_tokens(kernels_, {.q = x, .kv = view, .tokens = first_indices(count), .out = out}, shape);
}

void HostKv::rows(Half half, std::uint32_t token, std::uint32_t count, float* out) {
  const PageLayout& layout = view_.layout;
  const std::byte* const first = half == Half::keys ? view_.k_row(token) : view_.v_row(token);
  for (std::uint32_t i = 0; i < count; ++i) {
    const float* const scale = layout.scaled() ? view_.scales(token + i) + (half == Half::keys ? 0 : 1) : nullptr;
    cpu::read_row(kernels_, layout, first + i * layout.row_bytes(), scale, out + std::size_t{i} * layout.head_dim);
  }
}

}  // namespace sluice::runtime

#pragma once

#include <atomic>
#include <cstring>
#include <limits>

#include "cpu/kernels/kernels.hpp"
#include "cpu/stages/rows.hpp"
#include "cpu/stages/sharing.hpp"
#include "cpu/stages/stages.hpp"
#include "cpu/threads/workers.hpp"
#include "sluice/step/forward_verbs.hpp"

/// What the verbs of a forward do within a layer, now and here; see sluice::ForwardVerbs.
namespace sluice::cpu {

[[nodiscard]] inline bool runs(const ForwardMemory& memory) noexcept {
  return memory.state->status == ForwardStatus::running;
}

/// A word that workers or callers look at.
template <class T>
[[nodiscard]] std::atomic_ref<T> shared(T& word) noexcept {
  return std::atomic_ref<T>(word);
}

/// body(row, KV head, index of both) for every row that chooses, as it is in a layer.
template <class Body>
void for_each_head(const ForwardMemory& m, std::uint32_t layer, const Body& body) {
  for (std::uint32_t r = 0; r < m.bucket.decode_rows; ++r) {
    if (m.rows[r].list == kNone) continue;
    const ForwardRow row = m.rows[r].in(layer, m.window);
    for (std::uint32_t h = 0; h < m.shape.kv_heads; ++h) body(row, h, r * m.shape.kv_heads + h);
  }
}

/// body(memory, row, plane, index) likewise, for all rows of a KV head by one thread: it alone changes what the head's
/// plane keeps of near rows. `body` is copied, and refers to nothing but the memory of the forward.
template <class Body>
void for_each_plane(const Workers& workers, const ForwardMemory& memory, std::uint32_t layer, const Body& body) {
  std::uint64_t tokens = 0;
  for_each_head(memory, layer, [&](const ForwardRow& row, std::uint32_t, std::uint32_t) { tokens += row.tokens; });
  // A token is looked at once, and is a bit or a row: enough of them are worth waking others for.
  constexpr std::uint64_t kBytesOfToken = 8;
  const Lent<ForwardMemory> lent(workers, memory);
  for_each_unit(workers, memory.shape.kv_heads, tokens * kBytesOfToken,
                [all = lent.get(), layer, body](std::uint32_t head) {
                  const ForwardMemory& m = *all;
                  const std::uint32_t plane = m.plane(layer, head);
                  for (std::uint32_t r = 0; r < m.bucket.decode_rows; ++r) {
                    if (m.rows[r].list != kNone)
                      body(m, m.rows[r].in(layer, m.window), plane, r * m.shape.kv_heads + head);
                  }
                });
}

/// Makes a sequence's mean key of a plane from its first `tokens` tokens, and the codes of its first page with it.
void renew_key_mean(const Kernels& kernels, const ForwardMemory& m, const ForwardKeyMean& of, std::uint32_t plane);

/// See ForwardVerbs::derive.
void derive(const Workers& workers, const Kernels& kernels, const ForwardMemory& m, std::uint32_t plane,
            std::span<const FarPage> pages, const float* mean);

/// First of the group's query heads, over all rows that choose.
[[nodiscard]] inline std::uint64_t first_head(const ForwardMemory& m, std::uint32_t index) noexcept {
  return std::uint64_t{index} * m.shape.group();
}

/// A far row of keys or values to a near one, of the same values. `scale`: the far row's, if such rows have some.
inline void copy_near(const Kernels& kernels, const ForwardMemory& m, const std::byte* far, const float* scale,
                      std::byte* near) {
  if (!m.far_layout.scaled()) {
    std::memcpy(near, far, m.layout.row_bytes());
    return;
  }
  float wide[kMaxHeadDim];
  read_row(kernels, m.far_layout, far, scale, wide);
  write_row(kernels, m.layout, wide, near, nullptr);
}

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
/// The outputs of all heads of a packed row.
void fill_out(const Kernels& kernels, const ForwardMemory& memory, const ForwardLayer& layer, std::uint32_t at,
              float value, float lse);

/// Near rows of freed blocks, and of the tokens that come, when a slip's lists have been taken.
void acquire_rows(const Kernels& kernels, const ForwardMemory& memory);
/// Fills those of rows that were listed to come near, see ForwardVerbs::fill.
void fill_rows(const Kernels& kernels, const ForwardMemory& memory);
void append(const Kernels& kernels, const ForwardMemory& memory, const ForwardLayer& layer);
void prefill(const Host& host, const ForwardMemory& memory, const ForwardLayer& layer);
void rank(const Host& host, const ForwardMemory& memory, std::uint32_t layer);
void score(const Host& host, const ForwardMemory& memory, const ForwardLayer& layer);
/// The caller's scores to where rows that are scored() choose by them.
void spread_scores(const ForwardMemory& memory, const ForwardLayer& layer);
void propose(const ForwardMemory& memory, std::uint32_t layer);
void choose(const Host& host, const ForwardMemory& memory, std::uint32_t layer);
void choose_clusters(const Host& host, const ForwardMemory& memory, std::uint32_t layer);
/// Outside of layers.
void cluster(const Host& host, const ForwardMemory& memory, const ForwardClustering& clustering);
void split(const Workers& workers, const ForwardMemory& memory, std::uint32_t layer);
void attend(const Workers& workers, const Kernels& kernels, const ForwardMemory& memory, std::uint32_t layer);
void attend_whole(const Host& host, const ForwardMemory& memory, const ForwardLayer& layer);
/// Queries of rows that choose, or of teams, to both sides.
void append_queries(const Kernels& kernels, const ForwardMemory& memory, const ForwardLayer& layer);
/// Of a team what some of its rows see and others do not, into what it has attended near.
void attend_edge(const Kernels& kernels, const ForwardMemory& memory, const ForwardRow& row, std::uint32_t plane,
                 std::uint32_t index);
void promote(const ForwardMemory& memory, std::uint32_t layer);
void fetch(const Kernels& kernels, const ForwardMemory& memory, std::uint32_t layer);
void merge(const Kernels& kernels, const ForwardMemory& memory, const ForwardLayer& layer);
void audit(const Kernels& kernels, const ForwardMemory& memory, const ForwardLayer& layer);

}  // namespace sluice::cpu

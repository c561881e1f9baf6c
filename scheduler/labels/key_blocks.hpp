#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "scheduler/layer_policy.hpp"
#include "scheduler/undo.hpp"

namespace sluice::scheduler {

/// Calls visit(key) for the keys of tokens [first, end), a block at a time, in float32 [head_dim]; what it is given it
/// may change. The block is the thread's: a call that times out may leave another thread behind that fills it.
template <class Visit>
void for_each_key(KvReader& kv, std::uint32_t head_dim, std::uint32_t first, std::uint32_t end, const Visit& visit) {
  constexpr std::uint32_t kRows = 256;
  thread_local std::vector<float> keys;
  keys.resize(std::size_t{kRows} * head_dim);
  for (std::uint32_t at = first; at < end; at += kRows) {
    const std::uint32_t rows = std::min(kRows, end - at);
    kv.keys(at, rows, keys.data());
    for (std::uint32_t r = 0; r < rows; ++r) visit(keys.data() + std::size_t{r} * head_dim);
  }
}

[[nodiscard]] inline bool is_finite(const float* row, std::size_t size) noexcept {
  return std::all_of(row, row + size, [](float x) { return std::isfinite(x); });
}

/// Tokens that a list has room for at most which grows by one at a time: it reserves for a sixteenth more.
[[nodiscard]] constexpr std::uint64_t room_of(std::uint64_t tokens) noexcept { return tokens + tokens / 16; }

/// Makes room for `tokens` tokens of `each` items; of a list that is to grow on, for some more.
template <class T>
void make_room(std::vector<T>& list, std::uint32_t tokens, std::size_t each) {
  if (tokens * each > list.capacity()) list.reserve((list.empty() ? tokens : room_of(tokens)) * each);
}

/// Keeps `tokens` tokens; gives memory back that tokens taken back have left, but for what kUndoTokens of them take.
template <class T>
void cut(std::vector<T>& list, std::uint32_t tokens, std::size_t each) noexcept {
  if (tokens * each >= list.size()) return;
  list.resize(tokens * each);
  if (list.capacity() > room_of(std::uint64_t{tokens} + kUndoTokens) * each) list.shrink_to_fit();
}

}  // namespace sluice::scheduler

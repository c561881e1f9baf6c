#include "scheduler/admission/prompt_share.hpp"

#include <algorithm>

namespace sluice::scheduler {
namespace {

/// What a chunk adds to a forward, in seconds.
double cost(const Pace& pace, PacedForward beside, std::uint32_t first, std::uint32_t tokens) noexcept {
  const double before = pace.seconds({.decode_rows = beside.decode_rows});
  beside.add_chunk(first, tokens);
  return std::max(0.0, pace.seconds(beside) - before);
}

/// The least tokens in [least, most] for which `reached`, which holds for all above if it holds for one; else `most`.
template <class Reached>
std::uint32_t least_tokens(std::uint32_t least, std::uint32_t most, const Reached& reached) noexcept {
  std::uint32_t low = std::min(least, most), high = most;
  while (low < high) {
    const std::uint32_t middle = low + (high - low) / 2;
    if (reached(middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

/// The most tokens in [least, most] that cost no more than `share`; `least` if none do.
std::uint32_t affordable(const Pace& pace, const PacedForward& beside, std::uint32_t first, std::uint32_t least,
                         std::uint32_t most, double share) noexcept {
  const auto too_many = [&](std::uint32_t tokens) { return cost(pace, beside, first, tokens) > share; };
  if (most <= least || !too_many(most)) return std::max(std::min(least, most), most);
  return std::max(least_tokens(least, most, too_many), least + 1) - 1;
}

}  // namespace

std::uint32_t PromptShare::trusted(const Pace& pace) noexcept {
  const std::uint32_t largest = pace.largest();
  return std::max(largest + largest / 4, kFirstChunk);
}

std::uint32_t PromptShare::first_chunk(const Pace& pace, std::uint32_t rows, std::uint32_t first, std::uint32_t least,
                                       std::uint32_t most, double slowdown) noexcept {
  if (rows == 0) return most;
  const PacedForward beside{.decode_rows = rows};
  const std::uint32_t tried = std::min(std::max(least, trusted(pace)), most);
  const double one = cost(pace, beside, first, 1);
  const double alone = pace.seconds(beside);
  const std::uint32_t worth = least_tokens(least, tried, [&](std::uint32_t tokens) {
    return cost(pace, beside, first, tokens) >= std::min((1.0 + kWorth) * one, kMostStall * slowdown * alone);
  });
  share_ = (slowdown - 1.0) * alone;
  const double wanted = cost(pace, beside, first, worth);
  if (wanted <= share_) {
    saved_ = 0.0;  // Nothing is saved for.
  } else {
    if (saved_ + share_ < wanted && waited_ < kMostWaits) return 0;
    share_ = wanted;
  }
  return affordable(pace, beside, first, worth, tried, share_);
}

std::uint32_t PromptShare::next_chunk(const Pace& pace, const PacedForward& beside, std::uint32_t first,
                                      std::uint32_t most) const noexcept {
  if (beside.decode_rows == 0) return most;
  const std::uint32_t all = trusted(pace);
  return affordable(pace, beside, first, 0, std::min(most, all - std::min(all, beside.chunk_tokens)), share_);
}

void PromptShare::settle(const Pace& pace, const PacedForward& forward, bool prompts, double slowdown) noexcept {
  if (!prompts || forward.decode_rows == 0) {
    saved_ = 0.0;
    waited_ = 0;
    return;
  }
  waited_ = forward.chunk_tokens == 0 ? waited_ + 1 : 0;
  const double alone = pace.seconds({.decode_rows = forward.decode_rows});
  saved_ = std::max(0.0, saved_ + slowdown * alone - pace.seconds(forward));
}

}  // namespace sluice::scheduler

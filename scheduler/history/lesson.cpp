#include "scheduler/history/lesson.hpp"

#include <algorithm>
#include <array>
#include <bit>

#include "sluice/units.hpp"

namespace sluice::scheduler {
namespace {

/// That leave a list's parts in unary two bits long on average, or less.
std::uint8_t rice_bits(std::uint64_t sum, std::size_t count) noexcept {
  const std::uint64_t mean = sum / count;
  return static_cast<std::uint8_t>(mean == 0 ? 0 : std::bit_width(mean) - 1);
}

std::size_t most_words(std::size_t tokens) noexcept {
  // A gap and a weight, with what they have in unary, and two ranks: 34 + 10 + 2 * 16.
  constexpr std::size_t kMostBits = 76;
  return div_up(tokens * kMostBits, 64);
}

/// Where the writer is then. By value, so that it stays in registers.
BitWriter put_ranks(const Lesson::Change& change, const WeightCode* codes, float scale, std::size_t count,
                    BitWriter to) noexcept {
  constexpr std::size_t kChunk = 512;
  std::array<std::uint32_t, kChunk> ranked;
  const ScoreStep step = change.step;
  for (std::size_t first = 0; first < count; first += kChunk) {
    std::size_t listed = 0;  // Written always, kept if there is a rank: which have one cannot be predicted.
    for (std::size_t i = first; i < std::min(first + kChunk, count); ++i) {
      ranked[listed] = static_cast<std::uint32_t>(i);
      listed += !ScoreStep::only_source(change.entries[i].before, change.entries[i].after);
    }
    for (std::size_t j = 0; j < listed; ++j) {
      const auto [old, now] = change.entries[ranked[j]];
      const ScoreStep::Sources sources = step.sources(now, step.gain(kWeights[codes[ranked[j]]] * scale));
      to.put(static_cast<std::uint32_t>(old - sources.first), sources.bits());
    }
  }
  return to;
}

}  // namespace

Lesson::Head Lesson::Head::of(std::uint32_t head, float scale, const ScoreTable::Undo& vertical,
                              const ScoreTable::Undo& slash) noexcept {
  return {.vertical_sums = vertical.before.sums,
          .slash_sums = slash.before.sums,
          .g = vertical.before.g,
          .scale = scale,
          .vertical_max = vertical.before.max,
          .slash_max = slash.before.max,
          .dead = vertical.before.dead,
          .rested = vertical.before.rested,
          .octaves = vertical.octaves,
          .head = static_cast<std::uint8_t>(head)};
}

void Lesson::clear(std::uint32_t of_step) noexcept {
  step = of_step;
  heads.clear();
  bits.clear();
}

void Lesson::reserve(std::size_t tokens) {
  heads.reserve(heads.size() + 1);
  bits.reserve(bits.size() + most_words(tokens));
}

void Lesson::add(Head head, std::span<const std::uint32_t> tokens, const WeightCode* codes, const Change& vertical,
                 const Change& slash) noexcept {
  const std::size_t count = tokens.size();
  std::uint64_t below = 0;
  head.largest = *std::max_element(codes, codes + count);
  for (std::size_t i = 0; i < count; ++i) below += static_cast<std::uint64_t>(head.largest - codes[i]);
  head.tokens = static_cast<std::uint32_t>(count);
  head.gap_bits = rice_bits(tokens.back(), count);
  head.weight_bits = rice_bits(below, count);
  heads.push_back(head);

  const std::size_t first = bits.size();
  bits.resize(first + most_words(count));
  BitWriter to(bits.data() + first);
  std::uint32_t last = 0;
  for (std::size_t i = 0; i < count; ++i) {
    to.put_rice(tokens[i] - last, head.gap_bits);
    to.put_rice(static_cast<std::uint32_t>(head.largest - codes[i]), head.weight_bits);
    last = tokens[i];
  }
  to = put_ranks(vertical, codes, head.scale, count, to);
  to = put_ranks(slash, codes, head.scale, count, to);
  bits.resize(static_cast<std::size_t>(to.flush() - bits.data()));
}

BitReader take_back(const Lesson::Head& head, const BitReader& bits, const LessonScope& scope, ScoreTable& vertical,
                    ScoreTable& slash) noexcept {
  BitReader ranks = LessonTokens(head, bits).ranks();
  const auto restore = [&](ScoreTable& table, const ScoreTable::Undo& scalars, const auto& index_of) {
    LessonTokens tokens(head, bits);
    const ScoreStep step = table.step();
    table.undo(scalars, head.tokens, [&]() -> ScoreTable::Entry {
      const LessonTokens::Observed seen = tokens.next();
      const std::uint32_t index = index_of(seen.token);
      const ScoreStep::Sources sources = step.sources(table.stored()[index], step.gain(seen.weight));
      const auto rank = static_cast<std::uint32_t>(ranks.get(sources.bits()));
      return {.index = index, .code = static_cast<ScoreCode>(sources.first + rank)};
    });
  };
  restore(vertical, head.vertical(), [&](std::uint32_t token) { return token - scope.sinks; });
  restore(slash, head.slash(), [&](std::uint32_t token) { return scope.tokens - 1 - token; });
  return ranks.next_word();
}

}  // namespace sluice::scheduler

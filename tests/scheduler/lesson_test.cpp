// What a step added to a history's tables, written in a few bits per token, and read again to take it back.
#include "scheduler/history/lesson.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"

using namespace sluice::scheduler;
using sluice::test::Random;

namespace {

ScoreCode any_code(Random& random) {
  switch (random.below(8)) {
    case 0: return static_cast<ScoreCode>(random.below(3));
    case 1: return static_cast<ScoreCode>(kLargestCode - random.below(3));
    default: return static_cast<ScoreCode>(random.below(65536));
  }
}

/// From as large as a score gets to less than any code tells apart.
float any_weight(Random& random) {
  return static_cast<float>(std::ldexp(1.0 + random.uniform(), -static_cast<int>(random.below(40))));
}

/// A head's tables, before and after a step that observes some tokens.
struct Observed {
  ScoreTable vertical, slash, vertical_before, slash_before;
  std::vector<std::uint32_t> listed;
  std::vector<WeightCode> codes;
  float scale = 0.f;

  void observe(std::uint32_t h, Lesson& lesson) {
    std::vector<float> weights;
    for (const WeightCode code : codes) weights.push_back(kWeights[code] * scale);
    std::vector<std::uint32_t> distances;
    for (const std::uint32_t token : listed) distances.push_back(vertical.size() - 1 - token);
    vertical_before = vertical;
    slash_before = slash;
    const ScoreTable::Undo of_vertical = vertical.decay(0.95), of_slash = slash.decay(0.95);
    std::vector<ScoreChange> by_position(listed.size()), by_distance(listed.size());
    vertical.add(listed, weights.data(), by_position.data());
    slash.add(distances, weights.data(), by_distance.data());
    lesson.reserve(listed.size());
    const std::uint64_t* const memory = lesson.bits.data();
    lesson.add(Lesson::Head::of(h, scale, of_vertical, of_slash), listed, codes.data(),
               {.step = vertical.step(), .entries = by_position.data()},
               {.step = slash.step(), .entries = by_distance.data()});
    REQUIRE(lesson.bits.data() == memory);  // There was room.
  }
};

/// `stride`: tokens from one that is observed to the next, at most.
Observed about_to_observe(std::uint32_t tokens, std::uint32_t stride, Random& random) {
  Observed head;
  std::vector<float> scores(tokens);
  for (ScoreTable* table : {&head.vertical, &head.slash}) {
    for (float& score : scores) score = random.below(3) == 0 ? 0.f : any_weight(random);
    table->assign(scores);
  }
  for (std::uint32_t token = random.below(std::min(tokens, stride)); token < tokens; token += 1 + random.below(stride))
    head.listed.push_back(token);
  head.codes.resize(head.listed.size());
  for (WeightCode& code : head.codes) code = static_cast<WeightCode>(random.below(1 + random.below(kWeightCodes)));
  head.scale = 0.5f / static_cast<float>(1 + random.below(100));
  return head;
}

void require_same(const ScoreTable& table, const ScoreTable& before) {
  REQUIRE(table.size() == before.size());
  REQUIRE(std::equal(table.stored(), table.stored() + table.size(), before.stored()));
  REQUIRE(table.step().per_weight == before.step().per_weight);
  REQUIRE(table.sum() == before.sum());
  REQUIRE(table.cut(0.2).threshold == before.cut(0.2).threshold);
}

}  // namespace

TEST_CASE("a code is found again from its rank among those that a weight turns into the same one", "[lesson]") {
  Random random(5);
  std::size_t alone = 0, wide = 0;
  for (int i = 0; i < 100'000; ++i) {
    const double unit = std::ldexp(1.0 + random.uniform(), -1 - static_cast<int>(random.below(20)));
    const ScoreStep step{.per_weight = 1.0 / unit,
                         .dead = random.below(2) == 0 ? ScoreCode{0} : static_cast<ScoreCode>(random.below(30) * 1024)};
    const float gain = step.gain(any_weight(random));
    // Also those that stand at the edge of what is forgotten, and of what a gain of this size still changes.
    const ScoreCode edges[] = {any_code(random), step.dead, static_cast<ScoreCode>(step.dead + 1), to_code(gain),
                               static_cast<ScoreCode>(to_code(gain) - random.below(20'000))};
    const ScoreCode old = edges[random.below(5)];
    const ScoreCode now = step.after(old, gain);
    const ScoreStep::Sources sources = step.sources(now, gain);
    CAPTURE(i, old, now, step.dead, gain, sources.first, sources.last);
    const auto rank = static_cast<std::uint32_t>(old - sources.first);
    // Alike in one comparison: REQUIRE would take most of the time.
    const bool found = sources.first <= old && old <= sources.last && (rank >> sources.bits()) == 0;
    const bool first = sources.first == 0 || step.after(static_cast<ScoreCode>(sources.first - 1), gain) < now;
    const bool last = sources.last == kLargestCode || step.after(static_cast<ScoreCode>(sources.last + 1), gain) > now;
    const bool all = step.after(sources.first, gain) == now && step.after(sources.last, gain) == now;
    const bool told = !ScoreStep::only_source(old, now) || sources.bits() == 0;
    if (!found || !first || !last || !all || !told) FAIL("not the codes that become this one");
    alone += sources.bits() == 0;
    wide += sources.bits() > 12;
  }
  REQUIRE(alone > 10'000);
  REQUIRE(wide > 10'000);
}

TEST_CASE("the codes that become one are those that a scan of all codes finds", "[lesson]") {
  Random random(6);
  for (int i = 0; i < 60; ++i) {
    const ScoreStep step{.per_weight = std::ldexp(1.0, static_cast<int>(random.below(17))),
                         .dead = static_cast<ScoreCode>(i % 2 == 0 ? 0 : 16 * 1024)};
    const float gain = step.gain(any_weight(random));
    std::uint32_t first = 0;
    for (std::uint32_t code = 1; code <= 65536; ++code) {
      const ScoreCode now = step.after(static_cast<ScoreCode>(first), gain);
      if (code < 65536 && step.after(static_cast<ScoreCode>(code), gain) == now) continue;
      const ScoreStep::Sources sources = step.sources(now, gain);
      if (sources.first != first || sources.last != code - 1) FAIL("codes " << first << " to " << code - 1);
      first = code;
    }
  }
  SUCCEED();
}

TEST_CASE("weights are the nearest of 160, and none below 2^-20 of the largest", "[lesson]") {
  REQUIRE(weight_code(0.f) == 0);
  REQUIRE(kWeights[0] == 1.f);
  for (float below = 0.f; below < 13.8f; below += 0.001f) {
    const std::uint32_t code = weight_code(below);
    REQUIRE(code < kWeightCodes);
    REQUIRE(std::abs(std::log(static_cast<double>(kWeights[code])) + static_cast<double>(below)) <=
            std::log(2.0) / (2 * kWeightsPerOctave) + 1e-5);
  }
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float none : {14.f, 1e30f, infinity, -infinity, -1.f, std::numeric_limits<float>::quiet_NaN()})
    REQUIRE(weight_code(none) == kWeightCodes);
}

TEST_CASE("numbers of any size come back from a bit stream", "[lesson]") {
  Random random(7);
  std::vector<std::uint64_t> words(60'000);
  std::vector<std::pair<std::uint32_t, std::uint32_t>> numbers;  // A value, and its bits.
  for (int i = 0; i < 20'000; ++i) {
    const std::uint32_t bits = random.below(21);
    numbers.emplace_back(random.below(1u << bits), bits);
  }
  BitWriter to(words.data());
  for (const auto& [value, bits] : numbers) {
    to.put(value, bits);
    to.put_rice(value, bits > 8 ? bits - 8 : 0);  // Up to 256 zeros.
  }
  words.resize(static_cast<std::size_t>(to.flush() - words.data()));
  BitReader from(words);
  for (const auto& [value, bits] : numbers) {
    if (from.get(bits) != value) FAIL("put");
    if (from.get_rice(bits > 8 ? bits - 8 : 0) != value) FAIL("put_rice");
  }
}

TEST_CASE("a lesson gives back tokens, weights and what stood in both tables, of every head", "[lesson]") {
  Random random(GENERATE(1u, 2u, 3u));
  const std::uint32_t tokens = GENERATE(1u, 40u, 3000u, 300'000u);
  CAPTURE(tokens);
  std::vector<Observed> heads(4);
  Lesson lesson;
  lesson.clear(tokens);
  for (std::uint32_t h = 0; h < heads.size(); ++h) {
    // The first one observes everything.
    heads[h] = about_to_observe(tokens, h == 0 ? 1 : 1 + random.below(200), random);
    heads[h].observe(h, lesson);
  }
  BitReader bits(lesson.bits);
  for (const Lesson::Head& undo : lesson.heads) {
    Observed& head = heads[undo.head];
    LessonTokens all(undo, bits);
    REQUIRE(undo.tokens == head.listed.size());
    for (std::size_t i = 0; i < head.listed.size(); ++i) {
      const LessonTokens::Observed seen = all.next();
      if (seen.token != head.listed[i] || seen.weight != kWeights[head.codes[i]] * undo.scale) FAIL("token " << i);
    }
    bits = take_back(undo, bits, {.tokens = tokens, .sinks = 0}, head.vertical, head.slash);
    require_same(head.vertical, head.vertical_before);
    require_same(head.slash, head.slash_before);
  }
}

#include "tools/cli/bench/pattern_prompt.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "cpu/device/host_device.hpp"
#include "cpu/float16.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::tools;

namespace {

constexpr AttentionShape kShape{.layers = 3, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
constexpr std::uint32_t kTokens = 9000;
constexpr std::uint32_t kSteps = 40;

std::vector<float> floats(const std::byte* row) {
  std::vector<float> out(kShape.head_dim);
  const auto* halves = reinterpret_cast<const std::uint16_t*>(row);
  std::transform(halves, halves + out.size(), out.begin(), cpu::bf16_to_float);
  return out;
}

bool same(const std::byte* a, const std::byte* b) {
  return std::memcmp(a, b, kShape.head_dim * sizeof(std::uint16_t)) == 0;
}

/// What one layer of a sequence imports: keys of each KV head, and the queries that come with the last chunk.
struct Imported {
  std::vector<std::vector<std::vector<float>>> keys;
  std::vector<std::vector<std::vector<float>>> values;
  std::vector<std::vector<float>> queries;  ///< of query head 0
};

class Prompts {
 public:
  explicit Prompts(PatternPromptOptions options)
      : device_(std::make_shared<const cpu::Workers>(cpu::Topology(), cpu::WorkersOptions{.threads = 2})),
        stream_(device_.create_stream("test")),
        prompt_(options, kShape, device_, *stream_) {}

  [[nodiscard]] Imported imported(std::uint32_t sequence, std::uint32_t layer) const {
    Imported all{.keys = std::vector<std::vector<std::vector<float>>>(kShape.kv_heads), .values = {}, .queries = {}};
    all.values = all.keys;
    prompt_.for_each_chunk(sequence, prompt_.options().tokens,
                           [&](LayerId of, const TensorView& k, const TensorView& v, const TensorView& q) {
                             CHECK(k.tokens <= kImportChunk);
                             if (of.value != layer) return;
                             for (std::uint32_t t = 0; t < k.tokens; ++t) {
                               for (std::uint32_t head = 0; head < kShape.kv_heads; ++head) {
                                 all.keys[head].push_back(floats(k.row(t, head)));
                                 all.values[head].push_back(floats(v.row(t, head)));
                               }
                             }
                             for (std::uint32_t t = 0; t < q.tokens; ++t) all.queries.push_back(floats(q.row(t, 0)));
                           });
    return all;
  }

  /// The rows of a forward's layer, copied, as they lie where the next forward's will.
  [[nodiscard]] AttentionCall attended(std::uint32_t layer, std::uint32_t position, std::uint32_t rows,
                                       std::uint32_t drafts = 1) {
    prompt_.begin(position, drafts, *stream_);
    stream_->synchronize(deadline_after(std::chrono::seconds(20)));
    TensorView own;
    own.tokens = rows;
    AttentionCall call = prompt_.attended({.layer = LayerId{layer}, .q = own, .k = own, .v = own, .out = {}}, drafts);
    const auto place = call.q.data;
    CHECK((places_.emplace(std::pair(layer, drafts), place).first->second == place));
    const std::uint64_t heads = kShape.q_heads + 2 * kShape.kv_heads;
    const std::uint64_t elements = (rows - 1) * call.q.token_stride + heads * kShape.head_dim;
    copies_.emplace_back(place, place + elements * sizeof(std::uint16_t));
    for (TensorView* view : {&call.q, &call.k, &call.v}) view->data = copies_.back().data() + (view->data - place);
    return call;
  }

 private:
  cpu::HostDevice device_;
  std::unique_ptr<Stream> stream_;
  PatternPrompt prompt_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, const std::byte*> places_;  ///< of layers and drafts
  std::deque<std::vector<std::byte>> copies_;
};

std::vector<double> softmax(const std::vector<float>& q, const std::vector<std::vector<float>>& keys) {
  std::vector<double> masses;
  for (const std::vector<float>& k : keys)
    masses.push_back(std::inner_product(q.begin(), q.end(), k.begin(), 0.0) / std::sqrt(double{kShape.head_dim}));
  const double most = *std::ranges::max_element(masses);
  double sum = 0.0;
  for (double& mass : masses) sum += mass = std::exp(mass - most);
  for (double& mass : masses) mass /= sum;
  return masses;
}

std::vector<std::size_t> heaviest(const std::vector<double>& masses, std::size_t count) {
  std::vector<std::size_t> order(masses.size());
  std::iota(order.begin(), order.end(), 0u);
  std::ranges::nth_element(order, order.begin() + static_cast<std::ptrdiff_t>(count),
                           [&](std::size_t a, std::size_t b) { return masses[a] > masses[b]; });
  order.resize(count);
  std::ranges::sort(order);
  return order;
}

PatternPromptOptions options_of(PromptStructure structure, std::uint32_t sequences = 2) {
  return {.structure = structure, .seed = 5, .tokens = kTokens, .sequences = sequences, .steps = kSteps};
}

}  // namespace

TEST_CASE("few tokens hold most of the softmax of every row behind a structured prompt, and sinks their part",
          "[pattern]") {
  struct Case {
    PromptStructure structure;
    double least, most;
  };
  const auto each = GENERATE(values<Case>({{PromptStructure::narrow_slash, 0.85, 1.0},
                                           {PromptStructure::vertical_slash, 0.6, 0.97},
                                           {PromptStructure::uniform, 0.0, 0.4}}));
  Prompts prompts(options_of(each.structure));
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
    for (const std::uint32_t sequence : {0u, 1u}) {
      const Imported imported = prompts.imported(sequence, layer);
      REQUIRE(imported.keys[1].size() == kTokens);
      for (const std::uint32_t step : {0u, kSteps - 1}) {
        const AttentionCall call = prompts.attended(layer, kTokens + step, 2);
        double mean = 0.0, sinks = 0.0;
        for (std::uint32_t head = 0; head < kShape.q_heads; ++head) {
          const auto masses = softmax(floats(call.q.row(sequence, head)), imported.keys[head / kShape.group()]);
          for (const std::size_t token : heaviest(masses, kTokens / 25)) mean += masses[token] / kShape.q_heads;
          for (std::uint32_t token = 0; token < PromptPattern::kSinks; ++token) sinks += masses[token] / kShape.q_heads;
        }
        CAPTURE(to_string(each.structure), layer, sequence, step, sinks);
        CHECK(mean > each.least);
        CHECK(mean < each.most);
        CHECK((sinks > 0.05) == (each.structure != PromptStructure::uniform));
      }
    }
  }
}

TEST_CASE("layers and sequences want other tokens of their prompts", "[pattern]") {
  Prompts prompts(options_of(PromptStructure::narrow_slash));
  std::vector<std::vector<std::size_t>> wanted;
  for (const std::uint32_t sequence : {0u, 1u}) {
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      const AttentionCall call = prompts.attended(layer, kTokens, 2);
      wanted.push_back(
          heaviest(softmax(floats(call.q.row(sequence, 0)), prompts.imported(sequence, layer).keys[0]), 100));
    }
  }
  for (std::size_t a = 0; a < wanted.size(); ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      std::vector<std::size_t> both;
      std::ranges::set_intersection(wanted[a], wanted[b], std::back_inserter(both));
      CAPTURE(a, b);
      CHECK(both.size() < 50);  // Sinks, and neighbours of the newest.
    }
  }
}

TEST_CASE("a forward's rows go on with the prompt: alone, in a batch, and as drafts", "[pattern]") {
  constexpr std::uint32_t kShort = 8000;
  PatternPromptOptions options = options_of(PromptStructure::narrow_slash);
  options.tokens = kShort;
  Prompts prompts(options);
  options.sequences = 1;
  options.drafts = 4;
  Prompts alone(options);
  options.tokens = kShort - 16;
  Prompts shorter(options);
  const Imported whole = alone.imported(0, 1);
  CHECK(whole.queries.size() == kShownQueries);
  for (std::uint32_t step = 0; step + 4 <= kSteps; step += 4) {
    CAPTURE(step);
    const AttentionCall drafts = alone.attended(1, kShort + step, 4, 4);
    for (std::uint32_t draft = 0; draft < 4; ++draft) {
      const AttentionCall one = alone.attended(1, kShort + step + draft, 1);
      const AttentionCall both = prompts.attended(1, kShort + step + draft, 2);
      for (std::uint32_t head = 0; head < kShape.q_heads; ++head) {
        CHECK(same(drafts.q.row(draft, head), one.q.row(0, head)));
        CHECK(same(both.q.row(0, head), one.q.row(0, head)));
        CHECK_FALSE(same(both.q.row(1, head), one.q.row(0, head)));
      }
      CHECK(same(drafts.k.row(draft, 1), one.k.row(0, 1)));
      CHECK(same(both.v.row(0, 1), one.v.row(0, 1)));
    }
  }
  // The prompt's end of one is what forwards write behind a shorter one.
  for (std::uint32_t i = 0; i < 16; ++i) {
    const AttentionCall call = shorter.attended(1, kShort - 16 + i, 1);
    CAPTURE(i);
    CHECK((floats(call.q.row(0, 0)) == whole.queries[kShownQueries - 16 + i]));
    CHECK((floats(call.k.row(0, 1)) == whole.keys[1][kShort - 16 + i]));
    CHECK((floats(call.v.row(0, 0)) == whole.values[0][kShort - 16 + i]));
  }
}

TEST_CASE("prompts of any length come in whole, with the queries of their newest tokens", "[pattern]") {
  const auto tokens = GENERATE(1u, 4u, 5u, 20u, 4100u, 4101u, 8196u);
  const Prompts prompts({.structure = PromptStructure::vertical_slash, .seed = 1, .tokens = tokens});
  const Imported imported = prompts.imported(0, 2);
  CAPTURE(tokens);
  CHECK(imported.keys[0].size() == tokens);
  CHECK(imported.values[1].size() == tokens);
  CHECK(imported.queries.size() == (tokens == 5 ? 1 : std::min(tokens > 4 ? tokens - 4 : tokens, kShownQueries)));
  // The newest query is that of the last position.
  if (tokens > 1 && tokens < 8000) {
    Prompts before({.structure = PromptStructure::vertical_slash, .seed = 1, .tokens = tokens - 1});
    CHECK((floats(before.attended(2, tokens - 1, 1).q.row(0, 0)) == imported.queries.back()));
  }
}

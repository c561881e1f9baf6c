// Select, then prune, through the whole runtime: by the device's program and by the CPU, against float64.
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "cpu/backend.hpp"
#include "cpu/host_device.hpp"
#include "cpu/topology.hpp"
#include "cpu/workers.hpp"
#include "sluice/error.hpp"
#include "scheduler/layer_policy.hpp"
#include "scheduler/step_graph.hpp"
#include "tests/runtime/toy.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/prune_reference.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr AttentionShape kShape{.layers = 2, .q_heads = 6, .kv_heads = 2, .head_dim = 64};
constexpr double kTolerance = 2e-5;

/// What a policy of pages or all tokens and top-p selects of a Toy, and the attention over it, from their definitions.
class Definition {
 public:
  Definition(const Toy& toy, const PolicySpec& spec, std::uint32_t page_tokens)
      : toy_(toy), spec_(spec), layout_{.page_tokens = page_tokens, .head_dim = kShape.head_dim, .dtype = DType::f32} {}

  /// Output of position `token`, which attends what is selected and near: [q_heads, head_dim].
  [[nodiscard]] std::vector<double> step(std::uint32_t layer, std::uint32_t token) {
    if (spec_.dense(layer)) return toy_.dense(layer, token);
    std::vector<double> out;
    for (std::uint32_t kv = 0; kv < kShape.kv_heads; ++kv) {
      const std::set<std::uint32_t> tokens = attended(layer, kv, token);
      sizes.push_back(tokens.size());
      for (std::uint32_t h = 0; h < kShape.group(); ++h) {
        const std::vector<double> one = attend(layer, kv, token, h, tokens);
        out.insert(out.end(), one.begin(), one.end());
      }
    }
    return out;
  }

  std::vector<std::size_t> sizes;  ///< attended by each KV head and step

 private:
  [[nodiscard]] const float* key(std::uint32_t layer, std::uint32_t kv, std::uint32_t token) const {
    return reinterpret_cast<const float*>(toy_.k(layer, 0, toy_.tokens()).row(token, kv));
  }
  [[nodiscard]] const float* query(std::uint32_t layer, std::uint32_t kv, std::uint32_t token, std::uint32_t h) const {
    return reinterpret_cast<const float*>(toy_.q(layer, 0, toy_.tokens()).row(token, kv * kShape.group() + h));
  }
  [[nodiscard]] static double product(const float* q, const float* k) {
    double sum = 0.0;
    for (std::uint32_t c = 0; c < kShape.head_dim; ++c) sum += double{q[c]} * k[c];
    return sum / 8.0;
  }

  [[nodiscard]] double estimate(std::uint32_t layer, std::uint32_t kv, std::uint32_t token, const float* q) {
    auto& row = decoded_[{layer, kv, token}];
    if (row.empty()) {
      const Int4Layout copy(layout_);
      std::vector<std::byte> page(layout_.page_bytes()), codes(copy.page_bytes());
      std::copy_n(key(layer, kv, token), kShape.head_dim, reinterpret_cast<float*>(page.data()));
      static const cpu::Topology topology;
      static const cpu::Workers workers(topology, {.threads = 1});
      static cpu::Backend backend(workers);
      const QuantizeTask task{.page = page.data(), .rows = 1, .out = codes.data()};
      backend.quantize({&task, 1}, layout_, nullptr);
      const DecodedRow values = decode_row(codes.data(), copy, 0);
      for (std::uint32_t c = 0; c < kShape.head_dim; ++c) row.push_back(static_cast<float>(values.at(c)));
    }
    return product(q, row.data());
  }

  [[nodiscard]] std::vector<std::uint32_t> ranked(std::uint32_t layer, std::uint32_t kv, std::uint32_t pages,
                                                  const float* q) const {
    std::vector<double> bounds(pages);
    for (std::uint32_t page = 0; page < pages; ++page) {
      for (std::uint32_t c = 0; c < kShape.head_dim; ++c) {
        double hi = -INFINITY, lo = INFINITY;
        for (std::uint32_t r = 0; r < layout_.page_tokens; ++r) {
          const double k = key(layer, kv, page * layout_.page_tokens + r)[c];
          hi = std::max(hi, k);
          lo = std::min(lo, k);
        }
        bounds[page] += std::max(q[c] * hi, q[c] * lo);
      }
    }
    std::vector<std::uint32_t> order(pages);
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return bounds[a] > bounds[b]; });
    order.resize(scheduler::budget_pages(spec_.pages, pages, layout_.page_tokens));
    std::sort(order.begin(), order.end());
    return order;
  }

  [[nodiscard]] std::set<std::uint32_t> attended(std::uint32_t layer, std::uint32_t kv, std::uint32_t token) {
    const std::uint32_t n = token + 1;
    const std::uint32_t open = token / layout_.page_tokens * layout_.page_tokens;
    const bool int4 = spec_.estimate == Estimate::int4;
    std::set<std::uint32_t> anyway;
    for (std::uint32_t t = 0; t < n; ++t) {
      const bool near = t < spec_.near.sink_tokens || t + spec_.near.recent_tokens >= n;
      if (near || (int4 && t >= open)) anyway.insert(t);
    }
    std::set<std::uint32_t> all = anyway;
    for (std::uint32_t h = 0; h < kShape.group(); ++h) {
      const float* const q = query(layer, kv, token, h);
      std::vector<std::uint32_t> candidates;
      if (spec_.uses(Source::exact)) {
        candidates.resize(open);
        std::iota(candidates.begin(), candidates.end(), 0u);
      } else {
        for (const std::uint32_t page : ranked(layer, kv, open / layout_.page_tokens, q)) {
          for (std::uint32_t r = 0; r < layout_.page_tokens; ++r) candidates.push_back(page * layout_.page_tokens + r);
        }
      }
      for (std::uint32_t t = open; t < n && !int4; ++t) candidates.push_back(t);
      std::erase_if(candidates, [&](std::uint32_t t) { return anyway.contains(t); });
      const std::size_t choice = candidates.size();
      candidates.insert(candidates.end(), anyway.begin(), anyway.end());
      std::vector<float> logits;
      for (const std::uint32_t t : candidates) {
        const bool estimated = int4 && t < open;
        logits.push_back(static_cast<float>(estimated ? estimate(layer, kv, t, q) : product(q, key(layer, kv, t))));
      }
      for (const std::uint32_t i : sorted_top_p(logits, spec_.budget.mass, {.end = choice})) all.insert(candidates[i]);
    }
    return all;
  }

  [[nodiscard]] std::vector<double> attend(std::uint32_t layer, std::uint32_t kv, std::uint32_t token, std::uint32_t h,
                                           const std::set<std::uint32_t>& tokens) const {
    std::vector<double> out(kShape.head_dim);
    double sum = 0.0;
    for (const std::uint32_t t : tokens) {
      const double weight = std::exp(product(query(layer, kv, token, h), key(layer, kv, t)));
      const auto* v = reinterpret_cast<const float*>(toy_.v(layer, 0, toy_.tokens()).row(t, kv));
      for (std::uint32_t c = 0; c < kShape.head_dim; ++c) out[c] += weight * v[c];
      sum += weight;
    }
    for (double& x : out) x /= sum;
    return out;
  }

  const Toy& toy_;
  PolicySpec spec_;
  PageLayout layout_;
  std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>, std::vector<float>> decoded_;
};

RuntimeOptions options_with(std::uint32_t tokens, std::uint32_t page_tokens) {
  RuntimeOptions options = toy_options(kShape, tokens);
  options.page_tokens = page_tokens;
  return options;
}

constexpr const char* kNear = " | near=0%,sinks=4,recent=10";

}  // namespace

TEST_CASE("what is pruned, by the device or by the CPU, is what the definition says", "[runtime][pruned]") {
  const Drive drive = GENERATE(Drive::waiting, Drive::queued);
  CAPTURE(to_string(drive));
  const std::string source = GENERATE("pages:box,pages=3", "pages:box,budget=80", "exact");
  const std::string stages = GENERATE(" | int4 | top_p=0.8", " | int4 | top_p=0.99", " | top_p=0.8");
  const std::uint32_t page_tokens = GENERATE(8u, 32u);
  const PlacementMode placement = GENERATE(PlacementMode::hybrid, PlacementMode::stream);
  const std::string text = source + stages + kNear + " | dense=1";
  CAPTURE(text, page_tokens, to_string(placement));
  const Toy toy(kShape, 215, 41);
  RuntimeOptions options = options_with(250, page_tokens);
  options.placement = placement;
  Runtime runtime(options, device_of(drive));
  const PolicySpec spec = parse_policy(text);
  REQUIRE(scheduler::prunes_on_device(spec) == (spec.estimate == Estimate::int4));
  const SequenceId id = runtime.begin(spec);
  const std::vector<float> got = decode(runtime, id, toy, 190, drive);
  Definition definition(toy, spec, page_tokens);
  std::size_t at = 0;
  double worst = 0.0;
  for (std::uint32_t token = 190; token < toy.tokens(); ++token) {
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      for (const double want : definition.step(layer, token)) worst = std::max(worst, std::abs(want - got[at++]));
    }
  }
  REQUIRE(at == got.size());
  REQUIRE(worst < kTolerance);
  const Stats stats = runtime.stats(id);
  const std::size_t sparse = std::accumulate(definition.sizes.begin(), definition.sizes.end(), std::size_t{0});
  REQUIRE(stats.attended_tokens == sparse + stats.dense_tokens / 2);  // Half of the layers are dense.
  REQUIRE((stats.estimated_keys > 0) == (spec.estimate == Estimate::int4));
}

TEST_CASE("device program and host lane select the same tokens", "[runtime][pruned]") {
  const Drive drive = GENERATE(Drive::waiting, Drive::queued);
  CAPTURE(to_string(drive));
  // Beside pages, `exact` is no business of a device, but still proposes every token.
  const std::string near = GENERATE("near=0%,sinks=4,recent=10", "near=0%,sinks=20,recent=50",
                                    "near=0%,sinks=0,recent=0", "near=20%,sinks=4,recent=20",
                                    "near=0%,sinks=0,recent=320");
  const std::string stages = " | int4 | top_p=0.5 | " + near;
  CAPTURE(stages);
  const Toy toy(kShape, 330, 42);
  std::vector<std::vector<float>> outputs;
  std::vector<Stats> stats;
  for (const std::string source : {"exact", "exact+pages", "pages:box,pages=all"}) {
    Runtime runtime(options_with(350, 16), device_of(drive));
    const PolicySpec spec = parse_policy(source + stages);
    REQUIRE(scheduler::prunes_on_device(spec) == (source != "exact+pages"));
    const SequenceId id = runtime.begin(spec);
    outputs.push_back(decode(runtime, id, toy, 300, drive));
    stats.push_back(runtime.stats(id));
  }
  for (std::size_t i = 1; i < outputs.size(); ++i) {
    REQUIRE(outputs[i] == outputs[0]);
    REQUIRE(stats[i].attended_tokens == stats[0].attended_tokens);
    REQUIRE(stats[i].far_tokens == stats[0].far_tokens);
  }
  REQUIRE(stats[0].attended_tokens < stats[0].dense_tokens);
}

TEST_CASE("estimates feed history and every budget", "[runtime][pruned]") {
  const Drive drive = GENERATE(Drive::waiting, Drive::queued);
  CAPTURE(to_string(drive));
  const std::string policy =
      GENERATE("history+pages | int4 | top_p=0.9", "history:share_group=on+pages | int4 | top_k=32",
               "history | top_p=0.9", "exact | int4 | top_k=32", "clusters:least=64 | int4 | top_p=0.9",
               "lsh:recent_prompt=8 | int4 | top_p=0.9", "lsh:recent_prompt=8+pages:pages=4 | top_p=0.9");
  CAPTURE(policy);
  const Toy toy(kShape, 360, 43);
  Runtime runtime(options_with(380, 16), device_of(drive));
  const SequenceId id = runtime.begin(parse_policy(policy + kNear));
  const std::vector<float> out = decode(runtime, id, toy, 300, drive);
  REQUIRE(std::none_of(out.begin(), out.end(), [](float x) { return std::isnan(x); }));
  const Stats stats = runtime.stats(id);
  REQUIRE(stats.attended_tokens < stats.dense_tokens);
  REQUIRE((stats.estimated_keys > 0) == (policy.find("int4") != std::string::npos));
}

TEST_CASE("p = 1 over all tokens is dense attention, from any prompt", "[runtime][pruned]") {
  const Drive drive = GENERATE(Drive::waiting, Drive::queued);
  CAPTURE(to_string(drive));
  const std::string source = GENERATE("exact | int4", "pages:box,pages=all | int4", "exact");
  const std::uint32_t prompt = GENERATE(0u, 1u, 16u, 40u);
  CAPTURE(source, prompt);
  const Toy toy(kShape, prompt + 40, 44);
  Runtime runtime(options_with(100, 16), device_of(drive));
  const SequenceId id = runtime.begin(parse_policy(source + " | top_p=1 | near=0%,sinks=0,recent=0"));
  REQUIRE(worst_error(decode(runtime, id, toy, prompt, drive), toy, prompt) < kTolerance);
}

TEST_CASE("a second prompt, an imported prefix and other sequences change nothing", "[runtime][pruned]") {
  const Drive drive = GENERATE(Drive::waiting, Drive::queued);
  CAPTURE(to_string(drive));
  const std::string policy = std::string(GENERATE("pages:box,pages=4", "exact")) + " | int4 | top_p=0.85" + kNear;
  CAPTURE(policy);
  const Toy toy(kShape, 260, 45);
  const auto last_steps = [&](Runtime& runtime, SequenceId id) { return decode_rest(runtime, id, toy, 240, drive); };
  const auto import = [&](Runtime& runtime, SequenceId id, std::uint32_t begin, std::uint32_t end) {
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      runtime.import_prefix({.sequence = id,
                             .layer = LayerId{layer},
                             .k = toy.k(layer, begin, end - begin),
                             .v = toy.v(layer, begin, end - begin),
                             .last_q = toy.q(layer, end - 1, 1)});
    }
  };
  RuntimeOptions options = options_with(1'000, 16);
  Runtime runtime(options, device_of(drive));
  const SequenceId whole = runtime.begin(parse_policy(policy));
  prefill(runtime, whole, toy, 240, 64, drive);
  const std::vector<float> want = last_steps(runtime, whole);

  const SequenceId pieces = runtime.begin(parse_policy(policy));
  import(runtime, pieces, 0, 100);
  std::vector<float> between(std::size_t{21} * kShape.layers * kShape.q_heads * kShape.head_dim);
  for (std::uint32_t i = 0; i < 21; ++i) {
    step_into(runtime, pieces, toy, 100 + i, between.data() + between.size() / 21 * i, drive);
  }
  import(runtime, pieces, 121, 240);
  (void)runtime.begin(parse_policy("streaming:recent=20"));  // Makes room for one more, without a ranking.
  REQUIRE(last_steps(runtime, pieces) == want);
  runtime.end(whole);
  const SequenceId again = runtime.begin(parse_policy(policy));  // In frames that had other copies.
  import(runtime, again, 0, 240);
  REQUIRE(last_steps(runtime, again) == want);
}

TEST_CASE("a sequence that finds no memory to begin leaves those that run as they were", "[runtime][pruned]") {
  const std::string text = GENERATE("pages:box,pages=3 | int4 | top_p=0.8", "exact | int4 | top_p=0.8", "pages:box,pages=3 | top_k=8",
                                    "pages:box | progressive=0.8");
  CAPTURE(text);
  const Toy toy(kShape, 215, 43);
  const PolicySpec spec = parse_policy(text + kNear);
  const auto options = [&] {
    RuntimeOptions one = options_with(250, 16);
    one.placement = PlacementMode::stream;
    return one;
  }();
  std::vector<float> want;
  {
    Runtime runtime(options);
    want = decode(runtime, runtime.begin(spec), toy, 200);
  }
  int failures = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    CAPTURE(seed);
    const cpu::Topology topology;
    const auto workers = std::make_shared<const cpu::Workers>(topology, cpu::WorkersOptions{.threads = 2, .pin = false});
    const auto device = std::make_shared<cpu::HostDevice>(workers);
    Runtime runtime(options, device);
    const SequenceId id = runtime.begin(spec);
    device->misbehave({.seed = seed, .fail_allocation = 0.1});
    bool begun = true;
    try {
      (void)runtime.begin(spec);
    } catch (const Error&) {
      begun = false;
    }
    device->misbehave({});
    failures += begun ? 0 : 1;
    REQUIRE(worst_difference(decode(runtime, id, toy, 200), want) == 0.0);
  }
  REQUIRE(failures > 4);
}

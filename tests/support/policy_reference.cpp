#include "tests/support/policy_reference.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <optional>

#include "cpu/stages/rows.hpp"
#include "scheduler/plan/forward_rows.hpp"
#include "sluice/step/partial.hpp"
#include "tests/support/reference.hpp"

namespace sluice::test::policies {

Reference::Reference(const EngineRig& rig, const Story& story, const AttentionShape& shape, const PolicySpec& policy)
    : story_(story),
      shape_(shape),
      policy_(policy),
      layout_{.page_tokens = kPageTokens, .head_dim = shape.head_dim, .dtype = rig.kv_dtype},
      frames_(div_up(story.tokens(), kPageTokens)),
      pages_(std::size_t{shape.layers} * shape.kv_heads,
             std::vector<std::byte>(frames_.size() * layout_.page_bytes())) {
  std::iota(frames_.rbegin(), frames_.rend(), 0u);
  report_.layers = shape.layers;
  report_.q_heads = shape.q_heads;
}

void Reference::append(std::uint32_t token) {
  for (std::uint32_t plane = 0; plane < pages_.size(); ++plane) {
    const std::uint32_t layer = plane / shape_.kv_heads;
    const std::size_t head = std::size_t{plane % shape_.kv_heads} * shape_.head_dim;
    const KvView kv{.base = pages_[plane].data(), .frames = frames_.data(), .layout = layout_};
    const auto put = [&](const float* values, std::byte* row, std::size_t half) {
      const std::vector<double> exact(values + head, values + head + shape_.head_dim);
      store_row(row, layout_.scaled() ? kv.scales(token) + half : nullptr, layout_.dtype, exact);
    };
    put(story_.k(layer, token), kv.k_row(token), 0);
    put(story_.v(layer, token), kv.v_row(token), 1);
  }
}

void Reference::take(std::uint32_t tokens, bool queries) {
  if (begun_ || !queries) prompt_begin_ = at_;
  begun_ = false;
  for (; at_ < tokens; ++at_) append(at_);
  if (!queries) prompt_begin_ = at_;
}

runtime::HostKv Reference::reader(std::uint32_t layer, std::uint32_t kv_head, std::uint32_t tokens) {
  runtime::HostKv kv(
      shape_, {.base = pages_[layer * shape_.kv_heads + kv_head].data(), .frames = frames_.data(), .layout = layout_});
  // The device copies keys as they come.
  const bool own_pages = policy_.budget.kind == BudgetKind::progressive && policy_.estimate == Estimate::int4;
  const bool all =
      policy_.budget.kind == BudgetKind::fitted || own_pages || scheduler::copies_open_page(policy_, kPageTokens);
  kv.use_codes(tokens == 0 ? 0 : all ? static_cast<std::uint32_t>(frames_.size()) : (tokens - 1) / kPageTokens,
               tokens);
  return kv;
}

void Reference::begin() {
  layers_.clear();
  const std::uint32_t queries = std::min(at_ - prompt_begin_, scheduler::prompt_queries(policy_));
  const std::size_t group = std::size_t{shape_.group()} * shape_.head_dim;
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    layers_.push_back(policy_.dense(layer) || window(layer) != 0
                          ? nullptr
                          : scheduler::make_layer_policy(policy_, shape_, kPageTokens, LayerId{layer}));
    for (std::uint32_t kv_head = 0; kv_head < shape_.kv_heads && layers_.back(); ++kv_head) {
      std::vector<float> last_q;
      for (std::uint32_t token = at_ - queries; token < at_; ++token) {
        const float* const q = story_.q(layer, token) + kv_head * group;
        last_q.insert(last_q.end(), q, q + group);
      }
      runtime::HostKv kv = reader(layer, kv_head, at_);
      layers_.back()->begin({.kv_head = kv_head, .tokens = at_, .queries = queries, .last_q = last_q, .kv = &kv});
      layers_.back()->forecast(kv_head, at_ + 1);
    }
  }
  begun_ = true;
}

void Reference::rank(std::uint32_t layer, std::uint32_t kv_head, std::uint32_t pages, std::uint32_t picks,
                     std::vector<float>& scores, std::vector<std::uint32_t>& ranked) {
  const std::uint32_t d = shape_.head_dim;
  const PageLayout made = layout_.near();
  const cpu::ElementKernels& kernels = cpu::kernels_for(cpu::fastest_kernels(), layout_.dtype);
  const auto digest = policy_.pages.digest == DigestKind::box ? kernels.digest_box : kernels.digest_cuboid_mean;
  // Rounded as pages keep them.
  std::vector<std::vector<std::byte>> digests(pages, std::vector<std::byte>(2 * made.row_bytes()));
  for (std::uint32_t page = 0; page < pages; ++page) {
    const std::byte* const keys =
        pages_[layer * shape_.kv_heads + kv_head].data() + frames_[page] * layout_.page_bytes();
    digest({.k = keys,
            .scales = cpu::scales_in(layout_, keys),
            .out = digests[page].data(),
            .rows = kPageTokens,
            .head_dim = d});
  }
  for (std::uint32_t h = 0; h < shape_.group(); ++h) {
    const float* const q = story_.q(layer, at_) + (std::size_t{kv_head} * shape_.group() + h) * d;
    std::vector<std::pair<double, std::uint32_t>> order;
    for (std::uint32_t page = 0; page < pages; ++page) {
      double score = 0.0;
      for (std::uint32_t c = 0; c < d; ++c) {
        score += std::max(q[c] * load_element(digests[page].data(), made.dtype, c),
                          q[c] * load_element(digests[page].data(), made.dtype, d + c));
      }
      order.emplace_back(-score, page);
      scores.push_back(static_cast<float>(score));
    }
    std::ranges::sort(order);
    std::vector<std::uint32_t> best;
    for (std::uint32_t i = 0; i < picks; ++i) best.push_back(order[i].second);
    std::ranges::sort(best);
    ranked.insert(ranked.end(), best.begin(), best.end());
  }
}

/// A layer at the token that is decoded; what is rehearsed are the queries of the layer before, as ForwardTensors has
/// it.
class Reference::Layer final : public scheduler::LayerReader {
 public:
  Layer(Reference& of, std::uint32_t layer) : of_(of), layer_(layer), scores_(of.shape_.kv_heads) {}
  [[nodiscard]] std::uint64_t step() const noexcept override { return of_.at_ + std::uint64_t{1}; }
  [[nodiscard]] const float* q(std::uint32_t kv_head) const noexcept override { return query(layer_, kv_head); }
  [[nodiscard]] const float* rehearsed(std::uint32_t kv_head) const noexcept override {
    return layer_ == 0 ? nullptr : query(layer_ - 1, kv_head);
  }
  [[nodiscard]] std::span<const float> page_scores(std::uint32_t kv_head) const noexcept override {
    return scores_[kv_head];
  }
  [[nodiscard]] scheduler::KvReader& kv(std::uint32_t kv_head) override {
    return kv_.emplace(of_.reader(layer_, kv_head, of_.at_ + 1));
  }
  void rank(std::uint32_t pages) {
    std::vector<std::uint32_t> none;
    for (std::uint32_t kv = 0; kv < scores_.size(); ++kv) of_.rank(layer_, kv, pages, 0, scores_[kv], none);
  }

 private:
  [[nodiscard]] const float* query(std::uint32_t layer, std::uint32_t kv_head) const noexcept {
    return of_.story_.q(layer, of_.at_) + std::size_t{kv_head} * of_.shape_.group() * of_.shape_.head_dim;
  }
  Reference& of_;
  std::uint32_t layer_;
  std::vector<std::vector<float>> scores_;  ///< [kv_heads], of policies that rank by themselves
  std::optional<runtime::HostKv> kv_;
};

Reference::Attended Reference::choose(std::uint32_t layer, std::uint32_t kv_head) {
  const std::uint32_t tokens = at_ + 1;
  const ForwardRow row =
      scheduler::forward_row(policy_, tokens, scheduler::row_shape(shape_, kPageTokens)).in(layer, window(layer));
  Attended attended;
  attended.heads.resize(tokens);
  for (std::uint32_t t = 0; t < tokens; ++t) attended.heads[t] = row.in_window(t) ? ~0u : 0;
  if (!layers_[layer]) return attended;
  Layer whole(*this, layer);
  std::vector<std::uint32_t> ranked;
  const std::uint32_t pages = at_ / kPageTokens;  // All but the newest.
  if (scheduler::ranks_itself(policy_)) {
    whole.rank(pages);
  } else if (policy_.uses(Source::pages)) {
    std::vector<float> scores;
    rank(layer, kv_head, pages, scheduler::budget_pages(policy_.pages, pages, kPageTokens), scores, ranked);
  }
  runtime::HostKv kv = reader(layer, kv_head, tokens);
  const scheduler::NearSet near{
      .sink_end = row.sink_end, .recent_begin = row.recent_begin, .page_tokens = kPageTokens};
  scheduler::SelectCounters counters;
  layers_[layer]->select({.kv_head = kv_head,
                          .tokens = tokens,
                          .q = whole.q(kv_head),
                          .rehearsed = whole.rehearsed(kv_head),
                          .ranked_pages = ranked,
                          .page_scores = whole.page_scores(kv_head),
                          .near = &near,
                          .kv = &kv,
                          .layer = &whole},
                         attended.selected, attended.bypass, counters);
  const std::uint32_t all = ~attended.bypass.heads;
  for (const PageRun& run : attended.selected.runs)
    for (std::uint32_t r = run.begin; r < run.end; ++r) attended.heads[run.page * kPageTokens + r] = all;
  for (std::size_t i = 0; i < attended.selected.tokens.size(); ++i) {
    attended.heads[attended.selected.tokens[i]] =
        attended.selected.members.empty() ? all : attended.selected.members[i];
  }
  return attended;
}

double Reference::score(std::uint32_t layer, std::uint32_t head, std::uint32_t token) const {
  const float* const q = story_.q(layer, at_) + std::size_t{head} * shape_.head_dim;
  const float* const k = story_.k(layer, token) + std::size_t{head / shape_.group()} * shape_.head_dim;
  double dot = 0.0;
  for (std::uint32_t c = 0; c < shape_.head_dim; ++c) dot += double{q[c]} * k[c];
  return reference::score(shape_, dot);
}

void Reference::attend(std::uint32_t layer, std::uint32_t kv_head, const Attended& attended, float* out) {
  const std::uint32_t tokens = at_ + 1;
  const std::uint32_t group = shape_.group();
  const std::uint32_t d = shape_.head_dim;
  const auto value = [&](std::uint32_t t, std::uint32_t c) { return story_.v(layer, t)[kv_head * d + c]; };
  const auto& given = attended.selected;
  const std::uint32_t first = window(layer) == 0 || window(layer) > tokens ? 0 : tokens - window(layer);
  runtime::AuditedGroup audited{.first = first, .tokens = tokens - first, .group = group, .head_dim = d};
  std::vector<float> sums(group);
  for (std::uint32_t h = 0; h < group; ++h) {
    // Weights of what is attended, some of them given; then of everything.
    std::vector<double> own(tokens, -INFINITY), exact(tokens);
    for (std::uint32_t t = 0; t < tokens; ++t) {
      exact[t] = t < first ? -INFINITY : score(layer, kv_head * group + h, t);
      if ((attended.heads[t] >> h & 1) != 0) own[t] = exact[t];
    }
    for (std::size_t i = 0; i < given.tokens.size() && !given.scores.empty(); ++i)
      if ((attended.heads[given.tokens[i]] >> h & 1) != 0) own[given.tokens[i]] = given.scores[i * group + h];
    const bool bypassed = (attended.bypass.heads >> h & 1) != 0;
    const double mean_mass = bypassed ? double{attended.bypass.lse[h]} : -INFINITY;
    const auto mixed = [&](const std::vector<double>& scores, double mass, std::vector<double>& sum) {
      const double top = std::max(mass, *std::ranges::max_element(scores));
      double all = std::exp(mass - top);
      sum.assign(d, 0.0);
      for (std::uint32_t c = 0; c < d && mass != -INFINITY; ++c) sum[c] = all * attended.bypass.out[h * d + c];
      for (std::uint32_t t = 0; t < tokens; ++t) {
        const double weight = std::exp(scores[t] - top);
        all += weight;
        for (std::uint32_t c = 0; c < d && weight != 0.0; ++c) sum[c] += weight * value(t, c);
      }
      for (double& x : sum) x /= all;
      return top + std::log(all);
    };
    std::vector<double> sum, whole;
    sums[h] = static_cast<float>(mixed(own, mean_mass, sum));
    audited.lse.push_back(static_cast<float>(mixed(exact, -INFINITY, whole)));
    for (std::uint32_t c = 0; c < d; ++c) out[h * d + c] = static_cast<float>(sum[c]);
    audited.out.insert(audited.out.end(), whole.begin(), whole.end());
    if (bypassed || scheduler::corrects_scores(policy_)) audited.estimated |= 1u << h;
  }
  audited.attended_out = out;
  audited.attended_lse = sums.data();
  report(layer, kv_head, attended, audited);
}

void Reference::report(std::uint32_t layer, std::uint32_t kv_head, const Attended& attended,
                       runtime::AuditedGroup& audited) {
  const std::uint32_t tokens = at_ + 1;
  const std::uint32_t group = shape_.group();
  const std::uint32_t d = shape_.head_dim;
  const std::uint32_t first = audited.first;
  audited.scores.resize(std::size_t{tokens - first} * group);
  for (std::size_t i = 0; i < audited.scores.size(); ++i)
    audited.scores[i] = static_cast<float>(score(layer, kv_head * group + static_cast<std::uint32_t>(i % group),
                                                 first + static_cast<std::uint32_t>(i / group)));
  for (std::uint32_t t = first; t < tokens; ++t) {
    double square = 0.0;
    const float* const value = story_.v(layer, t) + kv_head * d;
    for (std::uint32_t c = 0; c < d; ++c) square += double{value[c]} * value[c];
    audited.largest_value = std::max(audited.largest_value, std::sqrt(square));
  }
  audited.heads.assign(attended.heads.begin() + first, attended.heads.end());
  report_.heads.resize(std::size_t{shape_.layers} * shape_.q_heads);
  for (std::uint32_t h = 0; h < group; ++h)
    runtime::add(runtime::find(audited, h, watched_),
                 report_.heads[layer * shape_.q_heads + kv_head * group + h]);
  report_.bypassed_heads += static_cast<std::uint64_t>(std::popcount(attended.bypass.heads));
  report_.attended_tokens += static_cast<std::uint64_t>(
      std::ranges::count_if(attended.heads, [](std::uint32_t heads) { return heads != 0; }));
}

void Reference::learn() {
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    for (std::uint32_t kv_head = 0; kv_head < shape_.kv_heads && layers_[layer]; ++kv_head) {
      if (!layers_[layer]->wants_observation(kv_head)) continue;
      runtime::HostKv kv = reader(layer, kv_head, at_);
      layers_[layer]->observe(kv_head, kv);
      layers_[layer]->forecast(kv_head, at_ + 1);
    }
  }
}

std::vector<float> Reference::decode() {
  if (!begun_) begin();
  append(at_);
  std::vector<float> out(std::size_t{shape_.layers} * shape_.q_heads * shape_.head_dim);
  const std::size_t group = std::size_t{shape_.group()} * shape_.head_dim;
  for (std::uint32_t plane = 0; plane < pages_.size(); ++plane) {
    const std::uint32_t layer = plane / shape_.kv_heads;
    const std::uint32_t kv_head = plane % shape_.kv_heads;
    attend(layer, kv_head, choose(layer, kv_head), out.data() + plane * group);
  }
  ++at_;
  learn();
  return out;
}

}  // namespace sluice::test::policies

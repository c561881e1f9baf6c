#include "scheduler/plan/forward_work.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <utility>

#include "sluice/step/fetch_share.hpp"
#include "sluice/step/int4.hpp"

namespace sluice::scheduler {
namespace {

/// Tokens of a row, per KV head.
struct RowTokens {
  std::uint64_t window = 0;  ///< sinks and recent ones, or all
  std::uint64_t most = 0;    ///< that it may attend, these included
  std::uint64_t scored = 0;  ///< whose copies in codes are read
  std::uint64_t brought = 0;  ///< whose scores the caller brings
  std::uint64_t sampled = 0;  ///< likewise, to choose clusters
};

RowTokens tokens_of(const WorkPlace& place, const ForwardRow& row) noexcept {
  RowTokens tokens;
  tokens.window = row.whole() ? row.tokens : row.sink_end + (row.tokens - row.recent_begin);
  const std::uint64_t between = row.tokens - tokens.window;
  const std::uint64_t in_pages = std::uint64_t{place.shape.group()} * row.page_picks * place.layout.page_tokens;
  std::uint64_t picked = row.in_pages() ? in_pages : 0;
  if (row.mass > 0.f && !row.in_pages()) picked = between;
  if (row.picks != 0) picked = std::uint64_t{place.shape.group()} * row.picks;
  if (row.asks != 0) picked = between;
  if (row.most != kNone) picked = std::min(picked, std::uint64_t{place.shape.group()} * row.most);
  tokens.most = tokens.window + std::min(picked, between);
  if (row.ranks())
    (row.scored() ? tokens.brought : tokens.scored) = row.in_pages() ? in_pages + tokens.window : row.tokens;
  if (row.clusters.count != 0)
    tokens.sampled = std::uint64_t{place.shape.group()} * (row.clusters.samples.size() + tokens.window);
  return tokens;
}

std::uint64_t rounded(double value) noexcept { return static_cast<std::uint64_t>(std::llround(std::max(0.0, value))); }

/// What a layer's rows come to, over all KV heads.
struct LayerTokens {
  std::uint32_t choosing = 0;  ///< rows that choose
  std::uint32_t decoded = 0;   ///< their tokens
  std::uint32_t ranking = 0;   ///< of these, those that rank pages
  std::uint32_t scoring = 0;
  std::uint32_t asking = 0;  ///< for which the CPU chooses
  std::uint64_t pages = 0;
  std::uint64_t scored = 0;
  std::uint64_t brought = 0;
  std::uint32_t clustered = 0;  ///< rows that choose among clusters
  std::uint64_t clusters = 0;   ///< of them
  std::uint64_t sampled = 0;    ///< tokens
  double attended = 0.0;
};

LayerTokens tokens_of(const WorkPlace& place, std::span<const ForwardRow> rows, double chosen, std::uint32_t layer) {
  LayerTokens all;
  for (const ForwardRow& each : rows) {
    if (each.list == kNone) continue;
    const ForwardRow row = each.in(layer, place.window(layer));
    const RowTokens tokens = tokens_of(place, row);
    ++all.choosing;
    all.decoded += std::max(1u, row.drafts);
    all.ranking += row.pages != 0 ? 1 : 0;
    all.scoring += row.ranks() ? 1 : 0;
    all.asking += row.asks != 0 ? 1 : 0;
    all.pages += std::uint64_t{place.shape.kv_heads} * row.pages;
    all.scored += place.shape.kv_heads * tokens.scored;
    all.brought += place.shape.kv_heads * tokens.brought;
    all.clustered += row.clusters.count != 0 ? 1 : 0;
    all.clusters += std::uint64_t{place.shape.kv_heads} * row.clusters.count;
    all.sampled += place.shape.kv_heads * tokens.sampled;
    all.attended += static_cast<double>(place.shape.kv_heads * tokens.window) +
                    chosen * static_cast<double>(place.shape.kv_heads * (tokens.most - tokens.window));
  }
  return all;
}

/// Of a layer's rows that the device chooses for, far tokens over all KV heads that it fetches: lists are cut one by
/// one.
std::uint64_t cut_of(const WorkPlace& place, std::span<const ForwardRow> rows, const WorkShares& shares,
                     std::uint32_t layer) {
  std::uint64_t fetched = 0;
  for (const ForwardRow& each : rows) {
    const ForwardRow row = each.in(layer, place.window(layer));
    if (each.list == kNone || row.asks != 0) continue;
    const RowTokens tokens = tokens_of(place, row);
    const double attended =
        static_cast<double>(tokens.window) + shares.chosen * static_cast<double>(tokens.most - tokens.window);
    const std::uint64_t far = rounded((1.0 - shares.near) * attended);
    fetched += std::uint64_t{place.shape.kv_heads} * fetched_rows(static_cast<std::uint32_t>(far), place.fetch_share);
  }
  return fetched;
}

/// Work of the tasks of one forward.
class WorkList {
 public:
  WorkList(const WorkPlace& place, std::span<const ForwardRow> rows, std::span<const ForwardChunk> chunks,
           const WorkShares& shares)
      : place_(place), rows_(rows), chunks_(chunks), shares_(shares) {}

  std::vector<WorkItem> take() {
    const ForwardTasks tasks = unrolled(TaskGraph(kind_of(place_)), place_.shape.layers);
    before_.resize(tasks.nodes.size());
    auto edge = tasks.edges.begin();
    for (std::uint32_t node = 0; node < tasks.nodes.size(); ++node) {
      const auto& [task, layer] = tasks.nodes[node];
      if (task.verb == Verb::model) enter(layer);
      const auto first = edge;
      while (edge != tasks.edges.end() && edge->to == node) ++edge;
      await(task, std::span(first, edge), node);
      if (layer != kNone) add(task);
      pass(task, node);
    }
    return std::move(items_);
  }

 private:
  /// Tasks that must have ended, as bits: the node before is bit 0. Those further back than a layer or two end long
  /// before.
  using Ancestors = std::uint64_t;
  static constexpr std::uint32_t kWindow = 64;
  struct Before {
    Ancestors ancestors = 0;
    std::vector<std::uint32_t> ended{};  ///< items that have ended when the task has: its own, or if it has none theirs
  };

  void enter(std::uint32_t layer) {
    layer_ = layer;
    tokens_ = tokens_of(place_, rows_, shares_.chosen, layer_);
    near_ = rounded(shares_.near * tokens_.attended);
    elsewhere_ = rounded(tokens_.attended) - std::min(near_, rounded(tokens_.attended));
    fetched_ = streams() ? elsewhere_ : std::min(elsewhere_, cut_of(place_, rows_, shares_, layer_));
    linked_ = std::min(elsewhere_ - fetched_, rounded(shares_.linked * tokens_.attended));
    // Of shares that leave the CPU nothing no token is left by rounding: one would be a question.
    if (shares_.linked > 0.0 && shares_.near + shares_.linked > 1.0 - 1e-9) linked_ = elsewhere_ - fetched_;
    queue_of(Queue::stream).insert(queue_of(Queue::stream).end(), beside_.begin(), beside_.end());
    beside_.clear();
    answered_ = false;
  }

  /// What the task's items wait for: tasks before it in its queue, and those that its edges come from, but for those
  /// that others of them wait for.
  void await(const Task& task, std::span<const TaskEdge> edges, std::uint32_t node) {
    std::vector<std::uint32_t> direct = queue_of(task.queue);
    for (const TaskEdge& edge : edges) direct.push_back(edge.from);
    std::ranges::sort(direct, std::greater{});
    direct.erase(std::ranges::unique(direct).begin(), direct.end());
    after_.clear();
    Ancestors known = 0;
    for (const std::uint32_t from : direct) {
      const std::uint32_t back = node - from - 1;
      if (back < kWindow && (known >> back & 1) != 0) continue;
      after_.insert(after_.end(), before_[from].ended.begin(), before_[from].ended.end());
      if (back >= kWindow) continue;
      known |= Ancestors{1} << back;
      if (back + 1 < kWindow) known |= before_[from].ancestors << (back + 1);
    }
    std::ranges::sort(after_);
    after_.erase(std::ranges::unique(after_).begin(), after_.end());
    before_[node].ancestors = known;
  }

  /// What comes behind the task.
  void pass(const Task& task, std::uint32_t node) {
    before_[node].ended = added_.empty() ? after_ : std::exchange(added_, {});
    if (task.beside) {
      beside_.push_back(node);
    } else {
      queue_of(task.queue).assign(1, node);
    }
  }

  [[nodiscard]] std::vector<std::uint32_t>& queue_of(Queue queue) noexcept {
    return queues_[static_cast<std::size_t>(queue)];
  }
  [[nodiscard]] bool streams() const noexcept { return place_.placement == PlacementMode::stream; }
  /// Of a token's key and value.
  [[nodiscard]] std::uint64_t near_bytes() const noexcept { return 2 * place_.layout.near().row_bytes(); }
  [[nodiscard]] std::uint64_t far_bytes() const noexcept {
    return 2 * place_.layout.row_bytes() + place_.layout.scale_bytes();
  }
  [[nodiscard]] std::uint64_t copy_bytes() const noexcept {
    if (place_.code_bits == 0) return 0;
    return CodeLayout(place_.layout, place_.code_bits).row_bytes() + CodeLayout::kParamBytes;
  }
  [[nodiscard]] static constexpr std::uint64_t score_bytes() noexcept { return sizeof(float); }
  [[nodiscard]] std::uint64_t planes(double tokens) const noexcept { return rounded(tokens * place_.shape.kv_heads); }
  [[nodiscard]] std::uint64_t partials() const noexcept {
    return std::uint64_t{4} * (place_.shape.head_dim + 1) * place_.shape.q_heads * tokens_.choosing;
  }

  void put(Stage stage, Lane lane, std::uint32_t rows, std::uint64_t read, std::uint64_t written = 0) {
    if (rows == 0) return;
    items_.push_back({.stage = stage,
                      .lane = lane,
                      .layer = layer_,
                      .rows = rows,
                      .read = read,
                      .written = written,
                      .after = after_});
    added_.push_back(static_cast<std::uint32_t>(items_.size() - 1));
  }

  void add(const Task& task) {
    const Stage stage = task.stage;
    const bool asks = elsewhere_ - fetched_ - linked_ != 0 || tokens_.asking != 0;
    switch (task.verb) {
      case Verb::append: return add_append();
      case Verb::gather: return add_chunks(stage, Lane::link, far_bytes());
      case Verb::prefill: return add_chunks(stage, Lane::device, near_bytes());
      case Verb::rank: return put(stage, Lane::device, tokens_.ranking, near_bytes() * tokens_.pages);
      case Verb::score:
        return put(stage, Lane::device, tokens_.scoring,
                   copy_bytes() * tokens_.scored + score_bytes() * tokens_.brought,
                   place_.shape.group() * score_bytes() * tokens_.brought);
      case Verb::choose:
        return put(stage, Lane::device, tokens_.scoring + tokens_.clustered,
                   score_bytes() * place_.shape.group() * (tokens_.scored + tokens_.brought) +
                       4 * place_.shape.head_dim * tokens_.clusters + copy_bytes() * tokens_.sampled);
      case Verb::split:
        put(stage, Lane::device, tokens_.choosing, 0, 4 * near_);
        if (asks) put(stage, Lane::link, tokens_.choosing, 0, 4 * (elsewhere_ - fetched_ - linked_));
        return;
      case Verb::choose_far: return add_choose_far();
      case Verb::attend_far: return add_attend_far();
      case Verb::attend: return add_attend(linked_);
      case Verb::attend_whole: return add_attend(elsewhere_);
      case Verb::promote: return add_promote();
      case Verb::fetch: return put(stage, Lane::link, tokens_.choosing, far_bytes() * fetched_);
      case Verb::merge:
        put(stage, Lane::device, tokens_.choosing, partials());
        if (answered_) put(stage, Lane::link, tokens_.choosing, partials());
        return;
      case Verb::audit:
        return put(stage, Lane::link, tokens_.choosing, 0,
                   (8 * place_.shape.head_dim + 4) * std::uint64_t{place_.shape.q_heads} * tokens_.choosing +
                       4 * (near_ + elsewhere_));
      default: return;  // Of no bytes that count, or not of a layer.
    }
  }

  [[nodiscard]] std::uint64_t seen_keys(const ForwardChunk& chunk) const noexcept {
    const std::uint64_t window = place_.window(layer_);
    const std::uint64_t seen = window + chunk.count - 1;  // By its first token and those behind it.
    return window == 0 ? chunk.keys() : std::min<std::uint64_t>(chunk.keys(), seen);
  }

  void add_append() {
    std::uint64_t prompt = 0;
    for (const ForwardChunk& chunk : chunks_) prompt += chunk.list == kNone ? 0 : chunk.count;
    const std::uint64_t rows = tokens_.decoded + prompt;
    const std::uint64_t tokens = rows * place_.shape.kv_heads;
    const std::uint64_t queries = std::uint64_t{4} * place_.shape.head_dim * place_.shape.q_heads * tokens_.choosing;
    const auto count = static_cast<std::uint32_t>(rows);
    put(Stage::append, Lane::device, count, near_bytes() * tokens, copy_bytes() * tokens);
    put(Stage::append, Lane::link, count, 0, far_bytes() * tokens + queries);
  }

  void add_chunks(Stage stage, Lane lane, std::uint64_t row_bytes) {
    std::uint32_t rows = 0;
    std::uint64_t keys = 0;
    for (const ForwardChunk& chunk : chunks_) {
      if (chunk.list == kNone) continue;
      rows += chunk.count;
      keys += std::uint64_t{place_.shape.kv_heads} * seen_keys(chunk);
    }
    put(stage, lane, rows, row_bytes * keys);
  }

  void add_attend(std::uint64_t over_link) {
    put(Stage::attend, Lane::device, tokens_.choosing, near_bytes() * near_);
    if (over_link != 0) put(Stage::attend, Lane::link, tokens_.choosing, far_bytes() * over_link);
  }

  void add_choose_far() {
    put(Stage::choose_far, Lane::cpu, tokens_.asking, far_bytes() / 2 * planes(shares_.scored * tokens_.asking));
    answered_ = answered_ || !added_.empty();
  }

  void add_attend_far() {
    const std::uint64_t in_place = elsewhere_ - fetched_ - linked_;
    if (in_place != 0) put(Stage::attend_far, Lane::cpu, tokens_.choosing, far_bytes() * in_place);
    answered_ = answered_ || !added_.empty();
  }

  /// What `fill` brings near of the layer comes first: as much as is listed, beside any part of the forward, and
  /// nothing waits for it.
  void add_promote() {
    put(Stage::promote, Lane::link, tokens_.choosing, far_bytes() * planes(shares_.promoted));
    added_.clear();
    put(Stage::promote, Lane::device, tokens_.choosing, 4 * planes(shares_.promoted), 4 * planes(shares_.promoted));
  }

  const WorkPlace& place_;
  std::span<const ForwardRow> rows_;
  std::span<const ForwardChunk> chunks_;
  const WorkShares& shares_;
  std::uint32_t layer_ = 0;
  LayerTokens tokens_;
  std::uint64_t near_ = 0;       ///< tokens of the layer
  std::uint64_t elsewhere_ = 0;  ///< likewise, attended by the CPU or over the link
  std::uint64_t fetched_ = 0;    ///< of these, over the link, by `fetch`
  std::uint64_t linked_ = 0;     ///< likewise, by `attend`
  bool answered_ = false;        ///< the CPU has had something to do in the layer
  std::array<std::vector<std::uint32_t>, kQueues> queues_;  ///< nodes that the next task of a queue comes behind
  std::vector<std::uint32_t> beside_;                       ///< nodes that the rest of their layer does not wait for
  std::vector<Before> before_;                              ///< [nodes]
  std::vector<std::uint32_t> after_;                        ///< items that those of the task wait for
  std::vector<std::uint32_t> added_;                        ///< items of the task that are waited for
  std::vector<WorkItem> items_;
};

}  // namespace

ForwardKind kind_of(const WorkPlace& place) noexcept {
  const bool streams = place.placement == PlacementMode::stream;
  ForwardKind kind = kind_of(place.bucket, place.promotes, streams ? kWholeFetchShare : place.fetch_share);
  kind.fetches_chosen = kind.fetches && streams;
  return kind;
}

WorkShares shares_of(const WorkPlace& place, std::span<const ForwardRow> rows, const EngineStats& before,
                     const EngineStats& after) noexcept {
  double least = 0.0, most = 0.0, asking = 0.0;
  for (std::uint32_t layer = 0; layer < place.shape.layers; ++layer) {
    least += tokens_of(place, rows, 0.0, layer).attended;
    const LayerTokens tokens = tokens_of(place, rows, 1.0, layer);
    most += tokens.attended;
    asking += static_cast<double>(tokens.asking) * place.shape.kv_heads;
  }
  const auto since = [&](std::uint64_t EngineStats::*field) {
    return static_cast<double>(after.*field - before.*field);
  };
  const double near = since(&EngineStats::near_tokens);
  const double all = near + since(&EngineStats::far_tokens) + since(&EngineStats::fetched_tokens);
  WorkShares shares;
  if (all != 0.0) shares.near = near / all;
  const bool fetches = place.placement == PlacementMode::stream || place.fetch_share != 0;
  if (all != 0.0 && !fetches && !place.bucket.whole) shares.linked = since(&EngineStats::fetched_tokens) / all;
  if (most > least) shares.chosen = std::clamp((all - least) / (most - least), 0.0, 1.0);
  shares.promoted = since(&EngineStats::promoted) / (static_cast<double>(place.shape.layers) * place.shape.kv_heads);
  if (asking != 0.0) shares.scored = since(&EngineStats::scored) / asking;
  return shares;
}

std::vector<WorkItem> forward_work(const WorkPlace& place, std::span<const ForwardRow> rows,
                                   std::span<const ForwardChunk> chunks, const WorkShares& shares) {
  return WorkList(place, rows, chunks, shares).take();
}

}  // namespace sluice::scheduler

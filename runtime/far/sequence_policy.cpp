#include "runtime/far/sequence_policy.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"

namespace sluice::runtime {

/// A layer in the step that is asked for.
class SequencePolicy::Layer final : public scheduler::LayerReader {
 public:
  Layer(const SequencePolicy& of, const Asked& asked, std::uint32_t tokens) : of_(of), asked_(asked), tokens_(tokens) {}

  [[nodiscard]] std::uint64_t step() const noexcept override { return asked_.forward; }
  [[nodiscard]] const float* q(std::uint32_t kv_head) const noexcept override { return of_head(asked_.q, kv_head); }
  [[nodiscard]] const float* rehearsed(std::uint32_t kv_head) const noexcept override {
    return of_head(asked_.rehearsed, kv_head);
  }
  [[nodiscard]] std::span<const float> page_scores(std::uint32_t kv_head) const noexcept override {
    if (asked_.page_scores == nullptr) return {};
    const std::size_t own = std::size_t{of_.memory_.shape.group()} * asked_.row.pages;
    return {asked_.page_scores + kv_head * asked_.page_scores_stride, own};
  }
  [[nodiscard]] scheduler::KvReader& kv(std::uint32_t kv_head) override {
    return kv_.emplace(of_.reader(asked_.layer, kv_head, of_.blocks_, tokens_));
  }

 private:
  [[nodiscard]] const float* of_head(const float* rows, std::uint32_t kv_head) const noexcept {
    const AttentionShape& shape = of_.memory_.shape;
    const std::size_t floats = std::size_t{asked_.drafts} * shape.group() * shape.head_dim;
    return rows == nullptr ? nullptr : rows + kv_head * floats;
  }

  const SequencePolicy& of_;
  const Asked& asked_;
  std::uint32_t tokens_;
  std::optional<HostKv> kv_;
};

SequencePolicy::SequencePolicy(const PolicySpec& spec, const ForwardMemory& memory,
                               const std::vector<std::uint32_t>& blocks)
    : memory_(memory),
      blocks_(blocks.data()),
      prompt_blocks_(blocks),
      corrects_scores_(scheduler::corrects_scores(spec)),
      copies_open_page_(scheduler::copies_open_page(spec, memory.layout.page_tokens)),
      heads_(memory.layer_heads()) {
  for (std::uint32_t layer = 0; layer < memory.shape.layers; ++layer) {
    const bool chooses = !spec.dense(layer) && memory.window_in(layer) == 0;
    layers_.push_back(chooses
                          ? scheduler::make_layer_policy(spec, memory.shape, memory.layout.page_tokens, LayerId{layer})
                          : nullptr);
  }
}

SequencePolicy::SequencePolicy(const SequencePolicy& other, std::vector<std::unique_ptr<scheduler::LayerPolicy>> layers)
    : memory_(other.memory_),
      blocks_(nullptr),
      corrects_scores_(other.corrects_scores_),
      copies_open_page_(other.copies_open_page_),
      layers_(std::move(layers)),
      heads_(other.heads_.size()),
      spoilt_(other.spoilt()) {
  for (std::size_t i = 0; i < heads_.size(); ++i) {
    heads_[i].tokens = other.heads_[i].tokens;
    heads_[i].keep = other.heads_[i].keep;
    heads_[i].heap_bytes.store(other.heads_[i].heap_bytes.load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
}

std::shared_ptr<SequencePolicy> SequencePolicy::clone() const {
  std::vector<std::unique_ptr<scheduler::LayerPolicy>> layers;
  for (const auto& layer : layers_) layers.push_back(layer ? layer->clone() : nullptr);
  return std::shared_ptr<SequencePolicy>(new SequencePolicy(*this, std::move(layers)));
}

template <class Visit>
void SequencePolicy::for_each_head(const Visit& visit) const {
  for (std::uint32_t head = 0; head < heads_.size(); ++head) {
    const std::uint32_t layer = head / memory_.shape.kv_heads;
    if (layers_[layer]) visit(head, *layers_[layer], head % memory_.shape.kv_heads);
  }
}

HostKv SequencePolicy::reader(std::uint32_t layer, std::uint32_t kv_head, const std::uint32_t* blocks,
                              std::uint32_t tokens) const {
  std::byte* const first = memory_.far_block(memory_.plane(layer, kv_head), 0);
  HostKv kv(memory_.shape, KvView{.base = first, .frames = blocks, .layout = memory_.far_layout});
  // The newest page is scored as it is, as a rule.
  const std::uint32_t page = memory_.layout.page_tokens;
  kv.use_codes(copies_open_page_ ? static_cast<std::uint32_t>(div_up(tokens, page))
               : tokens == 0     ? 0
                                 : (tokens - 1) / page,
               tokens);
  return kv;
}

void SequencePolicy::look(const Prompt& prompt, std::uint32_t layer_head) {
  const std::uint32_t layer = layer_head / memory_.shape.kv_heads;
  if (layers_[layer]) begin_head(prompt, layer, layer_head % memory_.shape.kv_heads);
}

void SequencePolicy::begin_head(const Prompt& prompt, std::uint32_t layer, std::uint32_t kv_head) {
  const std::uint32_t group = memory_.shape.group();
  const std::uint64_t floats = std::uint64_t{group} * memory_.shape.head_dim;
  std::vector<float> queries;
  for (std::uint32_t i = 0; i < prompt.queries; ++i) {
    const std::uint32_t row = prompt.tail + (prompt.tokens - prompt.queries + i) % prompt.room;
    const std::uint64_t at = std::uint64_t{layer} * memory_.tail_rows + row;
    const float* const from = memory_.tails + (at * memory_.shape.q_heads + kv_head * group) * memory_.shape.head_dim;
    queries.insert(queries.end(), from, from + floats);
  }
  HostKv kv = reader(layer, kv_head, prompt_blocks_.data(), prompt.tokens);
  layers_[layer]->begin(
      {.kv_head = kv_head, .tokens = prompt.tokens, .queries = prompt.queries, .last_q = queries, .kv = &kv});
  layers_[layer]->forecast(kv_head, prompt.tokens + 1);
  weigh(layer, kv_head);
}

void SequencePolicy::catch_up(HeadState& mine, std::uint32_t layer, std::uint32_t kv_head, std::uint64_t forward,
                              std::chrono::milliseconds timeout) {
  // What is to be learnt comes from before this forward, which would not run had that one failed.
  const auto learnt = [&] { return mine.lesson.load(std::memory_order_acquire) == 0; };
  learn(layer, kv_head, forward - 1);
  if (!learnt() && !comes(learnt, timeout))
    throw Error(Errc::timeout, "a thread that learns from an earlier token has not come back within " +
                                   std::to_string(timeout.count()) + " ms");
  if (spoilt()) throw Error(Errc::device, "what it has learnt is lost");
  if (const std::uint32_t keep = std::exchange(mine.keep, kNone); keep != kNone)
    layers_[layer]->truncate(kv_head, keep);
}

void SequencePolicy::propose(std::uint64_t forward, std::uint32_t layer, std::uint32_t kv_head, const ForwardRow& row,
                             std::chrono::milliseconds timeout) noexcept {
  HeadState& mine = state_of(layer, kv_head);
  const std::uint32_t slot = row.proposed - 1;
  ForwardProposal& proposal = memory_.proposal_of(slot, layer, kv_head);
  bool known = false;
  try {
    catch_up(mine, layer, kv_head, forward, timeout);
    mine.tokens = row.tokens;  // Before the step begins: what fails behind that, or is cancelled, is taken back.
    const std::size_t head_words = memory_.proposed_words() / 2;
    auto* const words = reinterpret_cast<std::uint64_t*>(memory_.proposed_of(slot, layer, kv_head));
    scheduler::ProposedTokens to{.words = {words, memory_.shape.group() * head_words}, .head_words = head_words};
    known = layers_[layer]->propose(kv_head, row.tokens, to);
    proposal.shared = to.shared ? 1 : 0;
    if (known) {
      mine.ahead = row;
      if (layers_[layer]->wants_observation(kv_head)) mine.lesson.store(forward, std::memory_order_release);
    }
  } catch (const std::exception&) {
    known = false;  // Who chooses then finds out why, and says so.
  }
  proposal.asks = known ? 0 : 1;
  std::atomic_ref(proposal.forward).store(forward, std::memory_order_release);
}

void SequencePolicy::choose(const Asked& asked, SelectionRow& row, Bypass& bypass,
                            scheduler::SelectCounters& counters) {
  const auto& [forward, layer, kv_head, window, drafts, layer_q, rehearsed, ranked_pages, page_scores, stride, timeout,
               caller] = asked;
  HeadState& mine = state_of(layer, kv_head);
  // Another head of the row could propose nothing, so that all of them choose here.
  std::uint64_t proposed = forward;
  (void)mine.lesson.compare_exchange_strong(proposed, 0, std::memory_order_acq_rel);
  catch_up(mine, layer, kv_head, forward, timeout);
  mine.ahead = {};  // Not before: another thread may have been learning from it.
  const bool team = window.drafts != 0;
  const std::uint32_t visible = team ? window.tokens + 1 : window.tokens;
  const std::size_t floats = std::size_t{memory_.shape.group()} * memory_.shape.head_dim;
  Layer whole(*this, asked, visible);
  const float* const q = whole.q(kv_head);
  HostKv kv = reader(layer, kv_head, blocks_, visible);
  kv.share(caller);
  mine.tokens = visible;  // Also if it fails: what the step has begun by then is to be taken back.
  const scheduler::NearSet near{
      .sink_end = window.sink_end, .recent_begin = window.recent_begin, .page_tokens = memory_.layout.page_tokens};
  layers_[layer]->select({.kv_head = kv_head,
                          .tokens = visible,
                          .q = q,
                          .rehearsed = whole.rehearsed(kv_head),
                          .behind = {q + floats, team ? (window.drafts - 1) * floats : 0},
                          .ranked_pages = ranked_pages,
                          .page_scores = whole.page_scores(kv_head),
                          .near = &near,
                          .kv = &kv,
                          .layer = &whole},
                         row, bypass, counters);
  if (!layers_[layer]->wants_observation(kv_head)) return weigh(layer, kv_head);
  mine.lesson.store(forward, std::memory_order_release);
}

void SequencePolicy::learn(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t good) noexcept {
  HeadState& other = state_of(layer, kv_head);
  std::uint64_t forward = other.lesson.load(std::memory_order_acquire);
  if (forward == 0 || (forward & kBusy) != 0 || forward > good) return;
  if (!other.lesson.compare_exchange_strong(forward, forward | kBusy, std::memory_order_acq_rel)) return;
  learn_now(other, layer, kv_head);
  other.lesson.store(0, std::memory_order_release);
}

void SequencePolicy::choose_again(HeadState& state, std::uint32_t layer, std::uint32_t kv_head, HostKv& kv) {
  thread_local SelectionRow row;  // Of no use but for its memory.
  row.clear();
  Bypass bypass;
  scheduler::SelectCounters counters;
  const scheduler::NearSet near{.sink_end = state.ahead.sink_end,
                                .recent_begin = state.ahead.recent_begin,
                                .page_tokens = memory_.layout.page_tokens};
  layers_[layer]->select({.kv_head = kv_head,
                          .tokens = state.tokens,
                          .q = memory_.proposed_q_of(state.ahead.proposed - 1, layer, kv_head),
                          .near = &near,
                          .kv = &kv},
                         row, bypass, counters);
  state.ahead = {};
}

void SequencePolicy::learn_now(HeadState& state, std::uint32_t layer, std::uint32_t kv_head) noexcept {
  try {
    HostKv kv = reader(layer, kv_head, blocks_, state.tokens);
    if (state.ahead.proposed != 0) choose_again(state, layer, kv_head, kv);
    layers_[layer]->observe(kv_head, kv);
    layers_[layer]->forecast(kv_head, state.tokens + 1);
    weigh(layer, kv_head);
  } catch (const std::exception&) {
    spoilt_.store(true, std::memory_order_relaxed);
  }
}

void SequencePolicy::forget(std::uint64_t forward) noexcept {
  for (HeadState& each : heads_) {
    std::uint64_t lesson = forward;
    (void)each.lesson.compare_exchange_strong(lesson, 0, std::memory_order_acq_rel);
  }
}

void SequencePolicy::learn_all(std::uint64_t good) noexcept {
  for_each_head([&](std::uint32_t head, const scheduler::LayerPolicy&, std::uint32_t kv_head) {
    learn(head / memory_.shape.kv_heads, kv_head, good);
  });
}

bool SequencePolicy::can_truncate(std::uint32_t tokens) const noexcept {
  bool can = !spoilt();
  for_each_head([&](std::uint32_t, const scheduler::LayerPolicy& layer, std::uint32_t kv_head) {
    can = can && layer.can_truncate(kv_head, tokens);
  });
  return can;
}

void SequencePolicy::truncate(std::uint32_t tokens) noexcept {
  for_each_head([&](std::uint32_t head, scheduler::LayerPolicy& layer, std::uint32_t kv_head) {
    HeadState& each = heads_[head];
    if (each.tokens <= tokens) return;
    each.lesson.store(0, std::memory_order_relaxed);
    each.keep = std::min(each.keep, tokens);
    // So many have not been learnt from; what is held for them need not wait until then.
    if (each.tokens - tokens > scheduler::kUndoTokens) {
      layer.truncate(kv_head, std::exchange(each.keep, kNone));
      weigh(head / memory_.shape.kv_heads, kv_head);
    }
    each.tokens = tokens;
  });
}

void SequencePolicy::keep_at_most(std::uint32_t tokens) noexcept {
  for (HeadState& each : heads_) {
    if (each.keep == kNone) continue;  // A thread may be learning from what stays.
    each.keep = std::min(each.keep, tokens);
    each.tokens = std::min(each.tokens, tokens);
  }
}

void SequencePolicy::weigh(std::uint32_t layer, std::uint32_t kv_head) noexcept {
  state_of(layer, kv_head).heap_bytes.store(layers_[layer]->heap_bytes(kv_head), std::memory_order_relaxed);
}

std::uint64_t SequencePolicy::heap_bytes() const noexcept {
  std::uint64_t bytes = 0;
  for (const HeadState& each : heads_) bytes += each.heap_bytes.load(std::memory_order_relaxed);
  return bytes;
}

void SequencePolicy::close() noexcept {
  for (HeadState& each : heads_) each.lesson.store(0, std::memory_order_release);
  layers_.clear();
}

}  // namespace sluice::runtime

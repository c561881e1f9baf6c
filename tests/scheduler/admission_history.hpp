#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "sluice/error.hpp"
#include "tests/scheduler/naive_admission.hpp"
#include "tests/support/random.hpp"

namespace sluice::test {

/// A caller at random: requests come, end and are aborted, forwards fail, engines refuse. Every answer is held against
/// what its options say.
class AdmissionHistory {
 public:
  explicit AdmissionHistory(std::uint64_t seed)
      : random_(seed), options_(draw_options()), room_{options_}, admission_(options_) {}

  /// All decisions, in order.
  std::vector<std::uint64_t> run() {
    for (int step = 0; step < 40; ++step) {
      for (std::uint32_t come = random_.below(3); come != 0; --come) submit();
      turn();
    }
    std::uint64_t work = 0;
    for (const NaiveRequest& each : lives_) work += each.asked.prompt_tokens + each.asked.max_new_tokens;
    while (!lives_.empty()) {
      // The oldest of all gets on in every forward that does not fail.
      law(work + failed_ != 0, "requests do not end");
      (work != 0 ? work : failed_) -= 1;
      turn();
    }
    turn();
    law(pool_.held() == 0, "pages are left");
    law(admission_.use().running == 0 && admission_.use().waiting == 0, "requests are left");
    return log_;
  }
  [[nodiscard]] std::uint64_t preempted() const { return preempted_; }

 private:
  using Lives = std::vector<NaiveRequest>;  ///< in the order in which they came

  AdmissionOptions draw_options() {
    AdmissionOptions options{.decode_rows = 1 + random_.below(5),
                             .prefill_rows = 1 + random_.below(20),
                             .prefills = 1 + random_.below(3),
                             .sequences = 1 + random_.below(5),
                             .cpu_sequences = random_.below(3),
                             .page_tokens = 1u << random_.below(4),
                             .max_tokens = random_.below(2) * (20 + random_.below(60)),
                             .pages = 2 + random_.below(20),
                             .watermark_pages = random_.below(2) * random_.below(4)};
    if (random_.below(3) == 0) {
      options.near_pages = 1 + random_.below(12);
      options.near_pages_per_sequence = random_.below(4);
    }
    counts_shared_ = random_.below(2) == 0;
    if (counts_shared_) {  // Many that share most of what they have, and grow in every turn.
      options.decode_rows = options.sequences = 3 + random_.below(6);
      options.page_tokens = 1u << random_.below(2);
      options.pages = 10 + random_.below(20);
    }
    return options;
  }

  [[nodiscard]] std::size_t running() const {
    return static_cast<std::size_t>(std::ranges::count(lives_, true, &NaiveRequest::runs));
  }
  [[nodiscard]] NaiveRequest& at(RequestId id) {
    const auto found = std::ranges::find(lives_, id, [](const NaiveRequest& each) { return each.asked.id; });
    law(found != lives_.end(), "an answer names a request that does not live");
    return *found;
  }
  void note(std::uint64_t what) { log_.push_back(what); }

  void submit() {
    NaiveRequest each{.asked = {.id = RequestId{next_id_++},
                                .prompt_tokens = 1 + random_.below(8 * options_.page_tokens),
                                .max_new_tokens = random_.below(12),
                                .on_cpu = random_.below(4) == 0},
                      .alike = counts_shared_ ? 0 : random_.below(2)};
    const std::uint32_t last = each.last_tokens();
    const bool can_run = room_.fits(room_.pages_of(last), room_.near_of(last)) &&
                         (options_.max_tokens == 0 || last <= options_.max_tokens) &&
                         (!each.asked.on_cpu || options_.cpu_sequences != 0);
    bool refused = false;
    try {
      admission_.submit(each.asked);
    } catch (const Error& error) {
      refused = error.code() == Errc::out_of_capacity;
    }
    law(refused != can_run, "what can run is refused, or what cannot is not");
    if (!refused) lives_.push_back(each);
  }

  void turn() {
    const bool held = counts_shared_ && random_.below(4) != 0;
    const AdmissionChanges changes = admission_.admit(held ? std::optional(pool_.held()) : std::nullopt);
    for (const RequestId id : changes.preempt) preempt(id, !held);
    for (const RequestId id : changes.admit) admit(id, !held);
    if (!held) law(!head_fits(), "there is room for the oldest that waits");
    law(pool_.held() <= options_.pages, "more pages are held than there are");
    refuse();
    const std::uint32_t chunk = random_.below(2) * random_.below(24);
    const std::vector<TurnItem> items = admission_.next(chunk);
    law(items.empty() == lives_.empty(), "idle means that nothing lives");
    if (items.empty()) return;
    check(items, chunk);
    if (random_.below(12) == 0) end();
    random_.below(10) == 0 ? fail() : complete();
    ending_.clear();
    if (random_.below(12) == 0 && !lives_.empty()) end();
    ending_.clear();
    check_running();
  }

  void stop(NaiveRequest& each) {
    each.runs = false;
    each.has = 0;
    each.pages.clear();
  }

  void preempt(RequestId id, bool exact) {
    std::uint64_t pages = 0, near = 0;
    for (const NaiveRequest& each : lives_) {
      pages += each.runs ? room_.pages_of(each.wants()) : 0;
      near += each.runs ? room_.near_of(each.wants()) : 0;
    }
    law(!exact || !room_.fits(pages, near), "a request is preempted though there is room");
    const std::size_t count = running();
    law(count > 1 && lives_[count - 1].asked.id == id, "not the youngest is preempted, or the oldest is");
    stop(lives_[count - 1]);
    ++preempted_;
    note(id.value << 2 | 1);
  }

  /// Whether the oldest that waits may be admitted beside those that run, shared pages counted for each.
  [[nodiscard]] bool head_fits() const {
    const std::size_t count = running();
    if (count == lives_.size() || count >= std::min(options_.decode_rows, options_.sequences)) return false;
    if (held_back_) return false;
    const NaiveRequest& head = lives_[count];
    std::uint64_t pages = count == 0 ? 0 : options_.watermark_pages, near = 0, on_cpu = 0;
    for (std::size_t i = 0; i < count; ++i) {
      pages += room_.pages_of(lives_[i].wants());
      near += room_.near_of(lives_[i].wants());
      on_cpu += lives_[i].asked.on_cpu ? 1 : 0;
    }
    const std::uint32_t tokens = std::min(head.tokens() + options_.page_tokens, head.last_tokens());
    return room_.fits(pages + room_.pages_of(tokens), near + room_.near_of(tokens)) &&
           (!head.asked.on_cpu || on_cpu < options_.cpu_sequences);
  }

  void admit(RequestId id, bool exact) {
    law(!exact || head_fits(), "a request is admitted without room");
    NaiveRequest& each = lives_[running()];
    law(each.asked.id == id, "not the oldest that waits is admitted");
    each.runs = true;
    each.prompt = each.tokens();
    note(id.value << 2 | 2);
    // Whole pages that others have computed, or that a cache has kept.
    for (std::uint32_t page = 0; (page + 1) * options_.page_tokens < each.asked.prompt_tokens; ++page) {
      NaivePool::Page found = pool_.find({each.alike, page});
      if (found == nullptr && random_.below(4) == 0) found = pool_.take();
      if (found == nullptr) break;
      each.pages.push_back(std::move(found));
    }
    each.has = static_cast<std::uint32_t>(each.pages.size()) * options_.page_tokens;
    if (each.has != 0) admission_.begun(id, each.has);
    law(on_cpu() <= options_.cpu_sequences, "too many choose on the CPU");
  }
  [[nodiscard]] std::uint64_t on_cpu() const {
    return static_cast<std::uint64_t>(
        std::ranges::count_if(lives_, [](const NaiveRequest& each) { return each.runs && each.asked.on_cpu; }));
  }

  /// The engine has no room for some request.
  void refuse() {
    if (lives_.empty() || random_.below(15) != 0) return;
    const std::size_t first = 1 + random_.below(static_cast<std::uint32_t>(lives_.size()));
    if (first >= lives_.size()) return;
    const std::size_t count = running();
    const std::vector<RequestId> stopped = admission_.preempt(lives_[first].asked.id);
    law(stopped.size() == count - std::min(first, count), "not all from there on are preempted");
    for (std::size_t i = 0; i < stopped.size(); ++i) {
      law(lives_[count - 1 - i].asked.id == stopped[i], "the youngest does not go first");
      stop(lives_[count - 1 - i]);
    }
    held_back_ = held_back_ || !stopped.empty();
  }

  void check(const std::vector<TurnItem>& items, std::uint32_t chunk) {
    const std::size_t count = running();
    std::size_t next = 0;
    for (std::size_t i = 0; i < count; ++i) {
      if (lives_[i].has == lives_[i].tokens() - 1 && lives_[i].has >= lives_[i].prompt) decode(lives_[i], items, next);
    }
    std::uint32_t rows = chunk == 0 ? options_.prefill_rows : std::min(chunk, options_.prefill_rows), chunks = 0;
    for (std::size_t i = 0; i < count; ++i) {
      if (lives_[i].has < lives_[i].prompt && chunks < options_.prefills) prefill(lives_[i], items, next, rows, chunks);
    }
    law(next == items.size(), "there are items of nobody");
    law(lives_.front().item.tokens != 0, "the oldest does not get on");
    std::uint64_t near = 0;
    for (const NaiveRequest& each : lives_) near += each.runs ? room_.near_of(std::max(each.prompt, each.has + 1)) : 0;
    law(options_.near_pages == 0 || near <= options_.near_pages, "near pages are not enough");
    law(pool_.held() <= options_.pages, "more pages are held than there are");
  }

  void take(NaiveRequest& each, const TurnItem& item) {
    law(item.request == each.asked.id && item.first == each.has, "not the next tokens of the next request");
    const bool output = item.first + item.tokens == each.tokens() && each.asked.max_new_tokens != 0;
    law(item.output == output, "the last token known has an output, and no other");
    each.item = item;
    while (each.pages.size() < room_.pages_of(item.first + item.tokens)) each.pages.push_back(pool_.take());
    note(std::uint64_t{item.tokens} << 32 | item.request.value << 2 | 3);
  }
  void decode(NaiveRequest& each, const std::vector<TurnItem>& items, std::size_t& next) {
    law(next < items.size() && !items[next].prefill && items[next].tokens == 1, "one that decodes has no row");
    take(each, items[next++]);
  }
  void prefill(NaiveRequest& each, const std::vector<TurnItem>& items, std::size_t& next, std::uint32_t& rows,
               std::uint32_t& chunks) {
    const std::uint32_t left = each.prompt - each.has, page = options_.page_tokens;
    std::uint32_t most = 0;  // The longest chunk that ends where a page or the prompt does.
    for (std::uint32_t tokens = 1; tokens <= std::min(rows, left); ++tokens) {
      if (tokens == left || (each.has + tokens) % page == 0) most = tokens;
    }
    if (most == 0 && chunks == 0) most = rows;
    if (most == 0) {
      rows = 0;  // Nobody overtakes it.
      return;
    }
    law(next < items.size() && items[next].prefill && items[next].tokens == most, "not the chunk that fits");
    take(each, items[next++]);
    rows -= most;
    ++chunks;
  }

  /// Some request ends or is aborted; its sequence does when the turn is over.
  void end() {
    const auto which = lives_.begin() + random_.below(static_cast<std::uint32_t>(lives_.size()));
    admission_.end(which->asked.id);
    note(which->asked.id.value << 2);
    held_back_ = held_back_ && !which->runs;
    ending_.push_back(std::move(*which));
    lives_.erase(which);
  }

  void fail() {
    admission_.fail();
    ++failed_;
    for (NaiveRequest& each : lives_) {
      if (random_.below(2) == 0 && each.runs) each.pages.resize(room_.pages_of(each.has));
      each.item.tokens = 0;
    }
  }

  void complete() {
    const std::vector<RequestId> ended = admission_.complete();
    std::vector<RequestId> want;
    for (NaiveRequest& each : lives_) {
      if (each.item.tokens == 0) continue;
      each.has += std::exchange(each.item.tokens, 0);
      for (std::uint32_t page = 0; (page + 1) * options_.page_tokens <= std::min(each.has, each.asked.prompt_tokens);
           ++page)
        pool_.name({each.alike, page}, each.pages[page]);
      each.generated += each.item.output ? 1 : 0;
      if (each.has >= each.prompt && each.generated == each.asked.max_new_tokens) want.push_back(each.asked.id);
    }
    law(ended == want, "those that have all their tokens end, and no others");
    for (const RequestId id : ended) {
      law(at(id).runs, "one ends that does not run");
      std::erase_if(lives_, [&](const NaiveRequest& each) { return each.asked.id == id; });
    }
    held_back_ = held_back_ && ended.empty();
  }

  void check_running() {
    std::vector<RequestId> want;
    for (const NaiveRequest& each : lives_) {
      if (each.runs) want.push_back(each.asked.id);
    }
    law(admission_.running() == want, "others run");
    for (std::size_t i = 0; i < want.size(); ++i) law(lives_[i].runs, "a younger one runs before an older one");
    law(admission_.use().running == want.size() && admission_.use().waiting == lives_.size() - want.size(),
        "not as many run and wait");
  }

  Random random_;
  bool counts_shared_ = false;
  AdmissionOptions options_;
  NaiveRoom room_;
  Admission admission_;
  NaivePool pool_;
  Lives lives_;
  Lives ending_;  ///< have ended, and their sequences have not
  bool held_back_ = false;
  std::uint64_t next_id_ = 1, failed_ = 0, preempted_ = 0;
  std::vector<std::uint64_t> log_;
};

}  // namespace sluice::test

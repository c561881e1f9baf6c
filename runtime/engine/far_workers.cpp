#include "runtime/engine/far_workers.hpp"

#include <algorithm>
#include <new>
#include <system_error>
#include <thread>

#include "cpu/backend/verbs.hpp"
#include "cpu/threads/spin.hpp"
#include "runtime/engine/mailbox.hpp"
#include "sluice/error.hpp"
#include "sluice/run_clock.hpp"

namespace sluice::runtime {
namespace {

std::int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

constexpr std::chrono::microseconds kNap{20};

/// A list is cut evenly, into parts with enough rows to make up for what a part costs, and no more than there is room
/// for: a thread that gets a small one left over keeps the answer waiting as long as the others do.
constexpr std::uint32_t kMostRows = 64;  ///< of a part, of lists that are not longer than kMostParts of these
constexpr std::uint32_t kMostParts = 32;
constexpr std::uint32_t kEven = 4;  ///< rows that kernels take at once
constexpr std::uint32_t part_rows(std::uint32_t count) noexcept {
  const std::uint64_t parts = std::clamp<std::uint64_t>(div_up(count, kMostRows), 1, kMostParts);
  return static_cast<std::uint32_t>(kEven * std::max<std::uint64_t>(div_up(count, parts * kEven), 1));
}
/// A policy of the CPU may choose everything.
std::uint32_t longest_list(const ForwardMemory& memory) noexcept {
  return memory.tail_rows == 0 ? memory.teams(memory.largest.drafts).list_room() : memory.largest.max_tokens;
}
/// Of a list, none of which is longer than `room`.
constexpr std::uint32_t most_parts(std::uint32_t room) noexcept {
  return std::min(kMostParts, static_cast<std::uint32_t>(div_up(room, kMostRows)));
}

}  // namespace

FarWorkers::Rows FarWorkers::rows_for(const ForwardMemory& memory) {
  const std::uint32_t most = std::max(part_rows(longest_list(memory)), kMostRows);
  return {.keys = std::vector<const std::byte*>(most),
          .scales = std::vector<const float*>(memory.far_layout.scaled() ? most : 0)};
}

FarWorkers::FarWorkers(const ForwardMemory& memory, FarChoice& choice, FarNotes& notes,
                       const FarWorkersOptions& options, cpu::CoreShares::Lease cores)
    : memory_(memory),
      choice_(choice),
      notes_(notes),
      options_(options),
      kernels_(cpu::fastest_kernels()),
      cores_(std::move(cores)),
      part_ends_(std::uint64_t{memory.largest.decode_rows} * memory.shape.kv_heads),
      most_parts_(most_parts(longest_list(memory))),
      partials_(part_ends_.size() * most_parts_ * memory.shape.group() * (memory.shape.head_dim + 1)),
      rows_(threads_on(cores_.topology().cores()), rows_for(memory)),
      places_(rows_.size()) {
  settle_in();
  try {
    for (std::uint32_t i = 0; i < rows_.size(); ++i)
      threads_.add([this, i](const std::stop_token& stop) { work(i, stop); });
  } catch (const std::system_error& error) {
    throw Error(Errc::device, std::string("the system has no thread left for the far part: ") + error.what() +
                                  "; ask for fewer threads or raise `ulimit -u`");
  }
}

std::uint32_t FarWorkers::threads_on(std::uint32_t cores) const noexcept {
  return options_.threads != 0 ? options_.threads : std::max(cores, options_.spare + 1) - options_.spare;
}

void FarWorkers::settle_in() noexcept {
  const std::uint64_t generation = cores_.generation();
  if (generation == generation_) return;
  try {
    const cpu::CoreShare share = cores_.share();
    // The first core is the caller's.
    const std::size_t first = share.pus.size() > 1 ? 1 : 0;
    for (std::size_t i = 0; i < places_.size(); ++i)
      places_[i].store(share.pus[first + i % (share.pus.size() - first)], std::memory_order_relaxed);
    const auto most = static_cast<std::uint32_t>(places_.size());
    const std::uint32_t active = std::min(threads_on(share.cores), most);
    constexpr std::uint32_t kMostThatNap = 3;
    spins_.store(cores_.topology().cores() > kMostThatNap && active < share.cores, std::memory_order_relaxed);
    active_.store(active, std::memory_order_relaxed);
    generation_ = generation;
  } catch (const std::bad_alloc&) {
    // As before: the next plan tries again.
  }
}

void FarWorkers::move(std::uint32_t thread, std::uint32_t& pu) const noexcept {
  const std::uint32_t place = places_[thread].load(std::memory_order_relaxed);
  if (options_.pin && place != std::exchange(pu, place)) (void)cores_.topology().bind_this_thread(place);
}

void FarWorkers::wake(std::uint64_t forward) {
  settle_in();
  {
    const std::lock_guard lock(mutex_);
    expected_.store(forward, std::memory_order_relaxed);
  }
  woken_.notify_all();
}

bool FarWorkers::stop(std::chrono::milliseconds timeout) noexcept {
  cores_.end();
  return threads_.stop(timeout);
}

bool FarWorkers::idle() const noexcept {
  return look(memory_.mailbox->question.asked) == look(memory_.mailbox->answer.answered);
}

bool FarWorkers::under_way() const noexcept {
  return look(memory_.mailbox->outcome.forward) < expected_.load(std::memory_order_relaxed);
}

void FarWorkers::sleep(std::uint32_t thread, std::uint64_t seen, const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  asleep_.fetch_add(1, std::memory_order_relaxed);
  woken_.wait(lock, stop, [&] {
    stirrings_.fetch_add(1, std::memory_order_relaxed);
    return thread < active() && (under_way() || look(memory_.mailbox->question.asked) > seen);
  });
  asleep_.fetch_sub(1, std::memory_order_relaxed);
}

void FarWorkers::work(std::uint32_t thread, const std::stop_token& stop) {
  // A forward that is not heard of for long is not waited for at full speed.
  constexpr std::chrono::milliseconds kSpin{2};
  std::uint64_t seen = look(memory_.mailbox->answer.answered);
  std::uint64_t learnt = 0;  // Nothing is left to be learnt from forwards up to this one.
  std::uint32_t pu = kNone;
  Clock::time_point heard = Clock::now();
  while (!stop.stop_requested()) {
    const bool called = thread < active();
    const std::uint64_t asked = look(memory_.mailbox->question.asked);
    if (called && asked > seen) {
      answer(asked, thread, stop);
      seen = asked;
      heard = Clock::now();
    } else if (const std::uint64_t ended = look(memory_.mailbox->outcome.forward); called && ended > learnt) {
      move(thread, pu);
      const auto wanted = [&] { return look(memory_.mailbox->question.asked) > seen || stop.stop_requested(); };
      if (choice_.learn(look(memory_.mailbox->outcome.good), wanted)) {
        learnt = ended;
      } else if (!wanted()) {
        std::this_thread::sleep_for(kNap);  // A caller holds FarChoice::Rest: no thread may learn.
      }
    } else if (!called || !under_way()) {
      sleep(thread, seen, stop);
      move(thread, pu);
      heard = Clock::now();
    } else if (spins() && Clock::now() - heard < kSpin) {
      for (int i = 0; i < 4; ++i) cpu::relax();
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
}

std::uint32_t FarWorkers::parts_of(std::uint32_t index) const noexcept {
  const std::uint32_t count = std::atomic_ref(memory_.far_counts[index]).load(std::memory_order_relaxed);
  return static_cast<std::uint32_t>(div_up(count, part_rows(count)));
}

FarWorkers::Part FarWorkers::part_at(std::uint32_t at, Cursor& cursor) const noexcept {
  for (; at - cursor.first >= parts_of(cursor.index); ++cursor.index) cursor.first += parts_of(cursor.index);
  const std::uint32_t count = memory_.far_counts[cursor.index];
  const std::uint32_t part = at - cursor.first;
  const std::uint32_t begin = part * part_rows(count);
  return {.index = cursor.index,
          .part = part,
          .parts = parts_of(cursor.index),
          .begin = begin,
          .end = std::min(begin + part_rows(count), count)};
}

std::uint32_t FarWorkers::all_parts() const noexcept {
  std::uint32_t parts = 0;
  const std::uint32_t lists = std::atomic_ref(memory_.mailbox->question.lists).load(std::memory_order_relaxed);
  for (std::uint32_t i = 0; i < lists; ++i) parts += parts_of(i);
  return parts;
}

void FarWorkers::begin_piece(std::uint64_t asked) {
  std::uint64_t seen = seen_.load(std::memory_order_relaxed);
  if (seen != asked && seen_.compare_exchange_strong(seen, asked, std::memory_order_relaxed))
    seen_ns_.store(now_ns(), std::memory_order_relaxed);
  if (options_.before_answer) options_.before_answer();
}

void FarWorkers::say(const FarQuestion& question) {
  const std::int64_t seen = seen_ns_.load(std::memory_order_relaxed);
  const std::int64_t now = now_ns();
  answer_ns_.fetch_add(static_cast<std::uint64_t>(now - seen), std::memory_order_relaxed);
  if (notes_.wants(question.forward))
    notes_.answer(question.forward, question.layer, {.seen_ns = seen, .answered_ns = now});
  std::atomic_ref(memory_.mailbox->answer.answered).store(question.asked, std::memory_order_release);
}

template <class Work>
void FarWorkers::do_piece(const FarQuestion& question, Stage stage, std::uint32_t thread, const Work& work) {
  const bool noted = notes_.wants(question.forward);
  const std::int64_t begin = noted ? now_ns() : 0;
  begin_piece(question.asked);
  work();
  if (!noted) return;
  notes_.add(question.forward,
             {.stage = stage, .layer = question.layer, .thread = thread, .begin_ns = begin, .end_ns = now_ns()});
}

FarWorkers::Choice FarWorkers::choose(const FarQuestion& question, std::uint32_t choices, std::uint32_t thread,
                                      const std::stop_token& stop) {
  Choice choice = Choice::made;
  for (std::uint32_t item = 0; (item = choices_.claim(question.asked, choices)) != kNone;) {
    do_piece(question, Stage::choose_far, thread,
             [&] { choice_.choose(question, item); });
    if (!choices_.finish(choices)) continue;
    choice = Choice::made_last;
    chosen_.store(question.asked, std::memory_order_release);
  }
  // Others are at it: what they choose is attended by all.
  const auto chosen = [&] { return chosen_.load(std::memory_order_acquire) >= question.asked; };
  if (spins() ? cpu::spin_until(chosen) : chosen()) return choice;
  const Deadline deadline = deadline_after(options_.timeout);
  while (!(spins() ? cpu::spin_until(chosen) : chosen())) {
    if (stop.stop_requested() || RunClock::now() >= deadline) return Choice::not_made;
    spins() ? std::this_thread::yield() : std::this_thread::sleep_for(kNap);
  }
  return choice;
}

void FarWorkers::answer(std::uint64_t asked, std::uint32_t thread, const std::stop_token& stop) {
  const auto word = [](auto& part) { return std::atomic_ref(part).load(std::memory_order_relaxed); };
  ForwardMailbox::Question& said = memory_.mailbox->question;
  const FarQuestion question{
      .asked = asked, .forward = word(said.forward), .layer = word(said.layer), .drafts = word(said.drafts)};
  const std::uint32_t choices = choices_.total(asked, [&] { return word(said.choices); });
  if (choices == kNone) return;
  const Choice choice = choices == 0 ? Choice::made : choose(question, choices, thread, stop);
  if (choice == Choice::not_made) return;
  const std::uint32_t parts = parts_.total(asked, [&] { return all_parts(); });
  if (parts == kNone) return;
  if (parts == 0 && choice == Choice::made_last) say(question);
  Cursor cursor;
  for (std::uint32_t at = 0; (at = parts_.claim(asked, parts)) != kNone;) {
    do_piece(question, Stage::attend_far, thread,
             [&] { attend(question, part_at(at, cursor), rows_[thread]); });
    if (parts_.finish(parts)) say(question);
  }
}

Partial FarWorkers::whole_of(const ForwardMemory& m, std::uint32_t index) noexcept {
  const std::uint64_t head = std::uint64_t{index} * m.shape.group();
  return {.out = m.far_out + head * m.shape.head_dim, .lse = m.far_lse + head};
}

Partial FarWorkers::place_of(const ForwardMemory& m, std::uint32_t index, std::uint32_t part) noexcept {
  const std::uint64_t out = std::uint64_t{m.shape.group()} * m.shape.head_dim;
  float* const at = partials_.data() + (std::uint64_t{index} * most_parts_ + part) * (out + m.shape.group());
  return {.out = at, .lse = at + out};
}

void FarWorkers::attend_part(const FarQuestion& question, const Part& part, Rows& rows, const ChosenList* chosen) {
  const ForwardMemory m = memory_.teams(question.drafts);
  const std::uint32_t group = m.shape.group();
  const std::uint32_t plane = m.plane(question.layer, part.index % m.shape.kv_heads);
  const std::uint32_t* const list =
      chosen != nullptr ? chosen->rows.data() : m.far_rows + part.index * std::uint64_t{m.list_room()};
  for (std::uint32_t i = part.begin; i < part.end; ++i) rows.keys[i - part.begin] = m.far_key(plane, list[i]);
  for (std::uint32_t i = part.begin; i < part.end && m.far_layout.scaled(); ++i)
    rows.scales[i - part.begin] = m.far_scales(plane, list[i]);
  // The first part goes to its place at once, the others follow in their order.
  const Partial place = part.part == 0 ? whole_of(m, part.index) : place_of(m, part.index, part.part);
  const bool members = chosen != nullptr && !chosen->members.empty();
  const bool scores = chosen != nullptr && !chosen->scores.empty();
  cpu::kernels_for(kernels_, m.far_layout.dtype)
      .attend({.q = m.far_q + std::uint64_t{part.index} * group * m.shape.head_dim,
               .scale = m.shape.score_scale(),
               .softcap = m.shape.softcap,
               .k = rows.keys.data(),
               .v_offset = m.far_layout.half_bytes(),
               .scales = rows.scales.data(),
               .members = members ? chosen->members.data() + part.begin : nullptr,
               .scores = scores ? chosen->scores.data() + std::uint64_t{part.begin} * group : nullptr,
               .count = part.end - part.begin,
               .group = group,
               .head_dim = m.shape.head_dim,
               .out = place.out,
               .lse = place.lse});
}

void FarWorkers::attend(const FarQuestion& question, const Part& part, Rows& rows) {
  const ChosenList* const chosen = choice_.find(question.asked, part.index);
  attend_part(question, part, rows, chosen);
  if (part_ends_[part.index].fetch_add(1, std::memory_order_acq_rel) + 1 != part.parts) return;
  part_ends_[part.index].store(0, std::memory_order_relaxed);
  const ForwardMemory m = memory_.teams(question.drafts);
  for (std::uint32_t i = 1; i < part.parts; ++i)
    cpu::merge_into(whole_of(m, part.index), place_of(m, part.index, i), m.shape.group(), m.shape.head_dim);
  if (chosen != nullptr) choice_.complete(question, *chosen, part.index);
}

}  // namespace sluice::runtime

#include "runtime/engine/far_workers.hpp"

#include <algorithm>
#include <chrono>
#include <system_error>

#include "cpu/spin.hpp"
#include "cpu/verbs.hpp"
#include "runtime/engine/mailbox.hpp"
#include "sluice/error.hpp"

namespace sluice::runtime {
namespace {

std::int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

constexpr std::uint64_t kLow = 0xffff'ffffu;

/// Rows of a part: enough to make up for what a part costs, and no more parts than there is room for.
constexpr std::uint32_t kLeastRows = 128;
constexpr std::uint32_t kMostParts = 32;
constexpr std::uint32_t part_rows(std::uint32_t count) noexcept {
  return std::max(kLeastRows, static_cast<std::uint32_t>(div_up(count, kMostParts)));
}
/// Of a list, none of which is longer than `room`.
constexpr std::uint32_t most_parts(std::uint32_t room) noexcept {
  return std::min(kMostParts, static_cast<std::uint32_t>(div_up(room, kLeastRows)));
}

}  // namespace

FarWorkers::FarWorkers(const ForwardMemory& memory, const FarWorkersOptions& options, const cpu::Topology& topology)
    : memory_(memory),
      options_(options),
      kernels_(cpu::fastest_kernels()),
      part_ends_(std::uint64_t{memory.largest.decode_rows} * memory.shape.kv_heads),
      most_parts_(most_parts(memory.list_room())),
      partials_(part_ends_.size() * most_parts_ * memory.shape.group() * (memory.shape.head_dim + 1)),
      rows_(options.threads, Rows(part_rows(memory.list_room()))) {
  const std::vector<std::uint32_t> cores = topology.core_order(options.numa_node);
  try {
    for (std::uint32_t i = 0; i < options.threads; ++i) {
      threads_.emplace_back([this, topology, cores, i](const std::stop_token& stop) {
        // The first core is the caller's.
        if (options_.pin)
          (void)topology.bind_this_thread(cores.size() > 1 ? cores[1 + i % (cores.size() - 1)] : cores.front());
        work(rows_[i], stop);
      });
    }
  } catch (const std::system_error& error) {
    for (std::jthread& thread : threads_) thread.request_stop();
    woken_.notify_all();
    throw Error(Errc::device, std::string("the system has no thread left for the far part: ") + error.what() +
                                  "; ask for fewer threads or raise `ulimit -u`");
  }
}

FarWorkers::~FarWorkers() {
  for (std::jthread& thread : threads_) thread.request_stop();
}

void FarWorkers::wake(std::uint64_t forward) {
  {
    const std::lock_guard lock(mutex_);
    expected_.store(forward, std::memory_order_relaxed);
  }
  woken_.notify_all();
}

bool FarWorkers::idle() const noexcept {
  return look(memory_.mailbox->question.asked) == look(memory_.mailbox->answer.answered);
}

bool FarWorkers::under_way() const noexcept {
  return look(memory_.mailbox->outcome.forward) < expected_.load(std::memory_order_relaxed);
}

void FarWorkers::work(Rows& rows, const std::stop_token& stop) {
  // A forward that is not heard of for long is not waited for at full speed.
  constexpr std::chrono::milliseconds kSpin{2};
  constexpr std::chrono::microseconds kNap{20};
  std::uint64_t seen = look(memory_.mailbox->answer.answered);
  Clock::time_point heard = Clock::now();
  while (!stop.stop_requested()) {
    const std::uint64_t asked = look(memory_.mailbox->question.asked);
    if (asked > seen) {
      answer(asked, rows);
      seen = asked;
      heard = Clock::now();
    } else if (!under_way()) {
      std::unique_lock lock(mutex_);
      woken_.wait(lock, stop, [&] { return under_way() || look(memory_.mailbox->question.asked) > seen; });
      heard = Clock::now();
    } else if (options_.spin && Clock::now() - heard < kSpin) {
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

std::uint32_t FarWorkers::parts_asked(std::uint64_t asked) noexcept {
  std::uint64_t known = parts_.load(std::memory_order_acquire);
  if (known >> 32 != ((asked - 1) & kLow)) return (known >> 32) == (asked & kLow) ? known & kLow : 0;
  // Should others have answered all of it meanwhile, the lists may be the next question's; but then they have said how
  // many parts there are, and the exchange fails.
  std::uint64_t parts = 0;
  const std::uint32_t lists = std::atomic_ref(memory_.mailbox->question.lists).load(std::memory_order_relaxed);
  for (std::uint32_t i = 0; i < lists; ++i) parts += parts_of(i);
  if (parts_.compare_exchange_strong(known, asked << 32 | parts, std::memory_order_acq_rel))
    return static_cast<std::uint32_t>(parts);
  return known >> 32 == (asked & kLow) ? known & kLow : 0;
}

void FarWorkers::answer(std::uint64_t asked, Rows& rows) {
  const std::uint32_t layer = std::atomic_ref(memory_.mailbox->question.layer).load(std::memory_order_relaxed);
  const std::uint32_t parts = parts_asked(asked);
  const std::uint64_t tag = asked << 32;
  std::uint64_t claims = claims_.load(std::memory_order_relaxed);
  Cursor cursor;
  while (true) {
    // Who comes late to a question finds all of it taken, or another one's claims.
    const bool fresh = claims >> 32 == ((asked - 1) & kLow);
    if (!fresh && (claims & ~kLow) != tag) return;
    const std::uint64_t next = fresh ? tag : claims;
    if ((next & kLow) >= parts) return;
    if (!claims_.compare_exchange_weak(claims, next + 1, std::memory_order_acq_rel, std::memory_order_relaxed))
      continue;
    if (fresh) seen_ns_.store(now_ns(), std::memory_order_relaxed);
    // From here until this part is done the question stands, and its lists with it.
    if (options_.before_answer) options_.before_answer();
    attend(layer, part_at(static_cast<std::uint32_t>(next & kLow), cursor), rows);
    if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 == parts) {
      finished_.store(0, std::memory_order_relaxed);
      const std::int64_t took = now_ns() - seen_ns_.load(std::memory_order_relaxed);
      answer_ns_.fetch_add(static_cast<std::uint64_t>(took), std::memory_order_relaxed);
      std::atomic_ref(memory_.mailbox->answer.answered).store(asked, std::memory_order_release);
      return;
    }
    claims = claims_.load(std::memory_order_relaxed);
  }
}

Partial FarWorkers::place_of(std::uint32_t index, std::uint32_t part) noexcept {
  const std::uint64_t out = std::uint64_t{memory_.shape.group()} * memory_.shape.head_dim;
  float* const at = partials_.data() + (std::uint64_t{index} * most_parts_ + part) * (out + memory_.shape.group());
  return {.out = at, .lse = at + out};
}

void FarWorkers::attend(std::uint32_t layer, const Part& part, Rows& rows) {
  const ForwardMemory& m = memory_;
  const std::uint32_t plane = m.plane(layer, part.index % m.shape.kv_heads);
  const std::uint32_t* const list = m.far_rows + part.index * std::uint64_t{m.list_room()};
  for (std::uint32_t i = part.begin; i < part.end; ++i) {
    rows[i - part.begin] = m.far + m.far_page(plane, list[i] / m.layout.page_tokens) * m.layout.page_bytes() +
                           list[i] % m.layout.page_tokens * m.layout.row_bytes();
  }
  const std::uint64_t head = std::uint64_t{part.index} * m.shape.group();
  const Partial whole{.out = m.far_out + head * m.shape.head_dim, .lse = m.far_lse + head};
  // The first part goes to its place at once, the others follow in their order.
  const Partial place = part.part == 0 ? whole : place_of(part.index, part.part);
  kernels_.element[static_cast<int>(m.layout.dtype)].attend({.q = m.far_q + head * m.shape.head_dim,
                                                             .k = rows.data(),
                                                             .v_offset = m.layout.half_bytes(),
                                                             .count = part.end - part.begin,
                                                             .group = m.shape.group(),
                                                             .head_dim = m.shape.head_dim,
                                                             .out = place.out,
                                                             .lse = place.lse});
  if (part_ends_[part.index].fetch_add(1, std::memory_order_acq_rel) + 1 != part.parts) return;
  part_ends_[part.index].store(0, std::memory_order_relaxed);
  for (std::uint32_t i = 1; i < part.parts; ++i)
    cpu::merge_into(whole, place_of(part.index, i), m.shape.group(), m.shape.head_dim);
}

}  // namespace sluice::runtime

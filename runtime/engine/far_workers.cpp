#include "runtime/engine/far_workers.hpp"

#include <chrono>
#include <system_error>

#include "cpu/spin.hpp"
#include "sluice/error.hpp"

namespace sluice::runtime {
namespace {

/// A word of the mailbox, which the device writes.
std::uint64_t look(const std::uint64_t& word) noexcept {
  return std::atomic_ref(const_cast<std::uint64_t&>(word)).load(std::memory_order_acquire);
}

}  // namespace

FarWorkers::FarWorkers(const DecodeMemory& memory, const FarWorkersOptions& options, const cpu::Topology& topology)
    : memory_(memory),
      options_(options),
      kernels_(cpu::fastest_kernels()),
      rows_(options.threads, Rows(memory.bucket.list_room(memory.shape))) {
  const std::vector<std::uint32_t> cores = topology.core_order(options.numa_node);
  try {
    for (std::uint32_t i = 0; i < options.threads; ++i) {
      threads_.emplace_back([this, topology, cores, i](const std::stop_token& stop) {
        // The first core is the caller's.
        if (options_.pin && cores.size() > 1) (void)topology.bind_this_thread(cores[1 + i % (cores.size() - 1)]);
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

void FarWorkers::answer(std::uint64_t asked, Rows& rows) {
  constexpr std::uint64_t kIndex = 0xffff'ffffu;
  const std::uint32_t items = memory_.bucket.rows * memory_.shape.kv_heads;
  const std::uint32_t layer = std::atomic_ref(memory_.mailbox->question.layer).load(std::memory_order_relaxed);
  const std::uint64_t tag = asked << 32;
  std::uint64_t claims = claims_.load(std::memory_order_relaxed);
  while (true) {
    // Who comes late to a question finds all of it taken, or another one's claims.
    const bool fresh = claims >> 32 == ((asked - 1) & kIndex);
    if (!fresh && (claims & ~kIndex) != tag) return;
    const std::uint64_t next = fresh ? tag : claims;
    const auto index = static_cast<std::uint32_t>(next & kIndex);
    if (index >= items) return;
    if (!claims_.compare_exchange_weak(claims, next + 1, std::memory_order_acq_rel, std::memory_order_relaxed)) continue;
    if (options_.before_answer) options_.before_answer();
    attend(layer, index, rows);
    if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 == items) {
      finished_.store(0, std::memory_order_relaxed);
      std::atomic_ref(memory_.mailbox->answer.answered).store(asked, std::memory_order_release);
      return;
    }
    claims = claims_.load(std::memory_order_relaxed);
  }
}

void FarWorkers::attend(std::uint32_t layer, std::uint32_t index, Rows& rows) const {
  const DecodeMemory& m = memory_;
  const std::uint32_t count = m.far_counts[index];
  if (count == 0) return;
  const std::uint32_t plane = m.plane(layer, index % m.shape.kv_heads);
  const std::uint32_t* const list = m.far_rows + index * std::uint64_t{m.bucket.list_room(m.shape)};
  for (std::uint32_t i = 0; i < count; ++i) {
    rows[i] = m.far + m.far_page(plane, list[i] / m.layout.page_tokens) * m.layout.page_bytes() +
              list[i] % m.layout.page_tokens * m.layout.row_bytes();
  }
  const std::uint64_t head = std::uint64_t{index} * m.shape.group();
  kernels_.element[static_cast<int>(m.layout.dtype)].attend({.q = m.far_q + head * m.shape.head_dim,
                                                             .k = rows.data(),
                                                             .v_offset = m.layout.half_bytes(),
                                                             .count = count,
                                                             .group = m.shape.group(),
                                                             .head_dim = m.shape.head_dim,
                                                             .out = m.far_out + head * m.shape.head_dim,
                                                             .lse = m.far_lse + head});
}

}  // namespace sluice::runtime

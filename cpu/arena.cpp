#include "cpu/arena.hpp"

#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/info.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>
#include <oneapi/tbb/task_scheduler_observer.h>

#include <algorithm>

namespace sluice::cpu {
namespace {

class Observer final : public tbb::task_scheduler_observer {
 public:
  Observer(tbb::task_arena& arena, const std::function<void(std::uint32_t)>& on_enter)
      : tbb::task_scheduler_observer(arena), on_enter_(on_enter) {
    observe(true);
  }
  ~Observer() override { observe(false); }
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  void on_scheduler_entry(bool is_worker) override {
    if (is_worker) on_enter_(static_cast<std::uint32_t>(std::max(tbb::this_task_arena::current_thread_index(), 0)));
  }

 private:
  const std::function<void(std::uint32_t)>& on_enter_;
};

/// oneTBB starts no more workers than the machine has cores unless it is told to. The controls of several
/// arenas combine to the smallest, hence none where the default suffices.
std::unique_ptr<tbb::global_control> allow(std::uint32_t threads) {
  if (threads <= static_cast<std::uint32_t>(tbb::info::default_concurrency())) return nullptr;
  return std::make_unique<tbb::global_control>(tbb::global_control::max_allowed_parallelism, threads);
}

}  // namespace

struct Arena::Impl {
  std::unique_ptr<tbb::global_control> more_than_cores;
  tbb::task_arena arena;
  Observer observer;

  Impl(std::uint32_t threads, const std::function<void(std::uint32_t)>& on_enter)
      : more_than_cores(allow(threads)),
        arena(static_cast<int>(threads), /*reserved_for_masters=*/1u),
        observer(arena, on_enter) {}
};

Arena::Arena(std::uint32_t threads, const std::function<void(std::uint32_t)>& on_enter)
    : impl_(std::make_unique<Impl>(threads, on_enter)) {}

Arena::~Arena() = default;

void Arena::run(std::uint32_t helpers, const std::function<void()>& help) {
  impl_->arena.execute([&help, helpers] {
    // Isolated: while a caller waits for its own helpers it takes up no other caller's work, which could be
    // long and would find this thread's scratch memory in use.
    tbb::this_task_arena::isolate([&help, helpers] {
      tbb::parallel_for(
          0u, helpers, [&help](std::uint32_t) { help(); }, tbb::simple_partitioner{});
    });
  });
}

}  // namespace sluice::cpu

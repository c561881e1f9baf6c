#include "tests/support/failing_new.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

namespace {

/// Allocations until the one that fails, of all threads; negative: none does.
std::atomic<long> until{-1};
/// Of this thread, of so many bytes or more.
thread_local long until_own = -1;
thread_local std::size_t least_own = 0;

bool refuses(std::size_t bytes) noexcept {
  if (bytes >= least_own && until_own >= 0 && until_own-- == 0) return true;
  return until.load(std::memory_order_relaxed) >= 0 && until.fetch_sub(1, std::memory_order_relaxed) == 0;
}

void* allocate(std::size_t bytes, std::size_t alignment) {
  void* memory = nullptr;
  if (!refuses(bytes) &&
      posix_memalign(&memory, std::max(alignment, sizeof(void*)), std::max<std::size_t>(bytes, 1)) == 0) {
    return memory;
  }
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

#if defined(__SANITIZE_ADDRESS__)
// Forms of new that are not replaced here end in the sanitizer's own, and their memory in the delete above.
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() { return "alloc_dealloc_mismatch=0"; }
#endif

namespace sluice::test {

void fail_allocation(long which) noexcept { until = which; }
void fail_own_allocation(long which, std::size_t least) noexcept {
  until_own = which;
  least_own = least;
}
bool one_failed() noexcept { return until.exchange(-1) < 0; }

}  // namespace sluice::test

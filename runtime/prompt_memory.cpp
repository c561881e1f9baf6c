#include "runtime/prompt_memory.hpp"

namespace sluice::runtime {

PromptMemory::Area PromptMemory::whole() const noexcept {
  if (run_.slots > 2 * window_pages_) return {.first = run_.first, .pages = run_.slots};
  return {.first = first_ + 2 * chunk_pages_, .pages = 2 * window_pages_};
}

PromptMemory::Area PromptMemory::half(std::size_t half) const noexcept {
  const Area all = whole();
  const std::uint32_t pages = all.pages / 2;
  return {.first = all.first + static_cast<std::uint32_t>(half) * pages, .pages = pages};
}

bool PromptMemory::borrow() {
  if (borrowed_) return false;
  run_ = pool_.borrow();
  borrowed_ = true;
  return true;
}

void PromptMemory::give_back() noexcept {
  if (borrowed_) pool_.give_back(run_);
  borrowed_ = false;
  run_ = {};
}

}  // namespace sluice::runtime

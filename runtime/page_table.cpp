#include "runtime/page_table.hpp"

#include <algorithm>

namespace sluice::runtime {

void HeadPages::push(PageRef ref) {
  refs.push_back(ref);
  frames.push_back(ref.frame);
  slots.push_back(kNone);
  residence.push_back(Residence::far);
  forced.push_back(0);
}

PageRef HeadPages::pop() {
  const PageRef ref = refs.back();
  refs.pop_back();
  frames.pop_back();
  slots.pop_back();
  residence.pop_back();
  forced.pop_back();
  return ref;
}

void HeadPages::promote(std::uint32_t page, std::uint32_t slot) {
  held.push_back(page);
  slots[page] = slot;
  residence[page] = Residence::promoting;
}

std::uint32_t HeadPages::leave(std::uint32_t page) noexcept {
  const std::uint32_t slot = slots[page];
  slots[page] = kNone;
  residence[page] = Residence::far;
  forced[page] = 0;
  const auto at = std::find(held.begin(), held.end(), page);
  *at = held.back();
  held.pop_back();
  return slot;
}

}  // namespace sluice::runtime

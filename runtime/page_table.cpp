#include "runtime/page_table.hpp"

#include <algorithm>

namespace sluice::runtime {

void HeadPages::make_room(std::size_t more) {
  const std::size_t room = refs.size() + more;
  if (room <= place.capacity() && room <= held.capacity() && room <= forced.capacity()) return;
  // `place` and what comes behind it last: they say that all of them have grown.
  const std::size_t capacity = std::max(room, refs.capacity() * 2);
  refs.reserve(capacity);
  frames.reserve(capacity);
  slots.reserve(capacity);
  residence.reserve(capacity);
  near.reserve(capacity);
  is_forced.reserve(capacity);
  place.reserve(capacity);
  held.reserve(capacity);  // A page may be brought near, or pinned there, at any time.
  forced.reserve(capacity);
}

void HeadPages::push(PageRef ref) noexcept {
  refs.push_back(ref);
  frames.push_back(ref.frame);
  slots.push_back(kNone);
  residence.push_back(Residence::far);
  near.push_back(0);
  place.push_back(0);
  is_forced.push_back(0);
}

PageRef HeadPages::pop() {
  const PageRef ref = refs.back();
  refs.pop_back();
  frames.pop_back();
  slots.pop_back();
  residence.pop_back();
  near.pop_back();
  place.pop_back();
  is_forced.pop_back();
  return ref;
}

void HeadPages::promote(std::uint32_t page, std::uint32_t slot) noexcept {
  place[page] = static_cast<std::uint32_t>(held.size());
  held.push_back(page);
  slots[page] = slot;
  residence[page] = Residence::promoting;
}

void HeadPages::arrive(std::uint32_t page) noexcept {
  residence[page] = Residence::near;
  near[page] = 1;
  listed = false;
}

std::uint32_t HeadPages::leave(std::uint32_t page) noexcept {
  const std::uint32_t slot = slots[page];
  slots[page] = kNone;
  residence[page] = Residence::far;
  near[page] = 0;
  listed = false;
  if (is_forced[page] != 0) std::erase(forced, page);
  is_forced[page] = 0;
  held[place[page]] = held.back();
  place[held.back()] = place[page];
  held.pop_back();
  return slot;
}

}  // namespace sluice::runtime

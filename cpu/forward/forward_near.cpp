// Which rows lie near: a cache that the device keeps by itself.
#include <algorithm>
#include <span>
#include <vector>

#include "cpu/forward/near_plane.hpp"

namespace sluice::cpu {
namespace {

using namespace near;

/// Near rows for tokens that come, of prompts or decoded ones, but for the first `skip` of these. Those that have one
/// count as used in that forward.
void acquire_coming(const ForwardMemory& m, const Plane& plane, bool decoded, std::size_t skip, Forward used,
                    Patience patience) {
  constexpr std::uint32_t kAtOnce = 256;  // As many as a device has threads for.
  const std::uint32_t tokens = m.slip->bucket.rows();
  std::vector<std::uint32_t> wanted;
  for (std::uint32_t base = 0; base < tokens; base += kAtOnce) {
    wanted.clear();
    for (const ForwardToken& token : std::span(m.tokens + base, std::min(kAtOnce, tokens - base))) {
      if (token.list == kNone || (token.decoded != 0) != decoded) continue;
      if (skip != 0) {
        --skip;
        continue;
      }
      const std::uint32_t row = m.row_of(token.list, token.position);
      if ((plane.entry(row) & kNearBit) == 0) {
        wanted.push_back(row);
      } else {
        plane.refresh(row, used);
      }
    }
    if (plane.acquire(wanted, static_cast<Forward>(m.slip->forward), used, patience) < wanted.size()) return;
  }
}

/// Tokens that come and found no near row are not as they were listed, if they were: before the sequence was cut.
void forget_coming(const ForwardMemory& m, const Plane& plane) {
  for (const ForwardToken& token : std::span(m.tokens, m.slip->bucket.rows())) {
    if (token.list == kNone) continue;
    std::uint32_t& entry = plane.entry(m.row_of(token.list, token.position));
    if ((entry & kNearBit) == 0) entry = 0;
  }
}

/// All tokens of rows that are whole, but for the new one, see ForwardVerbs::apply.
void keep_whole(const Kernels& kernels, const ForwardMemory& m, const Plane& plane) {
  const auto forward = static_cast<Forward>(m.slip->forward);
  std::size_t left = m.promotions;
  for (const ForwardRow& row : std::span(m.rows, m.slip->bucket.decode_rows)) {
    if (row.list == kNone || !m.keeps_near(row)) continue;
    std::vector<std::uint32_t> wanted;
    for (std::uint32_t token = 0; token + 1 < row.tokens; ++token) {
      const std::uint32_t at = m.row_of(row.list, token);
      if ((plane.entry(at) & kNearBit) != 0) {
        plane.refresh(at, forward);
      } else if (wanted.size() < left) {
        wanted.push_back(at);
      }
    }
    const std::uint32_t acquired = plane.acquire(wanted, forward, forward, {kNearPatience, kNearAgain});
    for (std::uint32_t i = 0; i < acquired; ++i) plane.load(kernels, wanted[i]);
    m.state->promoted += acquired;
    left -= acquired;
  }
}

/// body(memory), for every stack that has a layer in this plane.
template <class Body>
void for_each_stack(const ForwardMemory& m, std::uint32_t plane, const Body& body) {
  for (std::uint32_t stack = 0; stack < m.stacks; ++stack) {
    if (m.has_layer(stack, plane)) body(m.of_stack(stack));
  }
}

}  // namespace

void acquire_rows(const Kernels& kernels, const ForwardMemory& m) {
  if (m.near_pages == 0) return;
  const auto forward = static_cast<Forward>(m.slip->forward);
  const std::uint32_t page_tokens = m.layout.page_tokens;
  const auto prompts = static_cast<std::size_t>(
      std::ranges::count_if(std::span(m.tokens, m.slip->bucket.rows()),
                            [](const ForwardToken& token) { return token.list != kNone && token.decoded == 0; }));
  // All of them first: they are reported once, and what follows may find no memory.
  for (std::uint32_t p = 0; p < m.planes(); ++p) {
    const Plane plane(m, p);
    for_each_stack(m, p, [&](const ForwardMemory& stack) { settle(plane, Arriving(stack, p)); });
    for (const std::uint32_t block : std::span(m.slip_freed, m.slip->freed_blocks)) {
      for (std::uint32_t i = 0; i < page_tokens; ++i) plane.give_up(block * page_tokens + i);
    }
  }
  for (std::uint32_t p = 0; p < m.planes(); ++p) {
    const Plane plane(m, p);
    for_each_stack(m, p, [&](const ForwardMemory& stack) {
      acquire_coming(stack, plane, true, 0, forward, {kNearPatience, kNearAgain, 0});
    });
    if (m.state->kept == m.slip->forward) keep_whole(kernels, m, plane);
    // The newest of prompts, and in their order, so that the oldest give way first later on.
    const std::size_t most = std::min<std::size_t>(prompts, plane.rows());
    for_each_stack(m, p, [&](const ForwardMemory& stack) {
      acquire_coming(stack, plane, false, prompts - most, forward - kNearPatience, {kNearPatience});
    });
    for_each_stack(m, p, [&](const ForwardMemory& stack) {
      const Arriving arriving(stack, p);
      if (arriving.state().state != ForwardArrivals::State::listed) return;
      forget_coming(stack, plane);
      place(plane, arriving, forward);
      arriving.for_each([&](std::uint32_t) { ++m.state->promoted; });
    });
  }
}

void fill_rows(const Kernels& kernels, const ForwardMemory& m) {
  for (std::uint32_t p = 0; p < m.planes() && m.near_pages != 0; ++p) {
    const Plane plane(m, p);
    for_each_stack(m, p, [&](const ForwardMemory& stack) {
      const Arriving arriving(stack, p);
      if (arriving.state().state != ForwardArrivals::State::placed) return;
      arriving.for_each([&](std::uint32_t row) { plane.load(kernels, row); });
      arriving.state().state = ForwardArrivals::State::filled;
    });
  }
}

}  // namespace sluice::cpu

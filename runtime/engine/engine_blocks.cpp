// How sequences get blocks and let go of them.
#include <algorithm>
#include <string>
#include <vector>

#include "runtime/engine/impl.hpp"

namespace sluice {

std::uint32_t Engine::Impl::pages_of(std::uint32_t tokens) const noexcept {
  return static_cast<std::uint32_t>(div_up(tokens, memory.largest().layout.page_tokens));
}

std::uint32_t Engine::Impl::mean_block(const runtime::PageList& list, std::uint32_t tokens) const noexcept {
  return tokens > options.page_tokens ? list.blocks().front() : kNone;
}

std::uint32_t Engine::Impl::mean_block_of(std::uint32_t block) const noexcept {
  for (const auto& [id, sequence] : sequences) {
    const std::vector<std::uint32_t>& blocks = sequence.pages().blocks();
    if (std::ranges::find(blocks, block) != blocks.end()) return mean_block(sequence.pages(), sequence.planned);
  }
  return kNone;  // Of layers with windows.
}

std::uint32_t Engine::Impl::kept_from(const Sequence& sequence) const noexcept {
  // If there are layers with windows, the last stack is one of them.
  return std::max(sequence.lists.back().passed() * options.page_tokens, sequence.first_kept);
}

void Engine::Impl::pass_windows(Sequence& sequence) noexcept {
  const scheduler::LayerStacks& stacks = memory.stacks();
  if (!stacks.windowed()) return;
  const std::uint32_t pages = stacks.passed_pages(sequence.tokens);
  for (std::uint32_t stack = 0; stack < stacks.count(); ++stack) {
    if (stacks.windowed(stack)) sequence.lists[stack].pass(pages, table);
  }
}

void Engine::Impl::require_windows(SequenceId id, const Sequence& sequence, std::uint32_t tokens,
                                   const char* what) const {
  const std::uint32_t from = kept_from(sequence);
  if (tokens == 0 || from <= memory.stacks().seen_from(tokens)) return;
  throw Error(Errc::unsupported, std::string(what) + ": of layers with windows sequence " + text(id.value) +
                                     " has what comes from token " + text(from) + " on, and behind " + text(tokens) +
                                     " tokens more is seen; raise EngineOptions::window_slack, " +
                                     text(options.window_slack) + ", or begin another one");
}

void Engine::Impl::shrink(Sequence& sequence, std::uint32_t tokens) noexcept {
  for (runtime::PageList& list : sequence.lists) list.shrink(pages_of(tokens), table);
}

std::uint32_t Engine::Impl::open_block(const Sequence& sequence, const runtime::PageList& list) const noexcept {
  const std::uint32_t page = sequence.planned / options.page_tokens;
  return page < list.pages() ? list.blocks()[page] : kNone;
}

void Engine::Impl::require_room(std::span<const Wanted> wanted, std::uint32_t max_tokens) const {
  std::uint64_t needed = 0;
  std::uint64_t learnt = 0;  // More than is learnt now.
  std::vector<std::uint32_t> open;
  for (const auto& [sequence, item] : wanted) {
    const std::uint64_t tokens = std::uint64_t{sequence->planned} + item.tokens;
    if (tokens > max_tokens)
      throw Error(Errc::out_of_capacity, "a sequence would have " + text(tokens) + " tokens, and may have " +
                                             text(max_tokens) + "; raise largest.max_tokens and host_bytes");
    const std::uint32_t pages = pages_of(static_cast<std::uint32_t>(tokens));
    learnt += policy_share(sequence->spec, static_cast<std::uint32_t>(tokens)) -
              policy_share(sequence->spec, sequence->planned);
    for (const runtime::PageList& list : sequence->lists) {
      needed += pages - std::min(pages, list.pages());  // A forward that failed has left its blocks.
      if (const std::uint32_t block = open_block(*sequence, list); block != kNone) open.push_back(block);
    }
  }
  require_policy_room(learnt);
  // Of those that go on in a shared block, the last to hold it keeps it.
  std::ranges::sort(open);
  for (std::size_t i = 0, same = 0; i < open.size(); ++i) {
    same = i != 0 && open[i] == open[i - 1] ? same + 1 : 1;
    needed += same < table.holders(open[i]) ? 1 : 0;
  }
  if (const std::uint32_t left = table.free() + table.idle(); needed > left)
    throw Error(Errc::out_of_capacity, "the host pool has " + text(left) + " blocks of " +
                                           text(options.page_tokens) + " tokens left, and " +
                                           text(needed) + " are needed; end sequences or raise host_bytes");
}

void Engine::Impl::grow(std::span<const Wanted> wanted) noexcept {
  for (const auto& [sequence, item] : wanted) {
    for (runtime::PageList& list : sequence->lists) {
      own_open_block(*sequence, list);
      while (list.pages() < pages_of(sequence->planned + item.tokens)) list.push(take_block());
    }
  }
  trim_prefixes();
}

void Engine::Impl::own_open_block(const Sequence& sequence, runtime::PageList& list) noexcept {
  const std::uint32_t from = open_block(sequence, list);
  if (from == kNone) return;
  // What is cached of the tokens that it took back is cheaper to forget than to do without a block.
  if (table.kept(from) && table.holders(from) == 1 && table.free() + table.idle() == 0) prefixes->forget(from);
  if (!table.shared(from)) return;
  // Nothing in flight writes to it: who shares blocks rests.
  const std::uint32_t to = take_block();
  memory.copy_rows(from, to, sequence.planned % options.page_tokens);
  copies.push_back({.from = from, .to = to});  // There is room: see `send`.
  list.replace(sequence.planned / options.page_tokens, to);
  table.release(from);
}

}  // namespace sluice

// Sequences that begin with pages of others: what their tokens are called, and who finds them by that.
#include <algorithm>
#include <random>
#include <string>

#include "runtime/engine/engine_options.hpp"
#include "runtime/engine/impl.hpp"
#include "scheduler/plan/forward_rows.hpp"

namespace sluice {
namespace {

/// Pages of a prompt that a sequence may begin with.
std::uint32_t shareable(const PolicySpec& policy, std::size_t prompt_tokens, std::uint32_t page_tokens) noexcept {
  const std::size_t kept = std::max(scheduler::prompt_queries(policy), 1u);
  return prompt_tokens <= kept ? 0 : static_cast<std::uint32_t>((prompt_tokens - kept) / page_tokens);
}

}  // namespace

runtime::PrefixCache& Engine::Impl::prefix_cache() {
  if (prefixes) return *prefixes;
  std::random_device random;  // So that nobody can prepare prompts whose hashes collide, which would take long to find.
  const std::uint64_t seed = std::uint64_t{random()} << 32 | random();
  const std::uint64_t most = std::min<std::uint64_t>(options.prefix_bytes / memory.block_bytes(), table.blocks());
  prefixes = std::make_unique<runtime::PrefixCache>(table, options.page_tokens, static_cast<std::uint32_t>(most), seed,
                                                     runtime::hash_page, memory.stacks().count());
  seen_prefixes.store(prefixes.get(), std::memory_order_release);
  return *prefixes;
}

std::span<const std::int32_t> Engine::Impl::page_ids(std::span<const std::int32_t> ids,
                                                     std::uint32_t page) const noexcept {
  return ids.subspan(std::size_t{page} * options.page_tokens, options.page_tokens);
}

std::uint32_t Engine::Impl::known_pages(const PolicySpec& policy, std::span<const std::int32_t> prompt,
                                        std::uint64_t salt) const noexcept {
  std::uint32_t pages = 0;
  std::uint32_t whole = 0;  // Of the newest, in a row, those that layers with windows have, too.
  const scheduler::LayerStacks& layers = memory.stacks();
  const std::uint32_t most = shareable(policy, prompt.size(), options.page_tokens);
  for (runtime::PrefixPlace place{.salt = salt}; place.pages < most;) {
    const runtime::PrefixPlace next = prefixes->next(place, page_ids(prompt, place.pages));
    if (next.pages == place.pages) break;  // It is not known.
    place = next;
    whole = prefixes->has_others(place.block) ? whole + 1 : 0;
    const std::uint32_t needed = place.pages - layers.passed_pages(place.pages * options.page_tokens);
    if (!layers.windowed() || whole >= needed) pages = place.pages;
  }
  return pages;
}

std::uint32_t Engine::Impl::match_prefix(const PolicySpec& policy, std::span<const std::int32_t> prompt,
                                         std::uint64_t salt) const noexcept {
  if (!prefixes) return 0;
  return known_pages(policy, prompt, salt) * options.page_tokens;
}

SequenceId Engine::Impl::begin(const PolicySpec& policy, std::span<const std::int32_t> prompt, std::uint64_t salt) {
  const std::uint32_t most_tokens = memory.largest().largest.max_tokens;
  if (prompt.size() > most_tokens)
    throw Error(Errc::out_of_capacity, "begin: the prompt has " + text(prompt.size()) +
                                           " tokens, and a sequence may have " + text(most_tokens) +
                                           "; raise largest.max_tokens and host_bytes");
  if (!prompt.empty()) (void)prefix_cache();
  std::vector<std::int32_t> ids(prompt.begin(), prompt.end());
  sluice::validate(policy);
  require_served(policy);
  const std::uint32_t pages = prefixes ? known_pages(policy, prompt, salt) : 0;
  const SequenceId id = add(policy, pages * options.page_tokens);
  Sequence& sequence = at(id);
  sequence.names = {.ids = std::move(ids), .known = {.salt = salt}};
  begin_with(sequence, pages, prompt);
  sequence.tokens = sequence.planned = sequence.prompt_end = sequence.names.known.pages * options.page_tokens;
  runtime::count(counted.matched_tokens, sequence.tokens);
  return id;
}

void Engine::Impl::begin_with(Sequence& sequence, std::uint32_t pages, std::span<const std::int32_t> prompt) noexcept {
  const scheduler::LayerStacks& layers = memory.stacks();
  const std::uint32_t passed = layers.windowed() ? layers.passed_pages(pages * options.page_tokens) : 0;
  for (std::uint32_t stack = 0; stack < layers.count(); ++stack)
    if (layers.windowed(stack)) sequence.lists[stack].skip(passed);
  runtime::PrefixPlace& place = sequence.names.known;
  while (place.pages < pages) {
    place = prefixes->next(place, page_ids(prompt, place.pages));
    for (std::uint32_t stack = 0; stack < layers.count(); ++stack) {
      if (place.pages > passed || !layers.windowed(stack))
        sequence.lists[stack].share(prefixes->block_of(place.block, stack), table);
    }
  }
}

void Engine::Impl::name_tokens(SequenceId id, std::uint32_t first, std::span<const std::int32_t> ids) {
  Sequence& sequence = at(id);
  std::vector<std::int32_t>& known = sequence.names.ids;
  const std::uint32_t most_tokens = memory.largest().largest.max_tokens;
  if (first > known.size())
    throw Error(Errc::invalid_argument, "name_tokens: sequence " + text(id.value) + " has names of its first " +
                                            text(known.size()) + " tokens, and these begin with token " + text(first) +
                                            "; name those between, too");
  if (ids.size() > most_tokens - first)
    throw Error(Errc::out_of_capacity, "name_tokens: sequence " + text(id.value) + " may have " + text(most_tokens) +
                                           " tokens, and these would be names of more");
  const auto again = std::min<std::size_t>(ids.size(), std::min<std::size_t>(known.size(), sequence.planned) -
                                                           std::min<std::size_t>(first, sequence.planned));
  for (std::size_t i = 0; i < again; ++i) {
    if (known[first + i] != ids[i])
      throw Error(Errc::invalid_argument, "name_tokens: token " + text(first + i) + " of sequence " + text(id.value) +
                                              " is named " + std::to_string(known[first + i]) + " already, not " +
                                              std::to_string(ids[i]) + "; take it back first");
  }
  if (ids.empty()) return;
  (void)prefix_cache();
  // Nothing can fail from here on once there is room.
  if (known.capacity() < first + ids.size()) known.reserve(std::max(2 * known.capacity(), first + ids.size()));
  known.resize(std::max(known.size(), first + ids.size()));
  std::ranges::copy(ids, known.begin() + first);
  publish(sequence);
}

void Engine::Impl::publish(Sequence& sequence) noexcept {
  auto& [ids, known, sparse] = sequence.names;
  if (ids.empty()) return;
  std::size_t tokens = std::min<std::size_t>(sequence.tokens, ids.size());
  if (!options.prefix_decoded) tokens = std::min<std::size_t>(tokens, sparse);
  const auto pages = static_cast<std::uint32_t>(tokens / options.page_tokens);
  if (known.pages >= pages) return;
  if (!prefixes->knows(known)) known = {.salt = known.salt};  // It was given up with another sequence's page before it.
  while (known.pages < pages) {
    // Of layers with windows, a page of which rows are missing is the sequence's alone.
    const bool partial = known.pages * options.page_tokens < sequence.first_kept;
    runtime::PrefixPlace next = prefixes->next(known, page_ids(ids, known.pages));
    if (next.pages == known.pages) {
      const std::uint32_t block = sequence.pages().blocks()[known.pages];
      // A fork's, to which the caller gave other names; or one that layers with windows have passed.
      if (block == kNone || table.kept(block) || (partial && memory.stacks().windowed(0))) return;
      next = prefixes->add(known, page_ids(ids, known.pages), block);
    }
    for (std::uint32_t stack = 1; stack < sequence.lists.size() && !partial; ++stack)
      prefixes->add_other(next.block, stack, sequence.lists[stack].blocks()[known.pages]);
    known = next;
  }
}

void Engine::Impl::forget_names(Sequence& sequence, std::uint32_t tokens) noexcept {
  auto& [ids, known, sparse] = sequence.names;
  if (sparse >= tokens) sparse = kNone;
  if (ids.size() > tokens) ids.resize(tokens);
  const std::uint32_t pages = tokens / options.page_tokens;
  if (known.pages <= pages) return;
  known = prefixes->knows(known) ? prefixes->up(known, pages) : runtime::PrefixPlace{.salt = known.salt};
}

Engine::Impl::Sequence::Names Engine::Impl::names_of(const Sequence& parent, std::uint32_t tokens) const {
  const Sequence::Names& names = parent.names;
  const auto count = static_cast<std::ptrdiff_t>(std::min<std::size_t>(names.ids.size(), tokens));
  Sequence::Names own{.ids = {names.ids.begin(), names.ids.begin() + count}, .known = {.salt = names.known.salt}};
  if (names.sparse < tokens) own.sparse = names.sparse;
  const std::uint32_t pages = std::min(names.known.pages, tokens / options.page_tokens);
  if (pages != 0 && prefixes->knows(names.known)) own.known = prefixes->up(names.known, pages);
  return own;
}

std::uint32_t Engine::Impl::take_block() noexcept {
  if (table.free() == 0) prefixes->evict();
  return table.take();
}

void Engine::Impl::trim_prefixes() noexcept {
  if (prefixes) prefixes->trim();
}

std::uint64_t Engine::Impl::names_bytes() const noexcept {
  if (!prefixes) return 0;
  std::uint64_t bytes = prefixes->heap_bytes();
  for (const auto& [id, sequence] : sequences) bytes += sequence.names.ids.capacity() * sizeof(std::int32_t);
  return bytes;
}

void Engine::Impl::preempt(SequenceId id) {
  const Sequence& sequence = at(id);
  for (const runtime::PageList& list : sequence.lists) {
    for (const std::uint32_t block : list.held()) {
      if (table.holders(block) == 1) table.give_up_near(block);
    }
  }
}

}  // namespace sluice

// Sequences that come back from a file or memory of the caller.
#include <algorithm>
#include <string>
#include <utility>

#include "runtime/engine/engine_options.hpp"
#include "runtime/engine/impl.hpp"
#include "runtime/park/park_blocks.hpp"
#include "runtime/park/park_head.hpp"

namespace sluice {
namespace {

std::string described(const AttentionShape& shape) {
  return text(shape.layers) + " layers of " + text(shape.q_heads) + " query heads, " + text(shape.kv_heads) +
         " KV heads and head_dim " + text(shape.head_dim);
}

/// Whether keys and values are what the engine's would be.
void require_alike(const runtime::ParkHead& head, const EngineOptions& options, std::string_view model) {
  if (head.shape != options.shape)
    throw Error(Errc::invalid_argument, "resume: the sequence was parked with " + described(head.shape) +
                                            ", and this engine has " + described(options.shape) +
                                            "; it is of another model");
  if (head.dtype != options.kv_dtype)
    throw Error(Errc::invalid_argument, std::string("resume: the sequence was parked with keys and values of ") +
                                            to_string(head.dtype) + ", and EngineOptions::kv_dtype is " +
                                            to_string(options.kv_dtype) + "; use an engine of that type");
  for (std::uint32_t layer = 0; layer < options.shape.layers; ++layer) {
    const auto window = [&](const std::vector<std::uint32_t>& windows) {
      return windows.empty() || windows[layer] == 0 ? kNone : windows[layer];
    };
    const std::uint32_t parked = window(head.windows), here = window(options.windows);
    if (parked != here && (head.passed != 0 || std::min(parked, here) < head.tokens))
      throw Error(Errc::invalid_argument,
                  "resume: the sequence was parked with another window in layer " + text(layer) +
                      " than EngineOptions::windows has; use an engine with the same");
  }
  if (head.model != model)
    throw Error(Errc::invalid_argument, "resume: the sequence was parked of model '" + head.model +
                                            "', and is to be resumed of model '" + std::string(model) +
                                            "'; its keys and values mean nothing to another one");
}

/// @throws Error{Errc::invalid_argument}; Error{Errc::unsupported} if the engine does not serve it
PolicySpec parked_policy(const runtime::ParkHead& head, const EngineOptions& options) {
  PolicySpec spec = parse_policy(head.policy);
  spec.name = head.policy_name;
  sluice::validate(spec);
  runtime::require_served(spec, options);
  return spec;
}

/// First token whose keys and values no prompt of this engine would have; kNone: there is none.
std::uint32_t first_unlike(const runtime::ParkHead& head, const EngineOptions& options) {
  const bool exact = head.prefill.mode == PrefillMode::full && options.prefill.mode == PrefillMode::full;
  return exact || head.prefill == runtime::prefill_of(options.prefill) || head.prompt_end == 0 ? head.sparse : 0;
}

std::uint64_t body_begin(const runtime::ParkSource& source, const runtime::ParkHead& head) {
  return source.bytes() - runtime::parked_body_bytes(head.body_bytes());
}

}  // namespace

void Engine::Impl::let_go(std::vector<std::uint32_t>& blocks) noexcept {
  for (const std::uint32_t block : blocks) table.release(block);
  blocks.clear();
}

void Engine::Impl::release_late() noexcept {
  std::erase_if(late_side_data, [&](LateSideData& late) {
    if (!late.made->idle()) return false;
    let_go(late.blocks);
    let_go(late.copies);
    return true;
  });
}

std::vector<std::uint32_t> Engine::Impl::give_up(Sequence& sequence) noexcept {
  for (runtime::PageList& list : sequence.lists) list.give_up(given_up);
  return std::exchange(given_up, {});
}

SequenceId Engine::Impl::resume(runtime::ParkSource& source, std::string_view model) {
  release_late();
  const runtime::ParkHead head = runtime::read_head(source);
  require_alike(head, options, model);
  const PolicySpec spec = parked_policy(head, options);
  if (const std::uint32_t most = memory.largest().largest.max_tokens; head.tokens > most)
    throw Error(Errc::out_of_capacity, "resume: the sequence has " + text(head.tokens) +
                                           " tokens, and a sequence may have " + text(most) +
                                           "; raise largest.max_tokens and host_bytes");
  const scheduler::LayerStacks& stacks = memory.stacks();
  const std::uint64_t pages = std::uint64_t{stacks.count()} * pages_of(head.tokens) -
                              std::uint64_t{stacks.windowed_stacks()} * (head.passed / options.page_tokens);
  if (const std::uint32_t left = table.free() + table.idle(); pages > left)
    throw Error(Errc::out_of_capacity, "resume: the host pool has " + text(left) + " blocks of " +
                                           text(options.page_tokens) + " tokens left, and " + text(pages) +
                                           " are needed; end sequences or raise host_bytes");
  // What is cached gives way, but not to what is damaged.
  if (pages > table.free()) require_whole(source, head);
  const SequenceId id = add(spec, head.tokens);
  try {
    load(source, head, at(id));
  } catch (...) {
    // The next one gets a stream of its own. A thread that is lost goes on using what it has.
    if (side_data && !device->lost()) {
      if (!side_data->idle())
        late_side_data.push_back({std::move(side_data), give_up(at(id)), std::exchange(side_copies, {})});
      side_data.reset();
    }
    let_go(side_copies);
    remove(id);
    throw;
  }
  return id;
}

void Engine::Impl::require_whole(runtime::ParkSource& source, const runtime::ParkHead& head) {
  runtime::ParkBody nowhere;
  nowhere.add({.rows = head.body_bytes()});
  const std::uint64_t from = body_begin(source, head);
  const auto job = begin_blocks(0, runtime::park_blocks(nowhere.bytes()), [&](std::uint64_t block, auto& scratch) {
    runtime::read_block(nowhere, block, source, from, scratch);
  });
  await_blocks(*job, "resume");
}

void Engine::Impl::load(runtime::ParkSource& source, const runtime::ParkHead& head, Sequence& sequence) {
  if (!side_data) {
    late_side_data.reserve(late_side_data.size() + 1);  // Where one is late nothing else may fail.
    side_data = std::make_unique<runtime::SideData>(memory.largest(), *device, options.timeout);
  }
  given_up.reserve(std::size_t{memory.stacks().count()} * pages_of(head.tokens));  // Likewise.
  finish_copies();
  std::vector<std::int32_t> ids(std::min(head.names, memory.largest().largest.max_tokens));
  Sequence::Tail& tail = sequence.tail;
  tail.end = head.tail_end;
  tail.begin = tail.slot == kNone ? tail.end : tail.end - std::min(tail.end - head.tail_begin, options.prompt_queries);
  sequence.tokens = sequence.planned = head.tokens;
  sequence.first_kept = head.passed;
  for (std::uint32_t stack = 0; stack < memory.stacks().count(); ++stack) {
    runtime::PageList& list = sequence.lists[stack];
    if (memory.stacks().windowed(stack)) list.skip(head.passed / options.page_tokens);
    while (list.pages() < pages_of(head.tokens)) list.push(take_block());
  }
  load_body(source, head, sequence, ids);
  if (!ids.empty()) (void)prefix_cache();
  // Nothing can fail from here on.
  sequence.prompt_end = head.prompt_end;
  sequence.bets = {.balance = scheduler::PrefillBets(head.balance), .rests = head.rests, .end = head.chunk_end};
  sequence.names = {.ids = std::move(ids), .known = {.salt = head.salt}, .sparse = first_unlike(head, options)};
  publish(sequence);
}

void Engine::Impl::load_body(runtime::ParkSource& source, const runtime::ParkHead& head, Sequence& sequence,
                             std::span<std::int32_t> names) {
  // Enough for all threads to be busy until the next ones have begun; what the device makes of them takes as long.
  constexpr std::uint64_t kBlocks = 256;
  const ParkedBody parked = park_body(sequence, head, names);
  const std::uint64_t blocks = runtime::park_blocks(parked.body.bytes());
  const std::uint64_t from = body_begin(source, head);
  const auto begin = [&](std::uint64_t first) -> std::unique_ptr<runtime::BorrowingJob> {
    if (first >= blocks) return nullptr;
    return begin_blocks(first, std::min(first + kBlocks, blocks), [&](std::uint64_t block, auto& scratch) {
      runtime::read_block(parked.body, block, source, from, scratch);
    });
  };
  std::uint32_t made = 0;  // Planes whose digests and 4-bit copies are on their way.
  std::unique_ptr<runtime::BorrowingJob> job = begin(0);
  for (std::uint64_t first = 0; job; first += kBlocks) {
    std::unique_ptr<runtime::BorrowingJob> next = begin(first + kBlocks);
    await_blocks(*job, "resume");
    for (const std::uint64_t there = (first + kBlocks) * runtime::kParkBlock;
         made < parked.plane_ends.size() && parked.plane_ends[made] <= there; ++made) {
      const std::uint32_t layer = made / options.shape.kv_heads;
      // Where there is a window nothing is chosen, and so nothing is made of keys.
      if (memory.largest().window_in(layer) == 0)
        side_data->make(memory.largest().plane(layer, made % options.shape.kv_heads), sequence.pages().blocks(),
                        head.tokens);
    }
    job = std::move(next);
  }
  side_data->wait();
}

void Engine::Impl::finish_copies() {
  if (copies.empty()) return;
  side_copies.reserve(copies.size());
  for (const ForwardBlockCopy& copy : copies) {
    if (!table.in_use(copy.to)) continue;  // The sequence that it was for has ended, and nobody reads it.
    side_copies.push_back(copy.to);
    table.hold(copy.to);
  }
  const auto tokens = static_cast<std::uint32_t>(side_copies.size() * options.page_tokens);
  for (std::uint32_t plane = 0; plane < memory.largest().planes(); ++plane) side_data->make(plane, side_copies, tokens);
  side_data->wait();
  let_go(side_copies);
  copies.clear();
}

}  // namespace sluice

// Sequences that come back from a file or memory of the caller.
#include <algorithm>
#include <string>
#include <utility>

#include "runtime/engine/engine_options.hpp"
#include "runtime/engine/parking.hpp"
#include "runtime/park/park_blocks.hpp"

namespace sluice {
namespace {

std::string described(const AttentionShape& shape) {
  return text(shape.layers) + " layers of " + text(shape.q_heads) + " query heads, " + text(shape.kv_heads) +
         " KV heads and head_dim " + text(shape.head_dim) +
         (shape.latent() ? ", with values that are the first " + text(shape.value_dim) + " elements of keys" : "");
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
      return windows.empty() ? 0 : windows[layer];
    };
    // Also where it has no more tokens than either: what comes next would attend others.
    if (window(head.windows) != window(options.windows))
      throw Error(Errc::invalid_argument, "resume: the sequence was parked with a window of " +
                                              text(window(head.windows)) + " tokens in layer " + text(layer) +
                                              ", and EngineOptions::windows has " + text(window(options.windows)) +
                                              " (0: none); use an engine with the same");
  }
  if (head.model != model)
    throw Error(Errc::invalid_argument, "resume: the sequence was parked of model '" + head.model +
                                            "', and is to be resumed of model '" + std::string(model) +
                                            "'; its keys and values mean nothing to another one");
}

/// @throws Error{Errc::invalid_argument}
PolicySpec parked_policy(const runtime::ParkHead& head) {
  PolicySpec spec = parse_policy(head.policy);
  spec.name = head.policy_name;
  sluice::validate(spec);
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

void Engine::Impl::Parking::let_go(std::vector<std::uint32_t>& blocks) noexcept {
  for (const std::uint32_t block : blocks) engine_.table.release(block);
  blocks.clear();
}

void Engine::Impl::Parking::release_late() noexcept {
  std::erase_if(late_side_data_, [&](LateSideData& late) {
    if (!late.made->idle()) return false;
    let_go(late.blocks);
    let_go(late.copies);
    return true;
  });
}

std::vector<std::uint32_t> Engine::Impl::Parking::give_up(Sequence& sequence) noexcept {
  for (runtime::PageList& list : sequence.lists) list.give_up(given_up_);
  return std::exchange(given_up_, {});
}

SequenceId Engine::Impl::Parking::resume(runtime::ParkSource& source, std::string_view model) {
  release_late();
  const runtime::ParkHead head = runtime::read_head(source);
  require_alike(head, engine_.options, model);
  const PolicySpec spec = parked_policy(head);
  engine_.require_served(spec);
  if (const std::uint32_t most = engine_.memory.largest().largest.max_tokens; head.tokens > most)
    throw Error(Errc::out_of_capacity, "resume: the sequence has " + text(head.tokens) +
                                           " tokens, and a sequence may have " + text(most) +
                                           "; raise largest.max_tokens and host_bytes");
  const scheduler::LayerStacks& stacks = engine_.memory.stacks();
  const std::uint64_t pages = std::uint64_t{stacks.count()} * engine_.pages_of(head.tokens) -
                              std::uint64_t{stacks.windowed_stacks()} * (head.passed / engine_.options.page_tokens);
  if (const std::uint32_t left = engine_.table.free() + engine_.table.idle(); pages > left)
    throw Error(Errc::out_of_capacity, "resume: the host pool has " + text(left) + " blocks of " +
                                           text(engine_.options.page_tokens) + " tokens left, and " + text(pages) +
                                           " are needed; end sequences or raise host_bytes");
  // What is cached gives way, but not to what is damaged.
  if (pages > engine_.table.free()) require_whole(source, head);
  const SequenceId id = engine_.add(spec, head.tokens);
  try {
    load(source, head, engine_.at(id));
  } catch (...) {
    // The next one gets a stream of its own. A thread that is lost goes on using what it has.
    if (side_data_ && !engine_.device->lost()) {
      if (!side_data_->idle())
        late_side_data_.push_back({std::move(side_data_), give_up(engine_.at(id)), std::exchange(side_copies_, {})});
      side_data_.reset();
    }
    let_go(side_copies_);
    engine_.remove(id);
    throw;
  }
  return id;
}

void Engine::Impl::Parking::require_whole(runtime::ParkSource& source, const runtime::ParkHead& head) {
  runtime::ParkBody nowhere;
  nowhere.add({.rows = head.body_bytes()});
  const std::uint64_t from = body_begin(source, head);
  const auto job = begin_blocks(0, runtime::park_blocks(nowhere.bytes()), [&](std::uint64_t block, auto& scratch) {
    runtime::read_block(nowhere, block, source, from, scratch);
  });
  await_blocks(*job, "resume");
}

void Engine::Impl::Parking::load(runtime::ParkSource& source, const runtime::ParkHead& head, Sequence& sequence) {
  if (!side_data_) {
    late_side_data_.reserve(late_side_data_.size() + 1);  // Where one is late nothing else may fail.
    side_data_ = std::make_unique<runtime::SideData>(engine_.memory.largest(), *engine_.device, engine_.verbs,
                                                     engine_.options.timeout);
  }
  given_up_.reserve(std::size_t{engine_.memory.stacks().count()} * engine_.pages_of(head.tokens));  // Likewise.
  finish_copies();
  std::vector<std::int32_t> ids(std::min(head.names, engine_.memory.largest().largest.max_tokens));
  Sequence::Tail& tail = sequence.tail;
  tail.end = head.tail_end;
  tail.begin =
      tail.slot == kNone ? tail.end : tail.end - std::min(tail.end - head.tail_begin, engine_.sizes.prompt_queries);
  sequence.tokens = sequence.planned = head.tokens;
  sequence.first_kept = head.passed;
  for (std::uint32_t stack = 0; stack < engine_.memory.stacks().count(); ++stack) {
    runtime::PageList& list = sequence.lists[stack];
    if (engine_.memory.stacks().windowed(stack)) list.skip(head.passed / engine_.options.page_tokens);
    while (list.pages() < engine_.pages_of(head.tokens)) list.push(engine_.take_block());
  }
  load_body(source, head, sequence, ids);
  if (!ids.empty()) (void)engine_.prefix_cache();
  // Nothing can fail from here on.
  sequence.prompt_end = head.prompt_end;
  sequence.bets = {.balance = scheduler::PrefillBets(head.balance), .rests = head.rests, .end = head.chunk_end};
  sequence.names = {.ids = std::move(ids), .known = {.salt = head.salt}, .sparse = first_unlike(head, engine_.options)};
  engine_.publish(sequence);
}

void Engine::Impl::Parking::load_body(runtime::ParkSource& source, const runtime::ParkHead& head, Sequence& sequence,
                                      std::span<std::int32_t> names) {
  // Enough for all threads to be busy until the next ones have begun; what the device makes of them takes as long.
  constexpr std::uint64_t kBlocks = 256;
  const Body parked = body_of(sequence, head, names);
  const std::uint64_t blocks = runtime::park_blocks(parked.body.bytes());
  const std::uint64_t from = body_begin(source, head);
  const auto begin = [&](std::uint64_t first) -> std::unique_ptr<runtime::BorrowingJob> {
    if (first >= blocks) return nullptr;
    return begin_blocks(first, std::min(first + kBlocks, blocks), [&](std::uint64_t block, auto& scratch) {
      runtime::read_block(parked.body, block, source, from, scratch);
    });
  };
  std::uint32_t made = 0;  // Planes whose digests and copies of keys are on their way.
  std::unique_ptr<runtime::BorrowingJob> job = begin(0);
  for (std::uint64_t first = 0; job; first += kBlocks) {
    std::unique_ptr<runtime::BorrowingJob> next = begin(first + kBlocks);
    await_blocks(*job, "resume");
    for (const std::uint64_t there = (first + kBlocks) * runtime::kParkBlock;
         made < parked.plane_ends.size() && parked.plane_ends[made] <= there; ++made) {
      const std::uint32_t layer = made / engine_.options.shape.kv_heads;
      // Where there is a window nothing is chosen, and so nothing is made of keys.
      if (engine_.memory.largest().window_in(layer) == 0)
        side_data_->make(engine_.memory.largest().plane(layer, made % engine_.options.shape.kv_heads),
                         sequence.pages().blocks(), head.tokens, engine_.mean_block(sequence.pages(), head.tokens));
    }
    job = std::move(next);
  }
  side_data_->wait();
}

void Engine::Impl::Parking::finish_copies() {
  if (engine_.copies.empty()) return;
  side_copies_.reserve(engine_.copies.size());
  for (const ForwardBlockCopy& copy : engine_.copies) {
    if (!engine_.table.in_use(copy.to)) continue;  // The sequence that it was for has ended, and nobody reads it.
    side_copies_.push_back(copy.to);
    engine_.table.hold(copy.to);
  }
  for (const std::uint32_t block : side_copies_) {
    const std::uint32_t first = engine_.mean_block_of(block);
    for (std::uint32_t plane = 0; plane < engine_.memory.largest().planes(); ++plane)
      side_data_->make(plane, std::span(&block, 1), engine_.options.page_tokens, first);
  }
  side_data_->wait();
  let_go(side_copies_);
  engine_.copies.clear();
}

}  // namespace sluice

// Sequences that leave an engine for a file or memory of the caller: what is written of them.
#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "runtime/engine/parking.hpp"
#include "runtime/park/park_blocks.hpp"
#include "scheduler/policy/text.hpp"

namespace sluice {
namespace {

std::uint64_t parked_bytes(const runtime::ParkHead& head) {
  return runtime::encode(head).size() + runtime::parked_body_bytes(head.body_bytes());
}

/// Whether what is read of it comes back from its words; else who resumes it would go on by another one.
bool survives(const PolicySpec& spec, const std::string& words) {
  try {
    PolicySpec again = parse_policy(words);
    again.name = spec.name;
    return again == scheduler::what_is_read(spec);
  } catch (const Error&) {
    return false;
  }
}

/// Who parks a sequence can resume it.
void require_resumable(const runtime::ParkHead& head, const PolicySpec& spec) {
  if (!survives(spec, head.policy))
    throw Error(Errc::invalid_argument, "park: the sequence's policy has no words, and '" + head.policy +
                                            "' is another one; begin it with a policy that parse_policy gave");
  if (const std::string why = runtime::unsound(head); !why.empty())
    throw Error(Errc::invalid_argument,
                "park: nobody could resume the sequence: " + why + "; give its policy a shorter name");
}

}  // namespace

runtime::ParkHead Engine::Impl::Parking::head_of(SequenceId id, std::string_view model) {
  const Sequence& sequence = engine_.resting(id, "park");
  if (engine_.options.shape.latent())
    throw Error(Errc::unsupported,
                "park: keys of latent attention (shape.value_dim) have no format of parked sequences; keep the "
                "sequence, or its tokens, and bring these in again");
  if (model.size() > runtime::kMostModelBytes)
    throw Error(Errc::invalid_argument, "park: `model` has " + text(model.size()) + " bytes, and may have " +
                                            text(runtime::kMostModelBytes) + "; give it a hash of what it says");
  runtime::ParkHead head{.shape = engine_.options.shape,
                         .dtype = engine_.options.kv_dtype,
                         .tokens = sequence.tokens,
                         .prompt_end = sequence.prompt_end,
                         .sparse = sequence.names.sparse < sequence.tokens ? sequence.names.sparse : kNone,
                         .names = static_cast<std::uint32_t>(sequence.names.ids.size()),
                         .salt = sequence.names.known.salt,
                         .balance = sequence.bets.balance.balance(),
                         .chunk_end = sequence.bets.end,
                         .prefill = runtime::prefill_of(engine_.options.prefill),
                         .model = std::string(model),
                         .policy = to_string(sequence.spec),
                         .policy_name = sequence.spec.name,
                         .rests = sequence.bets.rests,
                         .passed = engine_.kept_from(sequence),
                         .windows = engine_.options.windows};
  const Sequence::Tail& tail = sequence.tail;
  if (tail.slot != kNone && tail.begin < tail.end) {
    head.tail_begin = tail.begin;
    head.tail_end = tail.end;
  }
  require_resumable(head, sequence.spec);
  return head;
}

std::uint64_t Engine::Impl::Parking::park_bytes(SequenceId id, std::string_view model) {
  return parked_bytes(head_of(id, model));
}

Engine::Impl::Parking::Body Engine::Impl::Parking::body_of(Sequence& sequence, const runtime::ParkHead& head,
                                                           std::span<std::int32_t> names) {
  Body parked;
  runtime::ParkBody& body = parked.body;
  body.add(
      {.row_bytes = sizeof(std::int32_t), .rows = names.size(), .base = reinterpret_cast<std::byte*>(names.data())});
  body.add({.row_bytes = sizeof(std::int32_t), .rows = head.names - names.size()});
  const ForwardMemory& m = engine_.memory.largest();
  const Sequence::Tail& tail = sequence.tail;
  // Behind those that are older than there is room for.
  const std::uint32_t kept = tail.slot == kNone || head.tail_begin == head.tail_end ? 0 : tail.end - tail.begin;
  const std::uint64_t query_bytes =
      std::uint64_t{engine_.options.shape.q_heads} * engine_.options.shape.head_dim * sizeof(float);
  for (std::uint32_t layer = 0; layer < engine_.options.shape.layers; ++layer) {
    body.add({.row_bytes = query_bytes, .rows = head.tail_end - head.tail_begin - kept});
    if (kept == 0) continue;
    float* const slot = m.tails + (std::uint64_t{layer} * m.tail_rows + tail.slot * engine_.sizes.prompt_queries) *
                                      (query_bytes / sizeof(float));
    body.add({.row_bytes = query_bytes,
              .rows = kept,
              .base = reinterpret_cast<std::byte*>(slot),
              .first = tail.begin,
              .turn = engine_.sizes.prompt_queries});
  }
  const PageLayout& layout = m.far_layout;
  for (std::uint32_t layer = 0; layer < engine_.options.shape.layers; ++layer) {
    const std::uint32_t first = head.first_token(layer);
    const auto add = [&](std::uint32_t kv_head, std::uint64_t offset, std::uint64_t row_bytes) {
      body.add({.row_bytes = row_bytes,
                .rows = head.tokens - first,
                .base = m.far_block(m.plane(layer, kv_head), 0) + offset,
                .first = first,
                .turn = layout.page_tokens,
                .frames = sequence.lists[m.place_of(layer).stack].blocks().data(),
                .frame_bytes = layout.page_bytes()});
    };
    for (std::uint32_t kv_head = 0; kv_head < engine_.options.shape.kv_heads; ++kv_head) {
      add(kv_head, 0, layout.row_bytes());
      add(kv_head, layout.half_bytes(), layout.row_bytes());
      if (layout.scaled()) add(kv_head, layout.scales_offset(), layout.scale_bytes());
      parked.plane_ends.push_back(body.bytes());
    }
  }
  return parked;
}

std::unique_ptr<runtime::BorrowingJob> Engine::Impl::Parking::begin_blocks(std::uint64_t first, std::uint64_t last,
                                                                           BlockWork work) {
  // A piece keeps a thread from a layer's question for as long: a tenth of a millisecond or two in memory, in files as
  // long as the system takes. One thread answers whatever the others do.
  constexpr std::uint64_t kBlocks = 2;
  const auto pieces = static_cast<std::uint32_t>(div_up(last - first, kBlocks));
  return std::make_unique<runtime::BorrowingJob>(
      [this](std::uint32_t count, std::function<void(std::uint32_t)> piece) {
        return engine_.begin_job(count, std::move(piece));
      },
      pieces,
      [first, last, work = std::move(work)](std::uint32_t piece) {
        std::vector<std::byte> scratch;
        const std::uint64_t begin = first + piece * kBlocks;
        for (std::uint64_t block = begin; block < std::min(begin + kBlocks, last); ++block) work(block, scratch);
      });
}

void Engine::Impl::Parking::await_blocks(runtime::BorrowingJob& job, const char* call) {
  if (!job.await(engine_.options.timeout))
    throw Error(Errc::timeout, std::string(call) +
                                   ": a thread that copies a part of the sequence has not come back within " +
                                   text(engine_.options.timeout.count()) +
                                   " ms; repeat the call, or, if the machine is merely busy, with a longer "
                                   "EngineOptions::timeout");
  job.rethrow();
}

void Engine::Impl::Parking::write(SequenceId id, const runtime::ParkHead& head, runtime::ParkSink& sink) {
  Sequence& sequence = engine_.at(id);
  const std::vector<std::byte> begin = runtime::encode(head);
  std::vector<std::byte> scratch;
  const auto room = sink.room(0, begin.size(), scratch);
  std::ranges::copy(begin, room.begin());
  sink.put(0, room);
  const runtime::ParkBody body = body_of(sequence, head, sequence.names.ids).body;
  const auto job = begin_blocks(0, runtime::park_blocks(body.bytes()), [&](std::uint64_t block, auto& own) {
    runtime::write_block(body, block, sink, begin.size(), own);
  });
  await_blocks(*job, "park");
  sink.finish();
}

std::uint64_t Engine::Impl::Parking::park(SequenceId id, std::span<std::byte> area, std::string_view model) {
  const runtime::ParkHead head = head_of(id, model);
  const std::uint64_t bytes = parked_bytes(head);
  if (area.size() < bytes)
    throw Error(Errc::out_of_capacity, "park: the area has " + text(area.size()) + " bytes, and sequence " +
                                           text(id.value) + " takes " + text(bytes) + "; ask Engine::park_bytes");
  runtime::MemorySink sink(area);
  write(id, head, sink);
  return bytes;
}

void Engine::Impl::Parking::park(SequenceId id, const std::string& file, std::string_view model) {
  const runtime::ParkHead head = head_of(id, model);
  runtime::FileSink sink(file);
  write(id, head, sink);
}

}  // namespace sluice

// Sequences that leave an engine for a file or memory of the caller: what is written of them.
#include <string>

#include "runtime/engine/impl.hpp"
#include "runtime/park/park_blocks.hpp"
#include "runtime/park/park_head.hpp"
#include "scheduler/policy/text.hpp"

namespace sluice {
namespace {

std::string text(std::uint64_t number) { return std::to_string(number); }

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
    throw Error(Errc::invalid_argument, "park: nobody could resume the sequence: " + why +
                                            "; give its policy a shorter name");
}

/// What prompts attended by, without what the mode does not read.
PrefillSpec prefill_of(const PrefillSpec& spec) { return spec.mode == PrefillMode::full ? PrefillSpec{} : spec; }

}  // namespace

runtime::ParkHead Engine::Impl::park_head(SequenceId id, std::string_view model) {
  const Sequence& sequence = resting(id, "park");
  if (model.size() > runtime::kMostModelBytes)
    throw Error(Errc::invalid_argument, "park: `model` has " + text(model.size()) + " bytes, and may have " +
                                            text(runtime::kMostModelBytes) + "; give it a hash of what it says");
  runtime::ParkHead head{.shape = options.shape,
                         .dtype = options.kv_dtype,
                         .tokens = sequence.tokens,
                         .prompt_end = sequence.prompt_end,
                         .sparse = sequence.names.sparse < sequence.tokens ? sequence.names.sparse : kNone,
                         .names = static_cast<std::uint32_t>(sequence.names.ids.size()),
                         .salt = sequence.names.known.salt,
                         .balance = sequence.bets.balance.balance(),
                         .chunk_end = sequence.bets.end,
                         .prefill = prefill_of(options.prefill),
                         .model = std::string(model),
                         .policy = to_string(sequence.spec),
                         .policy_name = sequence.spec.name,
                         .rests = sequence.bets.rests,
                         .passed = kept_from(sequence),
                         .windows = options.windows};
  const Sequence::Tail& tail = sequence.tail;
  if (tail.slot != kNone && tail.begin < tail.end) {
    head.tail_begin = tail.begin;
    head.tail_end = tail.end;
  }
  require_resumable(head, sequence.spec);
  return head;
}

std::uint64_t Engine::Impl::park_bytes(SequenceId id, std::string_view model) {
  return parked_bytes(park_head(id, model));
}

void Engine::Impl::park(SequenceId id, const runtime::ParkHead& head, runtime::ParkSink& sink) {
  const Sequence& sequence = at(id);
  const std::vector<std::byte> begin = runtime::encode(head);
  std::ranges::copy(begin, sink.next(begin.size()).begin());
  runtime::BlockWriter body(sink, head.body_bytes());
  body.put(std::as_bytes(std::span(sequence.names.ids)));
  for (std::uint32_t layer = 0; layer < options.shape.layers; ++layer) {
    for (std::uint32_t token = head.tail_begin; token < head.tail_end; ++token)
      body.put(std::as_bytes(tail_of(sequence, layer, token)));
  }
  for (std::uint32_t layer = 0; layer < options.shape.layers; ++layer) {
    for (std::uint32_t kv_head = 0; kv_head < options.shape.kv_heads; ++kv_head)
      for_each_run(sequence, layer, kv_head, head.first_token(layer),
                   [&](std::span<std::byte> rows) { body.put(rows); });
  }
  sink.finish();
}

std::uint64_t Engine::Impl::park(SequenceId id, std::span<std::byte> area, std::string_view model) {
  const runtime::ParkHead head = park_head(id, model);
  const std::uint64_t bytes = parked_bytes(head);
  if (area.size() < bytes)
    throw Error(Errc::out_of_capacity, "park: the area has " + text(area.size()) + " bytes, and sequence " +
                                           text(id.value) + " takes " + text(bytes) + "; ask Engine::park_bytes");
  runtime::MemorySink sink(area);
  park(id, head, sink);
  return bytes;
}

void Engine::Impl::park(SequenceId id, const std::string& file, std::string_view model) {
  const runtime::ParkHead head = park_head(id, model);
  runtime::FileSink sink(file);
  park(id, head, sink);
}

}  // namespace sluice

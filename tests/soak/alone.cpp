#include "tests/soak/alone.hpp"

#include <algorithm>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"

namespace sluice::test {
namespace {

/// Keys are attended in other parts there.
constexpr double kTolerance = 1e-4;

EngineOptions quiet(EngineOptions options) {
  options.near_bytes = 0;
  options.placement = PlacementMode::hybrid;  // Where tokens are attended changes none.
  options.fetch_share = 0.f;
  options.in_flight = 1;
  options.sequences = 2;  // One that forks, and its child.
  options.cpu_sequences = 2;
  options.largest.audit = false;
  options.largest.decode_rows = 2 * options.largest.drafts * kMostDrafts;
  options.largest.prefill_rows = 128;
  options.largest.prefills = 1;
  options.threads = 1;
  options.answer_timeout = std::chrono::milliseconds(30'000);
  options.timeout = std::chrono::milliseconds(30'000);
  options.before_answer = {};
  return options;
}

/// A fork of a whole prompt is as if its policy had been there from the beginning, if the queries of the prompt's
/// newest tokens were kept for its parent, too.
/// @return the policy of the last such fork; those forks are no calls any more
std::string from_the_beginning(std::string policy, std::vector<Call>& calls) {
  std::size_t tokens = 0;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const Call& call = calls[i];
    if (call.kind == Call::Kind::decode || call.kind == Call::Kind::truncate) break;
    tokens += call.tokens.size();
    if (call.kind != Call::Kind::fork) continue;
    if (call.count != tokens || scheduler::chooser(parse_policy(policy)) != scheduler::Chooser::cpu) break;
    if (!call.policy.empty()) policy = call.policy;
    // In its place remains what changes nothing.
    calls[i] = {.kind = Call::Kind::truncate, .count = call.count};
  }
  return policy;
}

}  // namespace

Alone::Alone(const EngineOptions& options, const Pool& pool, Device& memory)
    : pool_(pool),
      memory_(memory),
      engine_(quiet(options)),
      tensors_(memory, kSoakShape, engine_.options().largest.rows()) {}

void Alone::forward(SequenceId id, const Call& call) {
  const auto count = static_cast<std::uint32_t>(call.tokens.size());
  const PlanItem item{.sequence = id, .tokens = count, .prefill = call.kind == Call::Kind::prompt};
  for (std::uint32_t i = 0; i < count; ++i) tensors_.set(i, pool_, call.tokens[i]);
  tensors_.spoil();
  Bucket bucket = engine_.options().largest;
  bucket.drafts = call.drafts;
  const Batch batch = engine_.plan({&item, 1}, bucket, nullptr);
  tensors_.attend(engine_, bucket, nullptr);
  engine_.finish(batch);
}

void Alone::import(SequenceId id, const Call& call) {
  const auto count = static_cast<std::uint32_t>(call.tokens.size());
  for (std::uint32_t layer = 0; layer < kSoakShape.layers; ++layer) {
    std::vector<float> k, v, q;
    const auto append = [](std::vector<float>& to, const float* from, std::uint32_t heads) {
      to.insert(to.end(), from, from + heads * kSoakShape.head_dim);
    };
    for (std::uint32_t i = 0; i < count; ++i) {
      append(k, pool_.k(layer, call.tokens[i]), kSoakShape.kv_heads);
      append(v, pool_.v(layer, call.tokens[i]), kSoakShape.kv_heads);
      if (i + call.count >= count) append(q, pool_.q(layer, call.tokens[i]), kSoakShape.q_heads);
    }
    const auto view = [](const std::vector<float>& of, std::uint32_t tokens, std::uint32_t heads) {
      return dense_view(of.data(), DType::f32, tokens, heads, kSoakShape.head_dim);
    };
    engine_.import_prefix(id, LayerId{layer}, view(k, count, kSoakShape.kv_heads), view(v, count, kSoakShape.kv_heads),
                          nullptr, view(q, call.count, kSoakShape.q_heads));
  }
}

void Alone::call(SequenceId& id, const Call& call) {
  switch (call.kind) {
    case Call::Kind::prompt:
    case Call::Kind::decode: return forward(id, call);
    case Call::Kind::import: return import(id, call);
    case Call::Kind::truncate: return engine_.truncate(id, call.count);
    case Call::Kind::fork: {
      const SequenceId parent = id;
      id = call.policy.empty() ? engine_.fork(parent, call.count)
                               : engine_.fork(parent, call.count, parse_policy(call.policy));
      return engine_.end(parent);
    }
    case Call::Kind::park: {
      std::vector<std::byte> area(engine_.park_bytes(id));
      (void)engine_.park(id, area);
      engine_.end(id);
      id = engine_.resume(area);
      return;
    }
  }
}

void Alone::require_same(const Sequence& sequence, std::size_t call, RoundStats& stats) {
  for (const Said& said : sequence.said) {
    if (said.call != call) continue;
    const double off = difference(said.out, tensors_.out(said.row));
    if (!(off < kTolerance))
      throw Failure("not what it is alone, by " + std::to_string(off) + ": row " + std::to_string(said.row) +
                    " of call " + std::to_string(call) + " of " + sequence.story());
    ++stats.alone;
  }
}

void Alone::compare(const Sequence& sequence, RoundStats& stats) {
  SequenceId id{};
  std::vector<Call> calls = sequence.calls;
  const std::string policy = from_the_beginning(sequence.first_policy, calls);
  try {
    id = engine_.begin(parse_policy(policy));
    bool decoded = false;
    PolicySpec spec = parse_policy(policy);
    for (std::size_t i = 0; i < calls.size(); ++i) {
      decoded |= calls[i].kind == Call::Kind::decode;
      if (!calls[i].policy.empty()) spec = parse_policy(calls[i].policy);
      // It stays where it is, unless the other has forgotten what it had learnt.
      if (calls[i].kind != Call::Kind::park || (decoded && scheduler::remembers(spec))) call(id, calls[i]);
      require_same(sequence, i, stats);
    }
  } catch (const Error& error) {
    throw Failure(std::string("alone it fails (") + error.what() + "): " + sequence.story());
  }
  engine_.end(id);
}

}  // namespace sluice::test

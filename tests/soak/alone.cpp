#include "tests/soak/alone.hpp"

#include <algorithm>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"

namespace sluice::test {
namespace {

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

/// Whether what its rows attend depends on no number that a device rounds in its own way: it is as much as there is, or
/// a number of tokens that stand out.
bool is_certain(const PolicySpec& spec) {
  return scheduler::chooser(spec) == scheduler::Chooser::device &&
         (spec.sources == 0 || spec.uses(Source::all) || spec.budget.kind == BudgetKind::top_k);
}

}  // namespace

Alone::Alone(const EngineOptions& options, const Pool& pool, World& world)
    : pool_(pool),
      ground_(world.ground({.at_once = true})),
      engine_(quiet(options), ground_->device()),
      tensors_(ground_->memory(), pool_.shape(), engine_.options().largest.rows()),
      staging_(ground_->memory()) {}

void Alone::forward(SequenceId id, const Call& call) {
  const auto count = static_cast<std::uint32_t>(call.tokens.size());
  const PlanItem item{.sequence = id, .tokens = count, .prefill = call.kind == Call::Kind::prompt};
  for (std::uint32_t i = 0; i < count; ++i) tensors_.set(i, pool_, call.tokens[i]);
  tensors_.spoil();
  Bucket bucket = engine_.options().largest;
  bucket.drafts = call.drafts;
  const Batch batch = engine_.plan({&item, 1}, bucket, ground_->handle());
  tensors_.attend(engine_, bucket, ground_->handle());
  engine_.finish(batch);
  if (Stream* const stream = ground_->stream()) stream->synchronize(deadline_after(kSoakTimeout));
}

void Alone::import(SequenceId id, const Call& call) {
  const AttentionShape& shape = pool_.shape();
  const auto count = static_cast<std::uint32_t>(call.tokens.size());
  const std::size_t kv = std::size_t{shape.kv_heads} * shape.head_dim;
  float* at = staging_.room(shape.layers * (2 * count * kv + call.count * pool_.row()));
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    const auto rows = [&](const float* (Pool::*of)(std::uint32_t, std::uint32_t) const, std::uint32_t newest,
                          std::uint32_t heads) {
      const float* const begin = at;
      for (std::uint32_t i = count - newest; i < count; ++i)
        at = std::copy_n((pool_.*of)(layer, call.tokens[i]), heads * shape.head_dim, at);
      return dense_view(begin, DType::f32, newest, heads, shape.head_dim);
    };
    const TensorView k = rows(&Pool::k, count, shape.kv_heads);
    const TensorView v = rows(&Pool::v, count, shape.kv_heads);
    const TensorView q = rows(&Pool::q, call.count, shape.q_heads);
    engine_.import_prefix(id, LayerId{layer}, k, v, ground_->handle(), q);
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

void Alone::require_same(const Sequence& sequence, const PolicySpec& spec, std::size_t call, RoundStats& stats) {
  for (const Said& said : sequence.said) {
    if (said.call != call) continue;
    const double off = difference(said.out, tensors_.out(said.row));
    const bool same = off < pool_.terrain().tolerance;
    const bool certain = sequence.calls[call].kind == Call::Kind::prompt
                             ? engine_.options().prefill.mode == PrefillMode::full
                             : is_certain(spec);
    const bool rounded = pool_.terrain().rounds && !certain;
    // Averages of values, each of which is below 2.
    if (!same && !(rounded && off < 4.0))
      throw Failure("not what it is alone, by " + std::to_string(off) + ": row " + std::to_string(said.row) +
                    " of call " + std::to_string(call) + " of " + sequence.story());
    ++stats.alone;
    stats.rounded += rounded ? 1 : 0;
    stats.unlike += same ? 0 : 1;
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
      require_same(sequence, spec, i, stats);
    }
  } catch (const Error& error) {
    throw Failure(std::string("alone it fails (") + error.what() + "): " + sequence.story());
  }
  engine_.end(id);
}

}  // namespace sluice::test

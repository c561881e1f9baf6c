#include "tests/soak/roster.hpp"

#include <algorithm>
#include <optional>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "tests/soak/expect.hpp"

namespace sluice::test {
namespace {

bool on_cpu(const PolicySpec& spec) { return scheduler::chooser(spec) == scheduler::Chooser::cpu; }

/// Tokens that a policy has surely not forgotten how to take back, whatever came to nothing meanwhile: such tokens take
/// places in its journal, too, and where a query head observes how many it likes, as many as there are.
std::uint32_t surely_undone(const PolicySpec& spec) {
  if (!spec.uses(Source::history)) return kSoakTokens;
  return spec.budget.kind == BudgetKind::top_p ? 0 : 20;
}

template <class Call>
void require_error(Errc want, const std::string& what, const Call& call) {
  const std::optional<Errc> got = error_of(call);
  require(got == want, what + " ends with " + (got ? to_string(*got) : "no error") + " instead of " + to_string(want));
}

}  // namespace

void drain(const Driven& driven) {
  Stream* const stream = driven.ground.stream();
  if (stream == nullptr) return;
  const auto event = driven.ground.memory().create_event();
  stream->record(*event);  // Takes what has failed from the stream.
  stream->synchronize(deadline_after(driven.engine.options().timeout));
  require(driven.trouble || event->state() == Event::State::done, "the stream fails: " + event->reason());
}

Roster::Roster(const Driven& driven, Random& random, RoundStats& stats)
    : driven_(driven),
      random_(random),
      stats_(stats),
      staging_(driven.ground.memory()),
      pages_(driven.engine.options()),
      last_(driven.engine.stats()) {}

std::uint64_t Roster::stack_bytes() const noexcept {
  return block_bytes(driven_.engine.options()) / driven_.pool.shape().layers * pages_.stacks().layers();
}

std::uint64_t Roster::blocks() const noexcept { return driven_.engine.options().host_bytes / stack_bytes(); }

bool Roster::has_slot(const PolicySpec& spec) const {
  const auto cpu = std::ranges::count_if(sequences_, [](const auto& s) { return on_cpu(s->spec); });
  return sequences_.size() < driven_.engine.options().sequences &&
         (!on_cpu(spec) || cpu < driven_.engine.sizes().cpu_sequences);
}

Sequence* Roster::resting() {
  std::vector<Sequence*> all;
  for (const auto& sequence : sequences_) {
    if (sequence->rests()) all.push_back(sequence.get());
  }
  return all.empty() ? nullptr : all[random_.below(static_cast<std::uint32_t>(all.size()))];
}

std::vector<std::uint32_t> Roster::draw(std::uint32_t count) {
  std::vector<std::uint32_t> tokens(count);
  for (std::uint32_t& token : tokens) token = random_.below(kPoolTokens);
  return tokens;
}

Sequence& Roster::add(SequenceId id, Sequence sequence) {
  sequence.id = id;
  sequence.sampled = random_.below(2) == 0 || scheduler::remembers(sequence.spec);
  // Some prompts are long, most are not.
  sequence.prompt_left = random_.below(10) == 0 ? 0 : 1 + random_.below(random_.below(4) == 0 ? 400 : 160);
  sequence.decode_left = 1 + random_.below(40);
  ++stats_.sequences;
  return *sequences_.emplace_back(std::make_unique<Sequence>(std::move(sequence)));
}

bool Roster::begin() {
  const std::string& policy = driven_.policies[random_.below(static_cast<std::uint32_t>(driven_.policies.size()))];
  const PolicySpec spec = parse_policy(policy);
  if (!has_slot(spec)) {
    require_error(Errc::out_of_capacity, "begin without a slot", [&] { (void)driven_.engine.begin(spec); });
    ++stats_.refused;
    return false;
  }
  Sequence sequence{.id = {}, .policy = policy, .spec = spec};
  sequence.first_policy = policy;
  const SequenceId id = driven_.engine.begin(spec);
  pages_.begin(id);
  (void)add(id, std::move(sequence));
  return true;
}

void Roster::fork(Sequence& parent, bool under_its_own_policy) {
  const std::string policy =
      under_its_own_policy ? driven_.policies[random_.below(static_cast<std::uint32_t>(driven_.policies.size()))] : "";
  const PolicySpec spec = policy.empty() ? parent.spec : parse_policy(policy);
  const std::uint32_t tokens = !has_decoded(parent) || random_.below(2) == 0 ? parent.settled : draw_shorter(parent);
  SequenceId id{};
  const auto call = [&] {
    id = policy.empty() ? driven_.engine.fork(parent.id, tokens) : driven_.engine.fork(parent.id, tokens, spec);
  };
  const std::optional<Errc> error = error_of(call);
  if (!pages_.can_shorten(parent.id, tokens)) {
    require(error == Errc::unsupported, "fork of " + parent.name() + " with too few tokens is not refused");
    ++stats_.refused;
    return;
  }
  if (!has_slot(spec)) {
    require(error == Errc::out_of_capacity, "fork of " + parent.name() + " without a slot is not refused");
    ++stats_.refused;
    return;
  }
  require(!error, "fork of " + parent.name() + " fails");
  pages_.fork(parent.id, id, tokens);
  Sequence child{.id = id, .policy = policy.empty() ? parent.policy : policy, .spec = spec};
  child.tokens.assign(parent.tokens.begin(), parent.tokens.begin() + tokens);
  child.settled = tokens;
  child.uncertain = parent.uncertain;
  child.disturbed = parent.disturbed;
  if (policy.empty()) {
    child.begun_again = parent.begun_again;
    note_shorter(parent, tokens, child);
  }
  child.queries_from = std::min(parent.queries_from, tokens);
  child.first_policy = parent.first_policy;
  child.calls = parent.calls;
  child.vain = parent.vain;
  child.calls.push_back({.kind = Call::Kind::fork, .count = tokens, .policy = policy});
  Sequence& added = add(id, std::move(child));
  if (random_.below(2) == 0) added.prompt_left = 0;  // It goes on with what it has been given.
}

std::uint32_t Roster::draw_shorter(const Sequence& sequence) {
  constexpr std::uint32_t kNear = 36;  // What policies of the CPU take back, and a little more.
  std::uint32_t most = random_.below(3) == 0 ? sequence.settled : std::min(sequence.settled, kNear);
  // Of windows, fewer tokens than there may be are refused.
  if (windowed() && random_.below(6) != 0) most = std::min(most, sequence.settled - pages_.shortest(sequence.id));
  return sequence.settled - random_.below(most + 1);
}

void Roster::note_shorter(const Sequence& sequence, std::uint32_t tokens, Sequence& shorter) {
  const std::uint32_t back = sequence.settled - tokens;
  if (back != 0 && sequence.begun_again != kNone && tokens <= sequence.begun_again) shorter.uncertain = true;
  if (sequence.disturbed && has_decoded(sequence) && back > surely_undone(sequence.spec)) shorter.uncertain = true;
}

void Roster::truncate(Sequence& sequence, std::uint32_t tokens) {
  const std::optional<Errc> error = error_of([&] { driven_.engine.truncate(sequence.id, tokens); });
  if (!pages_.can_shorten(sequence.id, tokens)) {
    require(error == Errc::unsupported, "truncate of " + sequence.name() + " to too few tokens is not refused");
    ++stats_.refused;
    return;
  }
  require(!error, "truncate of " + sequence.name() + " fails");
  note_shorter(sequence, tokens, sequence);
  pages_.truncate(sequence.id, tokens);
  sequence.tokens.resize(tokens);
  sequence.settled = tokens;
  sequence.queries_from = std::min(sequence.queries_from, tokens);
  sequence.calls.push_back({.kind = Call::Kind::truncate, .count = tokens});
}

void Roster::import_layers(const Sequence& sequence, std::span<const std::uint32_t> tokens, std::uint32_t queries,
                           std::uint32_t layers) {
  const AttentionShape& shape = driven_.pool.shape();
  const auto count = static_cast<std::uint32_t>(tokens.size());
  const std::size_t kv = std::size_t{shape.kv_heads} * shape.head_dim;
  float* at = staging_.room(layers * count * (2 * kv + driven_.pool.row()));
  const auto rows = [&](const float* (Pool::*of)(std::uint32_t, std::uint32_t) const, std::uint32_t layer,
                        std::uint32_t from, std::uint32_t heads) {
    const float* const begin = at;
    for (std::uint32_t i = from; i < count; ++i)
      at = std::copy_n((driven_.pool.*of)(layer, tokens[i]), heads * shape.head_dim, at);
    return dense_view(begin, DType::f32, count - from, heads, shape.head_dim);
  };
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    const TensorView k = rows(&Pool::k, layer, 0, shape.kv_heads);
    const TensorView v = rows(&Pool::v, layer, 0, shape.kv_heads);
    const TensorView q = rows(&Pool::q, layer, count - queries, shape.q_heads);
    driven_.engine.import_prefix(sequence.id, LayerId{layer}, k, v, driven_.ground.handle(), q);
  }
  drain(driven_);  // One that was broken off is still to run.
}

void Roster::import(Sequence& sequence) {
  const EngineOptions& options = driven_.engine.options();
  // Where blocks are few the longest sequence may be shorter.
  const std::uint32_t longest = std::min(kSoakTokens, options.largest.max_tokens);
  const std::uint32_t most = std::min(options.import_rows, longest - std::min(longest, sequence.planned()));
  if (most == 0) return;
  if (driven_.calm) driven_.calm();
  const std::vector<std::uint32_t> tokens = draw(1 + random_.below(std::min(most, 150u)));
  const auto count = static_cast<std::uint32_t>(tokens.size());
  const std::uint32_t queries = random_.below(2) == 0 ? 0 : random_.below(count + 1);
  const PlanItem item{.sequence = sequence.id, .tokens = count, .prefill = true};
  if (!has_room({&item, 1})) {
    require_error(Errc::out_of_capacity, "import without room",
                  [&] { import_layers(sequence, tokens, queries, driven_.pool.shape().layers); });
    ++stats_.refused;
    return;
  }
  const bool broken_off = random_.below(6) == 0;
  if (broken_off) {
    import_layers(sequence, tokens, queries, 1 + random_.below(driven_.pool.shape().layers - 1));
    pages_.grow(sequence.id, sequence.planned(), count);
    sequence.disturbed = true;
    sequence.queries_from = sequence.planned();
    require_error(Errc::invalid_argument, "truncate within an import",
                  [&] { driven_.engine.truncate(sequence.id, sequence.settled); });
  }
  try {
    import_layers(sequence, tokens, queries, driven_.pool.shape().layers);
  } catch (const Error& error) {
    // What was to break a forward has broken this.
    if (error.code() != Errc::device || !driven_.trouble) throw;
    sequence.disturbed = true;
    sequence.queries_from = sequence.planned();
    import_layers(sequence, tokens, queries, driven_.pool.shape().layers);
  }
  if (!broken_off) pages_.grow(sequence.id, sequence.planned(), count);
  sequence.tokens.insert(sequence.tokens.end(), tokens.begin(), tokens.end());
  sequence.settled += count;
  settle(sequence);
  sequence.calls.push_back({.kind = Call::Kind::import, .tokens = tokens, .count = queries});
}

void Roster::end(Sequence& sequence) {
  if (sequence.sampled && !sequence.uncertain) driven_.compare_alone(sequence);
  driven_.engine.end(sequence.id);
  pages_.end(sequence.id);
  require_error(Errc::not_found, "end of a sequence that has ended", [&] { driven_.engine.end(sequence.id); });
  std::erase_if(sequences_, [&](const auto& s) { return s.get() == &sequence; });
}

void Roster::watch(Sequence& sequence) {
  const std::vector<std::uint32_t> tokens{random_.below(kSoakTokens), random_.below(sequence.planned() + 1)};
  driven_.engine.watch(sequence.id, tokens);
}

void Roster::misuse(Sequence& sequence) {
  Engine& engine = driven_.engine;
  const SequenceId id = sequence.id;
  const std::uint32_t more = sequence.settled + 1;
  require_error(Errc::invalid_argument, "fork of more tokens than there are", [&] { (void)engine.fork(id, more); });
  require_error(Errc::invalid_argument, "truncate to more tokens than there are", [&] { engine.truncate(id, more); });
  const PlanItem twice[] = {{.sequence = id}, {.sequence = id}};
  Bucket single = engine.options().largest;  // Which every policy may be in.
  single.drafts = 1;
  require_error(Errc::invalid_argument, "plan of a sequence twice",
                [&] { (void)engine.plan(twice, single, driven_.ground.handle()); });
  require_error(Errc::invalid_argument, "cancel of no forward", [&] { engine.cancel({.forward = 0, .bucket = {}}); });
  require_error(Errc::invalid_argument, "finish of no forward", [&] { engine.finish({.forward = 0, .bucket = {}}); });
  if (sequence.rests()) return;
  require_error(Errc::invalid_argument, "park of a sequence in flight", [&] { (void)engine.park_bytes(id); });
  require_error(Errc::invalid_argument, "end of a sequence in flight", [&] { engine.end(id); });
  require_error(Errc::invalid_argument, "fork of a sequence in flight", [&] { (void)engine.fork(id, 0); });
  require_error(Errc::invalid_argument, "truncate of a sequence in flight", [&] { engine.truncate(id, 0); });
}

bool Roster::has_room(std::span<const PlanItem> items) const {
  PageModel after = pages_;
  for (const PlanItem& item : items) {
    const auto sequence = std::ranges::find(sequences_, item.sequence, [](const auto& s) { return s->id; });
    after.grow(item.sequence, (*sequence)->planned(), item.tokens);
  }
  return after.used() <= blocks();
}

void Roster::plan_in_vain(std::span<const PlanItem> items) {
  for (const PlanItem& item : items) {
    const auto sequence = std::ranges::find(sequences_, item.sequence, [](const auto& s) { return s->id; });
    pages_.grow(item.sequence, (*sequence)->planned(), item.tokens);
  }
}

void Roster::note_begun(std::span<const PlanItem> items) {
  for (const PlanItem& item : items) {
    Sequence& sequence = **std::ranges::find(sequences_, item.sequence, [](const auto& s) { return s->id; });
    const bool decodes = !item.prefill && scheduler::remembers(sequence.spec);
    if (decodes && begins_again(sequence, sequence.calls.size())) sequence.begun_again = sequence.planned();
  }
}

void Roster::settle(const Sequence& sequence) { pages_.settle(sequence.id, sequence.settled); }

void Roster::plan(Sequence& sequence, std::vector<std::uint32_t> tokens, bool prefill, std::uint32_t drafts) {
  // Its policy looks at what is left of them.
  const std::uint32_t queries = scheduler::prompt_queries(sequence.spec);
  if (!prefill && sequence.queries_from != 0 && sequence.planned() < sequence.queries_from + queries)
    sequence.uncertain = true;
  pages_.grow(sequence.id, sequence.planned(), static_cast<std::uint32_t>(tokens.size()));
  sequence.tokens.insert(sequence.tokens.end(), tokens.begin(), tokens.end());
  sequence.calls.push_back(
      {.kind = prefill ? Call::Kind::prompt : Call::Kind::decode, .tokens = std::move(tokens), .drafts = drafts});
  ++sequence.in_flight;
}

}  // namespace sluice::test

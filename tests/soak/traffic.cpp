#include "tests/soak/traffic.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

namespace sluice::test {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kEvents = 40;
constexpr int kAttempts = 100;
constexpr std::uint32_t kLongestChunk = 64;  ///< as toy_options sizes the staging memory
constexpr double kTolerance = 1e-4;
constexpr std::size_t kQ = std::size_t{kSoakShape.q_heads} * kSoakShape.head_dim;
constexpr std::size_t kKv = std::size_t{kSoakShape.kv_heads} * kSoakShape.head_dim;

/// Policies that attend every token.
constexpr const char* kDense[] = {"full", "full:near=20%", "full | near=0,sinks=4,recent=20", "topk:budget=100%",
                                  "exact | top_k=all"};

/// Beside the presets.
constexpr const char* kCompositions[] = {
    "pages:box | progressive=0.8,microbatch=2 | near=0,sinks=4,recent=20",
    "pages:box | progressive=0.9,microbatch=1,rule=certified | near=0,sinks=0,recent=0 | dense=0,every=2",
    "pages | progressive=0.7,microbatch=3,rule=median | near=20%,sinks=4,recent=20",
    "pages:box,pages=4 | int4 | top_p=0.9 | near=0,sinks=4,recent=0",
    "exact | int4 | top_p=0.7 | near=20%,sinks=3,recent=9",
    "clusters:recluster=64,least=64,size=4 | fitted=0.8 | near=20%,sinks=3,recent=18",
    "clusters:recluster=64,least=64,size=8,candidates=64+history:observe_every=4 | top_k=48 | "
    "near=10%,sinks=4,recent=16",
    "clusters:recluster=64,least=64,size=8,candidates=64+lsh:bits=4,tables=20 | top_k=48 | near=0,sinks=4,recent=16",
    "lsh:bits=5,tables=30 | sampled | near=0,sinks=4,recent=64 | dense=0,every=2",
    "history+pages | int4 | top_k=32 | near=10%,sinks=4,recent=16",
    "history:share_group=on+pages | top_p=0.9 | near=0,sinks=4,recent=16",
    "history | top_k=24 | near=0,sinks=4,recent=16 | bypass=sink:0.85",
    "none | near=0,sinks=4,recent=40"};

std::string sparse_policy(Random& random) {
  const auto& presets = policy_presets();
  const auto all = static_cast<std::uint32_t>(presets.size() + std::size(kCompositions));
  const std::uint32_t at = random.below(all);
  return at < presets.size() ? presets[at].spec.name : kCompositions[at - presets.size()];
}

void append(float*& to, const TensorView& from, std::size_t floats) {
  std::memcpy(to, from.row(0, 0), floats * sizeof(float));
  to += floats;
}

MutableTensorView rows_of(float* data, std::uint32_t rows) {
  return dense_view(data, DType::f32, rows, kSoakShape.q_heads, kSoakShape.head_dim);
}

TensorView rows_of(const float* data, std::uint32_t rows, std::uint32_t heads) {
  return dense_view(data, DType::f32, rows, heads, kSoakShape.head_dim);
}

}  // namespace

Traffic::Traffic(Runtime& runtime, std::span<const Toy> toys, const TrafficOptions& options)
    : runtime_(runtime), toys_(toys), options_(options), random_(options.seed) {}

template <class Call>
bool Traffic::insist(Call&& call, const Members& members) {
  std::string last;
  for (int attempt = 0; attempt < 2 * kAttempts; ++attempt) {
    // A call of many copies may never get through all of them; without faults it must.
    if (attempt == kAttempts) options_.stop_faults();
    try {
      call();
      return true;
    } catch (const Error& error) {
      last = error.what();
      if (error.code() != Errc::device && error.code() != Errc::out_of_capacity) throw;
      const bool full = error.code() == Errc::out_of_capacity;
      ++(full ? stats_.refused : stats_.errors);
      if (!full && !options_.ordered) continue;
      if (!full) {
        Members everybody;
        for (const auto& sequence : sequences_) everybody.push_back(sequence.get());
        give_up(everybody);
      } else {
        give_up(members);
      }
      return false;
    }
  }
  throw Failure("a call fails although faults have stopped: " + last);
}

void Traffic::end(SequenceId id) {
  for (int attempt = 0;; ++attempt) {
    try {
      return runtime_.end(id);
    } catch (const Error& error) {
      ++stats_.errors;
      if (error.code() == Errc::not_found && attempt > 0) return;  // it left, and something had failed
      if (error.code() != Errc::device || attempt == kAttempts) throw;
      // What ordered calls computed for it may have come to nothing.
      for (const auto& sequence : sequences_) {
        if (sequence->id == id) std::erase_if(rows_, [&](const Row& row) { return row.toy == sequence->toy; });
      }
    }
  }
}

void Traffic::give_up(const Members& members) {
  std::vector<SequenceId> ids;
  for (const Sequence* member : members) ids.push_back(member->id);
  // What ordered calls computed for the others is still to come; for these it says nothing any more.
  std::erase_if(rows_, [&](const Row& row) {
    return std::any_of(members.begin(), members.end(), [&](const Sequence* m) { return m->toy == row.toy; });
  });
  for (const SequenceId id : ids) end(id);
  std::erase_if(sequences_, [&](const auto& s) { return std::find(ids.begin(), ids.end(), s->id) != ids.end(); });
}

void Traffic::synchronize() {
  for (int attempt = 0;; ++attempt) {
    try {
      runtime_.synchronize();
      break;
    } catch (const Error& error) {
      if (error.code() != Errc::device || attempt == kAttempts) throw;
      ++stats_.errors;
      Members everybody;
      for (const auto& sequence : sequences_) everybody.push_back(sequence.get());
      give_up(everybody);
    }
  }
  check_outputs();
}

void Traffic::check_outputs() {
  for (const Row& row : rows_) {
    const float* got = outputs_[row.call].data() + row.offset;
    const auto where = [&] {
      return row.policy + ", layer " + std::to_string(row.layer) + ", token " + std::to_string(row.token);
    };
    if (std::any_of(got, got + kQ, [](float x) { return !std::isfinite(x); })) throw Failure("not finite: " + where());
    if (!row.dense) continue;
    ++stats_.checked;
    const std::vector<double> want = row.toy->dense(row.layer, row.token);
    double worst = 0.0;
    for (std::size_t i = 0; i < kQ; ++i) worst = std::max(worst, std::abs(want[i] - got[i]));
    if (worst > kTolerance) throw Failure("off dense attention by " + std::to_string(worst) + ": " + where());
  }
  rows_.clear();
  outputs_.clear();
}

float* Traffic::keep(std::size_t floats) {
  // NaN, so that an output that nobody wrote shows.
  return outputs_.emplace_back(floats, NAN).data();
}

void Traffic::expect(const Sequence& sequence, std::uint32_t layer, std::uint32_t token, const float* at) {
  rows_.push_back({.policy = sequence.policy,
                   .dense = sequence.dense,
                   .toy = sequence.toy,
                   .layer = layer,
                   .token = token,
                   .call = outputs_.size() - 1,
                   .offset = static_cast<std::size_t>(at - outputs_.back().data())});
}

Traffic::Members Traffic::some(std::uint32_t tokens) {
  Members members;
  for (const auto& sequence : sequences_) {
    if (sequence->at + tokens <= kSoakTokens) members.push_back(sequence.get());
  }
  for (std::size_t i = members.size(); i > 1; --i) {
    std::swap(members[i - 1], members[random_.below(static_cast<std::uint32_t>(i))]);
  }
  if (!members.empty()) members.resize(1 + random_.below(static_cast<std::uint32_t>(members.size())));
  return members;
}

void Traffic::join() {
  if (sequences_.size() == options_.most_sequences) return;
  auto sequence = std::make_unique<Sequence>();
  sequence->dense = random_.below(3) == 0;
  sequence->policy = sequence->dense ? kDense[random_.below(std::size(kDense))] : sparse_policy(random_);
  // Each has a toy of its own, by which give_up tells its outputs from others'.
  const auto taken = [&](const Toy& toy) {
    return std::any_of(sequences_.begin(), sequences_.end(), [&](const auto& s) { return s->toy == &toy; }) ||
           std::any_of(rows_.begin(), rows_.end(), [&](const Row& row) { return row.toy == &toy; });
  };
  std::uint32_t toy = random_.below(static_cast<std::uint32_t>(toys_.size()));
  for (std::size_t i = 0; i < toys_.size() && taken(toys_[toy]); ++i)
    toy = (toy + 1) % static_cast<std::uint32_t>(toys_.size());
  if (taken(toys_[toy])) return;
  sequence->toy = &toys_[toy];
  if (!insist([&] { sequence->id = runtime_.begin(parse_policy(sequence->policy)); }, {})) return;
  ++stats_.sequences;
  sequences_.push_back(std::move(sequence));
  if (random_.below(4) == 0) import(*sequences_.back());
}

void Traffic::import(Sequence& sequence) {
  const std::uint32_t count = 1 + random_.below(200);
  const std::uint32_t last = std::min(count, random_.below(40));
  for (std::uint32_t layer = 0; layer < kSoakShape.layers; ++layer) {
    const ImportArgs args{.sequence = sequence.id,
                          .layer = LayerId{layer},
                          .k = sequence.toy->k(layer, 0, count),
                          .v = sequence.toy->v(layer, 0, count),
                          .last_q = sequence.toy->q(layer, count - last, last)};
    if (!insist([&] { runtime_.import_prefix(args); }, {&sequence})) return;
  }
  sequence.at = count;
}

bool Traffic::chunk(const Members& members, const std::vector<std::uint32_t>& counts) {
  const bool last = random_.below(3) == 0;
  for (std::uint32_t layer = 0; layer < kSoakShape.layers; ++layer) {
    std::vector<PrefillArgs> batch;
    for (std::size_t i = 0; i < members.size(); ++i) {
      const Sequence& s = *members[i];
      float* out = keep(counts[i] * kQ);
      batch.push_back({.sequence = s.id,
                       .layer = LayerId{layer},
                       .q = s.toy->q(layer, s.at, counts[i]),
                       .k = s.toy->k(layer, s.at, counts[i]),
                       .v = s.toy->v(layer, s.at, counts[i]),
                       .out = rows_of(out, counts[i]),
                       .ordered = options_.ordered,
                       .last = last});
      // All of them would take longer than what is tested.
      expect(s, layer, s.at, out);
      expect(s, layer, s.at + counts[i] - 1, out + (counts[i] - 1) * kQ);
    }
    if (!insist([&] { runtime_.prefill(batch); }, members)) return false;
  }
  for (std::size_t i = 0; i < members.size(); ++i) members[i]->at += counts[i];
  return true;
}

void Traffic::prompt() {
  const Members members = some(kLongestChunk);
  for (std::uint32_t left = 1 + random_.below(3); left > 0 && !members.empty(); --left) {
    std::vector<std::uint32_t> counts;
    for (const Sequence* member : members) {
      counts.push_back(1 + random_.below(kLongestChunk));
      if (member->at + counts.back() > kSoakTokens) return;
    }
    if (!chunk(members, counts)) return;
    if (!options_.ordered) check_outputs();
  }
}

bool Traffic::step(const Members& members) {
  const auto batch = static_cast<std::uint32_t>(members.size());
  std::vector<SequenceId> ids;
  for (const Sequence* member : members) ids.push_back(member->id);
  for (std::uint32_t layer = 0; layer < kSoakShape.layers; ++layer) {
    float* const q = keep(batch * kQ);
    float* const k = keep(batch * kKv);
    float* const v = keep(batch * kKv);
    float *q_at = q, *k_at = k, *v_at = v;
    for (const Sequence* member : members) {
      append(q_at, member->toy->q(layer, member->at, 1), kQ);
      append(k_at, member->toy->k(layer, member->at, 1), kKv);
      append(v_at, member->toy->v(layer, member->at, 1), kKv);
    }
    float* const out = keep(batch * kQ);
    for (std::uint32_t i = 0; i < batch; ++i) expect(*members[i], layer, members[i]->at, out + i * kQ);
    const StepArgs args{.layer = LayerId{layer},
                        .sequences = ids,
                        .q = rows_of(q, batch, kSoakShape.q_heads),
                        .k = rows_of(k, batch, kSoakShape.kv_heads),
                        .v = rows_of(v, batch, kSoakShape.kv_heads),
                        .out = rows_of(out, batch),
                        .ordered = options_.ordered};
    if (!insist([&] { runtime_.step(args); }, members)) return false;
  }
  for (Sequence* member : members) ++member->at;
  return true;
}

void Traffic::decode() {
  const std::uint32_t steps = 1 + random_.below(8);
  const Members members = some(steps);
  const auto begin = Clock::now();
  std::uint64_t done = 0;
  for (std::uint32_t i = 0; i < steps && !members.empty(); ++i) {
    if (!step(members)) break;
    done += members.size();
  }
  stats_.seconds += std::chrono::duration<double>(Clock::now() - begin).count();
  stats_.steps += done;
  if (!options_.ordered) check_outputs();
}

void Traffic::leave_one() {
  if (sequences_.empty()) return;
  Sequence& sequence = *sequences_[random_.below(static_cast<std::uint32_t>(sequences_.size()))];
  const SequenceId id = sequence.id;
  end(id);  // what it has queued is done by then, and is checked like the rest
  std::erase_if(sequences_, [id](const auto& s) { return s->id == id; });
}

RoundStats Traffic::run() {
  for (int event = 0; event < kEvents; ++event) {
    switch (random_.below(10)) {
      case 0:
      case 1: join(); break;
      case 2:
      case 3: prompt(); break;
      case 4: leave_one(); break;
      case 5: synchronize(); break;
      default: decode(); break;
    }
  }
  return stats_;
}

void Traffic::leave() {
  synchronize();
  while (!sequences_.empty()) leave_one();
  synchronize();
}

}  // namespace sluice::test

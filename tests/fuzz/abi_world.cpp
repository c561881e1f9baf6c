#include "tests/fuzz/abi_world.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <span>

#include "tests/fuzz/fuzz.hpp"

namespace sluice::test::abi {
namespace {

/// Whether a policy's rows attend a subset of the tokens by their own weights, so that no log-sum is above that of all.
struct Policy {
  const char* text;
  bool all = false;  ///< it attends everything
  bool subset = true;
};
constexpr Policy kPolicies[] = {{"full:near=0", true},
                                {"exact | int4 | top_k=8 | near=0,sinks=2,recent=4"},
                                {"exact | int4 | top_p=0.9 | near=0"},
                                {"none | near=0,sinks=2,recent=8"},
                                {"topk"},
                                {"lfps:budget=8"},
                                {"quest:budget=16"},
                                {"sluice", false, false},
                                {"magicpig", false, false},
                                {"snapkv:budget=16"},
                                {"history+exact | int4 | top_k=6 | near=0"},
                                {"streaming:recent=12"}};
constexpr std::uint32_t kMostTokens = 120;
constexpr double kTolerance = 1e-4;

std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
  Random random(a * 0x9e3779b97f4a7c15u + b);
  return random.next();
}

/// Element `i` of what a token has: some are outliers.
float element(std::uint32_t token, std::uint32_t kind, std::uint32_t layer, std::uint32_t i) {
  const std::uint64_t bits = mixed((std::uint64_t{token} << 8) + kind * 4 + layer, i);
  const float value = static_cast<float>(static_cast<std::int64_t>(bits >> 40) - (1 << 23)) * 0x1p-23f;
  return bits % 61 == 0 ? 4.f * value : value;
}

}  // namespace

Tensor::Tensor(float* data, std::uint32_t rows, std::uint32_t heads, std::uint32_t dim) : shape{rows, heads, dim} {
  strides = {std::int64_t{heads} * dim, dim, 1};
  tensor.data = data;
  tensor.device.device_type = SLUICE_DEVICE_CPU;
  tensor.ndim = dim == 0 ? 2 : 3;
  if (dim == 0) strides = {heads, 1, 0};
  tensor.dtype.code = SLUICE_TYPE_FLOAT;
  tensor.dtype.bits = 32;
  tensor.dtype.lanes = 1;
  tensor.shape = shape.data();
  tensor.strides = strides.data();
}

sluice_engine_options options_of(World::Kind kind) {
  static constexpr std::uint32_t kWindows[kLayers] = {12, 0};
  sluice_engine_options options;
  FUZZ_REQUIRE(sluice_engine_options_init(&options, sizeof options) == SLUICE_OK);
  options.layers = kLayers, options.q_heads = kQHeads, options.kv_heads = kKvHeads, options.head_dim = kHeadDim;
  options.kv_dtype = SLUICE_F32;
  options.page_tokens = 8;
  options.host_bytes = 256u << 10;
  options.near_bytes = 32u << 10;
  options.largest_decode_rows = kRows, options.largest_prefill_rows = kPromptRows, options.largest_prefills = 2;
  options.largest_features = SLUICE_BUCKET_TOP_K | SLUICE_BUCKET_UNBOUNDED | SLUICE_BUCKET_PAGES | SLUICE_BUCKET_AUDIT;
  static constexpr auto kNames = [] {
    std::array<const char*, std::size(kPolicies)> names{};
    std::ranges::transform(kPolicies, names.begin(), &Policy::text);
    return names;
  }();
  options.policies = kNames.data(), options.policy_count = kNames.size();
  options.sequences = options.cpu_sequences = kRows;
  options.import_rows = kPromptRows;
  options.threads = 1, options.pin_threads = 0;
  options.answer_timeout_ms = options.timeout_ms = 60'000;
  if (kind == World::Kind::windows) {
    options.window_count = kLayers;
    options.windows = kWindows;
    options.window_slack = 8;
  }
  if (kind == World::Kind::streams) options.placement = SLUICE_PLACE_STREAM;
  return options;
}

World::World(Kind kind) : kind_(kind) {
  const sluice_engine_options options = options_of(kind);
  sluice_engine* made = nullptr;
  FUZZ_REQUIRE(sluice_engine_create(&options, &made) == SLUICE_OK);
  engine_.reset(made);
}

bool World::call(sluice_status status) {
  ++calls_;
  note(&status, sizeof status);
  if (status == SLUICE_OK) return true;
  FUZZ_REQUIRE(std::strlen(sluice_last_error()) > 10);
  FUZZ_REQUIRE(status != SLUICE_INTERNAL && status != SLUICE_DEVICE && status != SLUICE_TIMEOUT);
  return false;
}

void World::note(const void* data, std::size_t size) {
  for (const auto byte : std::span(static_cast<const unsigned char*>(data), size))
    seen_ = (seen_ ^ byte) * 0x100000001b3u;
}

void World::require_tokens(const Sequence& of) {
  std::uint32_t tokens = 0;
  FUZZ_REQUIRE(call(sluice_engine_tokens(engine_.get(), of.id, &tokens)));
  FUZZ_REQUIRE(tokens == of.tokens.size());
}

void World::play(std::string_view input) {
  token_ = 0;
  Bytes bytes(input);
  for (int calls = 0; bytes.left() && calls < 64; ++calls) one(bytes);
  while (!sequences_.empty()) end(0);
}

void World::one(Bytes& bytes) {
  const std::uint32_t what = bytes.below(16);
  if (what == 0 || sequences_.empty()) return begin(bytes);
  if (what < 7) return forward(bytes);
  if (what == 7) return wild(bytes);
  const std::size_t at = bytes.below(static_cast<std::uint32_t>(sequences_.size()));
  switch (what) {
    case 8:
    case 9: return import(bytes, sequences_[at]);
    case 10: return fork(bytes, Sequence(sequences_[at]));
    case 11: return truncate(bytes, sequences_[at]);
    case 12: return park(sequences_[at]);
    case 13: return name(bytes, sequences_[at]);
    case 14: return look(sequences_[at]);
    default: return end(at);
  }
}

void World::begin(Bytes& bytes) {
  Sequence made{.id = 0, .policy = bytes.below(std::size(kPolicies)), .tokens = {}};
  const bool began = call(sluice_engine_begin(engine_.get(), kPolicies[made.policy].text, &made.id));
  FUZZ_REQUIRE(began || sequences_.size() == kRows);
  if (began) sequences_.push_back(made);
}

void World::import(Bytes& bytes, Sequence& of) {
  const std::uint32_t count = 1 + bytes.below(kPromptRows);
  if (of.tokens.size() + count > kMostTokens) return;
  std::vector<std::uint32_t> added(count);
  for (std::uint32_t& token : added) token = fresh();
  Tensors t;
  bool whole = true;
  for (std::uint32_t layer = 0; layer < kLayers && whole; ++layer) {
    for (std::uint32_t i = 0; i < count; ++i) {
      for (std::uint32_t c = 0; c < kKvHeads * kHeadDim; ++c) {
        t.k[i * kKvHeads * kHeadDim + c] = element(added[i], 1, layer, c);
        t.v[i * kKvHeads * kHeadDim + c] = element(added[i], 2, layer, c);
      }
      for (std::uint32_t c = 0; c < kQHeads * kHeadDim; ++c)
        t.q[i * kQHeads * kHeadDim + c] = element(added[i], 0, layer, c);
    }
    const Tensor q(t.q.data(), count, kQHeads, kHeadDim), k(t.k.data(), count, kKvHeads, kHeadDim),
        v(t.v.data(), count, kKvHeads, kHeadDim);
    whole = call(sluice_engine_import_prefix(engine_.get(), of.id, layer, &k.tensor, &v.tensor, &q.tensor, nullptr));
    FUZZ_REQUIRE(whole || layer == 0);
  }
  if (whole) of.tokens.insert(of.tokens.end(), added.begin(), added.end());
  require_tokens(of);
}

void World::fork(Bytes& bytes, const Sequence& of) {
  Sequence child = of;
  child.tokens.resize(bytes.below(static_cast<std::uint32_t>(of.tokens.size()) + 1));
  if (call(sluice_engine_fork(engine_.get(), of.id, static_cast<std::uint32_t>(child.tokens.size()), nullptr,
                              &child.id))) {
    require_tokens(child);
    sequences_.push_back(child);
  }
  require_tokens(of);
}

void World::truncate(Bytes& bytes, Sequence& of) {
  const std::uint32_t tokens = bytes.below(static_cast<std::uint32_t>(of.tokens.size()) + 1);
  if (call(sluice_engine_truncate(engine_.get(), of.id, tokens))) of.tokens.resize(tokens);
  require_tokens(of);
}

/// And back: the same tokens, of a policy that may have forgotten what it had learnt.
void World::park(Sequence& of) {
  std::uint64_t bytes = 0, written = 0;
  FUZZ_REQUIRE(call(sluice_engine_park_bytes(engine_.get(), of.id, "model", &bytes)));
  std::vector<std::byte> area(bytes);
  FUZZ_REQUIRE(!call(sluice_engine_park_memory(engine_.get(), of.id, "model", area.data(), bytes - 1, &written)));
  FUZZ_REQUIRE(call(sluice_engine_park_memory(engine_.get(), of.id, "model", area.data(), bytes, &written)));
  FUZZ_REQUIRE(written == bytes);
  FUZZ_REQUIRE(call(sluice_engine_end(engine_.get(), of.id)));
  sluice_sequence back = 0;
  FUZZ_REQUIRE(!call(sluice_engine_resume_memory(engine_.get(), area.data(), bytes, "another model", &back)));
  FUZZ_REQUIRE(!call(sluice_engine_resume_memory(engine_.get(), area.data(), bytes - 1, "model", &back)));
  FUZZ_REQUIRE(call(sluice_engine_resume_memory(engine_.get(), area.data(), bytes, "model", &of.id)));
  require_tokens(of);
}

void World::name(Bytes& bytes, const Sequence& of) {
  std::array<std::int32_t, 24> ids{};
  for (std::int32_t& id : ids) id = static_cast<std::int32_t>(bytes.next());
  const std::uint32_t first = bytes.below(static_cast<std::uint32_t>(of.tokens.size()) + 2);
  (void)call(sluice_engine_name_tokens(engine_.get(), of.id, first, ids.data(), bytes.below(ids.size() + 1)));
  std::uint32_t known = 0;
  FUZZ_REQUIRE(call(sluice_engine_match_prefix(engine_.get(), kPolicies[of.policy].text, ids.data(), ids.size(),
                                               bytes.below(2), &known)));
  FUZZ_REQUIRE(known <= ids.size() && known % 8 == 0);
}

void World::look(Sequence& of) {
  sluice_audit audit{};
  audit.struct_size = sizeof audit;
  FUZZ_REQUIRE(call(sluice_engine_audit(engine_.get(), of.id, &audit)));
  FUZZ_REQUIRE(audit.coverage_mean >= 0.0 && audit.coverage_mean <= 1.0 + 1e-6);
  sluice_memory memory{};
  memory.struct_size = sizeof memory;
  FUZZ_REQUIRE(call(sluice_engine_memory(engine_.get(), &memory)));
  FUZZ_REQUIRE(memory.far_pages_used <= memory.far_pages);
  FUZZ_REQUIRE(call(sluice_engine_preempt(engine_.get(), of.id)));
  std::uint64_t far = 0;
  FUZZ_REQUIRE(call(sluice_engine_far_bytes(engine_.get(), of.id, &far)));
}

void World::end(std::size_t at) {
  FUZZ_REQUIRE(call(sluice_engine_end(engine_.get(), sequences_[at].id)));
  sequences_.erase(sequences_.begin() + static_cast<std::ptrdiff_t>(at));
}

/// A token of some sequences each, or chunks of prompts of up to two.
void World::forward(Bytes& bytes) {
  struct Part {
    Sequence* of;
    std::vector<std::uint32_t> tokens;
  };
  const bool prefill = bytes.below(4) == 0;
  const std::uint32_t wanted = bytes.next();
  sluice_bucket bucket{};
  bucket.struct_size = sizeof bucket;
  (prefill ? bucket.prefill_rows : bucket.decode_rows) = prefill ? kPromptRows : kRows;
  bucket.prefills = prefill ? 2 : 0;
  bucket.features = prefill ? 0 : SLUICE_BUCKET_TOP_K | SLUICE_BUCKET_UNBOUNDED | SLUICE_BUCKET_PAGES;
  if (!prefill && bytes.below(4) == 0) bucket.features |= SLUICE_BUCKET_AUDIT;
  std::vector<Part> parts;
  std::vector<sluice_plan_item> items;
  for (std::size_t i = 0; i < sequences_.size() && (!prefill || parts.size() < 2); ++i) {
    const std::uint32_t count = prefill ? 1 + bytes.below(kPromptRows / 2) : 1;
    if ((wanted >> i & 1) == 0 || sequences_[i].tokens.size() + count > kMostTokens) continue;
    parts.push_back({.of = &sequences_[i], .tokens = {}});
    for (std::uint32_t n = 0; n < count; ++n) parts.back().tokens.push_back(fresh());
    items.push_back({sizeof(sluice_plan_item), count, sequences_[i].id, prefill ? 1u : 0u, 0});
  }
  std::uint64_t number = 0;
  if (!call(sluice_engine_plan(engine_.get(), items.data(), items.size(), &bucket, nullptr, &number))) return;
  if (bytes.below(8) == 7) {
    FUZZ_REQUIRE(call(sluice_engine_cancel(engine_.get(), number)));
    for (const Part& part : parts) require_tokens(*part.of);
    return;
  }
  const std::uint32_t rows = bucket.decode_rows + bucket.prefill_rows;
  for (const Part& part : parts) part.of->tokens.insert(part.of->tokens.end(), part.tokens.begin(), part.tokens.end());
  auto t = std::make_unique<Tensors>();
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    std::uint32_t row = 0;
    for (const Part& part : parts) {
      for (const std::uint32_t token : part.tokens) {
        for (std::uint32_t c = 0; c < kKvHeads * kHeadDim; ++c) {
          t->k[row * kKvHeads * kHeadDim + c] = element(token, 1, layer, c);
          t->v[row * kKvHeads * kHeadDim + c] = element(token, 2, layer, c);
        }
        for (std::uint32_t c = 0; c < kQHeads * kHeadDim; ++c)
          t->q[row * kQHeads * kHeadDim + c] = element(token, 0, layer, c);
        ++row;
      }
    }
    const Tensor q(t->q.data(), rows, kQHeads, kHeadDim), k(t->k.data(), rows, kKvHeads, kHeadDim),
        v(t->v.data(), rows, kKvHeads, kHeadDim), out(t->out.data(), rows, kQHeads, kHeadDim),
        lse(t->lse.data(), rows, kQHeads, 0);
    FUZZ_REQUIRE(call(sluice_engine_attend(engine_.get(), &bucket, layer, &q.tensor, &k.tensor, &v.tensor, &out.tensor,
                                           &lse.tensor, nullptr)));
    note(t->out.data(), row * kQHeads * kHeadDim * sizeof(float));
    row = 0;
    for (const Part& part : parts) {
      for (std::size_t n = 0; n < part.tokens.size(); ++n) {
        const std::size_t length = part.of->tokens.size() - part.tokens.size() + n + 1;
        check_row(*t, row++, layer, std::span(part.of->tokens).first(length), prefill, part.of->policy);
      }
    }
  }
  FUZZ_REQUIRE(call(sluice_engine_finish(engine_.get(), number)));
  for (const Part& part : parts) require_tokens(*part.of);
}

/// Everything that is seen is attended, or a part of it: then no channel is outside of the values', and no log-sum is
/// above that of all.
void World::check_row(const Tensors& t, std::uint32_t row, std::uint32_t layer, std::span<const std::uint32_t> tokens,
                      bool prefill, std::uint32_t policy) const {
  const std::size_t window = kind_ == Kind::windows && layer == 0 ? 12 : tokens.size();
  const auto seen = tokens.last(std::min(window, tokens.size()));
  const bool all = prefill || kPolicies[policy].all || (kind_ == Kind::windows && layer == 0);
  for (std::uint32_t head = 0; head < kQHeads; ++head) {
    const std::uint32_t first = head / (kQHeads / kKvHeads) * kHeadDim;
    const float* const q = &t.q[(row * kQHeads + head) * kHeadDim];
    std::vector<double> scores;
    double most = -1e300;
    for (const std::uint32_t token : seen) {
      double score = 0.0;
      for (std::uint32_t c = 0; c < kHeadDim; ++c) score += double{q[c]} * element(token, 1, layer, first + c);
      scores.push_back(score / std::sqrt(double{kHeadDim}));
      most = std::max(most, scores.back());
    }
    double sum = 0.0;
    for (double& score : scores) sum += score = std::exp(score - most);
    const double lse = most + std::log(sum), got = t.lse[row * kQHeads + head];
    if (all) FUZZ_REQUIRE(std::abs(got - lse) < kTolerance);
    if (kPolicies[policy].subset) FUZZ_REQUIRE(got < lse + kTolerance);
    for (std::uint32_t c = 0; c < kHeadDim; ++c) {
      double want = 0.0, low = 1e300, high = -1e300;
      for (std::size_t i = 0; i < seen.size(); ++i) {
        const double value = element(seen[i], 2, layer, first + c);
        want += scores[i] / sum * value;
        low = std::min(low, value), high = std::max(high, value);
      }
      const double out = t.out[(row * kQHeads + head) * kHeadDim + c];
      FUZZ_REQUIRE(out > low - kTolerance && out < high + kTolerance);
      if (all) FUZZ_REQUIRE(std::abs(out - want) < kTolerance);
    }
  }
}

}  // namespace sluice::test::abi

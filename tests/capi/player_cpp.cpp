// An engine by its C++ interface.
#include <cstdlib>
#include <utility>

#include "sluice/policy.hpp"
#include "tests/capi/player.hpp"

namespace sluice::test::capi {
namespace {

/// The library's copy of the kernels and this program's each choose the fastest by a race, which they may see end
/// differently on a busy machine; instruction sets round differently. So both are told, before any engine is there.
[[maybe_unused]] const int kSameKernels = [] {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return ::setenv("SLUICE_CPU_ISA", avx2 ? "avx2" : "generic", 1);
#else
  return ::setenv("SLUICE_CPU_ISA", "generic", 1);
#endif
}();

std::byte* put(float value, DType dtype, std::byte* to) {
  if (dtype == DType::f32) {
    std::memcpy(to, &value, sizeof value);
  } else if (dtype == DType::f16) {
    const auto half = static_cast<_Float16>(value);
    std::memcpy(to, &half, sizeof half);
  } else {
    const auto top = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
    std::memcpy(to, &top, sizeof top);
  }
  return to + bytes_of(dtype);
}

template <class Value>
Rows filled(DType dtype, std::uint32_t rows, std::uint32_t heads, const Value& value) {
  Rows out{.dtype = dtype, .rows = rows, .heads = heads};
  const std::size_t count = std::size_t{rows} * heads * kShape.head_dim;
  out.bytes.resize(count * bytes_of(dtype));
  std::byte* to = out.bytes.data();
  for (std::size_t i = 0; i < count; ++i) to = put(value(), dtype, to);
  return out;
}

TensorView view_of(const Rows& rows) {
  return dense_view(rows.bytes.data(), rows.dtype, rows.rows, rows.heads, kShape.head_dim);
}

class CppPlayer final : public Player {
 public:
  explicit CppPlayer(const EngineOptions& options) : engine_(options) {}

  std::uint64_t begin(const std::string& policy) override { return engine_.begin(parse_policy(policy)).value; }
  std::uint64_t begin(const std::string& policy, std::span<const std::int32_t> prompt, std::uint64_t salt) override {
    return engine_.begin(parse_policy(policy), prompt, salt).value;
  }
  std::uint32_t match(const std::string& policy, std::span<const std::int32_t> prompt, std::uint64_t salt) override {
    return engine_.match_prefix(parse_policy(policy), prompt, salt);
  }
  void name(std::uint64_t sequence, std::uint32_t first, std::span<const std::int32_t> ids) override {
    engine_.name_tokens(SequenceId{sequence}, first, ids);
  }
  void preempt(std::uint64_t sequence) override { engine_.preempt(SequenceId{sequence}); }
  std::uint64_t fork(std::uint64_t sequence, std::uint32_t tokens, const std::string& policy) override {
    const SequenceId id{sequence};
    return (policy.empty() ? engine_.fork(id, tokens) : engine_.fork(id, tokens, parse_policy(policy))).value;
  }
  void truncate(std::uint64_t sequence, std::uint32_t tokens) override {
    engine_.truncate(SequenceId{sequence}, tokens);
  }
  void import_layer(std::uint64_t sequence, const Layer& layer) override {
    engine_.import_prefix(SequenceId{sequence}, LayerId{layer.index}, view_of(layer.k), view_of(layer.v), nullptr,
                          layer.q.rows == 0 ? TensorView{} : view_of(layer.q));
  }
  void end(std::uint64_t sequence) override { engine_.end(SequenceId{sequence}); }
  void watch(std::uint64_t sequence, std::span<const std::uint32_t> tokens) override {
    engine_.watch(SequenceId{sequence}, tokens);
  }
  std::uint64_t plan(std::span<const Item> items, const Bucket& bucket) override {
    std::vector<PlanItem> wanted;
    for (const Item& item : items)
      wanted.push_back({.sequence = SequenceId{item.sequence}, .tokens = item.tokens, .prefill = item.prefill});
    return engine_.plan(wanted, bucket, nullptr).forward;
  }
  void attend(const Bucket& bucket, Layer& layer) override {
    const auto out =
        dense_view(layer.out.bytes.data(), layer.out.dtype, layer.out.rows, layer.out.heads, kShape.head_dim);
    engine_.attend(bucket, LayerId{layer.index},
                   {.q = view_of(layer.q),
                    .k = view_of(layer.k),
                    .v = view_of(layer.v),
                    .out = out,
                    .lse = layer.lse.empty() ? nullptr : layer.lse.data(),
                    .rehearsed = layer.rehearsed.rows == 0 ? TensorView{} : view_of(layer.rehearsed),
                    .scores = layer.scores.empty() ? TensorView{}
                                                   : dense_view(std::as_const(layer.scores).data(), DType::f32,
                                                                bucket.decode_rows, 1, kScored)});
  }
  void finish(std::uint64_t forward) override { engine_.finish({.forward = forward}); }
  void cancel(std::uint64_t forward) override { engine_.cancel({.forward = forward}); }
  std::uint32_t tokens(std::uint64_t sequence) override { return engine_.tokens(SequenceId{sequence}); }
  std::uint64_t far_bytes(std::uint64_t sequence) override { return engine_.far_bytes(SequenceId{sequence}); }
  bool can_admit(std::uint32_t tokens) override { return engine_.can_admit(tokens); }

  std::vector<double> figures(std::uint64_t sequence) override {
    std::vector<double> all;
    const auto add = [&](auto... values) { (all.push_back(static_cast<double>(values)), ...); };
    const EngineStats s = engine_.stats();
    add(s.asked, s.unplanned, s.near_tokens, s.far_tokens, s.fetched_tokens, s.promoted, s.scored, s.estimated,
        s.ranked_pages, s.sparse_chunks, s.dense_chunks, s.kept_blocks, s.causal_blocks, s.matched_tokens,
        s.evicted_blocks, s.missed);
    const EngineMemoryUse m = engine_.memory();
    add(m.far_pages, m.far_pages_used, m.far_pages_cached, m.prefixes, m.pinned, m.partials, m.policies != 0,
        m.near_pages, m.near_pages_used, m.codes, m.digests, m.buffers);
    const AuditReport a = engine_.audit(SequenceId{sequence});
    add(AuditReport::top_k, a.layers, a.q_heads, a.tokens, a.attended_tokens, a.dense_tokens, a.bypassed_heads);
    add(a.coverage.count(), a.coverage.mean(), a.coverage.min(), a.coverage.percentile(0.05),
        a.coverage.percentile(0.5));
    add(a.overlap.count(), a.overlap.mean(), a.overlap.min(), a.watched.count(), a.watched.mean(), a.watched.min());
    for (const HeadAudit& h : a.heads)
      add(h.steps, h.bound_broken, h.watched_steps, h.coverage, h.coverage_min, h.overlap, h.error, h.relative_error,
          h.error_bound, h.watched_mass, h.watched_kept);
    return all;
  }

 private:
  Engine engine_;
};

}  // namespace

Rows Rows::spoilt(DType dtype, std::uint32_t rows, std::uint32_t heads) {
  return filled(dtype, rows, heads, [] { return 1e4f; });
}

Rows Rows::random(DType dtype, std::uint32_t rows, std::uint32_t heads, Random& random) {
  return filled(dtype, rows, heads, [&] { return static_cast<float>(4.0 * random.uniform() - 2.0); });
}

EngineOptions options_for(std::span<const std::string> policies) {
  EngineOptions options{.shape = kShape, .kv_dtype = DType::f16, .policies = {}, .threads = 2, .pin_threads = false};
  options.answer_timeout = std::chrono::seconds(30);  // However busy the machine is.
  options.host_bytes = 8 * MiB;
  options.near_bytes = 256 * KiB;
  options.largest = {
      .decode_rows = 4, .drafts = 2, .prefill_rows = 100, .prefills = 2, .max_tokens = 512, .audit = true};
  options.sequences = 6;
  options.cpu_sequences = 3;
  for (const std::string& policy : policies) options.policies.push_back(parse_policy(policy));
  return options;
}

std::unique_ptr<Player> cpp_player(std::span<const std::string> policies) {
  return std::make_unique<CppPlayer>(options_for(policies));
}

}  // namespace sluice::test::capi

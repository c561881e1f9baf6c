// An engine by its C interface.
#include "tests/capi/c_support.hpp"
#include "tests/capi/player.hpp"

namespace sluice::test::capi {
namespace {

/// Rows as a tensor of C that lies in memory in some way, in a copy.
class Lying {
 public:
  Lying(const Rows& rows, Layout layout)
      : rows_(rows), tensor_(nullptr, {rows.rows, rows.heads, kShape.head_dim}), element_(bytes_of(rows.dtype)) {
    const std::int64_t d = kShape.head_dim;
    std::int64_t strides[2] = {rows.heads * d, d};
    if (layout == Layout::padded) strides[1] = d + 16, strides[0] = rows.heads * strides[1] + 32;
    if (layout == Layout::heads_first) strides[0] = d, strides[1] = rows.rows * d;
    token_stride_ = static_cast<std::size_t>(strides[0]), head_stride_ = static_cast<std::size_t>(strides[1]);
    if (layout != Layout::compact && layout != Layout::offset) tensor_.set_strides({strides[0], strides[1], 1});
    tensor_.tensor.byte_offset = layout == Layout::offset ? 8 * element_ : 0;
    const std::size_t elements =
        std::max<std::size_t>(rows.rows * token_stride_, rows.heads * head_stride_) + rows.heads * head_stride_;
    memory_.resize(tensor_.tensor.byte_offset + elements * element_);
    tensor_.tensor.data = memory_.data();
    tensor_.tensor.dtype.code = rows.dtype == DType::bf16 ? SLUICE_TYPE_BFLOAT : SLUICE_TYPE_FLOAT;
    tensor_.tensor.dtype.bits = rows.dtype == DType::f32 ? 32 : 16;
    each([](std::byte* here, const std::byte* given, std::size_t bytes) { std::memcpy(here, given, bytes); });
  }
  [[nodiscard]] const sluice_tensor* get() const { return tensor_.get(); }

  /// What lies there now.
  [[nodiscard]] std::vector<std::byte> bytes() {
    std::vector<std::byte> out(rows_.bytes.size());
    each([&](const std::byte* here, const std::byte* given, std::size_t bytes) {
      std::memcpy(out.data() + (given - rows_.bytes.data()), here, bytes);
    });
    return out;
  }

 private:
  template <class Do>
  void each(const Do& act) {
    const std::size_t row = kShape.head_dim * element_;
    for (std::uint32_t token = 0; token < rows_.rows; ++token) {
      for (std::uint32_t head = 0; head < rows_.heads; ++head) {
        std::byte* const here =
            memory_.data() + tensor_.tensor.byte_offset + (token * token_stride_ + head * head_stride_) * element_;
        act(here, rows_.bytes.data() + (std::size_t{token} * rows_.heads + head) * row, row);
      }
    }
  }

  const Rows& rows_;
  CTensor tensor_;
  std::size_t element_, token_stride_ = 0, head_stride_ = 0;
  std::vector<std::byte> memory_;
};

sluice_bucket bucket_of(const Bucket& bucket) {
  auto out = sized<sluice_bucket>();
  out.decode_rows = bucket.decode_rows;
  out.prefill_rows = bucket.prefill_rows;
  out.prefills = bucket.prefills;
  out.max_tokens = bucket.max_tokens;
  out.drafts = bucket.drafts;
  if (bucket.top_k) out.features |= SLUICE_BUCKET_TOP_K;
  if (bucket.unbounded) out.features |= SLUICE_BUCKET_UNBOUNDED;
  if (bucket.pages) out.features |= SLUICE_BUCKET_PAGES;
  if (bucket.audit) out.features |= SLUICE_BUCKET_AUDIT;
  if (bucket.rehearsed) out.features |= SLUICE_BUCKET_REHEARSED;
  if (bucket.scores) out.features |= SLUICE_BUCKET_SCORES;
  return out;
}

/// By hand, as a caller of C would.
sluice_engine_options c_options_for(std::span<const char* const> policies) {
  sluice_engine_options options;
  require_ok(sluice_engine_options_init(&options, sizeof options));
  options.layers = kShape.layers;
  options.q_heads = kShape.q_heads;
  options.kv_heads = kShape.kv_heads;
  options.head_dim = kShape.head_dim;
  options.kv_dtype = SLUICE_F16;
  options.threads = 2;
  options.pin_threads = 0;
  options.answer_timeout_ms = 30000;  // However busy the machine is.
  options.host_bytes = 8u << 20;
  options.near_bytes = 256u << 10;
  options.largest_decode_rows = 4;
  options.largest_drafts = 2;
  options.largest_prefill_rows = 100;
  options.largest_prefills = 2;
  options.largest_max_tokens = 512;
  options.largest_features |= SLUICE_BUCKET_AUDIT;
  options.sequences = 6;
  options.cpu_sequences = 3;
  options.policies = policies.data();
  options.policy_count = policies.size();
  return options;
}

class CPlayer final : public Player {
 public:
  CPlayer(const sluice_engine_options& options, Layout layout) : engine_(create(options)), layout_(layout) {}

  std::uint64_t begin(const std::string& policy) override {
    sluice_sequence sequence = 0;
    require_ok(sluice_engine_begin(engine_.get(), policy.c_str(), &sequence));
    return sequence;
  }
  std::uint64_t begin(const std::string& policy, std::span<const std::int32_t> prompt, std::uint64_t salt) override {
    sluice_sequence sequence = 0;
    require_ok(
        sluice_engine_begin_prompt(engine_.get(), policy.c_str(), prompt.data(), prompt.size(), salt, &sequence));
    return sequence;
  }
  std::uint32_t match(const std::string& policy, std::span<const std::int32_t> prompt, std::uint64_t salt) override {
    std::uint32_t tokens = 4711;
    require_ok(
        sluice_engine_match_prefix(engine_.get(), policy.c_str(), prompt.data(), prompt.size(), salt, &tokens));
    return tokens;
  }
  void name(std::uint64_t sequence, std::uint32_t first, std::span<const std::int32_t> ids) override {
    require_ok(sluice_engine_name_tokens(engine_.get(), sequence, first, ids.data(), ids.size()));
  }
  void preempt(std::uint64_t sequence) override { require_ok(sluice_engine_preempt(engine_.get(), sequence)); }
  std::uint64_t fork(std::uint64_t sequence, std::uint32_t tokens, const std::string& policy) override {
    sluice_sequence child = 0;
    require_ok(sluice_engine_fork(engine_.get(), sequence, tokens, policy.empty() ? nullptr : policy.c_str(), &child));
    return child;
  }
  void truncate(std::uint64_t sequence, std::uint32_t tokens) override {
    require_ok(sluice_engine_truncate(engine_.get(), sequence, tokens));
  }
  void import_layer(std::uint64_t sequence, const Layer& layer) override {
    const Lying k(layer.k, layout_), v(layer.v, layout_), q(layer.q, layout_);
    require_ok(sluice_engine_import_prefix(engine_.get(), sequence, layer.index, k.get(), v.get(),
                                           layer.q.rows == 0 ? nullptr : q.get(), nullptr));
  }
  void end(std::uint64_t sequence) override { require_ok(sluice_engine_end(engine_.get(), sequence)); }
  void watch(std::uint64_t sequence, std::span<const std::uint32_t> tokens) override {
    require_ok(sluice_engine_watch(engine_.get(), sequence, tokens.data(), tokens.size()));
  }
  std::uint64_t plan(std::span<const Item> items, const Bucket& bucket) override {
    std::vector<sluice_plan_item> wanted;
    for (const Item& item : items)
      wanted.push_back({sizeof(sluice_plan_item), item.tokens, item.sequence, item.prefill ? 1u : 0u, 0});
    const sluice_bucket given = bucket_of(bucket);
    std::uint64_t forward = 0;
    require_ok(sluice_engine_plan(engine_.get(), wanted.data(), wanted.size(), &given, nullptr, &forward));
    return forward;
  }
  void attend(const Bucket& bucket, Layer& layer) override {
    const Lying q(layer.q, layout_), k(layer.k, layout_), v(layer.v, layout_);
    Lying out(layer.out, layout_);
    const CTensor lse(layer.lse.data(), {layer.out.rows, kShape.q_heads});
    const sluice_bucket given = bucket_of(bucket);
    const sluice_tensor* const sums = layer.lse.empty() ? nullptr : lse.get();
    if (!layer.scores.empty()) {
      const CTensor scores(layer.scores.data(), {bucket.decode_rows, 1, kScored});
      auto args = sized<sluice_attend_args>();
      args.layer = layer.index;
      args.q = q.get(), args.k = k.get(), args.v = v.get(), args.out = out.get(), args.lse = sums;
      args.scores = scores.get();
      require_ok(sluice_engine_attend_layer(engine_.get(), &given, &args));
    } else if (layer.rehearsed.rows == 0) {
      require_ok(sluice_engine_attend(engine_.get(), &given, layer.index, q.get(), k.get(), v.get(), out.get(), sums,
                                      nullptr));
    } else {
      const Lying rehearsed(layer.rehearsed, layout_);
      require_ok(sluice_engine_attend_rehearsed(engine_.get(), &given, layer.index, q.get(), k.get(), v.get(),
                                                rehearsed.get(), out.get(), sums, nullptr));
    }
    layer.out.bytes = out.bytes();
  }
  void finish(std::uint64_t forward) override { require_ok(sluice_engine_finish(engine_.get(), forward)); }
  void cancel(std::uint64_t forward) override { require_ok(sluice_engine_cancel(engine_.get(), forward)); }
  std::uint32_t tokens(std::uint64_t sequence) override {
    std::uint32_t tokens = 0;
    require_ok(sluice_engine_tokens(engine_.get(), sequence, &tokens));
    return tokens;
  }
  std::uint64_t far_bytes(std::uint64_t sequence) override {
    std::uint64_t bytes = 0;
    require_ok(sluice_engine_far_bytes(engine_.get(), sequence, &bytes));
    return bytes;
  }
  bool can_admit(std::uint32_t tokens) override {
    int admitted = -1;
    require_ok(sluice_engine_can_admit(engine_.get(), tokens, &admitted));
    REQUIRE((admitted == 0 || admitted == 1));
    return admitted == 1;
  }

  std::vector<double> figures(std::uint64_t sequence) override {
    std::vector<double> all;
    const auto add = [&](auto... values) { (all.push_back(static_cast<double>(values)), ...); };
    auto s = sized<sluice_stats>();
    require_ok(sluice_engine_stats(engine_.get(), &s));
    add(s.asked, s.unplanned, s.near_tokens, s.far_tokens, s.fetched_tokens, s.promoted, s.scored, s.estimated,
        s.ranked_pages, s.sparse_chunks, s.dense_chunks, s.kept_blocks, s.causal_blocks, s.matched_tokens,
        s.evicted_blocks, s.missed);
    auto m = sized<sluice_memory>();
    require_ok(sluice_engine_memory(engine_.get(), &m));
    add(m.far_pages, m.far_pages_used, m.far_pages_cached, m.prefixes, m.pinned, m.partials, m.policies != 0,
        m.near_pages, m.near_pages_used, m.codes, m.digests, m.buffers);
    auto a = sized<sluice_audit>();
    require_ok(sluice_engine_audit(engine_.get(), sequence, &a));
    add(a.top_k, a.layers, a.q_heads, a.tokens, a.attended_tokens, a.dense_tokens, a.bypassed_heads);
    add(a.coverage_count, a.coverage_mean, a.coverage_min, a.coverage_p5, a.coverage_p50);
    add(a.overlap_count, a.overlap_mean, a.overlap_min, a.watched_count, a.watched_mean, a.watched_min);
    std::vector<sluice_head_audit> heads(kShape.layers * kShape.q_heads, sized<sluice_head_audit>());
    require_ok(sluice_engine_audit_heads(engine_.get(), sequence, heads.data(), heads.size()));
    for (const sluice_head_audit& h : heads) {
      if (a.layers == 0) break;
      add(h.steps, h.bound_broken, h.watched_steps, h.coverage, h.coverage_min, h.overlap, h.error, h.relative_error,
          h.error_bound, h.watched_mass, h.watched_kept);
    }
    return all;
  }

 private:
  EnginePointer engine_;
  Layout layout_;
};

}  // namespace

std::unique_ptr<Player> c_player(std::span<const std::string> policies, Layout layout) {
  std::vector<const char*> names;
  for (const std::string& policy : policies) names.push_back(policy.c_str());
  return std::make_unique<CPlayer>(c_options_for(names), layout);
}

}  // namespace sluice::test::capi

// What an engine is asked to be built with.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "runtime/engine/engine_options.hpp"
#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "sluice/page_rules.hpp"

namespace sluice::runtime {
namespace {

void require(bool holds, const std::string& field, std::uint64_t have, const std::string& want) {
  if (!holds) throw Error(Errc::invalid_argument, field + " is " + std::to_string(have) + "; it must be " + want);
}

/// What the model says of logits, and of what rows see.
void validate_scores(const EngineOptions& options) {
  const auto number = [](const char* field, float value, float most, const char* want) {
    if (value == 0.f || (std::isnormal(value) && value > 0.f && value <= most)) return;
    throw Error(Errc::invalid_argument, std::string(field) + " is " + std::to_string(value) + "; it must be " + want);
  };
  number("scale", options.scale, std::numeric_limits<float>::max(), "a finite number above 0, or 0");
  constexpr float kMostSoftcap = 1000.f;  // Kernels cap to some 1e-7 of it.
  number("softcap", options.softcap, kMostSoftcap, "above 0 and at most 1000, or 0");
  if (options.shape.scale != 0.f || options.shape.softcap != 0.f)
    throw Error(Errc::invalid_argument,
                "shape.scale and shape.softcap are set; an engine is told by EngineOptions::scale and ::softcap");
  require(options.windows.empty() || options.windows.size() == options.shape.layers, "the number of windows",
          options.windows.size(), "0, or that of layers, " + std::to_string(options.shape.layers));
  // Else drafts could be rejected only where no page of a window ends between them.
  if (std::ranges::any_of(options.windows, [](std::uint32_t window) { return window != 0; }))
    require(options.window_slack >= options.largest.drafts - 1, "window_slack", options.window_slack,
            "at least " + std::to_string(options.largest.drafts - 1) +
                ", so that all but the first of largest.drafts, " + std::to_string(options.largest.drafts) +
                ", can be taken back");
  if (options.softcap != 0.f && options.prefill.mode != PrefillMode::full)
    throw Error(Errc::unsupported,
                "softcap beside a prefill mode that chooses blocks of prompts: these are weighed without a cap; attend "
                "prompts in full");
}

void validate_placement(const EngineOptions& options) {
  require(is_valid(options.handover), "handover", static_cast<unsigned>(options.handover),
          "a value of sluice::Handover");
  require(is_valid(options.placement), "placement", static_cast<unsigned>(options.placement),
          "a value of sluice::PlacementMode");
  const float share = options.fetch_share;
  if (share == kFetchAuto) return;
  if (!(share >= 0.f && share <= 1.f))
    throw Error(Errc::invalid_argument,
                "fetch_share is " + std::to_string(share) + "; it must be in [0, 1], or kFetchAuto");
  if (share != 0.f && options.placement == PlacementMode::stream)
    throw Error(Errc::invalid_argument, "fetch_share is " + std::to_string(share) +
                                            " with placement stream, where the device fetches all that is far; leave "
                                            "it 0, or place hybrid (kFetchAuto goes with both)");
}

/// What latent attention does without, by name.
void validate_latent(const EngineOptions& options) {
  if (!options.shape.latent()) return;
  const auto without = [](bool set, const char* what, const char* remedy) {
    if (!set) return;
    throw Error(Errc::unsupported, std::string("shape.value_dim, of latent attention, beside ") + what + ": " + remedy);
  };
  without(options.kv_dtype == DType::fp8_e4m3, "kv_dtype fp8_e4m3", "keys have no scales; use bf16, f16 or f32");
  without(std::ranges::any_of(options.windows, [](std::uint32_t window) { return window != 0; }), "windows",
          "all of its layers see all tokens; leave them empty");
  without(options.near_bytes != 0, "near_bytes", "all keys lie in host memory; leave it 0");
  without(options.largest.drafts > 1, "largest.drafts above 1", "rows attend one by one; leave it 1");
  without(options.largest.audit, "largest.audit", "nothing compares it with exact attention; leave it off");
  without(options.largest.trace, "largest.trace", "bytes of its stages are not counted; leave it off");
  without(options.prefill.mode != PrefillMode::full, "a prefill mode that chooses blocks",
          "prompts attend all tokens; use PrefillMode::full");
  const auto some = [](std::uint32_t sequences) { return sequences != 0 && sequences != kAllSequences; };
  without(some(options.cpu_sequences), "cpu_sequences", "no policy of it chooses by whole keys; leave it out");
  without(some(options.cluster_sequences), "cluster_sequences", "no policy of it has clusters; leave it out");
}

}  // namespace

void validate(const EngineOptions& options) {
  sluice::validate(options.shape);
  validate_scores(options);
  validate_latent(options);
  const auto in = [](const char* field, std::uint64_t value, std::uint64_t low, std::uint64_t high) {
    require(value >= low && value <= high, field, value,
            "in [" + std::to_string(low) + ", " + std::to_string(high) + "]");
  };
  require(is_valid(options.kv_dtype), "kv_dtype", static_cast<unsigned>(options.kv_dtype), "a value of sluice::DType");
  validate_placement(options);
  const std::uint32_t page = options.page_tokens;
  require(page >= 8 && page <= 256 && (page & (page - 1)) == 0, "page_tokens", page, "a power of two in [8, 256]");
  in("largest.decode_rows", options.largest.decode_rows, 0, 1024);
  in("largest.drafts", options.largest.drafts, 1, kMostGroup / attended_shape(options.shape).group());
  require(options.largest.decode_rows % options.largest.drafts == 0, "largest.decode_rows", options.largest.decode_rows,
          "a multiple of largest.drafts, " + std::to_string(options.largest.drafts));
  in("largest.prefill_rows", options.largest.prefill_rows, 0, 65'536);
  in("largest.prefills", options.largest.prefills, options.largest.prefill_rows == 0 ? 0 : 1,
     options.largest.prefill_rows);
  in("rows of the largest bucket", options.largest.rows(), 1, 65'536);
  in("largest.max_tokens", options.largest.max_tokens, 0, 0x7fff'ffff);
  require(options.dense_tokens <= 0x7fff'ffff || options.dense_tokens == kDenseAuto, "dense_tokens",
          options.dense_tokens, "in [0, 2147483647], or kDenseAuto");
  in("in_flight", options.in_flight, 1, kMostForwards);
  in("sequences", options.sequences, 1, 65'536);
  in("promotions", options.promotions, 0, kMostPromotions);
  if (options.cpu_sequences != kAllSequences) in("cpu_sequences", options.cpu_sequences, 0, options.sequences);
  in("window_slack", options.window_slack, 0, 1u << 24);
  if (options.cluster_sequences != kAllSequences)
    in("cluster_sequences", options.cluster_sequences, 0, options.sequences);
  in("import_rows", options.import_rows, 1, 65'536);
  in("prefill_window", options.prefill_window, page, 1u << 20);
  sluice::validate(options.prefill);
  require(options.prefill.mode == PrefillMode::full || options.shape.layers <= ForwardChunk::kMostSparseLayers,
          "shape.layers", options.shape.layers, "at most 128 where blocks of prompts are chosen; attend them in full");
  require(options.prefill_window % page == 0, "prefill_window", options.prefill_window, "a multiple of page_tokens");
  in("threads", options.threads, 0, 4096);
  in("timeout (ms)", static_cast<std::uint64_t>(options.timeout.count()), 1, 3'600'000);
  in("answer_timeout (ms)", static_cast<std::uint64_t>(options.answer_timeout.count()), 1, 60'000);
  const PageLayout layout = far_layout(options);
  const std::uint64_t planes = std::uint64_t{options.shape.layers} * options.shape.kv_heads;
  const std::uint64_t block = layout.page_bytes() * planes;
  const std::uint64_t blocks = options.host_bytes / block;
  // Rows of pages are counted in 32 bits, near ones over all planes.
  constexpr std::uint64_t kMostRows = 0x7fff'ffff;
  require(blocks >= 1 && blocks * page <= kMostRows, "host_bytes", options.host_bytes,
          "in [" + std::to_string(block) + ", " + std::to_string(kMostRows / page * block) + "]");
  const std::uint64_t near_page = layout.near().page_bytes();
  const std::uint64_t near_pages = options.near_bytes / (near_page * planes) * planes;
  require(near_pages * 2 * page <= kMostRows, "near_bytes", options.near_bytes,
          "at most " + std::to_string(kMostRows / (2 * page) * near_page));
}

}  // namespace sluice::runtime

#include "tools/cli/bench/serve_bench.hpp"

#include <algorithm>

#include "sluice/error.hpp"
#include "sluice/step/page.hpp"
#include "tools/cli/bench/decode_room.hpp"
#include "tools/cli/text/message.hpp"

namespace sluice::tools {
namespace {

std::uint32_t longest_of(const std::vector<LoadRequest>& load) {
  std::uint32_t longest = 0;
  for (const LoadRequest& request : load) longest = std::max(longest, request.prompt + request.answer);
  return longest;
}

std::uint64_t page_bytes(const EngineOptions& sizes) {
  const PageLayout layout{.page_tokens = sizes.page_tokens, .head_dim = sizes.shape.head_dim, .dtype = sizes.kv_dtype};
  return layout.page_bytes() * sizes.shape.layers * sizes.shape.kv_heads;
}

Json over(double part, double whole) { return whole == 0.0 ? Json() : Json(part / whole); }
Json percentile_of(const std::vector<double>& samples, double fraction) {
  return samples.empty() ? Json() : Json(percentile(samples, fraction));
}

std::vector<Column> columns() {
  constexpr auto kShare = Column::Show::percent;
  return {{"policy", "policy"},
          {"rate_per_s", "rate", 2},
          {"requests", "requests"},
          {"seconds", "seconds", 2},
          {"answer_tokens_per_s", "tokens/s", 1},
          {"ttft_p50_ms", "TTFT p50 ms", 1},
          {"ttft_p99_ms", "TTFT p99", 1},
          {"tbt_p50_ms", "TBT p50 ms", 2},
          {"tbt_p99_ms", "TBT p99", 2},
          {"queued_p50_s", "queued p50 s", 2},
          {"refused", "refused"},
          {"unfinished", "unfinished"},
          {"held", "held"},
          {"preemptions", "preempted"},
          {"largest_batch", "batch"},
          {"room_tokens", "room"},
          {"decode_p50_ms", "forward ms", 2},
          {"chunk_p50_ms", "with a chunk", 2},
          {"attended_share", "attended", 1, kShare},
          {"near_hit_share", "near", 1, kShare},
          {"forwards", "forwards"},
          {"replayed_forwards", "replayed"},
          {"prompt_tokens", "prompts"},
          {"computed_prompt_tokens", "computed"},
          {"answer_tokens", "answers"}};
}

}  // namespace

std::vector<ServeMethod> parse_serve_methods(const BenchServeOptions& options) {
  std::vector<ServeMethod> methods;
  for (const std::string& name : split_policies(options.policies)) {
    const bool dense = name == "dense";
    const std::size_t slash = name.find('/');
    const bool placed = slash != std::string::npos;
    if (dense && options.kv_bytes == 0)
      throw Error(Errc::invalid_argument,
                  "--policies: dense has all keys and values in device memory; say how much that is by --kv-size");
    methods.push_back({.name = name, .dense = dense, .policy = {}});
    if (placed) methods.back().placement = parse_placement(name.substr(0, slash));
    methods.back().policy = parse_policy(dense ? "full" : name.substr(placed ? slash + 1 : 0));
    // Of attention alone what is timed is a layer that the policy works in.
    PolicySpec& policy = methods.back().policy;
    if (!options.model.empty() || !options.random_weights.empty()) continue;
    policy.dense_layers = policy.dense_every = 0;
    policy.rehearsed = false;
  }
  if (methods.empty())
    throw Error(Errc::invalid_argument, "--policies: the list is empty; name at least one, e.g. sluice");
  return methods;
}

ServeBench::ServeBench(const BenchServeOptions& options, const AttentionShape& shape, const Model* model,
                       std::shared_ptr<Device> device, std::vector<LoadRequest> load)
    : options_(options),
      shape_(shape),
      model_(model),
      device_(std::move(device)),
      load_(std::move(load)),
      longest_(longest_of(load_)),
      stream_(device_->create_stream("caller")),
      rows_(*device_, shape, parse_prompt_structure(options.structure, "--structure"), options.load.seed, longest_,
            options.batch + options.engine.prefill_chunk) {
  table_ = {.key = "serve",
            .title = std::string("Requests served as they come, ") +
                     (model == nullptr ? "attention alone" : "whole model") +
                     "; rate: requests a second, 0: all at once",
            .columns = columns()};
  held_ = {.key = "held",
           .title = "The highest of these rates that holds the limits",
           .columns = {{"policy", "policy"},
                       {"rate_per_s", "rate", 2},
                       {"answer_tokens_per_s", "tokens/s", 1},
                       {"tbt_p99_ms", "TBT p99 ms", 2},
                       {"speedup_over_first", "x first", 2}}};
}

void ServeBench::check(const std::vector<ServeMethod>& methods) const {
  (void)use_graphs(options_.graphs, device_->info().own_processor ? device_.get() : nullptr, options_.engine.handover);
  for (const ServeMethod& method : methods) (void)engine_options(method);
}

void ServeBench::take_method(const ServeMethod& method) {
  loop_.reset();  // Its memory is the next one's.
  method_ = method.name;
  kept_.clear();
  const EngineOptions sizes = engine_options(method);
  AdmissionOptions admission = admission_options(sizes);
  room_tokens_ = admission.pages * admission.page_tokens;
  admission.watermark_pages = options_.watermark_pages;
  admission.near_pages = options_.near_pages;
  admission.near_pages_per_sequence = options_.near_pages_per_sequence;
  admission.slowdown = options_.slowdown;
  loop_ = std::make_unique<ServeLoop>(
      sizes, admission, method.policy,
      ServeParts{.device = device_, .stream = *stream_, .rows = rows_, .model = model_, .graphs = options_.graphs});
  if (const std::string& refusal = loop_->forwards().refusal(); !refusal.empty())
    say(method.name + ": " + refusal + ". Such forwards are enqueued launch by launch");
  warm_up();
}

/// Threads, kernels and products of the usual sizes are there from then on.
void ServeBench::warm_up() {
  const LoadRequest& shown = load_.front();
  const LoadRequest first{.prompt = std::min(shown.prompt, model_ == nullptr ? 32u : options_.engine.prefill_chunk),
                          .answer = 2};
  (void)loop_->run({&first, 1}, 0.0);
}

EngineOptions ServeBench::engine_options(const ServeMethod& method) const {
  EngineFlags flags = options_.engine;
  if (method.dense) flags.host_bytes = 0;
  if (method.placement) {
    flags.placement = *method.placement;
    flags.fetch_share = share_for(*method.placement, flags.fetch_share);
  }
  const std::uint32_t page_tokens = page_tokens_for(method.policy, flags);
  EngineOptions sizes = sized(flags, shape_, {&method.policy, 1}, {.page_tokens = page_tokens, .tokens = longest_});
  if (flags.host_bytes == 0) {  // The `batch` longest requests, unless the user says how much.
    std::vector<std::uint32_t> tokens;
    for (const LoadRequest& request : load_) tokens.push_back(request.prompt + request.answer);
    std::ranges::sort(tokens, std::greater<>());
    sizes.host_bytes = 0;
    for (std::size_t i = 0; i < std::min<std::size_t>(options_.batch, tokens.size()); ++i)
      sizes.host_bytes += div_up(tokens[i], page_tokens) * page_bytes(sizes);
  }
  sizes.largest.decode_rows = sizes.sequences = options_.batch;
  sizes.largest.prefill_rows = options_.engine.prefill_chunk;
  sizes.largest.prefills = options_.prefills;
  if (sizes.cpu_sequences != 0) sizes.cpu_sequences = options_.batch;
  if (sizes.cluster_sequences != 0) sizes.cluster_sequences = options_.batch;
  if (options_.kv_bytes != 0) fit_device_memory(method, sizes);
  return sizes;
}

/// Dense attention has as many keys and values as fit, host memory holds the same ones, and what the engine has beside
/// them is not counted. Of other policies it is: near memory is what is left.
void ServeBench::fit_device_memory(const ServeMethod& method, EngineOptions& sizes) const {
  const std::string asked = "--kv-size " + format_size(options_.kv_bytes);
  if (method.dense) {
    const PageLayout layout{.page_tokens = sizes.page_tokens, .head_dim = shape_.head_dim, .dtype = sizes.kv_dtype};
    const std::uint64_t near_page = layout.near().page_bytes() * shape_.layers * shape_.kv_heads;
    const std::uint64_t pages = options_.kv_bytes / near_page;
    if (pages == 0)
      throw Error(Errc::out_of_capacity,
                  asked + " has no room for a page of keys and values, which takes " + format_size(near_page));
    sizes.host_bytes = pages * page_bytes(sizes);
    // Rows are attended as a whole, by two kernels, where each could be as long as the longest, padding of a graph
    // included: there is room for that, and no more tokens than asked for use it.
    constexpr std::uint64_t kSpare = 8;
    const std::uint64_t most = device_->info().memory_bytes / 2 / near_page;
    sizes.near_bytes = std::clamp(most, pages, kSpare * pages) * near_page;
    sizes.dense_tokens = sizes.largest.max_tokens;
    return;
  }
  const std::optional<std::uint64_t> near = near_bytes_within(sizes, options_.kv_bytes, device_.get());
  if (!near) {
    sizes.near_bytes = 0;
    throw Error(Errc::out_of_capacity, asked + " has no room for what " + method.name +
                                           " has beside keys and values of " + format_size(sizes.host_bytes) + ", " +
                                           format_size(memory_needed(sizes, device_.get()).device()) +
                                           "; raise it, or lower --host-size or --batch");
  }
  sizes.near_bytes = *near;
}

bool ServeBench::run(double rate) {
  const auto load = coming_within(load_, rate, options_.limits.seconds);
  const ServeResult result = loop_->run(load, rate, options_.limits);
  const bool held = holds(options_.limits, result);
  const double per_s = static_cast<double>(result.answer_tokens) / result.seconds;
  const Json late = percentile_of(result.between_ms, 0.99);
  const EngineStats& stats = result.decoded.stats;
  const auto far = static_cast<double>(stats.far_tokens + stats.fetched_tokens);
  const auto near = static_cast<double>(stats.near_tokens);
  const double dense = static_cast<double>(result.decoded.dense_tokens) * shape_.layers * shape_.kv_heads;
  table_.rows.push_back({method_,
                         rate,
                         result.requests,
                         result.seconds,
                         per_s,
                         percentile_of(result.first_ms, 0.5),
                         percentile_of(result.first_ms, 0.99),
                         percentile_of(result.between_ms, 0.5),
                         late,
                         percentile_of(result.queued_s, 0.5),
                         result.refused,
                         result.unfinished,
                         options_.limits.judge() ? Json(held) : Json(),
                         result.preempted,
                         result.largest_batch,
                         room_tokens_,
                         percentile_of(result.decode_ms, 0.5),
                         percentile_of(result.chunk_ms, 0.5),
                         over(near + far, dense),
                         over(near, near + far),
                         result.forwards,
                         result.replayed,
                         result.prompt_tokens,
                         result.computed_tokens,
                         result.answer_tokens});
  if (held) kept_.push_back({rate, per_s, late});
  return held;
}

void ServeBench::close_method() {
  if (!options_.limits.judge()) return;
  const auto best =
      std::ranges::max_element(kept_, {}, [](const std::vector<Json>& kept) { return kept[0].get<double>(); });
  std::vector<Json> row = best == kept_.end() ? std::vector<Json>(3) : *best;
  row.insert(row.begin(), method_);
  const Json& first = held_.rows.empty() ? row[1] : held_.rows.front()[1];
  row.push_back(first.is_null() || row[1].is_null() ? Json() : Json(row[1].get<double>() / first.get<double>()));
  held_.rows.push_back(std::move(row));
}

}  // namespace sluice::tools

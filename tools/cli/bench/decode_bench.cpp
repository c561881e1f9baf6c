#include "tools/cli/bench/decode_bench.hpp"

#include <algorithm>
#include <functional>
#include <numeric>

#include "cpu/device/host_device.hpp"
#include "scheduler/plan/forward_rows.hpp"
#include "tools/cli/bench/pattern_prompt.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/far_flag.hpp"
#include "tools/cli/text/values.hpp"
#include "tools/cli/trace/trace.hpp"

namespace sluice::tools {
namespace {

std::string to_string(const Verified& verified) {
  if (verified.rows == 1) return "1 token";
  return std::to_string(verified.rows) + (verified.drafts == 1 ? " one by one" : " together");
}

/// What is timed: one token and, if drafts are asked for, as many new tokens one by one, if the policy takes them so,
/// and together.
std::vector<Verified> timed(const BenchDecodeOptions& options, const DecodeMethod& method) {
  if (options.drafts == 1 || method.dense) return {{}};
  const Verified together{.rows = options.drafts, .drafts = options.drafts};
  if (scheduler::chooser(method.policy) == scheduler::Chooser::cpu) return {{}, together};
  return {{}, {.rows = options.drafts}, together};
}

/// Of tokens that were decoded by two methods.
double share_of_same(const std::vector<int>& tokens, const std::vector<int>& others) {
  const std::size_t same = std::transform_reduce(tokens.begin(), tokens.end(), others.begin(), std::size_t{0},
                                                 std::plus<>(), [](int a, int b) { return std::size_t{a == b}; });
  return static_cast<double>(same) / static_cast<double>(tokens.size());
}

/// For trying the command out, not for its times.
std::shared_ptr<Device> host_device() {
  const cpu::Topology topology;
  return std::make_shared<cpu::HostDevice>(std::make_shared<const cpu::Workers>(topology, cpu::WorkersOptions{}));
}

}  // namespace

DecodeBench::DecodeBench(const BenchDecodeOptions& options, std::shared_ptr<Device> device)
    : options_(options),
      model_(load_model(options.model, options.model.empty() ? options.random_weights : "", options.threads, device)),
      device_(device ? device : host_device()),
      shape_(model_.config().shape()),
      stream_(device_->create_stream("bench")),
      near_(parse_share(options.near, "--near")) {
  table_ = {.key = "decode",
            .title = std::string("Time per ") + (options.drafts == 1 ? "output token" : "forward") + " behind a " +
                     (options.structure.empty() ? "random prompt; " : "synthetic prompt; ") + kDecodeNote,
            .columns = {},
            .rows = {}};
}

void DecodeBench::run(std::uint32_t length, std::uint32_t batch, std::uint64_t kv_bytes,
                      const std::vector<DecodeMethod>& methods, ProgressBar& bar) {
  take_prompt(length, batch);
  First first;
  for (std::size_t m = 0; m < methods.size(); ++m) {
    bar.update(m, methods.size(),
               std::to_string(batch) + " x " + std::to_string(length) + " tokens: " + methods[m].name);
    const DecodeMethod method = limited(length, batch, methods[m]);
    for (const Verified& verified : timed(options_, method))
      run({.length = length, .sequences = batch, .kv_bytes = kv_bytes}, method, verified, first);
  }
}

void DecodeBench::take_prompt(std::uint32_t length, std::uint32_t batch) {
  if (options_.structure.empty()) {
    if (!prompt_) prompt_ = std::make_unique<RandomPrompt>(*device_, shape_);
    return;
  }
  const auto* const there = dynamic_cast<const PatternPrompt*>(prompt_.get());
  if (there != nullptr && there->options().tokens == length && there->options().sequences >= batch) return;
  prompt_.reset();  // Its memory is the next one's.
  const PatternPromptOptions options{.structure = parse_prompt_structure(options_.structure, "--structure"),
                                     .seed = options_.seed,
                                     .tokens = length,
                                     .sequences = batch,
                                     .steps = options_.warm_up + options_.steps + options_.audited + options_.drafts,
                                     .drafts = options_.drafts};
  prompt_ = std::make_unique<PatternPrompt>(options, shape_, *device_, *stream_);
}

void DecodeBench::run(const DecodeBatch& batch, const DecodeMethod& method, const Verified& verified, First& first) {
  work_ = {};
  work_.stream = stream_.get();
  work_.timeout = std::chrono::minutes(2);
  add_row(batch, method, verified, method.dense ? run_dense(batch, verified) : run_engine(batch, method, verified),
          first);
}

void DecodeBench::add_row(const DecodeBatch& batch, const DecodeMethod& method, const Verified& verified,
                          const Run& run, First& first) {
  const bool drafts = options_.drafts != 1;
  const bool ran = !run.decoded.ms.empty();
  const double p50 = ran ? percentile(run.decoded.ms, 0.5) : 0.0;
  const double rate = ran ? run.at_once * 1e3 / p50 : 0.0;
  if (!first.rate && ran) first = {.rate = rate, .tokens = run.decoded.tokens};
  const auto if_ran = [ran](double value) { return ran ? Json(value) : Json(); };
  std::vector<Column> columns = {{"length_tokens", "length"},
                                 {"batch", "batch"},
                                 {"kv_bytes", "KV memory"},
                                 {"method", "method"},
                                 {"at_once", "at once"},
                                 {"launched", "launched"},
                                 {drafts ? "forward_p50_ms" : "tpot_p50_ms", drafts ? "ms/forward" : "ms/token", 2},
                                 {drafts ? "forward_p95_ms" : "tpot_p95_ms", "p95", 2},
                                 {"tokens_per_s", "tokens/s", 1},
                                 {"speedup_over_first", "x first", 2},
                                 {"same_tokens_share", "same tokens", 0, Column::Show::percent},
                                 {"device_bytes", "device B"}};
  std::vector<Json> row = {batch.length,
                           batch.sequences,
                           batch.kv_bytes == 0 ? Json() : Json(batch.kv_bytes),
                           drafts ? method.name + ", " + to_string(verified) : method.name,
                           run.at_once,
                           ran ? Json(run.replayed ? "graph" : "enqueued") : Json(),
                           if_ran(p50),
                           if_ran(ran ? percentile(run.decoded.ms, 0.95) : 0.0),
                           if_ran(rate),
                           if_ran(first.rate ? rate / *first.rate : 0.0),
                           ran && given() ? Json(share_of_same(run.decoded.tokens, first.tokens)) : Json(),
                           run.device_bytes};
  append_decode(run.score, shape_, run.layout, columns, row);
  table_.columns = std::move(columns);
  table_.rows.push_back(std::move(row));
}

DecodeMethod DecodeBench::limited(std::uint32_t length, std::uint32_t batch, const DecodeMethod& method) {
  if (method.dense || options_.far.empty()) return method;
  const FarPlace place{.shape = shape_,
                       .kv_dtype = options_.kv_dtype,
                       .placement = method.placement,
                       .page_tokens = page_tokens_for(method.policy, EngineFlags{}),
                       .rows = batch,
                       .tokens = length,
                       .near_hits = usual_near_hits(near_)};
  const std::size_t policy = method.name.find('/') + 1;
  return parse_method(method.name.substr(0, policy) + with_far(method.name.substr(policy), options_.far, place, [&] {
                        const PageLayout layout{.head_dim = shape_.head_dim, .dtype = options_.kv_dtype};
                        if (!rates_) rates_ = measured_rates(device_.get(), layout.page_bytes(), options_.threads);
                        return *rates_;
                      }));
}

EngineOptions DecodeBench::sizes(const DecodeMethod& method, std::uint32_t length, const Verified& verified) const {
  EngineFlags flags;
  flags.placement = method.placement;
  flags.fetch_share = share_for(method.placement, options_.fetch_share);
  flags.handover = options_.handover;
  flags.kv_dtype = options_.kv_dtype;
  flags.threads = options_.threads;
  flags.prefill_chunk = 1;
  EngineOptions sizes = sized(flags, shape_, {&method.policy, 1},
                              {.page_tokens = page_tokens_for(method.policy, flags),
                               .tokens = length + options_.warm_up + options_.steps + options_.audited + verified.rows,
                               .near = method.all_near ? 1.0 : near_});
  sizes.largest.decode_rows = verified.rows;
  sizes.largest.drafts = verified.drafts;
  sizes.largest.audit = options_.audited != 0;
  sizes.import_rows = std::min(kImportChunk, length);
  return sizes;
}

DecodeBench::Run DecodeBench::run_dense(const DecodeBatch& batch, const Verified& verified) {
  Run run{.layout = {.page_tokens = 16, .head_dim = shape_.head_dim, .dtype = DType::bf16}};
  const std::uint64_t bytes = batch.length * DenseCache::token_bytes(shape_);
  room_.add_dense(batch, bytes);
  const std::uint64_t fit = batch.kv_bytes == 0 ? batch.sequences : batch.kv_bytes / bytes;
  run.at_once = static_cast<std::uint32_t>(std::min<std::uint64_t>(batch.sequences, fit));
  if (run.at_once == 0) return run;
  DenseAttention attention(shape_, *prompt_, run.at_once, batch.length, options_.warm_up + options_.steps, *device_,
                           *stream_);
  // Its kernels are launched for so many tokens: there is nothing to replay.
  const Forwards forwards{.attention = attention, .sequences = run.at_once, .verified = verified};
  (void)decode(forwards, batch.length, options_.warm_up);
  run.decoded = decode(forwards, batch.length + options_.warm_up, options_.steps);
  run.device_bytes = bytes * run.at_once;
  return run;
}

DecodeBench::Run DecodeBench::run_engine(const DecodeBatch& batch, const DecodeMethod& method,
                                         const Verified& verified) {
  Run run{.layout = {.page_tokens = 16, .head_dim = shape_.head_dim, .dtype = options_.kv_dtype}};
  const EngineOptions one = sizes(method, batch.length, verified);
  EngineOptions all = for_sequences(one, batch.sequences);
  if (batch.kv_bytes != 0 && !method.all_near) {
    const std::optional<std::uint64_t> near = near_bytes_within(all, batch.kv_bytes, device_.get());
    if (!near) return run;
    all.near_bytes = *near;
  } else if (batch.kv_bytes != 0 && memory_needed(all, device_.get()).device() > batch.kv_bytes) {
    return run;
  }
  EngineAttention attention(all, method.policy, *prompt_, batch.length, device_, *stream_);
  const EngineMemoryUse memory = attention.engine().memory();
  room_.add(batch, method.name, one, memory, device_.get());
  run.at_once = batch.sequences;
  run.device_bytes = memory.device();
  run.layout.page_tokens = attention.engine().options().page_tokens;
  Forwards forwards{.attention = attention, .sequences = batch.sequences, .verified = verified};
  if (use_graphs(options_.graphs, model_, attention.engine())) forwards.launch = Launch::graph;
  (void)decode(forwards, batch.length, options_.warm_up);
  const EngineStats before = attention.engine().stats();
  run.decoded = decode(forwards, batch.length + options_.warm_up, options_.steps);
  run.replayed = work_.replays != 0;
  run.score.stats = since(before, attention.engine().stats());
  run.score.tokens = std::uint64_t{options_.steps} * batch.sequences;
  run.score.code_bits = attention.engine().sizes().code_bits;
  for (std::uint32_t i = 0; i < options_.steps; ++i)
    run.score.dense_tokens += std::uint64_t{batch.sequences} * (batch.length + options_.warm_up + i + verified.rows);
  if (options_.audited == 0) return run;
  attention.audit();
  forwards.launch = Launch::enqueue;
  (void)decode(forwards, batch.length + options_.warm_up + options_.steps, options_.audited);
  run.score.audited = attention.audited();
  return run;
}

DecodeBench::Decoded DecodeBench::decode(const Forwards& forwards, std::uint32_t position, std::uint32_t steps) {
  Attention& attention = forwards.attention;
  const Verified& verified = forwards.verified;
  const std::uint32_t rows = forwards.sequences * verified.rows;
  const std::uint32_t vocabulary = model_.config().vocab_size;
  std::vector<PlacedToken> placed(rows);
  Decoded decoded;
  for (std::uint32_t i = 0; i < steps; ++i) {
    stop_if_interrupted();  // Nothing is queued here: the tokens were waited for.
    const Clock::time_point begin = Clock::now();
    for (std::uint32_t r = 0; r < rows; ++r) {
      const std::uint32_t at = position + i + r % verified.rows;
      const std::uint32_t token = given() ? at + r / verified.rows : static_cast<std::uint32_t>(token_) + r;
      placed[r] = {static_cast<int>(token % vocabulary), at};
    }
    prompt_->begin(position + i, verified.rows, *stream_);
    attention.begin();
    const auto attend = [&](const AttentionCall& call) {
      attention.attend(prompt_->attended(call, verified.rows));
      // A model on the CPU goes on with what is there, and its tensors are gone.
      if (stream_->native_handle() == nullptr) stream_->synchronize(deadline_after(work_.timeout));
    };
    model_.decode(placed, attend, work_, forwards.launch);
    attention.end(position + i + 1);
    Likeliest first;
    model_.likeliest(work_, {&first, 1});
    token_ = token_of(first);
    decoded.ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
    decoded.tokens.push_back(token_);
  }
  return decoded;
}

}  // namespace sluice::tools

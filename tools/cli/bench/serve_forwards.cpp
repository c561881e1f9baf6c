#include "tools/cli/bench/serve_forwards.hpp"

#include <algorithm>

#include "sluice/error.hpp"
#include "sluice/step/page.hpp"

namespace sluice::tools {
namespace {

/// Of keys and values of all layers, how many tokens near memory has room for.
std::uint64_t near_tokens(const sluice::Engine& engine) {
  const EngineOptions& options = engine.options();
  const PageLayout layout{
      .page_tokens = options.page_tokens, .head_dim = options.shape.head_dim, .dtype = options.kv_dtype};
  const std::uint64_t planes = std::uint64_t{options.shape.layers} * options.shape.kv_heads;
  return engine.memory().near_pages / (layout.near().page_bytes() * planes) * options.page_tokens;
}

bool reads_prompts(std::span<const ServeItem> items) noexcept { return items.back().turn.prefill; }

}  // namespace

ServeForwards::ServeForwards(sluice::Engine& engine, const ServeParts& parts)
    : parts_(parts),
      engine_(engine),
      stream_(parts.stream.native_handle() != nullptr ? parts.stream.native_handle() : &parts.stream),
      graphs_(parts.capturer ||
              use_graphs(parts.graphs, parts.device->info().own_processor ? parts.device.get() : nullptr,
                         engine.options().handover)) {
  if (!parts_.capturer) parts_.capturer = capture;
  work_.stream = &parts_.stream;
  work_.timeout = engine_.options().timeout;
  if (parts_.model != nullptr) reserve();
}

/// A model's buffers grow with the rows that it sees, which waits for the device and takes its graphs along.
void ServeForwards::reserve() {
  const Bucket& largest = engine_.options().largest;
  const std::vector<PlacedToken> placed(largest.rows());
  parts_.model->forward(
      placed, [](const AttentionCall&) {}, work_);
  chosen_.resize(std::min(largest.decode_rows + largest.prefills, largest.rows()));
  parts_.model->choose(work_, static_cast<std::uint32_t>(chosen_.size()));
  parts_.model->likeliest(work_, chosen_);
}

void ServeForwards::prepare(const PolicySpec& policy) {
  if (!graphs_) return;
  const std::uint32_t page = engine_.options().page_tokens;
  ServeItem item{.sequence = engine_.begin(policy), .turn = {.prefill = true}};
  run({&item, 1}, bucket_of({&item, 1}), std::nullopt, Capture::no);
  item.turn = {.first = 1, .output = true};
  // Whether this engine has launches for dense attention at all: it does not for every policy.
  const bool dense = run({&item, 1}, bucket_of({&item, 1}), std::nullopt, Capture::no).whole;
  engine_.truncate(item.sequence, 1);
  const auto decode = [&](DecodeSize size, Capture captures) {
    Bucket bucket = bucket_of({&item, 1});
    bucket.decode_rows = size.rows;
    bucket.max_tokens = size.tokens;
    run({&item, 1}, bucket, size, captures);
    engine_.truncate(item.sequence, 1);
  };
  const DecodeSizes sizes({.rows = engine_.options().largest.decode_rows,
                           .tokens = engine_.options().largest.max_tokens / page * page,
                           .page_tokens = page,
                           .dense_tokens = dense ? engine_.options().dense_tokens : 0,
                           .near_tokens = near_tokens(engine_)});
  sizes_ = sizes;
  for (const std::uint32_t rows : sizes.rows()) {
    for (const std::uint32_t tokens : sizes.tokens()) {
      // The first one lets libraries choose and load what they need, the second is captured.
      decode({rows, tokens}, Capture::no);
      decode({rows, tokens}, Capture::yes);
    }
  }
  engine_.end(item.sequence);
}

Bucket ServeForwards::bucket_of(std::span<const ServeItem> items) const {
  Bucket bucket = engine_.options().largest;
  bucket.decode_rows = bucket.prefill_rows = bucket.prefills = bucket.max_tokens = 0;
  for (const ServeItem& item : items) {
    const TurnItem& turn = item.turn;
    (turn.prefill ? bucket.prefill_rows : bucket.decode_rows) += turn.tokens;
    bucket.prefills += turn.prefill ? 1 : 0;
    bucket.max_tokens = std::max(bucket.max_tokens, turn.first + turn.tokens);
  }
  const std::uint32_t page = engine_.options().page_tokens;
  bucket.max_tokens = static_cast<std::uint32_t>(div_up(bucket.max_tokens, page)) * page;
  return bucket;
}

std::optional<DecodeSize> ServeForwards::graph_of(const Bucket& bucket) const {
  if (!sizes_ || bucket.prefills != 0) return std::nullopt;
  const auto size = sizes_->of({.rows = bucket.decode_rows, .tokens = bucket.max_tokens});
  const bool there = size && (parts_.model != nullptr || captured_.contains(*size));
  return there ? size : std::nullopt;
}

void ServeForwards::run(std::span<const ServeItem> items) {
  Bucket bucket = bucket_of(items);
  const std::optional<DecodeSize> size = graph_of(bucket);
  if (size) {
    bucket.decode_rows = size->rows;
    bucket.max_tokens = size->tokens;
  }
  run(items, bucket, size, Capture::no);
}

Bucket ServeForwards::run(std::span<const ServeItem> items, const Bucket& bucket, const std::optional<DecodeSize>& size,
                          Capture captures) {
  std::vector<PlanItem> planned;
  std::vector<RowSpan> spans;
  for (const ServeItem& item : items) {
    planned.push_back({.sequence = item.sequence, .tokens = item.turn.tokens, .prefill = item.turn.prefill});
    spans.push_back({.first = item.turn.first, .count = item.turn.tokens});
  }
  parts_.rows.put(spans, bucket.rows(), parts_.stream);
  const Batch batch = engine_.plan(planned, bucket, stream_);
  parts_.model == nullptr ? attend_alone(bucket, size, captures) : run_model(items, bucket, size);
  engine_.finish(batch);
  if (parts_.model == nullptr) return batch.bucket;
  // As many as requests want a token: of the last rows, whoever's they are.
  const auto outputs = std::ranges::count_if(items, [](const ServeItem& item) { return item.turn.output; });
  if (outputs != 0) parts_.model->likeliest(work_, std::span(chosen_).first(static_cast<std::size_t>(outputs)));
  return batch.bucket;
}

void ServeForwards::attend_alone(const Bucket& bucket, const std::optional<DecodeSize>& size, Capture captures) {
  const auto enqueue = [this, bucket, rows = parts_.rows.views(), out = parts_.rows.out()] {
    for (LayerId layer{0}; layer.value < engine_.options().shape.layers; ++layer.value)
      engine_.attend(bucket, layer, rows.q, rows.k, rows.v, out, stream_);
  };
  if (captures == Capture::yes) make_graph(*size, enqueue);
  const auto graph = size ? captured_.find(*size) : captured_.end();
  if (graph == captured_.end()) return enqueue();
  graph->second->replay();
  ++replays_;
}

/// What CUDA makes no graph of is enqueued, now and later. A forward that could not be enqueued cannot be either then,
/// and only its own error says why.
void ServeForwards::make_graph(const DecodeSize& size, const std::function<void()>& enqueue) {
  const auto failed = std::make_shared<bool>(false);
  try {
    captured_.insert_or_assign(size, parts_.capturer(stream_, [enqueue, failed] {
      *failed = true;
      enqueue();
      *failed = false;
    }));
  } catch (const Error& error) {
    const std::string what = "no graph could be made for rows=" + std::to_string(size.rows) +
                             ", tokens=" + std::to_string(size.tokens) + ": " + error.what();
    if (*failed || parts_.graphs == Graphs::on)
      throw Error(error.code(), what + "; --graphs off enqueues it launch by launch");
    if (refusal_.empty()) refusal_ = what;
  }
}

void ServeForwards::run_model(std::span<const ServeItem> items, const Bucket& bucket,
                              const std::optional<DecodeSize>& size) {
  const Model& model = *parts_.model;
  const auto [q, k, v] = parts_.rows.views();
  const auto attend = [&](const AttentionCall& call) {
    engine_.attend(bucket, call.layer, q, k, v, call.out, stream_);
    // A model on the CPU goes on with what is there.
    if (parts_.stream.native_handle() == nullptr) parts_.stream.synchronize(deadline_after(work_.timeout));
  };
  std::vector<PlacedToken> placed;
  for (const ServeItem& item : items) {
    const TurnItem& turn = item.turn;
    for (std::uint32_t position = turn.first; position < turn.first + turn.tokens; ++position)
      placed.push_back({static_cast<int>(position % model.config().vocab_size), position});
  }
  placed.resize(bucket.rows());  // Padding.
  if (!reads_prompts(items)) {
    work_.variant = size ? size->tokens : 0;
    return model.decode(placed, attend, work_, size ? Launch::graph : Launch::enqueue);
  }
  model.forward(placed, attend, work_);
  const auto outputs = std::ranges::count_if(items, [](const ServeItem& item) { return item.turn.output; });
  if (outputs != 0) model.choose(work_, static_cast<std::uint32_t>(outputs));
}

}  // namespace sluice::tools

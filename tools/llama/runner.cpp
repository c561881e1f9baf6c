#include "tools/llama/runner.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "sluice/error.hpp"

namespace sluice::tools {
namespace {

/// Empty: forwards can be captured.
std::string why_no_graphs(const Device* device, Handover asked) {
  if (device == nullptr) return "this runs on the CPU";
  if (device->info().captures_forwards(asked)) return {};
  const Handover by = asked == Handover::automatic ? device->info().handover : asked;
  if (by == Handover::host) return "with handover host the calling thread waits for the CPU's part of each layer";
  return "this driver cannot capture what waits for the CPU's part of a layer";
}

}  // namespace

const char* to_string(Graphs graphs) noexcept {
  switch (graphs) {
    case Graphs::automatic: return "auto";
    case Graphs::on: return "on";
    case Graphs::off: return "off";
  }
  return "unknown";
}

Graphs parse_graphs(std::string_view text, std::string_view option) {
  for (const Graphs graphs : {Graphs::automatic, Graphs::on, Graphs::off}) {
    if (text == to_string(graphs)) return graphs;
  }
  throw Error(Errc::invalid_argument,
              std::string(option) + ": '" + std::string(text) + "' is unknown; have auto, on, off");
}

bool use_graphs(Graphs graphs, const Device* device, Handover asked) {
  const std::string why = why_no_graphs(device, asked);
  if (graphs == Graphs::on && !why.empty())
    throw Error(Errc::unsupported, "graphs are asked for, and " + why + "; leave them to auto");
  return graphs != Graphs::off && why.empty();
}

bool use_graphs(Graphs graphs, const Model& model, const sluice::Engine& engine) {
  return use_graphs(graphs, model.device(), engine.options().handover);
}

Runner::Runner(const Model& model, sluice::Engine& engine, std::shared_ptr<Device> device, Graphs graphs)
    : model_(model), engine_(engine), device_(std::move(device)), graphs_(use_graphs(graphs, model, engine)) {
  if (device_ && model.device() != nullptr) {
    queue_ = device_->create_stream("session");
    stream_ = queue_->native_handle();
    work_.stream = queue_.get();
  }
  work_.timeout = engine.options().timeout;
}

Bucket Runner::decoding(std::uint32_t tokens) const noexcept {
  const Bucket& largest = engine_.options().largest;
  const bool pads = model_.device() != nullptr && tokens <= largest.decode_rows;
  return {.decode_rows = pads ? std::min(std::bit_ceil(tokens), largest.decode_rows) : tokens,
          .top_k = largest.top_k,
          .unbounded = largest.unbounded,
          .pages = largest.pages,
          .rehearsed = largest.rehearsed};
}

void Runner::read(std::span<const PlacedToken> tokens, const Attend& attend, std::uint32_t chosen) {
  vacate();
  work_.rehearse = false;
  model_.forward(tokens, attend, work_);
  if (chosen != 0) model_.choose(work_, chosen);
}

void Runner::decode(std::span<const PlacedToken> tokens, const Attend& attend, const Bucket& bucket) {
  vacate();
  padded_.assign(tokens.begin(), tokens.end());
  padded_.resize(bucket.rows());
  work_.rehearse = bucket.rehearsed;
  // What audits and traces write has its own launches, and they are few.
  const bool graph = graphs_ && !bucket.audit && !bucket.trace;
  model_.decode(padded_, attend, work_, graph ? Launch::graph : Launch::enqueue);
}

std::vector<std::shared_ptr<Logits>> Runner::take(std::uint32_t rows) {
  std::vector<Likeliest> best(rows);
  model_.likeliest(work_, best);
  std::vector<std::shared_ptr<Logits>> taken;
  for (std::uint32_t row = 0; row < rows; ++row)
    taken.push_back(std::make_shared<Logits>(shared_from_this(), row, best[row]));
  left_.assign(taken.begin(), taken.end());
  return taken;
}

/// What somebody still wants leaves the buffers.
void Runner::vacate() {
  for (const std::weak_ptr<Logits>& left : left_) {
    if (const auto logits = left.lock()) (void)logits->values();
  }
  left_.clear();
}

std::span<const float> Logits::values() {
  if (from_) {
    std::vector<float> values(from_->model_.config().vocab_size);
    from_->model_.chosen_logits(from_->work_, row_, values);
    values_ = std::move(values);
    from_.reset();
  }
  return values_;
}

}  // namespace sluice::tools

#include "tools/llama/engine_session.hpp"

#include <algorithm>
#include <string>

#include "sluice/error.hpp"
#include "tools/llama/one_error.hpp"

namespace sluice::tools {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw Error(Errc::invalid_argument, why); }

}  // namespace

EngineSession::EngineSession(const Model& model, sluice::Engine& engine, std::shared_ptr<Device> device,
                             const PolicySpec& policy)
    : model_(model), engine_(engine), device_(std::move(device)) {
  require_room();
  take_stream();
  sequence_ = as_one_error("begin a sequence", [&] { return engine.begin(policy); });
}

EngineSession::EngineSession(const Model& model, sluice::Engine& engine, std::shared_ptr<Device> device,
                             SequenceId sequence)
    : model_(model),
      engine_(engine),
      device_(std::move(device)),
      sequence_(sequence),
      tokens_(engine.tokens(sequence)) {
  require_room();
  take_stream();
}

void EngineSession::require_room() const {
  if (engine_.options().shape != model_.config().shape())
    refuse("the engine was built for another attention shape; set EngineOptions::shape to model.config().shape()");
  if (engine_.options().largest.prefills == 0 || engine_.options().largest.decode_rows == 0)
    refuse("the engine has no room for prompts, or none for decoding; give EngineOptions::largest both");
}

EngineSession::EngineSession(const EngineSession& parent, const PolicySpec& policy)
    : model_(parent.model_),
      engine_(parent.engine_),
      device_(parent.device_),
      tokens_(parent.tokens_),
      logits_(parent.logits_) {
  take_stream();
  sequence_ =
      as_one_error("fork a sequence", [&] { return engine_.fork(parent.sequence_, parent.tokens_, policy); });
}

void EngineSession::take_stream() {
  if (device_ && model_.device() != nullptr) {
    queue_ = device_->create_stream("session");
    stream_ = queue_->native_handle();
    work_.stream = queue_.get();
  }
  work_.timeout = engine_.options().timeout;
}

EngineSession::~EngineSession() {
  try {
    engine_.end(sequence_);
  } catch (...) {
    // A destructor cannot throw. The engine owns the blocks, and frees them with itself if not before.
  }
}

void EngineSession::require_usable(std::size_t more) const {
  if (broken_) refuse("an earlier error left a forward under way; end this session and begin another");
  const std::uint32_t limit = model_.config().max_position_embeddings;
  if (tokens_ + more > limit)
    refuse(std::to_string(tokens_ + more) + " tokens exceed the model's context of " + std::to_string(limit) +
           " (max_position_embeddings)");
}

void EngineSession::prefill(std::span<const int> tokens, const Progress& progress, PromptCache* record) {
  if (tokens.empty()) refuse("a prompt needs at least one token; begin it with BOS");
  require_usable(tokens.size());
  for (const int token : tokens) model_.require_token(token);
  if (record != nullptr && tokens_ != 0) refuse("a prompt can be recorded only from the session's first token");
  as_one_error("read the prompt", [&] {
    if (record != nullptr) record->start(model_.config().shape(), tokens);
    const std::size_t most = engine_.options().largest.prefill_rows;
    for (std::size_t done = 0; done < tokens.size();) {
      const auto chunk = tokens.subspan(done, std::min(most, tokens.size() - done));
      forward(chunk, {.decode_rows = 0, .prefill_rows = static_cast<std::uint32_t>(chunk.size()), .prefills = 1}, true,
              record);
      done += chunk.size();
      if (progress) progress(static_cast<std::uint32_t>(done), static_cast<std::uint32_t>(tokens.size()));
    }
    take_logits();
    if (record != nullptr) record->finish(logits_);
  });
}

TensorCourier* EngineSession::courier() {
  if (queue_ && !courier_) courier_ = std::make_unique<TensorCourier>(*device_, *queue_, work_.timeout);
  return courier_.get();
}

void EngineSession::record_layer(const AttentionCall& call, PromptCache& record) {
  using Slot = TensorCourier::Slot;
  const auto placed = [&](Slot slot, const TensorView& view) {
    return courier() != nullptr ? courier()->to_host(slot, view) : view;
  };
  record.record({.layer = call.layer,
                 .q = placed(Slot::q, call.q),
                 .k = placed(Slot::k, call.k),
                 .v = placed(Slot::v, call.v),
                 .out = {}},
                tokens_);
}

void EngineSession::import_prompt(const PromptCache& prompt) {
  require_usable(prompt.tokens());
  if (tokens_ != 0) refuse("import_prompt needs an empty session");
  if (!prompt.complete()) refuse("the prompt cache is empty; record a prefill into it first");
  if (prompt.shape() != model_.config().shape() || prompt.logits().size() != model_.config().vocab_size)
    refuse("the prompt cache was recorded by a model of another shape");
  as_one_error("import the prompt", [&] {
    for (std::uint32_t first = 0; first < prompt.tokens(); first += engine_.options().import_rows) {
      const std::uint32_t count = std::min(engine_.options().import_rows, prompt.tokens() - first);
      for (LayerId layer{0}; layer.value < prompt.shape().layers; ++layer.value)
        import_chunk(prompt, layer, first, count);
      tokens_ += count;
    }
    logits_.assign(prompt.logits().begin(), prompt.logits().end());
  });
}

void EngineSession::import_chunk(const PromptCache& prompt, LayerId layer, std::uint32_t first, std::uint32_t count) {
  using Slot = TensorCourier::Slot;
  const auto placed = [&](Slot slot, const TensorView& view) {
    return courier() != nullptr && view.tokens != 0 ? courier()->to_device(slot, view) : view;
  };
  engine_.import_prefix(sequence_, layer, placed(Slot::k, prompt.keys(layer, first, count)),
                        placed(Slot::v, prompt.values(layer, first, count)), stream_,
                        placed(Slot::q, prompt.last_queries(layer, first, count)));
}

void EngineSession::decode(int token) {
  require_usable(1);
  if (tokens_ == 0) refuse("decode before prefill; give the session a prompt first");
  model_.require_token(token);
  as_one_error("decode", [&] {
    Bucket bucket = decoding(1);
    bucket.audit = audit_every_ != 0 && decoded_ % audit_every_ == 0;
    forward({&token, 1}, bucket, false);
    ++decoded_;
    visible_ += tokens_;
    take_logits();
  });
}

Bucket EngineSession::decoding(std::uint32_t rows) const noexcept {
  const Bucket& largest = engine_.options().largest;
  return {.decode_rows = rows, .top_k = largest.top_k, .unbounded = largest.unbounded, .pages = largest.pages};
}

void decode_batch(std::span<EngineSession* const> sessions, std::span<const int> tokens) {
  if (sessions.empty() || sessions.size() != tokens.size())
    refuse("decode_batch needs a token for each of at least one session");
  const EngineSession& lead = *sessions.front();
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    const EngineSession& session = *sessions[i];
    if (&session.model_ != &lead.model_ || &session.engine_ != &lead.engine_)
      refuse("decode_batch needs sessions of one model and one engine");
    if (std::ranges::find(sessions.first(i), sessions[i]) != sessions.begin() + static_cast<std::ptrdiff_t>(i))
      refuse("decode_batch has a session twice");
    session.require_usable(1);
    if (session.tokens_ == 0) refuse("decode before prefill; give every session a prompt first");
    session.model_.require_token(tokens[i]);
  }
  as_one_error("decode a batch", [&] { EngineSession::decode_together(sessions, tokens); });
}

void EngineSession::decode_together(std::span<EngineSession* const> sessions, std::span<const int> tokens) {
  EngineSession& lead = *sessions.front();
  const auto rows = static_cast<std::uint32_t>(sessions.size());
  std::vector<PlanItem> items;
  lead.placed_.clear();
  for (std::uint32_t i = 0; i < rows; ++i) {
    items.push_back({.sequence = sessions[i]->sequence_});
    lead.placed_.push_back({.token = tokens[i], .position = sessions[i]->tokens_});
  }
  const Bucket bucket = lead.decoding(rows);
  const Batch batch = lead.engine_.plan(items, bucket, lead.stream_);
  for (EngineSession* session : sessions) session->broken_ = true;
  const auto whole_again = [&] {
    for (EngineSession* session : sessions) session->broken_ = lead.broken_;
  };
  try {
    lead.model_.forward(
        lead.placed_,
        [&](const AttentionCall& call) {
          lead.engine_.attend(bucket, call.layer, call.q, call.k, call.v, call.out, lead.stream_);
        },
        lead.work_);
    lead.engine_.finish(batch);
  } catch (...) {
    lead.take_back(batch);
    whole_again();
    throw;
  }
  lead.broken_ = false;
  whole_again();
  const std::size_t vocabulary = lead.model_.config().vocab_size;
  std::vector<float> logits(rows * vocabulary);
  lead.model_.logits(lead.work_, rows, logits);
  for (std::uint32_t i = 0; i < rows; ++i) {
    EngineSession& session = *sessions[i];
    session.logits_.assign(logits.begin() + static_cast<std::ptrdiff_t>(i * vocabulary),
                           logits.begin() + static_cast<std::ptrdiff_t>((i + 1) * vocabulary));
    ++session.decoded_;
    session.visible_ += ++session.tokens_;
  }
}

void EngineSession::forward(std::span<const int> tokens, Bucket bucket, bool prefill, PromptCache* record) {
  bucket.trace = static_cast<bool>(on_trace_);
  placed_.clear();
  for (const int token : tokens)
    placed_.push_back({.token = token, .position = tokens_ + static_cast<std::uint32_t>(placed_.size())});
  const PlanItem item{.sequence = sequence_, .tokens = static_cast<std::uint32_t>(tokens.size()), .prefill = prefill};
  const Batch batch = engine_.plan({&item, 1}, bucket, stream_);
  broken_ = true;  // until it is finished, or taken back
  try {
    model_.forward(
        placed_,
        [&](const AttentionCall& call) {
          if (record != nullptr) record_layer(call, *record);
          engine_.attend(bucket, call.layer, call.q, call.k, call.v, call.out, stream_);
        },
        work_);
    engine_.finish(batch);
  } catch (...) {
    take_back(batch);
    throw;
  }
  broken_ = false;
  tokens_ += item.tokens;
  if (on_trace_) on_trace_(engine_.trace(batch), prefill);
}

void EngineSession::take_back(const Batch& batch) noexcept {
  try {
    engine_.cancel(batch);
  } catch (const Error& error) {
    // A forward that ended is in flight no more. One that cannot be taken back leaves the session broken.
    if (error.code() != Errc::invalid_argument) return;
  }
  broken_ = false;
}

void EngineSession::take_logits() {
  logits_.resize(model_.config().vocab_size);
  model_.logits(work_, 1, logits_);
}

}  // namespace sluice::tools

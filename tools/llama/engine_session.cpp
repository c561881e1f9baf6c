#include "tools/llama/engine_session.hpp"

#include <algorithm>
#include <string>

#include "sluice/error.hpp"
#include "tools/llama/one_error.hpp"

namespace sluice::tools {
namespace {

constexpr const char* kLost = "the logits are lost, as a forward failed; go on with the token that it was to decode";

[[noreturn]] void refuse(const std::string& why) { throw Error(Errc::invalid_argument, why); }

/// Whether a forward that failed is no longer under way.
bool taken_back(sluice::Engine& engine, const Batch& batch) noexcept {
  try {
    engine.cancel(batch);
  } catch (const Error& error) {
    return error.code() == Errc::invalid_argument;  // It had ended.
  }
  return true;
}

}  // namespace

EngineSession::EngineSession(std::shared_ptr<Runner> runner, const PolicySpec& policy) : runner_(std::move(runner)) {
  require_room();
  sequence_ = as_one_error("begin a sequence", [&] { return engine().begin(policy); });
}

EngineSession::EngineSession(const Model& model, sluice::Engine& engine, std::shared_ptr<Device> device,
                             const PolicySpec& policy)
    : EngineSession(
          as_one_error("begin a session", [&] { return std::make_shared<Runner>(model, engine, std::move(device)); }),
          policy) {}

EngineSession::EngineSession(std::shared_ptr<Runner> runner, SequenceId sequence)
    : runner_(std::move(runner)), sequence_(sequence), tokens_(engine().tokens(sequence)) {
  require_room();
}

void EngineSession::require_room() const {
  if (engine().options().shape != model().config().shape())
    refuse("the engine was built for another attention shape; set EngineOptions::shape to model.config().shape()");
  if (engine().options().largest.prefills == 0 || engine().options().largest.decode_rows == 0)
    refuse("the engine has no room for prompts, or none for decoding; give EngineOptions::largest both");
}

EngineSession::EngineSession(const EngineSession& parent, const PolicySpec& policy)
    : runner_(parent.runner_), tokens_(parent.tokens_), lost_(parent.lost_), now_(parent.now_) {
  sequence_ = as_one_error("fork a sequence", [&] { return engine().fork(parent.sequence_, parent.tokens_, policy); });
}

EngineSession::~EngineSession() {
  try {
    engine().end(sequence_);
  } catch (...) {
    // A destructor cannot throw. The engine owns the blocks, and frees them with itself if not before.
  }
}

void EngineSession::require_usable(std::size_t more) const {
  if (broken_) refuse("an earlier error left a forward under way; end this session and begin another");
  const std::uint32_t limit = model().config().max_position_embeddings;
  if (tokens_ + more > limit)
    refuse(std::to_string(tokens_ + more) + " tokens exceed the model's context of " + std::to_string(limit) +
           " (max_position_embeddings)");
}

void EngineSession::prefill(std::span<const int> tokens, const Progress& progress, PromptCache* record) {
  if (tokens.empty()) refuse("a prompt needs at least one token; begin it with BOS");
  require_usable(tokens.size());
  for (const int token : tokens) model().require_token(token);
  if (record != nullptr && tokens_ != 0) refuse("a prompt can be recorded only from the session's first token");
  as_one_error("read the prompt", [&] {
    if (record != nullptr) record->start(model().config().shape(), tokens);
    const std::size_t most = engine().options().largest.prefill_rows;
    for (std::size_t done = 0; done < tokens.size();) {
      const auto chunk = tokens.subspan(done, std::min(most, tokens.size() - done));
      done += chunk.size();
      read_chunk(chunk, done == tokens.size(), record);
      if (progress) progress(static_cast<std::uint32_t>(done), static_cast<std::uint32_t>(tokens.size()));
    }
    now_ = runner_->take(1).front();
    if (record != nullptr) record->finish(now_->values());
  });
}

TensorCourier* EngineSession::courier() {
  if (runner_->queue() != nullptr && !courier_)
    courier_ = std::make_unique<TensorCourier>(*runner_->device(), *runner_->queue(), engine().options().timeout);
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
  if (prompt.shape() != model().config().shape() || prompt.logits().size() != model().config().vocab_size)
    refuse("the prompt cache was recorded by a model of another shape");
  as_one_error("import the prompt", [&] {
    for (std::uint32_t first = 0; first < prompt.tokens(); first += engine().options().import_rows) {
      const std::uint32_t count = std::min(engine().options().import_rows, prompt.tokens() - first);
      for (LayerId layer{0}; layer.value < prompt.shape().layers; ++layer.value)
        import_chunk(prompt, layer, first, count);
      tokens_ += count;
    }
    now_ = std::make_shared<Logits>(std::vector<float>(prompt.logits().begin(), prompt.logits().end()));
  });
}

void EngineSession::import_chunk(const PromptCache& prompt, LayerId layer, std::uint32_t first, std::uint32_t count) {
  using Slot = TensorCourier::Slot;
  const auto placed = [&](Slot slot, const TensorView& view) {
    return courier() != nullptr && view.tokens != 0 ? courier()->to_device(slot, view) : view;
  };
  engine().import_prefix(sequence_, layer, placed(Slot::k, prompt.keys(layer, first, count)),
                         placed(Slot::v, prompt.values(layer, first, count)), runner_->stream(),
                         placed(Slot::q, prompt.last_queries(layer, first, count)));
}

void EngineSession::decode(int token) {
  EngineSession* const self = this;
  decode_batch({&self, 1}, {&token, 1});
}

int EngineSession::best() const {
  if (now_) return token_of(now_->best());
  refuse(lost_ ? kLost : "no token is likeliest before a prompt; give the session one first");
}

std::span<const float> EngineSession::logits() const {
  if (now_) return as_one_error("copy the logits", [&] { return now_->values(); });
  if (lost_) refuse(kLost);
  return {};
}

void decode_batch(std::span<EngineSession* const> sessions, std::span<const int> tokens) {
  if (sessions.empty() || sessions.size() != tokens.size())
    refuse("decode_batch needs a token for each of at least one session");
  const EngineSession& lead = *sessions.front();
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    const EngineSession& session = *sessions[i];
    if (&session.model() != &lead.model() || &session.engine() != &lead.engine())
      refuse("decode_batch needs sessions of one model and one engine");
    if (std::ranges::find(sessions.first(i), sessions[i]) != sessions.begin() + static_cast<std::ptrdiff_t>(i))
      refuse("decode_batch has a session twice");
    session.require_usable(1);
    if (session.tokens_ == 0) refuse("decode before prefill; give every session a prompt first");
    session.model().require_token(tokens[i]);
  }
  as_one_error(sessions.size() == 1 ? "decode" : "decode a batch",
               [&] { EngineSession::decode_together(sessions, tokens); });
}

void EngineSession::decode_together(std::span<EngineSession* const> sessions, std::span<const int> tokens) {
  EngineSession& lead = *sessions.front();
  const auto rows = static_cast<std::uint32_t>(sessions.size());
  std::vector<PlanItem> items;
  std::vector<PlacedToken> placed;
  for (std::uint32_t i = 0; i < rows; ++i) {
    items.push_back({.sequence = sessions[i]->sequence_});
    placed.push_back({.token = tokens[i], .position = sessions[i]->tokens_});
  }
  Bucket bucket = lead.runner_->decoding(rows);
  // What is traced and audited is a session's alone.
  bucket.audit = rows == 1 && lead.audit_every_ != 0 && lead.decoded_ % lead.audit_every_ == 0;
  bucket.trace = rows == 1 && lead.on_trace_;
  const Batch batch = run(sessions, items, bucket, [&](Runner& runner) {
    const auto attend = [&](const AttentionCall& call) {
      runner.engine().attend(bucket, call.layer,
                             {.q = call.q,
                              .k = call.k,
                              .v = call.v,
                              .out = call.out,
                              .stream = runner.stream(),
                              .rehearsed = call.rehearsed});
    };
    runner.decode(placed, attend, bucket);
  });
  for (EngineSession* session : sessions) {
    ++session->decoded_;
    session->visible_ += ++session->tokens_;
  }
  if (bucket.trace) lead.on_trace_(lead.engine().trace(batch), false);
  const auto logits = lead.runner_->take(rows);
  for (std::uint32_t i = 0; i < rows; ++i) sessions[i]->now_ = logits[i];
}

void EngineSession::read_chunk(std::span<const int> tokens, bool last, PromptCache* record) {
  const Bucket bucket{.decode_rows = 0,
                      .prefill_rows = static_cast<std::uint32_t>(tokens.size()),
                      .prefills = 1,
                      .trace = static_cast<bool>(on_trace_)};
  std::vector<PlacedToken> placed;
  for (const int token : tokens)
    placed.push_back({.token = token, .position = tokens_ + static_cast<std::uint32_t>(placed.size())});
  const PlanItem item{.sequence = sequence_, .tokens = bucket.prefill_rows, .prefill = true};
  EngineSession* const self = this;
  const Batch batch = run({&self, 1}, {&item, 1}, bucket, [&](Runner& runner) {
    const auto attend = [&](const AttentionCall& call) {
      if (record != nullptr) record_layer(call, *record);
      engine().attend(bucket, call.layer, call.q, call.k, call.v, call.out, runner.stream());
    };
    runner.read(placed, attend, last ? 1 : 0);
  });
  tokens_ += item.tokens;
  if (bucket.trace) on_trace_(engine().trace(batch), true);
}

Batch EngineSession::run(std::span<EngineSession* const> sessions, std::span<const PlanItem> items,
                         const Bucket& bucket, const std::function<void(Runner&)>& queue) {
  Runner& runner = *sessions.front()->runner_;
  const Batch batch = runner.engine().plan(items, bucket, runner.stream());
  const auto each = [&](bool under_way) {
    for (EngineSession* session : sessions) session->broken_ = under_way;
  };
  each(true);  // Until it is finished, or taken back.
  for (EngineSession* session : sessions) {
    session->lost_ = true;
    session->now_.reset();
  }
  try {
    queue(runner);
    runner.engine().finish(batch);
  } catch (...) {
    each(!taken_back(runner.engine(), batch));
    throw;
  }
  each(false);
  return batch;
}

}  // namespace sluice::tools

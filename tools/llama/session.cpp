#include "tools/llama/session.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "sluice/error.hpp"
#include "tools/llama/one_error.hpp"

namespace sluice::tools {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw Error(Errc::invalid_argument, why); }

}  // namespace

Session::Session(const Model& model, Runtime& runtime, const PolicySpec& policy, const PrefillSpec& prefill)
    : model_(&model), runtime_(&runtime) {
  if (runtime.options().shape != model.config().shape()) {
    refuse("the runtime was built for another attention shape; set RuntimeOptions::shape to model.config().shape()");
  }
  if ((model.device() != nullptr) != (runtime.device_stream().native_handle() != nullptr)) {
    refuse(model.device() != nullptr ? "the model is on a GPU and the runtime is not; give both the same device"
                                     : "the runtime is on a GPU and the model is not; give both the same device");
  }
  work_.stream = &runtime.device_stream();
  work_.timeout = runtime.options().timeout;
  sequence_ = as_one_error("begin a sequence", [&] { return runtime.begin(policy, prefill); });
}

Session::Session(Session&& other) noexcept
    : model_(other.model_),
      runtime_(std::exchange(other.runtime_, nullptr)),
      sequence_(other.sequence_),
      tokens_(other.tokens_),
      decoding_(other.decoding_),
      broken_(other.broken_),
      logits_(std::move(other.logits_)),
      placed_(std::move(other.placed_)),
      work_(std::move(other.work_)),
      courier_(std::move(other.courier_)) {}

Session::~Session() {
  if (runtime_ == nullptr) return;
  try {
    runtime_->end(sequence_);
  } catch (...) {
    // A destructor cannot throw, and lack of memory is no Error. The runtime owns the pages and frees them with itself.
  }
}

void Session::require_usable(std::uint64_t more_tokens) const {
  if (runtime_ == nullptr) refuse("the session was moved from");
  if (broken_) refuse("an earlier error left the sequence between two layers; end this session and begin another");
  const std::uint32_t limit = model_->config().max_position_embeddings;
  if (tokens_ + more_tokens > limit) {
    refuse(std::to_string(tokens_ + more_tokens) + " tokens exceed the model's context of " + std::to_string(limit) +
           " (max_position_embeddings)");
  }
}

void Session::prefill(std::span<const int> tokens, const Progress& progress, PromptCache* record) {
  require_usable(tokens.size());
  if (tokens.empty()) refuse("a prompt needs at least one token; begin it with BOS");
  if (decoding_) refuse("prefill after decode; append further tokens with decode");
  if (record != nullptr && tokens_ != 0) refuse("a prompt can be recorded only from the session's first token");
  for (const int token : tokens) model_->require_token(token);

  as_one_error("read the prompt", [&] { prefill_all(tokens, progress, record); });
}

void Session::prefill_all(std::span<const int> tokens, const Progress& progress, PromptCache* record) {
  if (record != nullptr) record->start(model_->config().shape(), tokens);
  const std::size_t chunk_tokens = runtime_->options().prefill_chunk;
  broken_ = true;  // until the logits are there: a GPU tells of its failures late
  for (std::size_t done = 0; done < tokens.size();) {
    const auto chunk = tokens.subspan(done, std::min(chunk_tokens, tokens.size() - done));
    done += chunk.size();
    prefill_chunk(chunk, done == tokens.size(), record);
    if (progress) progress(static_cast<std::uint32_t>(done), static_cast<std::uint32_t>(tokens.size()));
  }
  logits_.resize(model_->config().vocab_size);
  model_->logits(work_, 1, logits_);
  broken_ = false;
  if (record != nullptr) record->finish(logits_);
}

void Session::prefill_chunk(std::span<const int> chunk, bool last, PromptCache* record) {
  placed_.clear();
  for (const int token : chunk) {
    placed_.push_back({token, tokens_ + static_cast<std::uint32_t>(placed_.size())});
  }
  model_->forward(
      placed_,
      [&](const AttentionCall& call) {
        if (record != nullptr) record_layer(call, *record);
        runtime_->prefill({.sequence = sequence_,
                           .layer = call.layer,
                           .q = call.q,
                           .k = call.k,
                           .v = call.v,
                           .out = call.out,
                           .ordered = model_->device() != nullptr,
                           .last = last});
      },
      work_);
  tokens_ += static_cast<std::uint32_t>(chunk.size());
}

TensorCourier& Session::courier() {
  if (!courier_) courier_ = std::make_unique<TensorCourier>(*model_->device(), *work_.stream, work_.timeout);
  return *courier_;
}

void Session::record_layer(const AttentionCall& call, PromptCache& record) {
  if (model_->device() == nullptr) return record.record(call, tokens_);
  using Slot = TensorCourier::Slot;
  record.record({.layer = call.layer,
                 .q = courier().to_host(Slot::q, call.q),
                 .k = courier().to_host(Slot::k, call.k),
                 .v = courier().to_host(Slot::v, call.v),
                 .out = {}},
                tokens_);
}

void Session::import_chunk(const PromptCache& prompt, LayerId layer, std::uint32_t first, std::uint32_t count) {
  using Slot = TensorCourier::Slot;
  const auto placed = [&](Slot slot, const TensorView& view) {
    return model_->device() == nullptr ? view : courier().to_device(slot, view);
  };
  runtime_->import_prefix({.sequence = sequence_,
                           .layer = layer,
                           .k = placed(Slot::k, prompt.keys(layer, first, count)),
                           .v = placed(Slot::v, prompt.values(layer, first, count)),
                           .last_q = placed(Slot::q, prompt.last_queries(layer, first, count))});
}

void Session::import_prompt(const PromptCache& prompt) {
  require_usable(prompt.tokens());
  if (tokens_ != 0) refuse("import_prompt needs an empty session");
  if (!prompt.complete()) refuse("the prompt cache is empty; record a prefill into it first");
  if (prompt.shape() != model_->config().shape() || prompt.logits().size() != model_->config().vocab_size) {
    refuse("the prompt cache was recorded by a model of another shape");
  }
  as_one_error("import the prompt", [&] { import_all(prompt); });
}

void Session::import_all(const PromptCache& prompt) {
  broken_ = true;  // until all layers are through
  const std::uint32_t chunk_tokens = runtime_->options().prefill_chunk;
  for (std::uint32_t first = 0; first < prompt.tokens(); first += chunk_tokens) {
    const std::uint32_t count = std::min(chunk_tokens, prompt.tokens() - first);
    for (LayerId layer{0}; layer.value < prompt.shape().layers; ++layer.value)
      import_chunk(prompt, layer, first, count);
  }
  tokens_ = prompt.tokens();
  logits_.assign(prompt.logits().begin(), prompt.logits().end());
  broken_ = false;
}

void Session::decode(int token) {
  Session* self = this;
  decode_batch({&self, 1}, {&token, 1});
}

void decode_batch(std::span<Session* const> sessions, std::span<const int> tokens) {
  as_one_error("decode", [&] { Session::decode_together(sessions, tokens); });
}

void Session::decode_together(std::span<Session* const> sessions, std::span<const int> tokens) {
  if (sessions.size() != tokens.size()) refuse("decode_batch needs one token per session");
  if (sessions.empty()) return;
  Session& lead = *sessions.front();
  std::vector<SequenceId> ids;
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    const Session& session = *sessions[i];
    session.require_usable(1);
    if (session.tokens_ == 0) refuse("decode before prefill; give the session a prompt first");
    if (session.model_ != lead.model_ || session.runtime_ != lead.runtime_) {
      refuse("decode_batch needs sessions of one model and one runtime");
    }
    if (std::find(ids.begin(), ids.end(), session.sequence_) != ids.end()) refuse("decode_batch got a session twice");
    session.model_->require_token(tokens[i]);
    ids.push_back(session.sequence_);
  }

  lead.placed_.clear();
  for (std::size_t i = 0; i < sessions.size(); ++i) lead.placed_.push_back({tokens[i], sessions[i]->tokens_});
  for (Session* session : sessions) session->broken_ = true;  // until all layers are through
  lead.model_->forward(
      lead.placed_,
      [&](const AttentionCall& call) {
        lead.runtime_->step({.layer = call.layer,
                             .sequences = ids,
                             .q = call.q,
                             .k = call.k,
                             .v = call.v,
                             .out = call.out,
                             .ordered = lead.model_->device() != nullptr});
      },
      lead.work_);

  const std::size_t vocabulary = lead.model_->config().vocab_size;
  // One session takes its logits without a detour.
  std::vector<float>& logits = sessions.size() == 1 ? lead.logits_ : lead.batch_logits_;
  logits.resize(sessions.size() * vocabulary);
  lead.model_->logits(lead.work_, static_cast<std::uint32_t>(sessions.size()), logits);
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    if (sessions.size() > 1) {
      const auto row = std::span<const float>(logits).subspan(i * vocabulary, vocabulary);
      sessions[i]->logits_.assign(row.begin(), row.end());
    }
    ++sessions[i]->tokens_;
    sessions[i]->decoding_ = true;
    sessions[i]->broken_ = false;
  }
}

}  // namespace sluice::tools

// The prompt calls of Runtime.
#include <algorithm>
#include <string>
#include <vector>

#include "runtime/impl.hpp"

namespace sluice {

runtime::PromptChunk Runtime::Impl::checked_chunk(SequenceId id, LayerId layer, const TensorView* q, const TensorView& k,
                                                  const TensorView& v) const {
  runtime::Sequence& sequence = find_whole(id);
  const AttentionShape& shape = options.shape;
  require_order(sequence, layer.value, k.tokens);
  require(k.tokens > 0, "k has no tokens");
  if (q != nullptr) require_tensor(*q, "q", k.tokens, shape.q_heads, shape.head_dim);
  require_tensor(k, "k", k.tokens, shape.kv_heads, shape.head_dim);
  require_tensor(v, "v", k.tokens, shape.kv_heads, shape.head_dim);
  require(k.dtype == v.dtype && k.token_stride == v.token_stride, "k and v differ in dtype or token stride");
  const std::uint64_t tokens = std::uint64_t{sequence.layers[layer.value].tokens} + k.tokens;
  const std::uint64_t room = pool.frames() / (shape.layers * shape.kv_heads) * std::uint64_t{options.page_tokens};
  if (tokens > room) {
    throw Error(Errc::out_of_capacity, "sequence " + std::to_string(id.value) + " would have " + std::to_string(tokens) +
                                           " tokens; the host pool holds " + std::to_string(room) +
                                           "; raise host_bytes or shorten the prompt");
  }
  return {.sequence = &sequence, .layer = &sequence.layers[layer.value], .q = {}, .k = k, .v = v, .last_q = {}, .out = {}};
}

void Runtime::Impl::add_prompts(LayerId layer, std::span<const runtime::PromptChunk> chunks, bool ordered) {
  std::vector<runtime::Sequence*> concerned;
  for (const runtime::PromptChunk& chunk : chunks) concerned.push_back(chunk.sequence);
  guarded(concerned, [&] {
    pipeline.settle_tail();  // It refers to tables of pages that grow now.
    pipeline.throw_news();
    for (const runtime::PromptChunk& chunk : chunks) {
      runtime::LayerState& state = *chunk.layer;
      const auto holds = [](const runtime::HeadPages& head) { return !head.held.empty(); };
      if (prompt.completes(state) || pipeline.has_begun(state) || state.policy ||
          std::any_of(state.heads.begin(), state.heads.end(), holds)) {
        // A prompt after decoding, or after a first step that failed, or after one that was said to be the last: what
        // was built from the old prompt is built again, and near copies of the open page would miss the new rows.
        prompt.settle();
        pipeline.forget_prompt(*chunk.sequence, state);
        residency.release(state);
      }
    }
    prompt.run(chunks, ordered);
    for (const runtime::PromptChunk& chunk : chunks) {
      chunk.layer->tokens += chunk.k.tokens;
      if (layer.value + 1 == options.shape.layers) chunk.sequence->stats.prefill_tokens += chunk.k.tokens;
    }
  });
}

void Runtime::prefill(const PrefillArgs& args) { prefill(std::span(&args, 1)); }

void Runtime::prefill(std::span<const PrefillArgs> batch) {
  translated([&] { impl_->prefill(batch); });
}

void Runtime::import_prefix(const ImportArgs& args) {
  translated([&] { impl_->import_prefix(args); });
}

void Runtime::Impl::prefill(std::span<const PrefillArgs> batch) {
  if (batch.empty()) return;
  const PrefillArgs& front = batch.front();
  std::vector<runtime::PromptChunk> chunks;
  chunks.reserve(batch.size());
  for (const PrefillArgs& args : batch) {
    const std::string who = "sequence " + std::to_string(args.sequence.value);
    require(args.layer == front.layer && args.ordered == front.ordered,
            who + " of the batch has another layer, or is ordered otherwise, than the first; prefill them in calls of "
                  "their own");
    runtime::PromptChunk chunk = checked_chunk(args.sequence, args.layer, &args.q, args.k, args.v);
    require_tensor(args.out, "out", args.k.tokens, options.shape.q_heads, options.shape.head_dim);
    const auto same = [&](const runtime::PromptChunk& other) { return other.sequence == chunk.sequence; };
    require(std::none_of(chunks.begin(), chunks.end(), same), who + " appears twice in the batch");
    chunk.q = chunk.last_q = args.q;
    chunk.out = args.out;
    chunk.last = args.last;
    chunks.push_back(chunk);
  }
  add_prompts(front.layer, chunks, front.ordered);
}

void Runtime::Impl::import_prefix(const ImportArgs& args) {
  runtime::PromptChunk chunk = checked_chunk(args.sequence, args.layer, nullptr, args.k, args.v);
  if (args.last_q.tokens != 0) {
    require_tensor(args.last_q, "last_q", args.last_q.tokens, options.shape.q_heads, options.shape.head_dim);
  }
  require(args.last_q.tokens <= args.k.tokens, "last_q has more tokens than the chunk");
  chunk.last_q = args.last_q;
  add_prompts(args.layer, {&chunk, 1}, false);
}

}  // namespace sluice

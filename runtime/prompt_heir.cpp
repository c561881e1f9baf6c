// What the pipeline has of a prompt before the first step: indices that were built while its pages passed through the
// device, and policies that begin in the background while later layers are still computed.
#include <algorithm>
#include <chrono>

#include "cpu/lent.hpp"
#include "runtime/host_kv.hpp"
#include "runtime/marked_range.hpp"
#include "runtime/pipeline.hpp"
#include "runtime/trace.hpp"
#include "runtime/wait.hpp"
#include "scheduler/policy/policies.hpp"
#include "sluice/error.hpp"

namespace sluice::runtime {
namespace {

std::uint64_t ns_since(Clock::time_point begin) {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(Clock::now() - begin).count());
}

std::uint32_t index_of(const Sequence& sequence, const LayerState& layer) {
  return static_cast<std::uint32_t>(&layer - sequence.layers.data());
}

/// What the bodies of begin_policy use.
struct Beginning {
  std::unique_ptr<scheduler::LayerPolicy> policy;
  std::vector<float> sums;
};

}  // namespace

PromptIndices Pipeline::indices(const Sequence& sequence, const LayerState& layer) {
  const std::uint32_t index = index_of(sequence, layer);
  const PolicySpec& spec = sequence.spec;
  PromptIndices wanted;
  if (ranks_pages(spec, index)) {
    wanted.digest = spec.pages.digest;
    wanted.digests = index_.digests();
  }
  if (prunes(spec, index)) {
    wanted.int4 = copies_.device();
    wanted.int4_host = copies_.host();
  } else if (estimates(spec, index)) {
    wanted.int4 = copies_.host();
  }
  return wanted;
}

void Pipeline::indexed(const Sequence& sequence, LayerState& layer, std::uint32_t begin, std::uint32_t end) {
  const std::uint32_t index = index_of(sequence, layer);
  // A page that decoding filled last is missing until the next step, which then builds what is behind it again.
  const auto extend = [&](std::uint32_t& pages) {
    if (begin <= pages) pages = std::max(pages, end);
  };
  if (ranks_pages(sequence.spec, index)) extend(layer.digested_pages);
  if (estimates(sequence.spec, index)) extend(layer.copied_pages);
  if (prunes(sequence.spec, index)) extend(layer.mirrored_pages);
}

scheduler::SumRequest Pipeline::sums(const Sequence& sequence, const LayerState& layer, std::uint32_t tokens) {
  const bool selects = scheduler::step_shape(sequence.spec, parts_.options.placement).select;
  if (!selects || sequence.spec.dense(index_of(sequence, layer))) return {};
  return scheduler::prompt_sums(sequence.spec, tokens);
}

void Pipeline::complete(Sequence& sequence, LayerState& layer, std::uint32_t tokens, std::vector<float> sums) {
  auto times = std::make_shared<BeginTimes>();
  auto kept = std::make_shared<std::vector<float>>(std::move(sums));
  const auto ticket = background_.post([this, &sequence, &layer, tokens, times, kept] {
    const MarkedRange range(parts_.device, "begin policy");
    *times = begin_policy(sequence, layer, tokens, std::move(*kept), deadline_after(parts_.options.timeout));
  });
  begun_.push_back({.ticket = ticket, .sequence = &sequence, .layer = &layer, .times = std::move(times)});
}

void Pipeline::collect_begun(LayerState& layer, Deadline deadline) {
  const auto at = std::find_if(begun_.begin(), begun_.end(), [&](const Begun& begun) { return begun.layer == &layer; });
  if (at == begun_.end()) return;
  const Clock::time_point begin = Clock::now();
  const Begun begun = *at;
  begun_.erase(at);
  try {
    background_.await(begun.ticket, deadline);
  } catch (const std::exception& error) {
    if (is_timeout(error)) throw;
    return;  // The first step begins the policy once more, and tells whoever asks for that step.
  }
  PromptStats& stats = begun.sequence->stats.prompt;
  stats.tables_ns += begun.times->tables_ns;
  stats.clusters_ns += begun.times->clusters_ns;
  stats.index_wait_ns += ns_since(begin);
}

void Pipeline::forget_prompt(Sequence& sequence, LayerState& layer) {
  settle(sequence);
  layer.policy.reset();
  layer.decoding = false;
}

/// The first step after a prompt: whatever was not prepared is built now.
void Pipeline::begin_decoding(Sequence& sequence, LayerState& layer, Deadline deadline) {
  const Clock::time_point begin = Clock::now();
  update_indices(sequence, layer, deadline);
  if (!layer.policy) {
    while (!begun_.empty()) {  // One at a time begins.
      collect_begun(*begun_.front().layer, deadline_after(parts_.options.timeout));
    }
    const BeginTimes times = begin_policy(sequence, layer, layer.tokens, {}, deadline);
    sequence.stats.prompt.tables_ns += times.tables_ns;
    sequence.stats.prompt.clusters_ns += times.clusters_ns;
  }
  sequence.stats.prompt.index_wait_ns += ns_since(begin);
  parts_.residency.fill(sequence, layer);
  parts_.residency.settle(sequence, layer, deadline_after(parts_.options.timeout));
  layer.decoding = true;
}

/// By the host, which has the last queries and all keys.
void Pipeline::sum_attention(const LayerState& layer, std::uint32_t tokens, const scheduler::SumRequest& wanted,
                             std::vector<float>& sums) {
  const std::uint64_t table = std::uint64_t{shape_.group()} * (tokens - wanted.sinks);
  sums.assign(2 * table * shape_.kv_heads, 0.f);
  std::vector<SumAttentionTask> tasks;
  for (std::uint32_t kv = 0; kv < shape_.kv_heads; ++kv) {
    const float* const q = layer.last_q.data() + std::uint64_t{kv} * shape_.group() * shape_.head_dim;
    tasks.push_back({.q = reinterpret_cast<const std::byte*>(q),
                     .kv = far_view(parts_.pool, layer.heads[kv]),
                     .first = tokens - layer.last_q_rows,
                     .count = layer.last_q_rows,
                     .rows = wanted.queries,
                     .sinks = wanted.sinks,
                     .by_position = sums.data() + 2 * kv * table,
                     .by_distance = sums.data() + (2 * kv + 1) * table});
  }
  const PrefillShape strides{.q_dtype = DType::f32,
                             .q_token_stride = std::uint64_t{shape_.q_heads} * shape_.head_dim,
                             .q_head_stride = shape_.head_dim};
  parts_.host.sum_attention(tasks, strides, shape_, nullptr);
}

Pipeline::BeginTimes Pipeline::begin_policy(Sequence& sequence, LayerState& layer, std::uint32_t tokens,
                                            std::vector<float> sums, Deadline deadline) {
  BeginTimes times;
  const Clock::time_point began = Clock::now();
  const std::uint32_t index = index_of(sequence, layer);
  // Where nothing is selected, nobody asks a policy: it need not look at the prompt.
  const bool selects = scheduler::step_shape(sequence.spec, parts_.options.placement).select;
  const cpu::Lent<Beginning> lent(parts_.workers);
  Beginning& begun = *lent;
  begun.policy = selects ? scheduler::make_layer_policy(sequence.spec, shape_, layout_.page_tokens, LayerId{index})
                         : scheduler::make_streaming_policy();
  begun.sums = std::move(sums);
  const std::uint32_t queries = layer.last_q_end == tokens ? layer.last_q_rows : 0;
  const std::uint32_t group = shape_.group();
  const std::uint64_t row = std::uint64_t{group} * shape_.head_dim;
  layer.hot.assign(shape_.kv_heads, {});
  Clock::time_point begin = Clock::now();
  // The host clusters as fast as the embedded device, which is the host, and all heads at a time.
  std::span<const scheduler::Clustering> clusterings;
  const auto request = scheduler::prompt_clustering(sequence.spec, tokens);
  if (selects && request.count != 0 && !sequence.spec.dense(index) && index_stream_) {
    clusterings = clusters_.make(request, layer.heads, *index_stream_, deadline);
    times.clusters_ns = ns_since(begin);
    begin = Clock::now();
  }
  const scheduler::SumRequest wanted = this->sums(sequence, layer, tokens);
  if (begun.sums.empty() && wanted.queries != 0 && wanted.queries <= queries) {
    sum_attention(layer, tokens, wanted, begun.sums);
  }
  const std::size_t table = begun.sums.size() / (2 * shape_.kv_heads);
  const std::uint32_t pages = static_cast<std::uint32_t>(div_up(tokens + 1, layout_.page_tokens));
  const std::uint32_t quota = parts_.residency.quota(sequence.spec, pages);
  parts_.workers.parallel_for(shape_.kv_heads, [=, this, &layer, all = lent.get()](std::uint32_t kv) {
    const cpu::Lent<std::vector<float>> last_q(parts_.workers, queries * row);
    for (std::uint32_t i = 0; i < queries; ++i) {
      const float* from = layer.last_q.data() + std::uint64_t{i} * shape_.q_heads * shape_.head_dim + kv * row;
      std::copy(from, from + row, last_q->data() + i * row);
    }
    const cpu::Lent<HostKv> reader(parts_.workers, parts_.host, shape_, parts_.pool, layer.heads[kv]);
    const auto both = std::span<const float>(all->sums).subspan(2 * kv * table, 2 * table);
    const scheduler::PromptSums own{.by_position = both.first(table), .by_distance = both.last(table)};
    all->policy->begin({.kv_head = kv,
                   .tokens = tokens,
                   .queries = queries,
                   .last_q = *last_q,
                   .kv = reader.get(),
                   .clustering = clusterings.empty() ? nullptr : &clusterings[kv],
                   .sums = all->sums.empty() ? nullptr : &own});
    all->policy->forecast(kv, tokens + 1, quota, layer.hot[kv]);
  });
  if (selects) times.tables_ns = ns_since(begin);
  trace(parts_.options.trace, "begin policy", Lane::cpu, index, began, Clock::now());
  layer.policy = std::move(begun.policy);
  return times;
}

}  // namespace sluice::runtime

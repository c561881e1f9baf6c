#include "runtime/prompt.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "runtime/host_kv.hpp"
#include "runtime/marked_range.hpp"
#include "runtime/wait.hpp"
#include "sluice/error.hpp"

namespace sluice::runtime {

Prompt::Prompt(const RuntimeOptions& options, Device& device, cpu::HostPool& pool, TransferEngine& link,
               Stream& device_stream, std::byte* staging, std::uint32_t staging_pages)
    : options_(options),
      shape_(options.shape),
      layout_(options.layout()),
      device_(device),
      pool_(pool),
      link_(link),
      device_stream_(device_stream),
      staging_(staging),
      staging_pages_(staging_pages),
      appended_(device.create_event()),
      flushed_(device.create_event()),
      attended_(device.create_event()) {}

void Prompt::append(Sequence& sequence, LayerState& layer, const TensorView& k, const TensorView& v) {
  const MarkedRange range(device_, "append prompt");
  const auto pages = static_cast<std::uint32_t>(div_up(layer.tokens + k.tokens, layout_.page_tokens));
  if (pages > layer.pages()) {
    const std::uint32_t missing = pages - layer.pages();
    const std::vector<PageRef> refs = pool_.allocate(missing * shape_.kv_heads);
    for (std::uint32_t kv = 0; kv < shape_.kv_heads; ++kv) {
      for (std::uint32_t i = 0; i < missing; ++i) layer.heads[kv].push(refs[kv * missing + i]);
    }
  }
  // Rows that fit the staging memory wherever in a page they start.
  const std::uint32_t room = (staging_pages_ / shape_.kv_heads - 1) * layout_.page_tokens;
  for (std::uint32_t done = 0; done < k.tokens;) {
    const std::uint32_t count = std::min(room, k.tokens - done);
    flush(layer, k, v, done, count);
    done += count;
  }
  sequence.stats.d2h_bytes += 2 * layout_.row_bytes() * shape_.kv_heads * k.tokens;
}

void Prompt::flush(LayerState& layer, const TensorView& k, const TensorView& v, std::uint32_t done, std::uint32_t count) {
  append_tasks_.clear();
  copies_.clear();
  const std::uint32_t first = layer.tokens + done;
  std::uint32_t staged = 0;
  for (std::uint32_t kv = 0; kv < shape_.kv_heads; ++kv) {
    for (std::uint32_t token = first; token < first + count;) {
      const std::uint32_t row = token % layout_.page_tokens;
      const std::uint32_t rows = std::min(layout_.page_tokens - row, first + count - token);
      std::byte* page = staging_ + layout_.page_bytes() * staged++;
      append_tasks_.push_back({.k = k.row(token - layer.tokens, kv),
                               .v = v.row(token - layer.tokens, kv),
                               .dtype = k.dtype,
                               .token_stride = k.token_stride,
                               .page = page,
                               .first_row = row,
                               .count = rows});
      std::byte* frame = pool_.frame(layer.heads[kv].frames[token / layout_.page_tokens]);
      const std::uint64_t offset = row * layout_.row_bytes();
      const std::uint64_t bytes = rows * layout_.row_bytes();
      if (rows == layout_.page_tokens) {
        copies_.push_back({.to = frame, .from = page, .bytes = layout_.page_bytes()});
      } else {
        copies_.push_back({.to = frame + offset, .from = page + offset, .bytes = bytes});
        const std::uint64_t half = layout_.half_bytes();
        copies_.push_back({.to = frame + half + offset, .from = page + half + offset, .bytes = bytes});
      }
      token += rows;
    }
  }
  device_.backend().append(append_tasks_, layout_, &device_stream_);
  device_stream_.record(*appended_);
  link_.stream().wait(*appended_);
  link_.copy(copies_);
  link_.stream().record(*flushed_);
  await(*flushed_, "write-through of a prompt chunk");
}

void Prompt::remember(Sequence& sequence, LayerState& layer, const TensorView& last_q) {
  const std::uint32_t wanted = wanted_queries(sequence.spec);
  if (wanted == 0 || last_q.tokens == 0) return;
  const std::uint64_t row = std::uint64_t{shape_.q_heads} * shape_.head_dim;
  const std::uint32_t fresh = std::min(wanted, last_q.tokens);
  const std::uint32_t kept = std::min(layer.last_q_rows, wanted - fresh);
  std::vector<float> rows(std::uint64_t{kept + fresh} * row);
  const auto old = layer.last_q.begin() + static_cast<std::ptrdiff_t>((layer.last_q_rows - kept) * row);
  std::copy_n(old, kept * row, rows.begin());
  TensorView tail = last_q;
  tail.data = last_q.row(last_q.tokens - fresh, 0);
  tail.tokens = fresh;
  const std::uint64_t bytes = fresh * row * sizeof(float);
  if (!last_q_ || last_q_->bytes() < bytes) last_q_ = device_.allocate_pinned(bytes);
  auto* const landed = reinterpret_cast<float*>(last_q_->data());
  device_.backend().to_f32(tail, landed, &device_stream_);
  device_stream_.record(*attended_);
  await(*attended_, "hand-over of the prompt's last queries");
  std::copy_n(landed, fresh * row, rows.begin() + static_cast<std::ptrdiff_t>(kept * row));
  layer.last_q = std::move(rows);
  layer.last_q_rows = kept + fresh;
}

void Prompt::attend(LayerState& layer, const TensorView& q, const MutableTensorView& out) {
  const MarkedRange range(device_, "attend prompt");
  prefill_tasks_.clear();
  for (std::uint32_t kv = 0; kv < shape_.kv_heads; ++kv) {
    const std::uint32_t head = kv * shape_.group();
    prefill_tasks_.push_back({.q = q.row(0, head),
                              .kv = far_view(pool_, layer.heads[kv]),
                              .first = layer.tokens,
                              .count = q.tokens,
                              .out = out.row(0, head)});
  }
  const PrefillShape strides{.q_dtype = q.dtype,
                             .out_dtype = out.dtype,
                             .q_token_stride = q.token_stride,
                             .q_head_stride = q.head_stride,
                             .out_token_stride = out.token_stride,
                             .out_head_stride = out.head_stride};
  device_.backend().prefill(prefill_tasks_, strides, shape_, &device_stream_);
  device_stream_.record(*attended_);
  await(*attended_, "prompt attention");
}

void Prompt::await(Event& event, const char* what) {
  const Deadline deadline = deadline_after(options_.timeout);
  if (!wait_until([&] { return event.state() != Event::State::pending; }, deadline)) {
    // Whatever is queued still refers to the caller's tensors; give it one more time-out to finish.
    device_stream_.synchronize(deadline_after(options_.timeout));
    throw Error(Errc::timeout, std::string(what) + " did not finish within " + std::to_string(options_.timeout.count()) +
                                   " ms; raise the timeout or prefill in smaller chunks");
  }
  if (event.state() == Event::State::failed) {
    throw Error(Errc::device, std::string(what) + " failed: " + event.reason() + "; the call may be repeated");
  }
}

}  // namespace sluice::runtime

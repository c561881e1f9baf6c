#include "tools/cli/bench/prefill_layer.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "cpu/float16.hpp"
#include "sluice/error.hpp"
#include "sluice/step/prefill_choice.hpp"
#include "tools/cli/bench/device_copies.hpp"
#include "tools/cli/text/report.hpp"
#include "tools/stages/stages.hpp"

namespace sluice::tools {
namespace {

constexpr std::chrono::minutes kPatience{10};
/// Tokens whose rows are in ordinary memory at a time.
constexpr std::uint32_t kPart = 8192;

void narrow(DType dtype, std::span<const float> row, std::byte* out) {
  if (dtype == DType::f32) {
    std::memcpy(out, row.data(), row.size_bytes());
    return;
  }
  auto* const halves = reinterpret_cast<std::uint16_t*>(out);
  for (std::size_t i = 0; i < row.size(); ++i) {
    halves[i] = dtype == DType::bf16 ? cpu::float_to_bf16(row[i]) : cpu::float_to_f16(row[i]);
  }
}

}  // namespace

void widen(DType dtype, const std::byte* from, std::span<float> out) {
  if (dtype == DType::f32) {
    std::memcpy(out.data(), from, out.size_bytes());
    return;
  }
  const auto* const halves = reinterpret_cast<const std::uint16_t*>(from);
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = dtype == DType::bf16 ? cpu::bf16_to_float(halves[i]) : cpu::f16_to_float(halves[i]);
  }
}

PrefillPages::PrefillPages(std::span<const PrefillLayerOptions> prompts, Device& device) {
  std::uint64_t pages = 0;
  for (const PrefillLayerOptions& prompt : prompts) {
    first_.push_back(static_cast<std::uint32_t>(pages));
    pages += div_up(prompt.tokens, prompt.layout.page_tokens) * prompt.shape.kv_heads;
  }
  if (pages >= kNone)
    throw Error(Errc::out_of_capacity, "bench prefill: " + std::to_string(pages) +
                                           " pages are more than a table can name; use --rows or --length of less, or "
                                           "a larger --page-tokens");
  pages_ = device.allocate(pages * prompts.front().layout.page_bytes());
}

PrefillLayer::PrefillLayer(const PrefillLayerOptions& options, std::byte* base, std::uint32_t first_page,
                           Device& device, Stream& stream, const cpu::Workers& builders)
    : options_(options), head_pages_(div_up(options.tokens, options.layout.page_tokens)), base_(base) {
  const AttentionShape& shape = options_.shape;
  const PageLayout& layout = options_.layout;
  for (std::uint32_t i = 0; i < head_pages_ * shape.kv_heads; ++i) frames_.push_back(first_page + i);
  const std::uint64_t token_bytes = layout.row_bytes() * shape.q_heads;
  queries_ = device.allocate(token_bytes * options.tokens);

  const PromptPattern pattern(options.structure, shape, options.seed);
  const std::uint64_t part_pages = std::min<std::uint64_t>(kPart / layout.page_tokens, head_pages_);
  const auto part = static_cast<std::uint32_t>(part_pages) * layout.page_tokens;
  const auto pages = device.allocate_pinned(part_pages * layout.page_bytes() * shape.kv_heads);
  const auto queries = device.allocate_pinned(token_bytes * part);
  for (std::uint32_t begin = 0; begin < options.tokens; begin += part) {
    const std::uint32_t count = std::min(part, options.tokens - begin);
    make_part(pattern, begin, count, pages->data(), queries->data(), builders);
    std::vector<Copy> copies{
        {.to = queries_->data() + begin * token_bytes, .from = queries->data(), .bytes = count * token_bytes}};
    const std::uint64_t bytes = div_up(count, layout.page_tokens) * layout.page_bytes();
    for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
      std::byte* const to = view(head).page(begin / layout.page_tokens);
      copies.push_back({.to = to, .from = pages->data() + head * bytes, .bytes = bytes});
    }
    stream.copy(copies);
    stream.synchronize(deadline_after(kPatience));
  }
}

/// Pages [kv_heads, pages], queries [count, q_heads, head_dim].
void PrefillLayer::make_part(const PromptPattern& pattern, std::uint32_t begin, std::uint32_t count, std::byte* pages,
                             std::byte* queries, const cpu::Workers& builders) const {
  const AttentionShape& shape = options_.shape;
  const PageLayout& layout = options_.layout;
  const auto part_pages = static_cast<std::uint32_t>(div_up(count, layout.page_tokens));
  builders.parallel_for(part_pages, [&](std::uint32_t page) {
    std::vector<float> rotation(pattern.rotation_size());
    std::vector<float> row(shape.head_dim);
    const std::uint32_t end = std::min(count, (page + 1) * layout.page_tokens);
    for (std::uint32_t t = page * layout.page_tokens; t < end; ++t) {
      pattern.rotation(begin + t, rotation.data());
      for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
        std::byte* const k = pages + (std::uint64_t{head} * part_pages + page) * layout.page_bytes() +
                             t % layout.page_tokens * layout.row_bytes();
        pattern.key(head, begin + t, rotation.data(), row.data());
        narrow(layout.dtype, row, k);
        pattern.value(head, begin + t, row.data());
        narrow(layout.dtype, row, k + layout.half_bytes());
      }
      for (std::uint32_t head = 0; head < shape.q_heads; ++head) {
        pattern.query(head, begin + t, rotation.data(), row.data());
        narrow(layout.dtype, row, queries + (std::uint64_t{t} * shape.q_heads + head) * layout.row_bytes());
      }
    }
  });
}

KvView PrefillLayer::view(std::uint32_t kv_head) const noexcept {
  return {.base = base_, .frames = frames_.data() + kv_head * head_pages_, .layout = options_.layout};
}

const std::byte* PrefillLayer::query(std::uint32_t token, std::uint32_t q_head) const noexcept {
  return queries_->data() + (std::uint64_t{token} * options_.shape.q_heads + q_head) * options_.layout.row_bytes();
}

PrefillShape PrefillLayer::strides() const noexcept {
  const std::uint64_t head = options_.shape.head_dim;
  const std::uint64_t token = head * options_.shape.q_heads;
  return {.q_dtype = options_.layout.dtype,
          .out_dtype = options_.layout.dtype,
          .q_token_stride = token,
          .q_head_stride = head,
          .out_token_stride = token,
          .out_head_stride = head};
}

PrefillPass::PrefillPass(const PrefillLayer& layer, std::uint32_t chunk_tokens, Device& device, Stream& stream)
    : layer_(layer), shape_(layer.options().shape), device_(device), stream_(stream) {
  const std::uint32_t tokens = layer.options().tokens;
  std::uint64_t words = 0;
  std::uint64_t scratch = 1;
  const auto stages = stages_of(device);
  for (std::uint32_t first = 0; first < tokens; first += chunk_tokens) {
    chunks_.push_back({.first = first, .count = std::min(chunk_tokens, tokens - first), .mask_at = words});
    words += shape_.kv_heads * mask_words(chunks_.back());
    scratch = std::max(scratch, stages->select_blocks_scratch_bytes(first, chunks_.back().count, shape_));
  }
  constexpr std::uint64_t kAlignment = 256;
  scratch = div_up(scratch, kAlignment) * kAlignment;
  out_ = device.allocate(std::uint64_t{tokens} * shape_.q_heads * layer.options().layout.row_bytes());
  lse_ = device.allocate(std::uint64_t{tokens} * shape_.q_heads * sizeof(float));
  masks_ = device.allocate(words * sizeof(std::uint32_t));
  choices_ = device.allocate(chunks_.size() * shape_.q_heads * sizeof(PrefillChoice));
  scratch_ = device.allocate(scratch * shape_.kv_heads);
  for (std::size_t c = 0; c < chunks_.size(); ++c) add_tasks(chunks_[c], c, scratch);
  chosen_.assign(chunks_.size(), false);
}

void PrefillPass::add_tasks(Chunk& chunk, std::size_t index, std::uint64_t scratch_bytes) {
  const std::uint32_t group = shape_.group();
  for (std::uint32_t head = 0; head < shape_.kv_heads; ++head) {
    const std::uint32_t q_head = head * group;
    const std::uint64_t row = std::uint64_t{head} * layer_.options().tokens + chunk.first;
    std::byte* const out =
        out_->data() + (std::uint64_t{chunk.first} * shape_.q_heads + q_head) * layer_.options().layout.row_bytes();
    std::uint32_t* const blocks =
        reinterpret_cast<std::uint32_t*>(masks_->data()) + chunk.mask_at + head * mask_words(chunk);
    chunk.dense.push_back({.q = layer_.query(chunk.first, q_head),
                           .kv = layer_.view(head),
                           .first = chunk.first,
                           .count = chunk.count,
                           .out = out,
                           .lse = reinterpret_cast<float*>(lse_->data()) + row * group});
    chunk.chosen.push_back(chunk.dense.back());
    chunk.chosen.back().blocks = blocks;
    chunk.choice.push_back(
        {.q = chunk.dense.back().q,
         .kv = chunk.dense.back().kv,
         .first = chunk.first,
         .count = chunk.count,
         .blocks = blocks,
         .choices = reinterpret_cast<PrefillChoice*>(choices_->data()) + index * shape_.q_heads + q_head,
         .scratch = scratch_->data() + head * scratch_bytes});
  }
}

std::uint64_t PrefillPass::mask_words(const Chunk& chunk) const noexcept {
  return std::uint64_t{shape_.group()} * prefill_blocks(chunk.first, chunk.count) *
         prefill_mask_words(chunk.first + chunk.count);
}

void PrefillPass::add_choice(std::size_t chunk, std::vector<SelectBlocksTask>& tasks) const {
  if (chunk >= chunks_.size() || !chosen_[chunk]) return;
  tasks.insert(tasks.end(), chunks_[chunk].choice.begin(), chunks_[chunk].choice.end());
}

void PrefillPass::add_attention(std::size_t chunk, std::vector<PrefillTask>& dense,
                                std::vector<PrefillTask>& chosen) const {
  if (chunk >= chunks_.size()) return;
  const Chunk& of = chunks_[chunk];
  std::vector<PrefillTask>& to = chosen_[chunk] ? chosen : dense;
  const std::vector<PrefillTask>& from = chosen_[chunk] ? of.chosen : of.dense;
  to.insert(to.end(), from.begin(), from.end());
}

std::vector<float> PrefillPass::lse() const {
  const std::uint64_t tokens = layer_.options().tokens;
  const std::uint32_t group = shape_.group();
  const auto by_head = downloaded<float>(device_, stream_, lse_->data(), tokens * shape_.q_heads);
  std::vector<float> lse(by_head.size());
  for (std::uint32_t head = 0; head < shape_.kv_heads; ++head) {
    for (std::uint64_t t = 0; t < tokens; ++t) {
      std::copy_n(&by_head[(head * tokens + t) * group], group, &lse[t * shape_.q_heads + head * group]);
    }
  }
  return lse;
}

std::vector<float> PrefillPass::outputs(std::span<const std::uint32_t> tokens) const {
  const DType dtype = layer_.options().layout.dtype;
  const std::uint64_t bytes = layer_.options().layout.row_bytes() * shape_.q_heads;
  const auto rows = device_.allocate_pinned(tokens.size() * bytes);
  std::vector<Copy> copies;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    copies.push_back({.to = rows->data() + i * bytes, .from = out_->data() + tokens[i] * bytes, .bytes = bytes});
  }
  stream_.copy(copies);
  stream_.synchronize(deadline_after(kPatience));
  std::vector<float> out(tokens.size() * shape_.q_heads * shape_.head_dim);
  widen(dtype, rows->data(), out);
  return out;
}

std::vector<PrefillChoice> PrefillPass::choices() const {
  return downloaded<PrefillChoice>(device_, stream_, choices_->data(), chunks_.size() * shape_.q_heads);
}

std::vector<std::uint32_t> PrefillPass::mask(std::uint32_t token, std::uint32_t q_head) const {
  const auto holds = [&](const Chunk& c) { return token - c.first < c.count; };
  const auto at_chunk = std::find_if(chunks_.begin(), chunks_.end(), holds);
  if (!chosen_[static_cast<std::size_t>(at_chunk - chunks_.begin())]) return {};
  const Chunk& chunk = *at_chunk;
  const std::uint32_t words = prefill_mask_words(chunk.first + chunk.count);
  const std::uint64_t blocks = prefill_blocks(chunk.first, chunk.count);
  const std::uint32_t block = token / kPrefillBlock - chunk.first / kPrefillBlock;
  const std::uint64_t at = chunk.mask_at + (q_head * blocks + block) * words;
  return downloaded<std::uint32_t>(device_, stream_, masks_->data() + at * sizeof(std::uint32_t), words);
}

}  // namespace sluice::tools

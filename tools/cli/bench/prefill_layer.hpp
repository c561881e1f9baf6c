#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "cpu/threads/workers.hpp"
#include "sluice/device.hpp"
#include "sluice/step/prefill_choice.hpp"
#include "sluice/step/prefill_tasks.hpp"
#include "tools/cli/synthetic/prompt_pattern.hpp"

namespace sluice::tools {

struct PrefillLayerOptions {
  AttentionShape shape;
  PageLayout layout;
  std::uint32_t tokens = 0;
  PromptStructure structure{};
  std::uint64_t seed = 0;
};

/// Device memory for the pages of prompts that are attended together: one piece of it, as an engine has, for kernels
/// take tasks of the same memory in one launch.
class PrefillPages {
 public:
  /// @throws Error{Errc::out_of_capacity} if the device cannot hold them.
  PrefillPages(std::span<const PrefillLayerOptions> prompts, Device& device);
  [[nodiscard]] std::byte* base() const noexcept { return pages_->data(); }
  /// The first page of the prompt with this index; its others follow.
  [[nodiscard]] std::uint32_t first(std::size_t prompt) const noexcept { return first_[prompt]; }

 private:
  std::vector<std::uint32_t> first_;
  std::unique_ptr<Buffer> pages_;
};

/// One layer of a synthetic prompt in device memory: keys and values in pages, the pages of a head one after the
/// other; queries [tokens, q_heads, head_dim] in the pages' dtype.
class PrefillLayer {
 public:
  /// Rows are made by all `builders`, a part of the prompt at a time. `base`: the memory that the prompt's pages are
  /// in, from page `first_page` on; it must outlive the layer.
  /// @throws Error{Errc::out_of_capacity} if the device cannot hold it.
  PrefillLayer(const PrefillLayerOptions& options, std::byte* base, std::uint32_t first_page, Device& device,
               Stream& stream, const cpu::Workers& builders);

  [[nodiscard]] const PrefillLayerOptions& options() const noexcept { return options_; }
  [[nodiscard]] KvView view(std::uint32_t kv_head) const noexcept;
  [[nodiscard]] std::uint64_t head_bytes() const noexcept { return head_pages_ * options_.layout.page_bytes(); }
  [[nodiscard]] const std::byte* query(std::uint32_t token, std::uint32_t q_head) const noexcept;
  /// Strides of queries, and of outputs of the same kind.
  [[nodiscard]] PrefillShape strides() const noexcept;

 private:
  void make_part(const PromptPattern& pattern, std::uint32_t begin, std::uint32_t count, std::byte* pages,
                 std::byte* queries, const cpu::Workers& builders) const;

  PrefillLayerOptions options_;
  std::uint64_t head_pages_;
  std::vector<std::uint32_t> frames_;  ///< [kv_heads, head_pages]
  std::byte* base_;
  std::unique_ptr<Buffer> queries_;
};

/// A prompt's attention, chunk by chunk: the tasks of the verbs, and what they write. Must stay until the stream has
/// passed what was enqueued of it.
class PrefillPass {
 public:
  PrefillPass(const PrefillLayer& layer, std::uint32_t chunk_tokens, Device& device, Stream& stream);

  /// Which chunks choose their blocks; the others are dense. [chunks]; all are dense at first.
  void plan(std::vector<bool> chosen) { chosen_ = std::move(chosen); }
  [[nodiscard]] std::size_t chunks() const noexcept { return chunks_.size(); }
  [[nodiscard]] bool chooses(std::size_t chunk) const noexcept { return chosen_[chunk]; }
  /// Keys that a chunk sees.
  [[nodiscard]] std::uint32_t keys(std::size_t chunk) const noexcept {
    return chunks_[chunk].first + chunks_[chunk].count;
  }

  /// Position of a chunk's first token.
  [[nodiscard]] std::uint32_t first(std::size_t chunk) const noexcept { return chunks_[chunk].first; }

  /// Tasks of a chunk, by KV head, as planned; none for a chunk that the prompt does not have, or that chooses nothing.
  void add_choice(std::size_t chunk, std::vector<SelectBlocksTask>& tasks) const;
  void add_attention(std::size_t chunk, std::vector<PrefillTask>& dense, std::vector<PrefillTask>& chosen) const;

  /// Waits. [tokens, q_heads]
  [[nodiscard]] std::vector<float> lse() const;
  /// Waits. [tokens.size(), q_heads, head_dim]
  [[nodiscard]] std::vector<float> outputs(std::span<const std::uint32_t> tokens) const;
  /// Waits. Of every chunk and query head, [chunks, q_heads], as far as chunks were ever chosen.
  [[nodiscard]] std::vector<PrefillChoice> choices() const;
  /// Waits. The words of the query block that a token is in; empty for a chunk that is dense.
  [[nodiscard]] std::vector<std::uint32_t> mask(std::uint32_t token, std::uint32_t q_head) const;

 private:
  struct Chunk {
    std::uint32_t first = 0;
    std::uint32_t count = 0;
    std::uint64_t mask_at = 0;                   ///< in words
    std::vector<PrefillTask> dense{}, chosen{};  ///< [kv_heads]
    std::vector<SelectBlocksTask> choice{};      ///< likewise
  };
  void add_tasks(Chunk& chunk, std::size_t index, std::uint64_t scratch_bytes);
  /// Of one KV head's group in one chunk.
  [[nodiscard]] std::uint64_t mask_words(const Chunk& chunk) const noexcept;

  const PrefillLayer& layer_;
  AttentionShape shape_;
  Device& device_;
  Stream& stream_;
  std::vector<Chunk> chunks_;
  std::vector<bool> chosen_;         ///< [chunks]
  std::unique_ptr<Buffer> out_;      ///< [tokens, q_heads, head_dim]
  std::unique_ptr<Buffer> lse_;      ///< [kv_heads, tokens, group]
  std::unique_ptr<Buffer> masks_;    ///< per chunk [q_heads, query blocks, words]
  std::unique_ptr<Buffer> choices_;  ///< [chunks, q_heads]
  std::unique_ptr<Buffer> scratch_;  ///< [kv_heads]
};

/// Elements in float32, whatever they are in memory.
void widen(DType dtype, const std::byte* from, std::span<float> out);

}  // namespace sluice::tools

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "scheduler/heap_bytes.hpp"
#include "scheduler/layer_policy.hpp"
#include "scheduler/lsh/hash_tables.hpp"
#include "scheduler/lsh/projections.hpp"
#include "scheduler/token_set.hpp"
#include "sluice/shape.hpp"

namespace sluice::scheduler {

/// How likely a key is to meet a query in `min_collisions` of the hash tables (MagicPIG, arXiv 2410.16179): each bit of
/// the hash agrees with probability 1 - angle / pi. What rounding puts outside [-1, 1] is taken for the end.
[[nodiscard]] float collision_probability(const LshOptions& options, float cosine) noexcept;

/// Hash tables over the keys of one KV head's prompt, without its sinks and its last tokens. Keys are hashed relative
/// to their mean: they lie in a cone, where random planes would hardly tell them apart. Queries are not, so that all
/// inner products of a query shift by one number, which softmax does not see.
class LshSource {
 public:
  LshSource(const LshOptions& options, const AttentionShape& shape, std::uint32_t sinks);

  void begin(const PromptContext& prompt);

  /// Tokens [first(), end()) are hashed. Empty after a prompt too short to have any.
  [[nodiscard]] std::uint32_t first() const noexcept { return first_; }
  [[nodiscard]] std::uint32_t end() const noexcept { return first_ + tables_->count(); }
  [[nodiscard]] bool empty() const noexcept { return tables_->count() == 0; }

  /// Hashes the queries [group, head_dim].
  void hash(const float* q, KvReader& kv);
  /// Bytes of the tables' lists that `add_collisions` reads for one query head, on average.
  [[nodiscard]] std::uint64_t lookup_bytes() const noexcept {
    return (std::uint64_t{options_.tables} * tables_->count() * sizeof(std::uint32_t)) >> options_.bits;
  }
  /// Adds the tokens that meet the query of head `h` hashed last.
  void add_collisions(std::uint32_t h, TokenSet& set);
  /// With which probability a hashed token of this score met that query.
  [[nodiscard]] float probability(std::uint32_t h, std::uint32_t token, float score) const noexcept;
  /// But for the projections, which all share; with the tables, which a copy shares.
  [[nodiscard]] std::uint64_t heap_bytes() const noexcept {
    return tables_->heap_bytes() + scheduler::heap_bytes(mean_, norms_, queries_, codes_, products_, keys_);
  }
  /// What a source that has hashed `tokens` tokens holds at most.
  [[nodiscard]] static std::uint64_t most_heap_bytes(const LshOptions& options, const AttentionShape& shape,
                                                     std::uint32_t tokens) noexcept;

 private:
  /// Keys that are hashed at once: as many columns as KvReader::score_rows takes.
  static constexpr std::uint32_t kBlock = 32;

  void find_mean(std::uint32_t count, KvReader& kv);
  void hash_keys(std::uint32_t count, KvReader& kv);
  [[nodiscard]] float uncapped(float score) const noexcept;

  LshOptions options_;
  std::uint32_t group_;
  std::uint32_t head_dim_;
  std::uint32_t sinks_;
  float scale_;    ///< AttentionShape::score_scale
  float softcap_;  ///< AttentionShape::softcap
  std::shared_ptr<const Projections> projections_;
  std::uint32_t first_ = 0;
  std::shared_ptr<const HashTables> tables_ = std::make_shared<const HashTables>();
  std::vector<float> mean_;   ///< [head_dim]
  std::vector<float> norms_;  ///< of the hashed keys, relative to the mean

  // The queries hashed last.
  struct Query {
    float norm = 0.f;
    float with_mean = 0.f;  ///< its product with the mean key
  };
  std::vector<Query> queries_;        ///< [group]
  std::vector<std::uint16_t> codes_;  ///< [tables, group]
  std::vector<float> products_;       // scratch
  std::vector<float> keys_;           // [kBlock, head_dim] scratch of `begin`
};

}  // namespace sluice::scheduler

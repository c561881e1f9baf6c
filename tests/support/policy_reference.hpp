#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cpu/kernels/kernels.hpp"
#include "runtime/background/audit_group.hpp"
#include "runtime/far/host_kv.hpp"
#include "scheduler/layer_policy.hpp"
#include "sluice/audit.hpp"
#include "tests/support/engine_rig.hpp"

namespace sluice::test::policies {

/// What a policy makes of a story, one token, layer and head after the other: what it chooses is asked of its
/// scheduler::LayerPolicy, and attended in float64; digests are the host's, scored in float64. Nothing is near, nothing
/// overlaps.
class Reference {
 public:
  Reference(const EngineRig& rig, const Story& story, const AttentionShape& shape, const PolicySpec& policy);
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;

  /// The next tokens are a prompt's, up to this one.
  void prefill(std::uint32_t tokens) { take(tokens, true); }
  /// Those of a prompt whose queries nobody has.
  void import(std::uint32_t tokens) { take(tokens, false); }
  /// Outputs of the next token: [layers, q_heads, head_dim].
  std::vector<float> decode();

  /// As Story::see has them.
  void see(std::vector<std::uint32_t> windows) { windows_ = std::move(windows); }
  void watch(std::vector<std::uint32_t> tokens) { watched_ = std::move(tokens); }
  /// Of all tokens that were decoded.
  [[nodiscard]] const AuditReport& audit() const noexcept { return report_; }

 private:
  static constexpr std::uint32_t kPageTokens = 16;
  /// What one KV head's group attends.
  struct Attended {
    SelectionRow selected;
    Bypass bypass;
    std::vector<std::uint32_t> heads;  ///< [tokens] bit h: query head h attends it
  };
  class Layer;
  void take(std::uint32_t tokens, bool queries);
  void append(std::uint32_t token);
  /// The policies look at all there is, with the queries of the prompt's newest tokens.
  void begin();
  [[nodiscard]] runtime::HostKv reader(std::uint32_t layer, std::uint32_t kv_head, std::uint32_t tokens);
  [[nodiscard]] Attended choose(std::uint32_t layer, std::uint32_t kv_head);
  void rank(std::uint32_t layer, std::uint32_t kv_head, std::uint32_t pages, std::uint32_t picks,
            std::vector<float>& scores, std::vector<std::uint32_t>& ranked);
  void attend(std::uint32_t layer, std::uint32_t kv_head, const Attended& attended, float* out);
  /// Adds to the audit what a group has attended; `audited` lacks what is the same of all its heads.
  void report(std::uint32_t layer, std::uint32_t kv_head, const Attended& attended, runtime::AuditedGroup& audited);
  void learn();
  [[nodiscard]] std::uint32_t window(std::uint32_t layer) const { return windows_.empty() ? 0 : windows_[layer]; }
  /// Of the token that is decoded.
  [[nodiscard]] double score(std::uint32_t layer, std::uint32_t head, std::uint32_t token) const;

  const Story& story_;
  AttentionShape shape_;
  PolicySpec policy_;
  PageLayout layout_;
  std::vector<std::uint32_t> frames_;              ///< in no order that would hide a mistake
  std::vector<std::vector<std::byte>> pages_;      ///< [layers, kv_heads]
  std::vector<std::unique_ptr<scheduler::LayerPolicy>> layers_;  ///< null: dense
  std::uint32_t at_ = 0;                           ///< tokens that there are
  std::uint32_t prompt_begin_ = 0;                 ///< tokens from here to `at_` are a prompt's, with queries
  bool begun_ = false;
  std::vector<std::uint32_t> windows_;
  std::vector<std::uint32_t> watched_;
  AuditReport report_;
};

}  // namespace sluice::test::policies

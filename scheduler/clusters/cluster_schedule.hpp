#pragma once

#include <algorithm>
#include <cstdint>

#include "sluice/policy.hpp"

namespace sluice::scheduler {

/// Which tokens of a sequence are in clusters, and in which: what ClusterSource does for the CPU, for keys that the
/// device clusters. What it says depends on the sequence's tokens alone, so that clusters can be made anew at any time.
class ClusterSchedule {
 public:
  explicit ClusterSchedule(const ClusterOptions& options = {}) noexcept : options_(options) {}

  /// The most clusters of a sequence of as many tokens: each clustering has one at least.
  [[nodiscard]] static std::uint32_t most_clusters(const ClusterOptions& options, std::uint32_t tokens) noexcept {
    return tokens / options.tokens_per_cluster + tokens / options.recluster_every + 1;
  }

  /// Tokens that are not decoded come: what is decoded behind them begins with a prompt.
  void forget() noexcept { known_ = false; }
  /// A token is going to be decoded behind `tokens` others. The first one behind a prompt sees this clustered; later
  /// ones see what is generated, in blocks, as soon as these are whole.
  void advance(std::uint32_t tokens) noexcept {
    if (!known_) {
      known_ = true;
      looked_ = tokens;
      first_ = clustered_ = tokens < options_.min_tokens ? 0 : tokens;
    } else if (tokens > looked_) {
      clustered_ = std::max(clustered_, blocks_end(tokens));
    }
  }
  /// As if there had never been more tokens.
  void truncate(std::uint32_t tokens) noexcept {
    if (tokens < looked_) return forget();
    clustered_ = std::min(clustered_, tokens > looked_ ? blocks_end(tokens) : first_);
  }

  /// Tokens [0, clustered()) are in clusters.
  [[nodiscard]] std::uint32_t clustered() const noexcept { return known_ ? clustered_ : 0; }
  [[nodiscard]] std::uint32_t clusters() const noexcept { return clusters_of(clustered()); }
  /// visit(first token, tokens, first cluster, clusters) for each clustering but those of the first `made` tokens.
  template <class Visit>
  void for_each_behind(std::uint32_t made, const Visit& visit) const {
    for (std::uint32_t at = 0; at < clustered();) {
      const std::uint32_t end = at < first_ ? first_ : at + options_.recluster_every;
      if (at >= made) visit(at, end - at, clusters_of(at), clusters_of(end) - clusters_of(at));
      at = end;
    }
  }

 private:
  [[nodiscard]] std::uint32_t blocks_end(std::uint32_t tokens) const noexcept {
    return first_ + (tokens - first_) / options_.recluster_every * options_.recluster_every;
  }
  /// In the first `tokens`, with which a clustering ends.
  [[nodiscard]] std::uint32_t clusters_of(std::uint32_t tokens) const noexcept {
    const auto in = [&](std::uint32_t count) { return std::max(count / options_.tokens_per_cluster, 1u); };
    if (tokens < first_ || tokens == 0) return 0;
    const std::uint32_t blocks = (tokens - first_) / options_.recluster_every;
    return (first_ == 0 ? 0 : in(first_)) + blocks * in(options_.recluster_every);
  }

  ClusterOptions options_;
  bool known_ = false;
  std::uint32_t looked_ = 0;     ///< tokens that there were behind the prompt
  std::uint32_t first_ = 0;      ///< of these, that were clustered at once
  std::uint32_t clustered_ = 0;  ///< tokens
};

}  // namespace sluice::scheduler

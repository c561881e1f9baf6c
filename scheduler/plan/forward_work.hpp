#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/plan/task_graph.hpp"
#include "sluice/engine.hpp"
#include "sluice/engine_options.hpp"
#include "sluice/shape.hpp"
#include "sluice/step/forward.hpp"
#include "sluice/step/page.hpp"
#include "sluice/trace.hpp"

namespace sluice::scheduler {

/// What decides which stages a forward has, and how many bytes they move, beside its rows.
struct WorkPlace {
  AttentionShape shape;
  PageLayout layout;  ///< of far pages
  PlacementMode placement = PlacementMode::hybrid;
  std::uint32_t fetch_share = 0;  ///< in `hybrid`, of kWholeFetchShare; see EngineOptions::fetch_share
  Bucket bucket;
  bool promotes = false;  ///< far rows are brought near
  std::span<const std::uint32_t> windows{};  ///< [layers] see EngineOptions::windows; or empty
  std::uint32_t code_bits = 4;               ///< of keys' copies, see EngineSizes::code_bits

  [[nodiscard]] std::uint32_t window(std::uint32_t layer) const noexcept {
    return windows.empty() ? 0 : windows[layer];
  }
};

/// Of its forwards.
[[nodiscard]] ForwardKind kind_of(const WorkPlace& place) noexcept;

/// What depends on queries and on the cache, not on the plan. By default as if the cache were empty and no two query
/// heads of a group chose the same token.
struct WorkShares {
  double near = 0.0;      ///< of the tokens that rows attend, those that lie near
  double linked = 0.0;    ///< likewise, few far ones that `attend` reads over the link, where there is no stage for it
  double chosen = 1.0;    ///< of the tokens beyond sinks and recent ones that a row may attend, those that it does
  double promoted = 0.0;  ///< tokens brought near, of each layer and KV head
  double scored = 0.0;    ///< keys that the CPU reads to choose, of each row, layer and KV head that it chooses for
};

/// The shares that a forward of these rows had, if `before` and `after` it the engine counted that. Those that cannot
/// be told, as there was nothing to count, keep their defaults.
[[nodiscard]] WorkShares shares_of(const WorkPlace& place, std::span<const ForwardRow> rows, const EngineStats& before,
                                   const EngineStats& after) noexcept;

/// The work of a forward, layer by layer. With R = bytes of a row of K or V, its scale included where it lies far and
/// has one, and per KV head unless it says otherwise:
///
/// | stage      | lane   | bytes                                                                                   |
/// |------------|--------|-----------------------------------------------------------------------------------------|
/// | append     | device | reads 2 R, writes head_dim / 2 + 4 per new token                                        |
/// |            | link   | writes 2 R per new token, and 4 head_dim per query head of each row that chooses        |
/// | prefill    | link   | reads 2 R per key that a chunk sees                                                     |
/// |            | device | likewise                                                                                |
/// | rank       | device | reads 2 R per ranked page                                                               |
/// | score      | device | reads head_dim / 2 + 4 per scored token                                                 |
/// | choose     | device | reads 4 per query head and scored token; of rows that choose among clusters 4 head_dim  |
/// |            |        | per cluster, and head_dim / 2 + 4 per sampled token                                     |
/// | split      | device | writes 4 per near token                                                                 |
/// |            | link   | writes 4 per far token that the CPU attends                                             |
/// | attend     | device | reads 2 R per near token                                                                |
/// |            | link   | of a bucket that is whole reads 2 R per far token, else of few ones                     |
/// | promote    | link   | reads 2 R per promoted token                                                            |
/// | choose_far | cpu    | reads R per key that is scored there                                                    |
/// | attend_far | cpu    | reads 2 R per far token                                                                 |
/// | fetch      | link   | reads 2 R per fetched token                                                             |
/// | merge      | device | reads 4 (head_dim + 1) per query head of each row that chooses                          |
/// |            | link   | likewise, if the CPU was asked                                                          |
/// | audit      | link   | writes 8 head_dim + 4 per query head of each row that chooses, and 4 per attended token |
///
/// Where tokens are attended that are not near follows from the placement, and in `hybrid` from the share of a list
/// that is fetched: by the CPU, or over the link. (MagicPIG's are always attended by the CPU.) Chunks that choose
/// blocks count as if they were dense; arithmetic is not counted, so that a chunk of a prompt takes longer than its
/// bytes. Items are those of the tasks of the forward's TaskGraph, in their order, on all lanes that a task moves bytes
/// over: they wait for those of the task before it in its queue, and of the tasks whose outputs it reads. What `fill`
/// brings near is an item of `promote`, for which nothing waits.
/// Stages without rows have no items. What a model does between layers is not among them.
[[nodiscard]] std::vector<WorkItem> forward_work(const WorkPlace& place, std::span<const ForwardRow> rows,
                                                 std::span<const ForwardChunk> chunks, const WorkShares& shares);

}  // namespace sluice::scheduler

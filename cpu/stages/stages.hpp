#pragma once

#include <cstdint>
#include <span>

#include "cpu/kernels/kernels.hpp"
#include "cpu/threads/workers.hpp"
#include "sluice/error.hpp"
#include "sluice/prefill.hpp"
#include "sluice/step/attend_tasks.hpp"
#include "sluice/step/prefill_tasks.hpp"
#include "sluice/step/select_tasks.hpp"

/// Stages of attention in host memory, of which forwards and benchmarks are made. They compute before they return, on
/// all workers where that is worthwhile; one long task is split and its parts are merged, the same way for any number
/// of threads. Safe to call from several threads and from inside a worker. Without tasks they do nothing.
/// @throws Error{Errc::unsupported} for a shape that `unsupported_reasons` names, before anything is written;
///         Error{Errc::timeout} that has left a worker behind: then the task array may go all the same, and the memory
///         that the tasks point to must stay for as long as the workers' threads, see Workers::keep.
namespace sluice::cpu {

/// Who computes, and by which kernels.
struct Host {
  const Workers& workers;
  const Kernels& kernels = fastest_kernels();
};

/// K and V are read once per GQA group.
void attend(const Host& host, std::span<const AttendTask> tasks, const AttentionShape& shape);

void score_pages(const Host& host, std::span<const ScorePagesTask> tasks, const AttentionShape& shape,
                 DType digest_dtype);
void score_int4(const Host& host, std::span<const ScoreInt4Task> tasks, const AttentionShape& shape,
                const PageLayout& layout);
void top_k(const Host& host, std::span<const TopKTask> tasks);
void top_p(const Host& host, std::span<const TopPTask> tasks);
/// Of one task, by the thread that calls: marks what it keeps in its mask; returns how many.
std::uint32_t select_top_p(const Kernels& kernels, const TopPTask& task);
/// @throws Error{Errc::invalid_argument} for more clusters than keys, none, or no iteration; nothing was written.
void cluster(const Host& host, std::span<const ClusterTask> tasks);
void choose_clusters(const Host& host, std::span<const ChooseClustersTask> tasks, const AttentionShape& shape,
                     const PageLayout& layout);
void choose_pages(const Host& host, std::span<const ChoosePagesTask> tasks, const AttentionShape& shape,
                  const PageLayout& layout);

/// Attention of prompts, by all keys or by a choice of blocks.
void prefill(const Host& host, std::span<const PrefillTask> tasks, const PrefillShape& strides,
             const AttentionShape& shape);
/// Chooses as `spec.mode` says; automatic is flexprefill.
/// @throws Error{Errc::invalid_argument} for PrefillMode::full, which chooses nothing
void select_blocks(const Host& host, std::span<const SelectBlocksTask> tasks, const PrefillSpec& spec,
                   const PrefillShape& strides, const AttentionShape& shape);

}  // namespace sluice::cpu

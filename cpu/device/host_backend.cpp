#include "cpu/device/host_backend.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/device/host_stream.hpp"
#include "sluice/error.hpp"

namespace sluice::cpu {

std::vector<std::string> HostBackend::unsupported_reasons(const AttentionShape& shape, const PageLayout& layout) const {
  return cpu_.unsupported_reasons(shape, layout);
}

void HostBackend::check(const AttentionShape& shape, const PageLayout& layout) const {
  const auto reasons = unsupported_reasons(shape, layout);
  if (!reasons.empty()) throw Error(Errc::unsupported, reasons.front());
}

void HostBackend::append(std::span<const AppendTask> tasks, const PageLayout& layout, Stream* stream) {
  if (tasks.empty()) return;
  run_or_enqueue(stream, "append", [=, this] { cpu_.append(tasks, layout, nullptr); });
}

void HostBackend::to_f32(std::span<const ToF32Task> tasks, Stream* stream) {
  const auto is_empty = [](const ToF32Task& task) { return task.in.tokens == 0; };
  if (std::all_of(tasks.begin(), tasks.end(), is_empty)) return;
  run_or_enqueue(stream, "to_f32",
                 [this, copied = std::vector(tasks.begin(), tasks.end())] { cpu_.to_f32(copied, nullptr); });
}

void HostBackend::attend(std::span<const AttendTask> tasks, const AttentionShape& shape, Stream* stream) {
  if (tasks.empty()) return;
  check(shape, tasks.front().kv.layout);
  run_or_enqueue(stream, "attend", [=, this] { cpu_.attend(tasks, shape, nullptr); });
}

void HostBackend::merge(std::span<const MergeTask> tasks, const AttentionShape& shape, DType out_dtype,
                        Stream* stream) {
  if (tasks.empty()) return;
  run_or_enqueue(stream, "merge", [=, this] { cpu_.merge(tasks, shape, out_dtype, nullptr); });
}

void HostBackend::digest(std::span<const DigestTask> tasks, DigestKind kind, const PageLayout& layout, Stream* stream) {
  if (tasks.empty()) return;
  run_or_enqueue(stream, "digest", [=, this] { cpu_.digest(tasks, kind, layout, nullptr); });
}

void HostBackend::make_codes(std::span<const CodesTask> tasks, const PageLayout& layout, Stream* stream) {
  if (tasks.empty()) return;
  run_or_enqueue(stream, "make_codes", [=, this] { cpu_.make_codes(tasks, layout, nullptr); });
}

void HostBackend::score_tokens(std::span<const ScoreTokensTask> tasks, const AttentionShape& shape, Stream* stream) {
  if (tasks.empty()) return;
  check(shape, tasks.front().kv.layout);
  run_or_enqueue(stream, "score_tokens", [=, this] { cpu_.score_tokens(tasks, shape, nullptr); });
}

void HostBackend::score_pages(std::span<const ScorePagesTask> tasks, const AttentionShape& shape, DType digest_dtype,
                              Stream* stream) {
  if (tasks.empty()) return;
  run_or_enqueue(stream, "score_pages", [=, this] { cpu_.score_pages(tasks, shape, digest_dtype, nullptr); });
}

void HostBackend::score_int4(std::span<const ScoreInt4Task> tasks, const AttentionShape& shape,
                             const PageLayout& layout, Stream* stream) {
  if (tasks.empty()) return;
  check(shape, layout);
  run_or_enqueue(stream, "score_int4", [=, this] { cpu_.score_int4(tasks, shape, layout, nullptr); });
}

void HostBackend::top_k(std::span<const TopKTask> tasks, Stream* stream) {
  if (tasks.empty()) return;
  run_or_enqueue(stream, "top_k", [=, this] { cpu_.top_k(tasks, nullptr); });
}

void HostBackend::top_p(std::span<const TopPTask> tasks, Stream* stream) {
  if (tasks.empty()) return;
  run_or_enqueue(stream, "top_p", [=, this] { cpu_.top_p(tasks, nullptr); });
}

void HostBackend::cluster(std::span<const ClusterTask> tasks, Stream* stream) {
  if (tasks.empty()) return;
  run_or_enqueue(stream, "cluster", [=, this] { cpu_.cluster(tasks, nullptr); });
}

std::uint64_t HostBackend::cluster_scratch_bytes(const ClusterTask& task) const {
  return cpu_.cluster_scratch_bytes(task);
}

void HostBackend::choose_clusters(std::span<const ChooseClustersTask> tasks, const AttentionShape& shape,
                                  const PageLayout& layout, Stream* stream) {
  if (tasks.empty()) return;
  check(shape, layout);
  run_or_enqueue(stream, "choose_clusters", [=, this] { cpu_.choose_clusters(tasks, shape, layout, nullptr); });
}

std::uint64_t HostBackend::choose_clusters_scratch_bytes(const ChooseClustersTask& task,
                                                         const AttentionShape& shape) const {
  return cpu_.choose_clusters_scratch_bytes(task, shape);
}

void HostBackend::choose_pages(std::span<const ChoosePagesTask> tasks, const AttentionShape& shape,
                               const PageLayout& layout, Stream* stream) {
  if (tasks.empty()) return;
  check(shape, layout);
  run_or_enqueue(stream, "choose_pages", [=, this] { cpu_.choose_pages(tasks, shape, layout, nullptr); });
}

void HostBackend::prefill(std::span<const PrefillTask> tasks, const PrefillShape& strides, const AttentionShape& shape,
                          Stream* stream) {
  if (tasks.empty()) return;
  check(shape, tasks.front().kv.layout);
  run_or_enqueue(stream, "prefill", [=, this] { cpu_.prefill(tasks, strides, shape, nullptr); });
}

void HostBackend::select_blocks(std::span<const SelectBlocksTask> tasks, const PrefillSpec& spec,
                                const PrefillShape& strides, const AttentionShape& shape, Stream* stream) {
  if (tasks.empty()) return;
  check(shape, tasks.front().kv.layout);
  run_or_enqueue(stream, "select_blocks", [=, this] { cpu_.select_blocks(tasks, spec, strides, shape, nullptr); });
}

std::uint64_t HostBackend::select_blocks_scratch_bytes(std::uint32_t first, std::uint32_t count,
                                                       const AttentionShape& shape) const {
  return cpu_.select_blocks_scratch_bytes(first, count, shape);
}

}  // namespace sluice::cpu

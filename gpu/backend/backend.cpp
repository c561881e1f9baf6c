#include "gpu/backend/backend.hpp"

#include "gpu/backend/verbs.hpp"
#include "gpu/device/driver.hpp"
#include "gpu/kernels/attend/attend.hpp"
#include "gpu/kernels/attend/merge.hpp"
#include "gpu/kernels/cluster/cluster.hpp"
#include "gpu/kernels/index/append.hpp"
#include "gpu/kernels/index/convert.hpp"
#include "gpu/kernels/index/digest.hpp"
#include "gpu/kernels/index/int4.hpp"
#include "gpu/kernels/prefill/flex.hpp"
#include "gpu/kernels/prefill/prefill.hpp"
#include "gpu/kernels/select/score.hpp"
#include "gpu/kernels/select/top_k.hpp"
#include "gpu/kernels/select/top_p.hpp"
#include "gpu/kernels/transfer/gather.hpp"
#include "gpu/kernels/transfer/signal.hpp"

namespace sluice::gpu {
namespace {

/// A shape with which a verb that takes none is checked: only its head_dim matters.
AttentionShape any_shape(std::uint32_t head_dim) {
  return {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = head_dim};
}

/// Tokens of ScoreTokensTasks on their way to one launch. The row list of a launch lies in the ring.
class TokenBatch {
 public:
  TokenBatch(CudaStream& stream, const ScoreShape& shape) : stream_(stream), shape_(shape) {}

  void add(const ScoreTokensTask& task) {
    if (task.kv.layout.dtype != shape_.dtype) {
      launch();
      shape_.dtype = task.kv.layout.dtype;
    }
    for (std::size_t begin = 0; begin < task.tokens.size();) {
      if (pieces_ == TaskArray<TokenRows>::kInline || rows_ == most_rows()) launch();
      const std::size_t count = std::min<std::size_t>(task.tokens.size() - begin, most_rows() - rows_);
      piece_[pieces_++] = {.task = &task, .begin = begin, .count = count};
      rows_ += count;
      begin += count;
    }
  }

  void launch() {
    if (pieces_ == 0) return;
    TaskArray<TokenRows> array;
    std::uint32_t* rows = stream_.params().take_array<std::uint32_t>(rows_).data();
    for (; array.count < pieces_; ++array.count) {
      const Piece& piece = piece_[array.count];
      array.inlined[array.count] = {.q = piece.task->q,
                                    .base = piece.task->kv.base,
                                    .rows = rows,
                                    .out = piece.task->out + piece.begin * shape_.group,
                                    .count = static_cast<std::uint32_t>(piece.count)};
      rows = list_rows(piece.task->kv, piece.task->tokens.subspan(piece.begin, piece.count), rows);
    }
    launch_score_tokens(array, shape_, stream_.handle());
    pieces_ = 0;
    rows_ = 0;
  }

 private:
  struct Piece {
    const ScoreTokensTask* task = nullptr;
    std::size_t begin = 0;
    std::size_t count = 0;
  };

  [[nodiscard]] std::size_t most_rows() const { return stream_.params().largest() / sizeof(std::uint32_t); }

  /// K rows counted from the base: a page has page_tokens of K and as many of V.
  static std::uint32_t* list_rows(const KvView& kv, std::span<const std::uint32_t> tokens, std::uint32_t* rows) {
    const std::uint32_t page_tokens = kv.layout.page_tokens;
    for (const std::uint32_t token : tokens) {
      *rows++ = kv.frames[token / page_tokens] * 2 * page_tokens + token % page_tokens;
    }
    return rows;
  }

  CudaStream& stream_;
  ScoreShape shape_;
  Piece piece_[TaskArray<TokenRows>::kInline];
  std::size_t pieces_ = 0;
  std::size_t rows_ = 0;
};

}  // namespace

Backend::Backend(std::uint32_t multiprocessors) : multiprocessors_(multiprocessors) {
  load_append_kernels();
  load_attend_kernels();
  load_cluster_kernels();
  load_convert_kernels();
  load_digest_kernels();
  load_gather_kernels();
  load_merge_kernels();
  load_prefill_kernels();
  warpgroups_ = Driver::instance().has_tensor_maps() && load_prefill_hopper_kernels();
  load_quantize_kernels();
  load_score_int4_kernels();
  load_score_kernels();
  load_select_blocks_kernels();
  load_signal_kernels();
  load_top_k_kernels();
  load_top_p_kernels();
  longest_top_p_ = load_top_p_cluster_kernels();
  longest_top_k_ = load_top_k_cluster_kernels();
}

std::vector<std::string> Backend::unsupported_reasons(const AttentionShape& shape, const PageLayout& layout) const {
  return gpu::unsupported_reasons(shape, layout);
}

void Backend::append(std::span<const AppendTask> tasks, const PageLayout& layout, Stream* stream) {
  if (tasks.empty()) return;
  check_supported("append", any_shape(layout.head_dim), layout);
  CudaStream& cuda = cuda_stream(stream, "append");
  for_each_launch(tasks, cuda.params(), [&](const auto& array) { launch_append(array, layout, cuda.handle()); });
}

void Backend::digest(std::span<const DigestTask> tasks, DigestKind kind, const PageLayout& layout, Stream* stream) {
  if (tasks.empty()) return;
  check_supported("digest", any_shape(layout.head_dim), layout);
  CudaStream& cuda = cuda_stream(stream, "digest");
  for_each_launch(tasks, cuda.params(), [&](const auto& array) { launch_digest(array, kind, layout, cuda.handle()); });
}

void Backend::score_pages(std::span<const ScorePagesTask> tasks, const AttentionShape& shape, DType digest_dtype,
                          Stream* stream) {
  if (tasks.empty()) return;
  check_supported("score_pages", shape, {.head_dim = shape.head_dim, .dtype = digest_dtype});
  CudaStream& cuda = cuda_stream(stream, "score_pages");
  const ScoreShape score{
      .dtype = digest_dtype, .group = shape.group(), .head_dim = shape.head_dim, .multiprocessors = multiprocessors_};
  for_each_launch(tasks, cuda.params(), [&](const auto& array) { launch_score_pages(array, score, cuda.handle()); });
}

void Backend::score_tokens(std::span<const ScoreTokensTask> tasks, const AttentionShape& shape, Stream* stream) {
  if (tasks.empty()) return;
  for (const ScoreTokensTask& task : tasks) check_supported("score_tokens", shape, task.kv.layout);
  TokenBatch batch(cuda_stream(stream, "score_tokens"), {.dtype = tasks.front().kv.layout.dtype,
                                                         .group = shape.group(),
                                                         .head_dim = shape.head_dim,
                                                         .multiprocessors = multiprocessors_});
  for (const ScoreTokensTask& task : tasks) batch.add(task);
  batch.launch();
}

void Backend::top_k(std::span<const TopKTask> tasks, Stream* stream) {
  if (tasks.empty()) return;
  CudaStream& cuda = cuda_stream(stream, "top_k");
  TaskArray<TopKRow> rows;  // By value, about as many at a time as thread blocks run at once.
  const auto launch = [&] {
    launch_top_k(rows, longest_top_k_, cuda.handle());
    rows.count = 0;
  };
  for (const TopKTask& task : tasks) {
    const auto count = static_cast<std::uint32_t>(task.values.size());
    const std::uint32_t k = std::min(task.k, count);
    if (k == 0) continue;
    rows.inlined[rows.count++] = {.values = task.values.data(), .out = task.out, .count = count, .k = k};
    if (rows.count == TaskArray<TopKRow>::kInline) launch();
  }
  launch();
}

void Backend::to_f32(std::span<const ToF32Task> tasks, Stream* stream) {
  if (tasks.empty()) return;
  CudaStream& cuda = cuda_stream(stream, "to_f32");
  for_each_launch(tasks, cuda.params(), [&](const auto& array) { launch_to_f32(array, cuda.handle()); });
}

}  // namespace sluice::gpu

// Verbs that score pages and tokens, and the largest of the scores.

#include <algorithm>

#include "gpu/backend/backend.hpp"
#include "gpu/backend/verbs.hpp"
#include "gpu/kernels/index/digest.hpp"
#include "gpu/kernels/select/score.hpp"
#include "gpu/kernels/select/top_k.hpp"
#include "sluice/error.hpp"

namespace sluice::gpu {
namespace {

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

void Backend::digest(std::span<const DigestTask> tasks, DigestKind kind, const PageLayout& layout, Stream* stream) {
  if (tasks.empty()) return;
  check_supported("digest", layout.near());
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
  if (shape.softcap != 0.f)
    throw Error(Errc::unsupported, "score_tokens: GPU kernels do not soft-cap scores of tokens; attend them");
  TokenBatch batch(cuda_stream(stream, "score_tokens"), {.dtype = tasks.front().kv.layout.dtype,
                                                         .group = shape.group(),
                                                         .head_dim = shape.head_dim,
                                                         .scale = shape.score_scale(),
                                                         .multiprocessors = multiprocessors_});
  for (const ScoreTokensTask& task : tasks) batch.add(task);
  batch.launch();
}

void Backend::top_k(std::span<const TopKTask> tasks, Stream* stream) {
  if (tasks.empty()) return;
  CudaStream& cuda = cuda_stream(stream, "top_k");
  TaskArray<TopKRow> rows;  // By value, about as many at a time as thread blocks run at once.
  const auto launch = [&] {
    launch_top_k(rows, limits_.longest_top_k, cuda.handle());
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

}  // namespace sluice::gpu

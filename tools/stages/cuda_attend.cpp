#include <algorithm>
#include <string>
#include <utility>

#include "gpu/device/cuda_stream.hpp"
#include "gpu/device/param_ring.hpp"
#include "gpu/kernels/attend/attend.hpp"
#include "gpu/stages/shapes.hpp"
#include "sluice/error.hpp"
#include "tools/stages/attend_plan.hpp"
#include "tools/stages/cuda_stages.hpp"
#include "tools/stages/merge.hpp"

namespace sluice::tools {

using namespace gpu;  // whose kernels are launched

namespace {

/// The results of a launch's slices fit the stream's scratch memory.
static_assert(CudaStream::kCounterBytes + kAttend.max_slices * 16 * (128 + 1) * sizeof(float) <=
              CudaStream::kScratchBytes);

/// Writes the jobs of consecutive tasks of a plan, and what the launch says of them.
class JobWriter {
 public:
  JobWriter(const AttendPlan& plan, const AttentionShape& shape, const AttendVariant& variant, CudaStream& stream)
      : plan_(plan), shape_(shape), variant_(variant), stream_(stream) {}

  /// `share`: AttendArgs::share.
  void launch(std::span<const AttendPlan::Task> tasks, std::uint32_t share) {
    std::uint64_t bytes = 0;
    for (const AttendPlan::Task& task : tasks) bytes += task.bytes;
    next_ = stream_.params().take(bytes);
    const std::uint64_t jobs = tasks.size() * plan_.head_blocks();
    job_ = args_.inline_jobs;
    args_.jobs = nullptr;
    if (jobs > AttendArgs::kInlineJobs)
      args_.jobs = job_ = reinterpret_cast<AttendJob*>(take(jobs * sizeof(AttendJob)));
    blocks_ = jobs_ = counters_ = partials_ = 0;
    args_.share = share;
    args_.units = 0;
    const std::span<std::byte> scratch = stream_.scratch();
    for (const AttendPlan::Task& task : tasks) put_task(task);
    args_.counters = reinterpret_cast<std::uint32_t*>(scratch.data());
    args_.partials = reinterpret_cast<float*>(scratch.data() + CudaStream::kCounterBytes);
    args_.partial_count = partials_;
    args_.score_scale = shape_.score_scale();
    args_.softcap = shape_.softcap;
    launch_attend(variant_, args_, blocks_, stream_.handle());
  }

 private:
  std::byte* take(std::uint64_t bytes) { return std::exchange(next_, next_ + div_up(bytes, 16) * 16); }

  void put_task(const AttendPlan::Task& task) {
    AttendJob job = plan_.job(task);
    auto* const words = reinterpret_cast<std::uint32_t*>(take(job.words() * sizeof(std::uint32_t)));
    plan_.write_words(task, words);
    job.lists = words;
    const float* const scores = put_scores(*task.task);
    for (std::uint32_t block = 0; block < plan_.head_blocks(); ++block) {
      put_job(job, *task.task, block * variant_.heads(), scores);
    }
  }

  const float* put_scores(const AttendTask& task) {
    if (task.scores.empty()) return nullptr;
    auto* const scores = reinterpret_cast<float*>(take(task.scores.size_bytes()));
    std::copy(task.scores.begin(), task.scores.end(), scores);
    return scores;
  }

  void put_job(AttendJob job, const AttendTask& task, std::uint32_t first_head, const float* scores) {
    const std::uint64_t first_dim = std::uint64_t{first_head} * shape_.head_dim;
    if (task.q != nullptr) job.q = task.q + first_dim;
    if (scores != nullptr) job.scores = scores + first_head;
    job.out = task.out.out + first_dim;
    job.lse = task.out.lse + first_head;
    job.heads = std::min(variant_.heads(), shape_.group() - first_head);
    job.group = shape_.group();
    job.first_head = first_head;
    job.first_partial = partials_;
    job.counter = counters_;
    put_blocks(job);
    job_[jobs_++] = job;
    if (job.slices > 1) {
      partials_ += job.slices;
      ++counters_;
    }
  }

  /// Which blocks attend the job: as many as it has slices, or those whose shares it lies in.
  void put_blocks(AttendJob& job) {
    job.first_slice = blocks_;
    if (args_.share != 0) {
      job.first_unit = jobs_ == 0 ? 0 : job_[jobs_ - 1].next_unit();
      job.first_slice = job.first_unit / args_.share;
      args_.units = job.end_unit();
      job.slices = (args_.units - 1) / args_.share + 1 - job.first_slice;
    }
    while (blocks_ < job.first_slice + job.slices) args_.job_of[blocks_++] = static_cast<std::uint16_t>(jobs_);
  }

  const AttendPlan& plan_;
  const AttentionShape& shape_;
  const AttendVariant& variant_;
  CudaStream& stream_;
  AttendArgs args_{};
  std::byte* next_ = nullptr;
  AttendJob* job_ = nullptr;
  std::uint32_t jobs_ = 0;
  std::uint32_t blocks_ = 0;
  std::uint32_t counters_ = 0;
  std::uint32_t partials_ = 0;
};

/// Merges of one launch: the largest second dimension of a grid.
constexpr std::size_t kMaxMerges = 65535;

/// Pinned memory that a merge takes unless it travels with the launch.
std::uint64_t merge_bytes(const MergeTask& task) noexcept {
  return sizeof(MergeItem) + task.parts.size() * sizeof(Partial);
}

/// Describes the tasks to the kernel, in pinned memory if they are many.
void pack_merges(std::span<const MergeTask> tasks, ParamRing& ring, MergeArgs& args) {
  std::size_t parts = 0;
  for (const MergeTask& task : tasks) parts += task.parts.size();
  MergeItem* items = args.inline_items;
  Partial* partials = args.inline_parts;
  args.items = nullptr;
  args.parts = nullptr;
  if (tasks.size() > MergeArgs::kInlineItems || parts > MergeArgs::kInlineParts) {
    static_assert(alignof(MergeItem) == alignof(Partial));
    std::byte* const memory = ring.take(tasks.size() * sizeof(MergeItem) + parts * sizeof(Partial));
    items = reinterpret_cast<MergeItem*>(memory);
    partials = reinterpret_cast<Partial*>(memory + tasks.size() * sizeof(MergeItem));
    args.items = items;
    args.parts = partials;
  }
  std::uint32_t first = 0;
  for (const MergeTask& task : tasks) {
    *items++ = {
        .out = task.out, .lse = task.lse, .first_part = first, .parts = static_cast<std::uint32_t>(task.parts.size())};
    partials = std::copy(task.parts.begin(), task.parts.end(), partials);
    first += static_cast<std::uint32_t>(task.parts.size());
  }
}

/// How many of the tasks, from the first on, fit one launch: all of a group, unless a guess at sizes was too low.
std::size_t launchable(std::span<const AttendPlan::Task> tasks, std::uint32_t head_blocks, std::uint64_t limit) {
  std::size_t count = 0;
  std::uint64_t slices = 0;
  for (std::uint64_t bytes = 0; count < tasks.size(); ++count) {
    bytes += tasks[count].bytes;
    slices += std::uint64_t{tasks[count].slices} * head_blocks;
    if (bytes > limit || slices > kAttend.max_slices) break;
  }
  return count;
}

/// Attends the tasks of one dtype in as few launches as their lists allow: one, as a rule.
void attend_tasks(std::span<const AttendTask> tasks, const AttentionShape& shape, const AttendVariant& variant,
                  std::uint32_t multiprocessors, CudaStream& stream) {
  const std::uint64_t limit = stream.params().largest();
  thread_local AttendPlan plan;
  plan.build(tasks, shape, variant, multiprocessors * blocks_per_sm(variant), limit);
  JobWriter writer(plan, shape, variant, stream);
  std::size_t begin = 0;
  for (std::size_t group = 0; group < plan.group_ends().size(); ++group) {
    while (begin < plan.group_ends()[group]) {
      const std::span<const AttendPlan::Task> rest = plan.tasks().subspan(begin, plan.group_ends()[group] - begin);
      const std::size_t count = launchable(rest, plan.head_blocks(), limit);
      writer.launch(rest.first(count), plan.group_shares()[group]);
      begin += count;
    }
  }
}

}  // namespace

void CudaStages::attend(std::span<const AttendTask> tasks, const AttentionShape& shape, Stream* stream) {
  if (tasks.empty()) return;
  CudaStream& queue = cuda_stream(stream, "attend");
  const PageLayout* checked = nullptr;
  for (const AttendTask& task : tasks) {
    if (checked != nullptr && *checked == task.kv.layout) continue;
    checked = &task.kv.layout;
    check_supported("attend", shape, *checked);
  }
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const AttendTask* first = nullptr;
    bool scored = false;
    for (const AttendTask& task : tasks) {
      if (task.kv.layout.dtype != dtype) continue;
      if (first == nullptr) first = &task;
      scored = scored || !task.scores.empty();
    }
    if (first == nullptr) continue;
    AttendVariant variant = attend_variant(shape, first->kv.layout, scored);
    variant.ring = device_.limits().attend_ring && !scored;
    attend_tasks(tasks, shape, variant, device_.multiprocessors(), queue);
  }
}

void CudaStages::merge(std::span<const MergeTask> tasks, const AttentionShape& shape, DType out_dtype, Stream* stream) {
  if (tasks.empty()) return;
  CudaStream& queue = cuda_stream(stream, "merge");
  check_supported("merge", shape, PageLayout{.head_dim = shape.head_dim});
  check_tensor_type("merge", out_dtype);
  const std::uint64_t limit = queue.params().largest();
  for (const MergeTask& task : tasks) {
    if (merge_bytes(task) <= limit) continue;
    throw Error(Errc::out_of_capacity,
                "merge: one task has " + std::to_string(task.parts.size()) + " partials; merge some of them first");
  }
  MergeArgs args{.heads = shape.group(), .head_dim = shape.head_dim, .out_dtype = out_dtype};
  while (!tasks.empty()) {
    std::size_t count = 0;
    for (std::uint64_t bytes = 0; count < tasks.size() && count < kMaxMerges; ++count) {
      bytes += merge_bytes(tasks[count]);
      if (bytes > limit) break;
    }
    pack_merges(tasks.first(count), queue.params(), args);
    launch_merge(args, static_cast<std::uint32_t>(count), queue.handle());
    tasks = tasks.subspan(count);
  }
}

}  // namespace sluice::tools

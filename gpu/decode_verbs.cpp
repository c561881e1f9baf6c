#include "gpu/decode_verbs.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "gpu/kernels/int4.hpp"
#include "gpu/verbs.hpp"
#include "sluice/carver.hpp"
#include "sluice/error.hpp"

namespace sluice::gpu {
namespace {

/// Makes the device current while a verb launches: streams belong to one, and callers may have made another current.
class Current {
 public:
  explicit Current(int ordinal) {
    (void)cudaGetDevice(&before_);
    if (before_ != ordinal) (void)cudaSetDevice(ordinal);
    changed_ = before_ != ordinal;
  }
  ~Current() {
    if (changed_) (void)cudaSetDevice(before_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

cudaStream_t handle(void* stream) { return static_cast<cudaStream_t>(stream); }

AttendVariant variant_of(const DecodeMemory& memory) { return attend_variant(memory.shape, memory.layout, false); }

/// Near rows of a job at most.
std::uint64_t near_room(const DecodeMemory& memory) {
  return std::min<std::uint64_t>(memory.bucket.list_room(memory.shape),
                                 std::uint64_t{memory.near_blocks} * memory.layout.page_tokens);
}

/// A job's slices are a fixed number, so that its grid is: as many as the machine runs at once, and enough for each
/// slice's list to fit shared memory; 0 if a launch may not have as many.
std::uint32_t slices_of(const DecodeMemory& memory, std::uint32_t jobs, std::uint32_t multiprocessors) {
  constexpr std::uint32_t kUnit = 16;
  const std::uint64_t wanted = multiprocessors * blocks_per_sm(variant_of(memory)) / jobs;
  const std::uint64_t useful = div_up(near_room(memory), kUnit * kAttend.min_slice_units);
  const std::uint64_t least = div_up(near_room(memory), kAttend.stage_words - 2 * kUnit);
  const std::uint64_t slices = std::max({std::min(wanted, useful), least, std::uint64_t{1}});
  const std::uint32_t most = kAttend.max_slices / jobs;
  return slices <= most ? static_cast<std::uint32_t>(slices) : least <= most ? most : 0;
}

}  // namespace

DecodeVerbs::DecodeVerbs(int ordinal, std::uint32_t multiprocessors)
    : ordinal_(ordinal), multiprocessors_(multiprocessors) {
  load_decode_kernels();
}

DecodeScratch DecodeVerbs::carve(const DecodeMemory& memory, std::byte* from, std::uint64_t* used) const {
  const std::uint32_t heads = memory.bucket.rows * memory.shape.kv_heads;
  const std::uint32_t block_heads = variant_of(memory).heads();
  DecodeScratch scratch{.head_blocks = static_cast<std::uint32_t>(div_up(memory.shape.group(), block_heads)),
                        .block_heads = block_heads};
  const std::uint32_t jobs = heads * scratch.head_blocks;
  scratch.slices = slices_of(memory, jobs, multiprocessors_);
  Carver carver(from);
  scratch.score_tasks = carver.take<ScoreInt4Task>(heads);
  scratch.top_k_rows = carver.take<TopKRow>(std::uint64_t{memory.bucket.rows} * memory.shape.q_heads);
  scratch.jobs = carver.take<AttendJob>(jobs);
  scratch.counters = carver.take<std::uint32_t>(jobs);
  scratch.partials =
      carver.take<float>(std::uint64_t{jobs} * scratch.slices * block_heads * (memory.shape.head_dim + 1));
  scratch.far_rows = carver.take<std::uint32_t>(std::uint64_t{heads} * memory.bucket.list_room(memory.shape));
  scratch.far_counts = carver.take<std::uint32_t>(heads);
  if (used != nullptr) *used = carver.used();
  return scratch;
}

DecodeScratch DecodeVerbs::scratch_of(const DecodeMemory& memory) const {
  return carve(memory, memory.scratch, nullptr);
}

std::uint64_t DecodeVerbs::scratch_bytes(const DecodeMemory& memory) const {
  const Current current(ordinal_);
  check_supported("a decode forward", memory.shape, memory.layout);
  const auto refuse = [](const std::string& what, std::uint64_t have, std::uint64_t most) {
    throw Error(Errc::unsupported, "a decode forward with " + what + " " + std::to_string(have) +
                                       " does not fit this device; at most " + std::to_string(most));
  };
  if (memory.bucket.max_tokens > most_decode_tokens())
    refuse("max_tokens", memory.bucket.max_tokens, most_decode_tokens());
  const DecodeScratch scratch = carve(memory, nullptr, nullptr);
  if (scratch.slices == 0) {
    const std::uint64_t per_row = memory.shape.kv_heads * scratch.head_blocks *
                                  std::max<std::uint64_t>(div_up(near_room(memory), kAttend.stage_words - 32), 1);
    refuse("rows, of " + std::to_string(near_room(memory)) + " near tokens each,", memory.bucket.rows,
           kAttend.max_slices / per_row);
  }
  std::uint64_t used = 0;
  (void)carve(memory, nullptr, &used);
  return used;
}

void DecodeVerbs::apply(const DecodeMemory& memory, void* stream) {
  const Current current(ordinal_);
  launch_decode_apply(memory, handle(stream));
}

void DecodeVerbs::begin(const DecodeMemory& memory, void* stream) {
  const Current current(ordinal_);
  launch_decode_begin(memory, handle(stream));
}

void DecodeVerbs::append(const DecodeMemory& memory, const DecodeLayer& layer) {
  const Current current(ordinal_);
  launch_decode_append(memory, layer.q.tokens == 0 ? DecodeScratch{} : scratch_of(memory), layer);
}

void DecodeVerbs::score(const DecodeMemory& memory, const DecodeLayer& layer) {
  const Current current(ordinal_);
  launch_score_int4(scratch_of(memory).score_tasks, memory.bucket.rows * memory.shape.kv_heads,
                    memory.bucket.max_tokens,
                    {.layout = Int4Layout(memory.layout),
                     .dtype = memory.layout.dtype,
                     .group = memory.shape.group(),
                     .multiprocessors = multiprocessors_},
                    handle(layer.stream));
}

void DecodeVerbs::choose(const DecodeMemory& memory, const DecodeLayer& layer) {
  const Current current(ordinal_);
  launch_top_k(scratch_of(memory).top_k_rows, memory.bucket.rows * memory.shape.q_heads, memory.bucket.max_tokens,
               handle(layer.stream));
}

void DecodeVerbs::split(const DecodeMemory& memory, const DecodeLayer& layer) {
  const Current current(ordinal_);
  launch_decode_split(memory, scratch_of(memory), layer);
}

void DecodeVerbs::attend(const DecodeMemory& memory, const DecodeLayer& layer) {
  const Current current(ordinal_);
  const DecodeScratch scratch = scratch_of(memory);
  const std::uint32_t jobs = memory.bucket.rows * memory.shape.kv_heads * scratch.head_blocks;
  AttendArgs args{.jobs = scratch.jobs,
                  .partials = scratch.partials,
                  .counters = scratch.counters,
                  .partial_count = jobs * scratch.slices,
                  .score_scale = 1.f / std::sqrt(static_cast<float>(memory.shape.head_dim))};
  for (std::uint32_t i = 0; i < jobs * scratch.slices; ++i)
    args.job_of[i] = static_cast<std::uint16_t>(i / scratch.slices);
  launch_attend(variant_of(memory), args, jobs * scratch.slices, handle(layer.stream));
}

void DecodeVerbs::merge(const DecodeMemory& memory, const DecodeLayer& layer) {
  const Current current(ordinal_);
  launch_decode_merge(memory, scratch_of(memory), layer);
}

void DecodeVerbs::cancel(const DecodeMemory& memory, void* stream) {
  const Current current(ordinal_);
  launch_decode_cancel(memory, handle(stream));
}

void DecodeVerbs::end(const DecodeMemory& memory, void* stream) {
  const Current current(ordinal_);
  launch_decode_end(memory, handle(stream));
}

}  // namespace sluice::gpu

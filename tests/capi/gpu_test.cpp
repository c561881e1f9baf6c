// The C interface on a GPU: results are the host's, and the caller's device stays current.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <thread>

#include "tests/capi/small_engine.hpp"
#include "tests/support/random.hpp"

using namespace sluice::test::capi;

namespace {

/// Attends everything, so that nothing hangs on how scores are rounded.
constexpr const char* kAll = "full | near=0";

void require_done(cudaError_t status) {
  INFO(cudaGetErrorString(status));
  REQUIRE(status == cudaSuccess);
}

sluice_engine_options options_on(std::int32_t device_type, std::int32_t device_id) {
  auto options = small_options();
  options.device_type = device_type;
  options.device_id = device_id;
  options.near_bytes = 256u << 10;
  options.policies = &kAll;
  return options;
}

/// Outputs of some tokens that are decoded, by an engine whose device reads pinned memory.
std::vector<float> decoded(sluice_engine* engine, void* stream) {
  constexpr std::size_t kFloats = kRows * kHeadDim * (2 * kQHeads + 2 * kKvHeads) + kRows * kQHeads;
  void* pinned = nullptr;
  require_done(cudaMallocHost(&pinned, kFloats * sizeof(float)));
  auto* const memory = static_cast<float*>(pinned);
  Tensors t;
  for (CTensor* const tensor : {&t.q, &t.k, &t.v, &t.out, &t.lse}) {
    tensor->tensor.data = memory + (static_cast<float*>(tensor->tensor.data) - t.memory.data());
    tensor->tensor.device.device_type = SLUICE_DEVICE_CUDA_HOST;
  }
  sluice::test::Random random(3);
  sluice_sequence sequence = 0;
  require_ok(sluice_engine_begin(engine, kAll, &sequence));
  auto bucket = sized<sluice_bucket>();
  bucket.decode_rows = kRows;
  bucket.features = SLUICE_BUCKET_UNBOUNDED;
  const sluice_plan_item item = {sizeof item, kRows, sequence, 0, 0};
  std::vector<float> out;
  for (int step = 0; step < 8; ++step) {
    std::uint64_t forward = 0;
    require_ok(sluice_engine_plan(engine, &item, 1, &bucket, stream, &forward));
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      for (std::size_t i = 0; i < kFloats; ++i) memory[i] = static_cast<float>(random.uniform() - 0.5);
      require_ok(sluice_engine_attend(engine, &bucket, layer, t.q.get(), t.k.get(), t.v.get(), t.out.get(), t.lse.get(),
                                      stream));
      require_done(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
      const auto* const first = static_cast<const float*>(t.out.tensor.data);
      out.insert(out.end(), first, first + kRows * kQHeads * kHeadDim);
    }
    require_ok(sluice_engine_finish(engine, forward));
  }
  require_done(cudaFreeHost(pinned));
  return out;
}

CUcontext current_context() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  require_done(cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &function, 12000, cudaEnableDefault, &found));
  REQUIRE(found == cudaDriverEntryPointSuccess);
  CUcontext context = nullptr;
  REQUIRE(reinterpret_cast<CUresult (*)(CUcontext*)>(function)(&context) == CUDA_SUCCESS);
  return context;
}

}  // namespace

TEST_CASE("C on a GPU gives what C on the host gives", "[capi][gpu]") {
  const EnginePointer gpu = create(options_on(SLUICE_DEVICE_CUDA, 0));
  const EnginePointer host = create(options_on(SLUICE_DEVICE_CPU, 0));
  cudaStream_t stream = nullptr;
  require_done(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const std::vector<float> got = decoded(gpu.get(), stream);
  const std::vector<float> want = decoded(host.get(), nullptr);
  require_done(cudaStreamDestroy(stream));
  double sum = 0.0, worst = 0.0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    sum += std::abs(want[i]);
    worst = std::max(worst, std::isnan(got[i]) ? INFINITY : double{std::abs(got[i] - want[i])});
  }
  CHECK(sum > 1.0);
  CHECK(worst < 1e-2);
}

TEST_CASE("what an engine on a GPU would take is what it takes", "[capi][gpu]") {
  auto options = options_on(SLUICE_DEVICE_CUDA, 0);
  const bool forecasts = GENERATE(false, true);
  // As much as the CPU would have to do once more, and an eighth of it.
  constexpr const char* const kHistories[] = {"history:observe_every=3 | int4 | top_k=9 | near=0",
                                              "history:observe_every=8 | int4 | top_k=9 | near=0"};
  options.policies = kHistories + (forecasts ? 1 : 0);
  auto needed = sized<sluice_memory>(), made = sized<sluice_memory>(), host = sized<sluice_memory>();
  require_ok(sluice_engine_options_memory_needed(&options, &needed));
  const EnginePointer engine = create(options);
  require_ok(sluice_engine_memory(engine.get(), &made));
  for (const auto field : {&sluice_memory::far_pages, &sluice_memory::pinned, &sluice_memory::near_pages,
                           &sluice_memory::codes, &sluice_memory::digests, &sluice_memory::buffers})
    CHECK(needed.*field == made.*field);
  auto got = sized<sluice_engine_sizes>();
  require_ok(sluice_engine_get_sizes(engine.get(), &got));
  CHECK((got.forecasts == 1) == forecasts);
  auto on_the_host = options;
  on_the_host.device_type = SLUICE_DEVICE_CPU;
  require_ok(sluice_engine_options_memory_needed(&on_the_host, &host));
  CHECK(needed.buffers > host.buffers);  // Scratch memory of kernels.
  CHECK((needed.pinned > host.pinned) == forecasts);
}

TEST_CASE("a tensor elsewhere than the engine's GPU is refused", "[capi][gpu][errors]") {
  const SmallEngine small(options_on(SLUICE_DEVICE_CUDA, 0));
  const auto refused = [&](std::int32_t type, std::int32_t id, const std::vector<std::string>& words) {
    Tensors t;
    for (CTensor* const tensor : {&t.q, &t.k, &t.v, &t.out, &t.lse})
      tensor->tensor.device.device_type = SLUICE_DEVICE_CUDA;
    t.k.tensor.device.device_type = static_cast<sluice_device_type>(type);
    t.k.tensor.device.device_id = id;
    check_fails([&] { return small.attend(0, t); }, SLUICE_INVALID_ARGUMENT, words);
  };
  refused(SLUICE_DEVICE_CPU, 0, {"k.device is of type 1", "GPU"});
  refused(SLUICE_DEVICE_CUDA, 7, {"k.device is GPU 7", "engine's is 0"});
  refused(SLUICE_DEVICE_CUDA_MANAGED, 7, {"k.device is GPU 7"});
}

TEST_CASE("an engine comes and goes without a device of the caller's", "[capi][gpu]") {
  CUcontext before = nullptr, between = nullptr, after = nullptr;
  std::thread([&] {  // One that has not used CUDA yet.
    before = current_context();
    EnginePointer engine = create(options_on(SLUICE_DEVICE_CUDA, 0));
    between = current_context();
    engine.reset();
    after = current_context();
  })
      .join();
  CHECK(before == nullptr);
  CHECK(between == nullptr);
  CHECK(after == nullptr);
}

TEST_CASE("no call changes the device that is current", "[capi][gpu]") {
  if (sluice_cuda_devices() < 2) {
    WARN("there is one GPU alone; nothing checked");
    return;
  }
  require_done(cudaSetDevice(1));
  cudaStream_t stream = nullptr;
  require_done(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  require_done(cudaSetDevice(0));
  int current = -1;
  {
    const EnginePointer engine = create(options_on(SLUICE_DEVICE_CUDA, 1));
    require_done(cudaGetDevice(&current));
    CHECK(current == 0);
    (void)decoded(engine.get(), stream);
    require_done(cudaGetDevice(&current));
    CHECK(current == 0);
  }
  require_done(cudaGetDevice(&current));
  CHECK(current == 0);
  require_done(cudaStreamDestroy(stream));
}

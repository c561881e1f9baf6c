// Batches of verbs: one CUDA graph each, or nothing special, and the same results in either case.
#include <cstdint>
#include <memory>
#include <vector>

#include "sluice/backend.hpp"
#include "sluice/cuda.hpp"
#include "sluice/error.hpp"
#include "tests/gpu/device_support.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

std::shared_ptr<Device> device_with(bool graphs) { return make_cuda_device({.graphs = graphs}); }

/// Zeroed pinned memory for `count` floats.
class Floats {
 public:
  Floats(Device& device, std::uint64_t count) : memory_(device.allocate_pinned(count * sizeof(float))) {}
  [[nodiscard]] float* at(std::uint64_t i) const { return reinterpret_cast<float*>(memory_->data()) + i; }
  [[nodiscard]] float operator[](std::uint64_t i) const { return *at(i); }

 private:
  std::unique_ptr<Buffer> memory_;
};

TensorView row(const float* from, std::uint32_t count) { return dense_view(from, DType::f32, 1, 1, count); }

}  // namespace

TEST_CASE("verbs of a batch run in their order, whatever their number and sizes", "[cuda_device][graph]") {
  const bool graphs = GENERATE(false, true);
  CAPTURE(graphs);
  constexpr std::uint32_t kRounds = 300, kMost = 5000, kLongest = 7;
  const auto device = device_with(graphs);
  const auto stream = device->create_stream("s");
  const Floats from(*device, kRounds);
  const Floats to(*device, kRounds);
  // A chain of copies through device memory, of 1 to 7 links: a link that is early or lost shows at its end.
  const auto links = device->allocate(std::uint64_t{kLongest} * kMost * sizeof(float));
  const auto link = [&](std::uint32_t i) { return reinterpret_cast<float*>(links->data()) + i * kMost; };
  const Floats wide(*device, kMost);
  for (std::uint32_t round = 0; round < kRounds; ++round) {
    *from.at(round) = static_cast<float>(round + 1);
    const std::uint32_t width = 1 + round * 131 % kMost;  // The grid changes with it.
    stream->begin_batch();
    device->backend().to_f32(row(wide.at(0), width), link(0), stream.get());
    device->backend().to_f32(row(from.at(round), 1), link(0), stream.get());
    for (std::uint32_t i = 1; i < 1 + round % kLongest; ++i) {
      device->backend().to_f32(row(link(i - 1), width), link(i), stream.get());
    }
    device->backend().to_f32(row(link(round % kLongest), 1), to.at(round), stream.get());
    stream->end_batch();
    if (round % 50 == 0) delay(*stream, 500);  // So that launches queue up.
  }
  stream->synchronize(soon());
  for (std::uint32_t round = 0; round < kRounds; ++round) REQUIRE(to[round] == static_cast<float>(round + 1));
}

TEST_CASE("arguments of batches stay as written while the ring turns", "[cuda_device][graph][ring]") {
  const bool graphs = GENERATE(false, true);
  CAPTURE(graphs);
  // 72 KB of tasks per verb: 22 MB through 4 MiB of ring, with segments that end within batches.
  constexpr std::uint32_t kBatches = 100, kVerbs = 3, kTasks = 1500;
  const auto device = device_with(graphs);
  const auto stream = device->create_stream("s");
  const std::uint64_t all = std::uint64_t{kBatches} * kVerbs * kTasks;
  const Floats from(*device, all);
  const Floats to(*device, all);
  for (std::uint64_t i = 0; i < all; ++i) *from.at(i) = static_cast<float>(i + 1);
  std::vector<ToF32Task> tasks(kTasks);
  for (std::uint64_t at = 0; at < all;) {
    if (at % (10 * kTasks) == 0) delay(*stream, 300);
    stream->begin_batch();
    for (std::uint32_t verb = 0; verb < kVerbs; ++verb) {
      for (ToF32Task& task : tasks) {
        task = {.in = row(from.at(at), 1), .out = to.at(at)};
        ++at;
      }
      device->backend().to_f32(tasks, stream.get());
    }
    stream->end_batch();
  }
  stream->synchronize(soon());
  std::uint64_t wrong = 0;
  for (std::uint64_t i = 0; i < all; ++i) wrong += to[i] == from[i] ? 0 : 1;
  REQUIRE(wrong == 0);
}

TEST_CASE("every other operation ends a batch", "[cuda_device][graph]") {
  const bool graphs = GENERATE(false, true);
  CAPTURE(graphs);
  const auto device = device_with(graphs);
  const auto stream = device->create_stream("s");
  const auto event = device->create_event();
  const auto near = device->allocate(64);
  Shared<Flag> flag(*device);
  const Floats from(*device, 16);
  const Floats to(*device, 16);
  const int operation = GENERATE(0, 1, 2, 3, 4, 5, 6);
  CAPTURE(operation);
  flag->signal(1);
  *from.at(0) = 5.f;
  stream->begin_batch();
  stream->begin_batch();
  device->backend().to_f32(row(from.at(0), 1), to.at(0), stream.get());
  switch (operation) {
    case 0: stream->record(*event); break;
    case 1: stream->signal(*flag, 2); break;
    case 2: stream->wait(*flag, 1); break;
    case 3: stream->wait(*event); break;
    case 4: copy(*stream, near->data(), from.at(0), 64); break;
    case 5: stream->end_batch(); break;
    default: break;  // synchronize does.
  }
  stream->end_batch();
  REQUIRE_NOTHROW(stream->synchronize(soon()));
  REQUIRE(to[0] == 5.f);
  REQUIRE(event->state() == Event::State::done);
  stream->begin_batch();  // One of nothing.
  stream->end_batch();
  REQUIRE_NOTHROW(stream->synchronize(soon()));
}

TEST_CASE("a batch that is spoilt fails the next event, and only that", "[cuda_device][graph]") {
  const auto device = device_with(true);
  const auto stream = device->create_stream("s");
  const auto event = device->create_event();
  const auto next = device->create_event();
  Shared<Flag> flag(*device);
  const Floats from(*device, 1);
  const Floats to(*device, 2);
  *from.at(0) = 3.f;
  const bool flagged = GENERATE(false, true);
  stream->begin_batch();
  device->backend().to_f32(row(from.at(0), 1), to.at(0), stream.get());
  // To ask for the progress of a stream that collects is an error that spoils what it has collected.
  REQUIRE(cudaStreamQuery(gpu::cuda_stream(stream.get(), "test").handle()) != cudaSuccess);
  (void)cudaGetLastError();
  stream->end_batch();
  if (flagged) {
    stream->signal(*flag, 1);
    stream->record(*event);
    stream->synchronize(soon());
    REQUIRE(flag->state(1) == Flag::State::failed);
    REQUIRE(event->state() == Event::State::done);
  } else {
    stream->record(*event);
    stream->synchronize(soon());
    REQUIRE(event->state() == Event::State::failed);
    REQUIRE(event->reason().find("batch") != std::string::npos);
  }
  REQUIRE(to[0] == 0.f);
  stream->begin_batch();
  device->backend().to_f32(row(from.at(0), 1), to.at(1), stream.get());
  stream->record(*next);
  stream->synchronize(soon());
  REQUIRE(next->state() == Event::State::done);
  REQUIRE(to[1] == 3.f);
}

TEST_CASE("a verb that is refused within a batch leaves the others alone", "[cuda_device][graph]") {
  const auto device = device_with(true);
  const auto stream = device->create_stream("s");
  const Floats from(*device, 1);
  const Floats to(*device, 1);
  *from.at(0) = 7.f;
  const AttentionShape odd{.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 17};
  AttendTask task;
  task.kv.layout = {.page_tokens = 32, .head_dim = 17, .dtype = DType::bf16};
  stream->begin_batch();
  device->backend().to_f32(row(from.at(0), 1), to.at(0), stream.get());
  REQUIRE(code_of([&] {
            device->backend().attend(std::span(&task, 1), odd, stream.get());
            return 0;
          }) == Errc::unsupported);
  stream->end_batch();
  REQUIRE_NOTHROW(stream->synchronize(soon()));
  REQUIRE(to[0] == 7.f);
}

TEST_CASE("a stream that goes with an open batch drops it, and the next one starts afresh", "[cuda_device][graph]") {
  const auto device = device_with(true);
  const Floats from(*device, 1);
  const Floats to(*device, 2);
  *from.at(0) = 9.f;
  {
    const auto stream = device->create_stream("s");
    stream->begin_batch();
    device->backend().to_f32(row(from.at(0), 1), to.at(0), stream.get());
  }
  const auto stream = device->create_stream("s");
  device->backend().to_f32(row(from.at(0), 1), to.at(1), stream.get());
  REQUIRE_NOTHROW(stream->synchronize(soon()));
  REQUIRE(to[0] == 0.f);
  REQUIRE(to[1] == 9.f);
}

#include <cstring>
#include <numeric>
#include <vector>

#include "cpu/device/host_device.hpp"
#include "cpu/machine/topology.hpp"
#include "cpu/threads/workers.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/tools/llama_failure.hpp"
#include "tools/llama/bf16.hpp"
#include "tools/llama/model.hpp"
#include "tools/llama/presets.hpp"
#include "tools/llama/prompt_cache.hpp"
#include "tools/llama/staging.hpp"

// What carries weights and prompts to a GPU, on the device that needs none.
namespace {

using namespace sluice;
using namespace sluice::tools;

constexpr std::chrono::milliseconds kTimeout{20'000};

struct Machine {
  cpu::Topology topology;
  std::shared_ptr<const cpu::Workers> workers =
      std::make_shared<cpu::Workers>(topology, cpu::WorkersOptions{.threads = 1, .pin = false, .numa_node = 0});
  cpu::HostDevice device{workers};
  std::unique_ptr<Stream> stream = device.create_stream("test");
};

/// [tokens, heads, head_dim] inside rows of `width` elements.
TensorView strided(const std::vector<std::uint16_t>& bits, std::uint32_t first, std::uint32_t heads,
                   std::uint32_t tokens, std::uint32_t head_dim, std::uint32_t width) {
  TensorView view = dense_view(bits.data() + first, DType::bf16, tokens, heads, head_dim);
  view.token_stride = width;
  return view;
}

}  // namespace

TEST_CASE("staging splits what is larger than its pinned memory", "[llama]") {
  Machine machine;
  Staging staging(machine.device, *machine.stream, kTimeout);
  const std::uint64_t bytes = 2 * Staging::kPieceBytes + 12;
  const auto near = machine.device.allocate(bytes);
  std::vector<std::uint64_t> offsets;
  staging.to_device(near->data(), bytes, [&](std::span<std::byte> piece, std::uint64_t offset) {
    offsets.push_back(offset);
    for (std::size_t i = 0; i < piece.size(); ++i) piece[i] = static_cast<std::byte>((offset + i) % 251);
  });
  CHECK(offsets == std::vector<std::uint64_t>{0, Staging::kPieceBytes, 2 * Staging::kPieceBytes});
  std::uint64_t wrong = 0;
  std::uint64_t seen = 0;
  staging.to_host(near->data(), bytes, [&](std::span<const std::byte> piece, std::uint64_t offset) {
    for (std::size_t i = 0; i < piece.size(); ++i) wrong += piece[i] != static_cast<std::byte>((offset + i) % 251);
    seen += piece.size();
  });
  CHECK(wrong == 0);
  CHECK(seen == bytes);
}

TEST_CASE("a bf16 chunk in device memory is recorded as its float32 values", "[llama]") {
  // 2 query heads, 1 KV head, head_dim 16: rows of q, q, k, v as the GPU's products leave them.
  const AttentionShape shape{.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 16};
  constexpr std::uint32_t kTokens = 5, kWidth = 64;
  std::vector<std::uint16_t> bits(kTokens * kWidth);
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = to_bf16(static_cast<float>(i));
  Machine machine;
  TensorCourier courier(machine.device, *machine.stream, kTimeout);
  using Slot = TensorCourier::Slot;
  PromptCache prompt;
  prompt.start(shape, std::vector<int>(kTokens, 'a'));
  prompt.record({.layer = {0},
                 .q = courier.to_host(Slot::q, strided(bits, 0, 2, kTokens, 16, kWidth)),
                 .k = courier.to_host(Slot::k, strided(bits, 32, 1, kTokens, 16, kWidth)),
                 .v = courier.to_host(Slot::v, strided(bits, 48, 1, kTokens, 16, kWidth)),
                 .out = {}},
                0);
  prompt.finish(std::vector<float>{1.f});

  const auto expect = [&](const TensorView& view, std::uint32_t first) {
    const TensorView moved = courier.to_device(Slot::k, view);
    CHECK(moved.data != view.data);
    std::size_t wrong = 0;
    for (std::uint32_t token = 0; token < view.tokens; ++token) {
      for (std::uint32_t i = 0; i < view.heads * view.head_dim; ++i) {
        float value = 0;
        std::memcpy(&value, moved.row(token, 0) + i * sizeof value, sizeof value);
        wrong += value != from_bf16(bits[token * kWidth + first + i]);
      }
    }
    CHECK(wrong == 0);
  };
  expect(prompt.keys({0}, 0, kTokens), 32);
  expect(prompt.values({0}, 0, kTokens), 48);
  expect(prompt.last_queries({0}, 0, kTokens), 0);
  CHECK(courier.to_device(Slot::q, prompt.last_queries({0}, 0, 0)).tokens == 0);
}

TEST_CASE("the embedded host device stands for the CPU as a model's device", "[llama]") {
  const auto machine = std::make_shared<Machine>();
  const std::shared_ptr<Device> device(machine, &machine->device);
  const Model model = Model::random(preset_config("tiny"), 1, {.threads = 1, .device = device});
  CHECK(model.device() == nullptr);
}

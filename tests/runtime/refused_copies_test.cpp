// Copies that a device refuses to queue: the call fails, nothing stays half on its way, and it can be repeated.
#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "cpu/host_device.hpp"
#include "cpu/topology.hpp"
#include "cpu/workers.hpp"
#include "sluice/error.hpp"
#include "tests/runtime/toy.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/forwarding.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr AttentionShape kShape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};

/// The link's stream of a HostDevice, which refuses one copy to come.
class RefusingStream final : public ForwardingStream {
 public:
  RefusingStream(std::unique_ptr<Stream> inner, std::atomic<int>& until)
      : ForwardingStream(std::move(inner)), until_(until) {}
  void copy(std::span<const Copy> batch) override {
    refuse();
    inner_->copy(batch);
  }
  void copy_in_background(std::span<const Copy> batch) override {
    refuse();
    inner_->copy_in_background(batch);
  }

 private:
  void refuse() {
    if (until_-- == 0) throw Error(Errc::device, "injected refusal of a copy");
  }

  std::atomic<int>& until_;
};

class RefusingDevice final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  [[nodiscard]] std::unique_ptr<Stream> create_stream(const std::string& name) override {
    auto stream = inner_->create_stream(name);
    if (name != "link") return stream;
    return std::make_unique<RefusingStream>(std::move(stream), until);
  }

  std::atomic<int> until = -1;  ///< copies before the one that is refused; negative: none is
};

}  // namespace

TEST_CASE("a step whose copies are refused can be repeated, and reads no page that did not come", "[refused]") {
  const int until = GENERATE(range(0, 12));
  const std::string policy = GENERATE("history:share_group=on+pages:pages=max(16, 3%) | int4 | top_k=max(64, 1%) | near=30%,recent=16", "full:near=40%", "streaming:recent=100");
  CAPTURE(until, policy);
  constexpr std::uint32_t kPrompt = 300;
  const Toy toy(kShape, kPrompt + 3, 91);
  const cpu::Topology topology;
  const auto workers = std::make_shared<const cpu::Workers>(topology, cpu::WorkersOptions{.threads = 2, .pin = false});
  const auto device = std::make_shared<RefusingDevice>(std::make_shared<cpu::HostDevice>(workers));
  Runtime runtime(toy_options(kShape, 350), device);
  Runtime calm(toy_options(kShape, 350));
  const SequenceId id = runtime.begin(parse_policy(policy));
  const SequenceId calm_id = calm.begin(parse_policy(policy));
  prefill(runtime, id, toy, kPrompt, 64);
  prefill(calm, calm_id, toy, kPrompt, 64);

  device->until = until;
  const std::size_t size = std::size_t{kShape.q_heads} * kShape.head_dim;
  int refusals = 0;
  for (std::uint32_t token = kPrompt; token < kPrompt + 3; ++token) {
    const std::vector<float> want = step(calm, calm_id, toy, token);
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      std::vector<float> out(size);
      const auto call = [&] {
        runtime.step({.layer = LayerId{layer},
                      .sequences = {&id, 1},
                      .q = toy.q(layer, token, 1),
                      .k = toy.k(layer, token, 1),
                      .v = toy.v(layer, token, 1),
                      .out = dense_view(out.data(), DType::f32, 1, kShape.q_heads, kShape.head_dim)});
      };
      try {
        call();
      } catch (const Error& error) {
        REQUIRE(std::string(error.what()).find("injected refusal") != std::string::npos);
        ++refusals;
        call();
      }
      // Which pages are near may differ from the calm run after a refusal; with everything attended that changes nothing.
      if (policy.front() == 'f' || refusals == 0) {
        for (std::size_t i = 0; i < size; ++i) REQUIRE(out[i] == Approx(want[layer * size + i]).margin(1e-5));
      }
      for (const float x : out) REQUIRE(std::isfinite(x));
    }
  }
  REQUIRE(refusals <= 1);
  runtime.end(id);
  REQUIRE(runtime.info().near_slots_free == runtime.info().near_slots);
  REQUIRE(runtime.info().host_pages_free == runtime.info().host_pages);
}

// What leaves a call of the public interface is an Error, whatever was thrown: short of memory or threads, or a defect.
#include "runtime/call.hpp"

#include <functional>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "tests/runtime/parked.hpp"
#include "tests/support/forwarding.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::parked;

namespace {

template <class Exception>
Refusal refusal(const Exception& exception) {
  return refusal_of([&] { translated([&] { throw exception; }); });
}

bool says(const Refusal& refused, const char* words) { return refused.text.find(words) != std::string::npos; }

/// Verbs whose next plan throws what no verb should.
class DefectiveVerbs final : public ForwardingVerbs {
 public:
  using ForwardingVerbs::ForwardingVerbs;
  void apply(const ForwardMemory& memory, ForwardSide& side, void* stream) override {
    if (const auto now = std::exchange(defect, nullptr)) now();
    inner_.apply(memory, side, stream);
  }
  std::function<void()> defect;
};

class DefectiveDevice final : public ForwardingDevice {
 public:
  explicit DefectiveDevice(std::shared_ptr<Device> inner)
      : ForwardingDevice(std::move(inner)), verbs(*inner_->forward_verbs()) {}
  [[nodiscard]] ForwardVerbs* forward_verbs() noexcept override { return &verbs; }
  DefectiveVerbs verbs;
};

}  // namespace

TEST_CASE("what nobody foresaw is internal, and asks to be reported", "[call]") {
  const Refusal unheard = refusal(std::logic_error("unheard of"));
  REQUIRE(unheard.code == Errc::internal);
  REQUIRE(says(unheard, "unheard of"));
  REQUIRE(says(unheard, "report"));
  REQUIRE(refusal(std::length_error("vector")).code == Errc::internal);
  const Refusal none = refusal(7);
  REQUIRE(none.code == Errc::internal);
  REQUIRE(says(none, "report"));
}

TEST_CASE("what is short is no defect, and an Error stays what it is", "[call]") {
  REQUIRE(refusal(std::bad_alloc()).code == Errc::out_of_capacity);
  const Refusal thread = refusal(std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again)));
  REQUIRE(thread.code == Errc::out_of_capacity);
  REQUIRE(says(thread, "raise its limit"));
  const Refusal failed = refusal(Error(Errc::device, "the device failed in this test"));
  REQUIRE(failed.code == Errc::device);
  REQUIRE(failed.text == "the device failed in this test");
}

TEST_CASE("a plan that meets a defect can be repeated", "[call]") {
  Parked parked(12);
  const auto device = std::make_shared<DefectiveDevice>(parked.rig.device);
  Engine engine(options(), device);
  const PlanItem item{.sequence = engine.resume(parked.area, "model")};
  const auto plan = [&] { return engine.plan({&item, 1}, engine.options().largest, parked.rig.stream); };
  device->verbs.defect = [] { throw std::out_of_range("a defect of this test"); };
  REQUIRE(code_of(plan) == Errc::internal);
  device->verbs.defect = [] { throw 7; };
  REQUIRE(code_of(plan) == Errc::internal);
  engine.cancel(plan());
  REQUIRE(engine.tokens(item.sequence) == 12);
}

TEST_CASE("a tensor that may be written is taken where one is read, and not the other way round", "[call]") {
  static_assert(std::is_convertible_v<MutableTensorView, TensorView>);
  static_assert(!std::is_convertible_v<TensorView, MutableTensorView>);
  static_assert(std::is_aggregate_v<TensorView> && std::is_aggregate_v<MutableTensorView>);
  std::vector<float> data(2 * 3 * 16);
  const TensorView read = dense_view(data.data(), DType::f32, 2, 3, 16);
  REQUIRE(read.data == reinterpret_cast<const std::byte*>(data.data()));
  REQUIRE(read.row(1, 2) == reinterpret_cast<const std::byte*>(data.data() + (1 * 3 + 2) * 16));
  REQUIRE((read.dtype == DType::f32 && read.tokens == 2 && read.heads == 3 && read.head_dim == 16));
}

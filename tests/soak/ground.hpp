#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cpu/device/fault_injector.hpp"
#include "sluice/device.hpp"
#include "sluice/shape.hpp"
#include "sluice/tensor.hpp"
#include "tests/soak/faults.hpp"

/// What tells the devices apart on which the soak lives: nothing else of it knows which one that is.
namespace sluice::test {

struct Terrain {
  AttentionShape shape;
  std::vector<DType> kv_dtypes;  ///< of which engines have one
  /// Of outputs: from float64, and of a sequence from what it says alone.
  double tolerance = 1e-4;
  /// EngineOptions::answer_timeout where threads are to be too late: no shorter than what a busy machine takes.
  std::chrono::milliseconds short_timeout{100};
  /// Tokens of EngineOptions::prefill_window: where each window takes launches, few of them take too long.
  std::uint32_t least_window = 8;
  /// When an answer is too late, some heads of a layer may have had it.
  bool in_parts = false;
  /// Queries are numbers of bf16, and where a token more or less is as near to the share of attention that is wanted,
  /// or to what was learnt, rounding decides.
  bool rounds = false;
};

/// A forward that was recorded once.
class Recorded {
 public:
  virtual ~Recorded() = default;
  virtual void replay() = 0;
};

/// What one engine stands on.
class Ground {
 public:
  virtual ~Ground() = default;
  /// For the engine, which fails as `inject` says; null: the engine brings its own.
  [[nodiscard]] virtual std::shared_ptr<Device> device() const = 0;
  /// Of tensors, which both sides see; it never fails.
  [[nodiscard]] virtual Device& memory() const = 0;
  /// The caller's; null: calls return when they are done.
  [[nodiscard]] virtual Stream* stream() const = 0;
  /// The same as Engine wants it.
  [[nodiscard]] virtual void* handle() const = 0;
  /// From now on; the device does of it what it can.
  virtual void inject(const cpu::FaultOptions& faults) = 0;
  /// Whether calls fail at once that fail at all; what another device cannot do shows in the forward.
  [[nodiscard]] virtual bool refuses() const noexcept = 0;
  /// Keeps the queue behind `handle` busy for so long, a second at most.
  virtual void delay(void* handle, std::chrono::microseconds time) = 0;
  /// `enqueue` is given the queue to be recorded. Null if nothing is recorded here.
  [[nodiscard]] virtual std::unique_ptr<Recorded> record(std::function<void(void* handle)> enqueue) = 0;
};

struct GroundOptions {
  bool at_once = false;  ///< no stream, where there are verbs without
  bool breaks = false;   ///< the device cannot do a part of a forward when Faults say so
  bool refuses = false;  ///< it refuses to be given one
};

/// A kind of device.
class World {
 public:
  virtual ~World() = default;
  [[nodiscard]] virtual const Terrain& terrain() const noexcept = 0;
  [[nodiscard]] virtual std::unique_ptr<Ground> ground(const GroundOptions& options) = 0;
};

[[nodiscard]] std::unique_ptr<World> host_world(std::shared_ptr<Faults> faults);
/// The GPU with this number.
/// @throws as make_cuda_device, in a build without CUDA, too
[[nodiscard]] std::unique_ptr<World> cuda_world(int ordinal, std::shared_ptr<Faults> faults);

/// A process that is stopped for longer has not timed out: deadlines measure time in which it ran.
inline constexpr std::chrono::milliseconds kSoakTimeout{10'000};

}  // namespace sluice::test

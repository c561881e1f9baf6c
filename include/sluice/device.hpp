#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/error.hpp"
#include "sluice/units.hpp"

namespace sluice {

class ForwardVerbs;

/// One word in memory that both sides of the link see; the hand-over between a stream and the host.
/// One writer; values only rise, so a flag is never reset. A failed producer raises the flag all the same, with
/// a mark, instead of leaving its reader to wait. One cache line, so that flags never share one.
///
/// The word is twice the value, plus 1 if the producer failed: a device that can only wait for a word to be
/// greater than or equal to another is released by both.
class alignas(64) Flag {
 public:
  enum class State { pending, reached, failed };
  [[nodiscard]] static constexpr std::uint64_t reached_word(std::uint64_t value) noexcept { return value << 1; }
  [[nodiscard]] static constexpr std::uint64_t failed_word(std::uint64_t value) noexcept { return value << 1 | 1; }

  /// Release: what the producer wrote before is visible to a thread that sees the value.
  void signal(std::uint64_t value) noexcept { word_.store(reached_word(value), std::memory_order_release); }
  /// Tells readers waiting for `value` or less that it will not come.
  void fail(std::uint64_t value) noexcept { word_.store(failed_word(value), std::memory_order_release); }
  [[nodiscard]] State state(std::uint64_t value) const noexcept {
    const std::uint64_t word = word_.load(std::memory_order_acquire);
    if (word < reached_word(value)) return State::pending;
    return word == failed_word(value) ? State::failed : State::reached;
  }
  /// Where the word lies, for a device that writes or waits for it by itself.
  [[nodiscard]] std::uint64_t* word() noexcept { return reinterpret_cast<std::uint64_t*>(&word_); }

 private:
  std::atomic<std::uint64_t> word_{0};
};

/// One copy between host and device memory. Its direction follows from the two addresses.
struct Copy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::uint64_t bytes = 0;
};

/// A point in a stream. Recorded again, it forgets the old point. Safe to query from any thread.
class Event {
 public:
  enum class State { pending, done, failed };
  virtual ~Event() = default;
  /// An event that was never recorded is done. `failed`: something enqueued between the previous
  /// recorded event of the stream and this one did not happen.
  [[nodiscard]] virtual State state() const noexcept = 0;
  /// Why the event failed; empty unless it did.
  [[nodiscard]] virtual std::string reason() const = 0;
  /// When the stream got there, to the device's precision. Meaningful once the state is not pending.
  [[nodiscard]] virtual Clock::time_point time() const noexcept = 0;
};

/// An in-order queue of work. Everything here enqueues and returns, except `synchronize`. A failed
/// operation does not stop the stream: it fails the next recorded event or signalled flag, which clears it.
/// Thread safety: one thread at a time per stream.
class Stream {
 public:
  virtual ~Stream() = default;
  /// Copies within one batch are unordered among each other. The memory, not the array, must stay alive.
  virtual void copy(std::span<const Copy> batch) = 0;
  /// Every byte of `memory`, of the device or pinned, becomes `value`.
  virtual void fill(std::span<std::byte> memory, std::byte value) = 0;
  virtual void record(Event& event) = 0;
  /// Later work of this stream waits for the event; a failed event fails this stream's next event too.
  virtual void wait(const Event& event) = 0;
  /// Raises `flag` to `value` when the stream gets there, or fails it.
  virtual void signal(Flag& flag, std::uint64_t value) = 0;
  /// Later work waits until the host has raised `flag` to `value`; a failed flag or one that does not come
  /// within the device's deadline fails this stream's next event.
  virtual void wait(const Flag& flag, std::uint64_t value) = 0;
  /// Blocks the caller until the queue is empty.
  /// @throws Error{Errc::timeout} past the deadline, Error{Errc::device} if work failed since the last event.
  virtual void synchronize(Deadline deadline) = 0;
  /// The queue underneath, for callers who enqueue work of their own between calls: a cudaStream_t with the CUDA
  /// device, null with the embedded host device.
  [[nodiscard]] virtual void* native_handle() const noexcept { return nullptr; }
};

/// Memory of a device or pinned memory of the host; freed by its destructor. Movable through unique_ptr.
class Buffer {
 public:
  virtual ~Buffer() = default;
  [[nodiscard]] virtual std::byte* data() const noexcept = 0;
  [[nodiscard]] virtual std::uint64_t bytes() const noexcept = 0;
};

/// Keeps a range of host memory registered (pinned) with a device; unregisters when destroyed.
class Registration {
 public:
  virtual ~Registration() = default;
};

/// How a device waits, in a layer, for what the CPU attends or chooses. Tokens are the same with each.
enum class Handover : std::uint8_t {
  automatic,  ///< as suits the device, see DeviceInfo::handover
  device,     ///< one thread block of a kernel looks for the answer: the fastest. Captured in graphs.
  /// The stream waits by a memory operation, and no kernel runs meanwhile; should the answer not come in time, a thread
  /// of the engine lets the stream go on. Captured in graphs where the driver does that.
  stream,
  /// Nothing on the device waits: the calling thread does, in Engine::attend, between what asks and what needs the
  /// answer. It cannot be captured. What goes where a GPU is shared, by MPS or in turns.
  host,
};

[[nodiscard]] constexpr bool is_valid(Handover handover) noexcept { return handover <= Handover::host; }

[[nodiscard]] constexpr const char* to_string(Handover handover) noexcept {
  switch (handover) {
    case Handover::automatic: return "auto";
    case Handover::device: return "device";
    case Handover::stream: return "stream";
    case Handover::host: return "host";
  }
  return "unknown";
}

/// @throws Error{Errc::invalid_argument} that lists them.
[[nodiscard]] Handover parse_handover(std::string_view text);

struct DeviceInfo {
  std::string name;
  std::uint64_t memory_bytes = 0;  ///< 0 if unknown
  bool own_processor = true;       ///< its verbs run beside the host's threads, not on them: queueing gains time
  bool captures = false;           ///< work on its streams can be captured in graphs and replayed
  /// How it waits for the CPU's part of a layer unless an engine is told, never automatic; and why not by its kernels,
  /// empty if it does.
  Handover handover = Handover::device;
  std::string handover_reason{};
  bool stream_waits = false;       ///< its streams can wait for a word by themselves, see Handover::stream
  bool captures_waits = false;     ///< and that can be captured
  std::string pci_bus_id{};        ///< domain:bus:device.function, "0000:1b:00.0"; empty: on no bus, or unknown
  /// The same of all devices of its kind that this process sees, by their numbers (CUDA's ordinals), its own included.
  std::vector<std::string> visible_bus_ids{};

  /// Whether forwards of an engine can be captured in which that waits for the CPU.
  [[nodiscard]] bool captures_forwards(Handover asked) const noexcept {
    const Handover by = asked == Handover::automatic ? handover : asked;
    return captures && by != Handover::host && (by != Handover::stream || captures_waits);
  }
};

/// What a device knows of its own speed, for the cost model; 0 where it does not know. 1 GB = 1e9 bytes.
struct DeviceRates {
  double link_gbps = 0.0;  ///< whole pages, host to device
  double near_gbps = 0.0;  ///< attention over pages in device memory
};

/// Where near pages live and near attention runs. Work is enqueued on streams; see Stream.
/// Thread safety: all members may be called from several threads.
class Device {
 public:
  virtual ~Device() = default;
  [[nodiscard]] virtual const DeviceInfo& info() const noexcept = 0;

  /// Device memory, 4 KiB-aligned.  @throws Error{Errc::out_of_capacity}
  [[nodiscard]] virtual std::unique_ptr<Buffer> allocate(std::uint64_t bytes) = 0;
  /// Small pinned host memory that both sides address alike, zero-filled.  @throws Error{Errc::out_of_capacity}
  [[nodiscard]] virtual std::unique_ptr<Buffer> allocate_pinned(std::uint64_t bytes) = 0;
  /// Pins existing host memory.  @throws Error{Errc::device} if refused; nothing stays registered then.
  [[nodiscard]] virtual std::unique_ptr<Registration> register_host(std::span<std::byte> memory) = 0;
  [[nodiscard]] virtual std::unique_ptr<Stream> create_stream(const std::string& name) = 0;
  [[nodiscard]] virtual std::unique_ptr<Event> create_event() = 0;

  /// Verbs of an engine's forwards; null where the device has none. They live as long as the device.
  [[nodiscard]] virtual ForwardVerbs* forward_verbs() noexcept { return nullptr; }

  /// For pages of this size. What is not known is taken to be as the host's own memory.
  [[nodiscard]] virtual DeviceRates rates(std::uint64_t page_bytes) const {
    (void)page_bytes;
    return {};
  }

  /// A thread of the host that computes for this device has not returned in time and may still use any memory that a
  /// verb was given. Nothing more can be computed; the owner of such memory must not free it.
  [[nodiscard]] virtual bool lost() const noexcept { return false; }
};

}  // namespace sluice

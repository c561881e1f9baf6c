#include "cpu/device/host_device.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "cpu/device/fault_injector.hpp"
#include "cpu/device/host_event.hpp"
#include "cpu/device/host_stream.hpp"
#include "cpu/forward/forward_verbs.hpp"
#include "cpu/machine/limits.hpp"
#include "sluice/error.hpp"

namespace sluice::cpu {
namespace {

constexpr std::uint64_t kAlignment = 4 * KiB;
/// Keys' codes are read page by page from wherever their block lies: in small pages three times as slowly.
constexpr std::uint64_t kHugePage = 2 * MiB;
/// Larger requests are held against what the machine has left, as reading that costs some 100 us.
constexpr std::uint64_t kLarge = 64 * MiB;

struct Free {
  void operator()(std::byte* data) const noexcept { std::free(data); }
};
using Memory = std::unique_ptr<std::byte, Free>;

/// Never of size 0, so that every buffer has an address of its own.
Memory take(std::uint64_t bytes) {
  const std::uint64_t alignment = bytes < kHugePage ? kAlignment : kHugePage;
  const bool possible = bytes <= std::numeric_limits<std::int64_t>::max() - alignment &&
                        (bytes < kLarge || bytes <= available_memory_bytes());
  const std::uint64_t rounded = possible ? div_up(std::max<std::uint64_t>(bytes, 1), alignment) * alignment : 0;
  Memory memory(possible ? static_cast<std::byte*>(std::aligned_alloc(alignment, rounded)) : nullptr);
  if (!memory)
    throw Error(Errc::out_of_capacity, "host device: asked for " + std::to_string(bytes) + " bytes, the machine has " +
                                           std::to_string(available_memory_bytes()) +
                                           " left; ask for less, or raise the process' limits");
#ifdef MADV_HUGEPAGE
  if (alignment == kHugePage) (void)::madvise(memory.get(), rounded, MADV_HUGEPAGE);  // A request, no more.
#endif
  return memory;
}

/// Bytes of `allocate` in use. Shared with the buffers.
class Ledger {
 public:
  explicit Ledger(std::uint64_t limit) noexcept
      : limit_(limit == 0 ? std::numeric_limits<std::uint64_t>::max() : limit) {}

  void charge(std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (bytes > limit_ - used_)
      throw Error(Errc::out_of_capacity, "host device: asked for " + std::to_string(bytes) + " bytes, " +
                                             std::to_string(limit_ - used_) + " of " + std::to_string(limit_) +
                                             " are free; give it larger memory_bytes (in Python "
                                             "device_bytes), or less near_bytes");
    used_ += bytes;
  }
  void refund(std::uint64_t bytes) noexcept {
    const std::lock_guard lock(mutex_);
    used_ -= bytes;
  }

 private:
  const std::uint64_t limit_;
  std::mutex mutex_;
  std::uint64_t used_ = 0;  ///< guarded by mutex_
};

class HostBuffer final : public Buffer {
 public:
  /// `ledger` may be null: memory that does not count.
  HostBuffer(std::uint64_t bytes, std::shared_ptr<Ledger> ledger) : bytes_(bytes), memory_(take(bytes)) {
    if (ledger) ledger->charge(bytes);
    ledger_ = std::move(ledger);
  }
  ~HostBuffer() override {
    if (ledger_) ledger_->refund(bytes_);
  }
  [[nodiscard]] std::byte* data() const noexcept override { return memory_.get(); }
  [[nodiscard]] std::uint64_t bytes() const noexcept override { return bytes_; }

 private:
  std::uint64_t bytes_;
  Memory memory_;
  std::shared_ptr<Ledger> ledger_;
};

/// Registered ranges. Ordinary memory needs no pinning; what is kept is the rule that none is pinned twice.
class Registry {
 public:
  void insert(std::span<const std::byte> memory) {
    const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
    const auto end = begin + memory.size();
    const std::lock_guard lock(mutex_);
    const auto next = ranges_.lower_bound(begin);
    const bool overlaps =
        (next != ranges_.end() && next->first < end) || (next != ranges_.begin() && std::prev(next)->second > begin);
    if (memory.empty() || overlaps)
      throw Error(Errc::device, memory.empty()
                                    ? "host device: there is no memory to register"
                                    : "host device: part of the memory is already registered; unregister it first");
    ranges_.emplace(begin, end);
  }
  void erase(const std::byte* begin) noexcept {
    const std::lock_guard lock(mutex_);
    ranges_.erase(reinterpret_cast<std::uintptr_t>(begin));
  }

 private:
  std::mutex mutex_;
  std::map<std::uintptr_t, std::uintptr_t> ranges_;  ///< begin to end, disjoint; guarded by mutex_
};

class HostRegistration final : public Registration {
 public:
  HostRegistration(std::span<std::byte> memory, std::shared_ptr<Registry> registry)
      : begin_(memory.data()), registry_(std::move(registry)) {
    registry_->insert(memory);
  }
  ~HostRegistration() override { registry_->erase(begin_); }

 private:
  const std::byte* begin_;
  std::shared_ptr<Registry> registry_;
};

}  // namespace

struct HostDevice::Impl {
  std::shared_ptr<const Workers> workers;
  std::chrono::milliseconds flag_timeout;
  DeviceInfo info;
  ForwardVerbs forward_verbs{*workers};
  std::shared_ptr<Ledger> ledger;
  std::shared_ptr<Registry> registry = std::make_shared<Registry>();
  std::shared_ptr<FaultInjector> injector;

  std::mutex mutex;
  FaultSequence sequence;                  ///< of the device itself; guarded by mutex
  std::uint64_t streams = 0;  ///< created so far; guarded by mutex

  Impl(std::shared_ptr<const Workers> shared_workers, const HostDeviceOptions& options)
      : workers(std::move(shared_workers)),
        flag_timeout(options.flag_timeout),
        info{.name = "host",
             .memory_bytes = options.memory_bytes,
             .own_processor = false,
             .handover = options.handover,
             .stream_waits = true},
        ledger(std::make_shared<Ledger>(options.memory_bytes)),
        injector(std::make_shared<FaultInjector>(options.faults)),
        sequence(*injector, 0) {}

  /// Throws if this operation of the device itself is to fail.
  void fail_if_injected(FaultSite site, Errc code, const char* what) {
    const std::lock_guard lock(mutex);
    if (!sequence.next(site).fails) return;
    injector->count_failure();
    throw Error(code, std::string("host device: ") + what + " failed: injected failure");
  }
};

HostDevice::HostDevice(std::shared_ptr<const Workers> workers, const HostDeviceOptions& options) {
  if (!workers) throw Error(Errc::invalid_argument, "host device: workers must not be null");
  if (options.flag_timeout.count() < 0)
    throw Error(Errc::invalid_argument, "host device: flag_timeout is negative; give it 0 or more milliseconds");
  FaultInjector::validate(options.faults);
  impl_ = std::make_unique<Impl>(std::move(workers), options);
}

HostDevice::~HostDevice() = default;

const DeviceInfo& HostDevice::info() const noexcept { return impl_->info; }
sluice::ForwardVerbs* HostDevice::forward_verbs() noexcept { return &impl_->forward_verbs; }

std::unique_ptr<Buffer> HostDevice::allocate(std::uint64_t bytes) {
  impl_->fail_if_injected(FaultSite::allocation, Errc::out_of_capacity, "allocation");
  return std::make_unique<HostBuffer>(bytes, impl_->ledger);
}

std::unique_ptr<Buffer> HostDevice::allocate_pinned(std::uint64_t bytes) {
  impl_->fail_if_injected(FaultSite::allocation, Errc::out_of_capacity, "allocation of pinned memory");
  auto buffer = std::make_unique<HostBuffer>(bytes, nullptr);
  std::memset(buffer->data(), 0, bytes);
  return buffer;
}

std::unique_ptr<Registration> HostDevice::register_host(std::span<std::byte> memory) {
  impl_->fail_if_injected(FaultSite::registration, Errc::device, "registration");
  return std::make_unique<HostRegistration>(memory, impl_->registry);
}

std::unique_ptr<Stream> HostDevice::create_stream(const std::string& name) {
  std::uint64_t actor = 0;
  {
    const std::lock_guard lock(impl_->mutex);
    actor = ++impl_->streams;
  }
  return std::make_unique<HostStream>(
      HostStreamOptions{.name = name, .flag_timeout = impl_->flag_timeout, .actor = actor}, impl_->injector);
}

std::unique_ptr<Event> HostDevice::create_event() { return std::make_unique<HostEvent>(); }

bool HostDevice::lost() const noexcept { return impl_->workers->lost(); }

void HostDevice::inject(const FaultOptions& faults) {
  FaultInjector::validate(faults);
  impl_->injector->change(faults);
}

std::uint64_t HostDevice::injected_failures() const noexcept { return impl_->injector->failures(); }

}  // namespace sluice::cpu

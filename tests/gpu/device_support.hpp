#pragma once

#include <sys/mman.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>

#include "gpu/device/cuda_device.hpp"
#include "gpu/device/cuda_stream.hpp"
#include "gpu/kernels/transfer/signal.hpp"
#include "sluice/cuda.hpp"
#include "sluice/error.hpp"
#include "tests/support/errors.hpp"

namespace sluice::test {

using namespace std::chrono_literals;

inline Deadline soon() { return deadline_after(60s); }

/// False where the enqueuing thread waits in the stream's place: there a test may not raise a flag later.
inline bool streams_wait(Device& device) { return gpu::cuda_device(device, "test").memory_operations(); }

/// An object in memory that both sides see.
template <class T>
class Shared {
 public:
  explicit Shared(Device& device) : memory_(device.allocate_pinned(sizeof(T))), object_(new (memory_->data()) T{}) {}
  T& operator*() { return *object_; }
  T* operator->() { return object_; }

 private:
  std::unique_ptr<Buffer> memory_;
  T* object_;
};

/// Blocks its stream until opened; opens itself when it goes, so that no test hangs.
class Gate {
 public:
  Gate(Device& device, Stream& stream) : flag_(device) { stream.wait(*flag_, 1); }
  ~Gate() { open(); }
  void open() { flag_->signal(1); }

 private:
  Shared<Flag> flag_;
};

inline void copy(Stream& stream, void* to, const void* from, std::uint64_t bytes) {
  const Copy one{.to = static_cast<std::byte*>(to), .from = static_cast<const std::byte*>(from), .bytes = bytes};
  stream.copy(std::span(&one, 1));
}

/// What the device has in a word.
inline std::uint64_t read(Stream& stream, const std::byte* from) {
  std::uint64_t value = 0;
  copy(stream, &value, from, sizeof value);
  stream.synchronize(soon());
  return value;
}

inline void delay(Stream& stream, std::uint32_t microseconds) {
  gpu::launch_delay(microseconds, static_cast<cudaStream_t>(stream.native_handle()));
}

inline void fail(Stream& stream, const std::string& reason) { gpu::cuda_stream(&stream, "test").fail(reason); }

inline bool await(const Flag& flag, std::uint64_t value) {
  const Deadline deadline = soon();
  while (flag.state(value) == Flag::State::pending && RunClock::now() < deadline) std::this_thread::yield();
  return flag.state(value) == Flag::State::reached;
}

/// Pages of its own, which registration is about.
class Pages {
 public:
  explicit Pages(std::size_t bytes) : bytes_(bytes) {
    data_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~Pages() { (void)::munmap(data_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  [[nodiscard]] std::span<std::byte> all() const { return {static_cast<std::byte*>(data_), bytes_}; }

 private:
  void* data_;
  std::size_t bytes_;
};

}  // namespace sluice::test

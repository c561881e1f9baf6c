#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include "cpu/threads/kept.hpp"
#include "cpu/threads/workers.hpp"

namespace sluice::cpu {

/// What the bodies of a parallel_for use of their caller: on the heap, where it outlives a caller that gave a worker
/// up. Destroyed with this object, unless the workers are lost; then they keep it.
template <class T>
class Lent {
 public:
  template <class... Args>
  explicit Lent(const Workers& workers, Args&&... args)
      : workers_(workers), box_(std::make_unique<Box>(std::forward<Args>(args)...)) {}
  /// The T that the calling thread had the last time, as it was left; a new one the first time. For calls so frequent
  /// that allocating would cost more than they do.
  [[nodiscard]] static Lent reused(const Workers& workers) { return Lent(Reuse{}, workers); }
  ~Lent() {
    if (workers_.lost()) {
      workers_.keep(std::move(box_));
    } else if (reuses_) {
      spare() = std::move(box_);
    }
  }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

  [[nodiscard]] T* get() const noexcept { return &box_->value; }
  [[nodiscard]] T* operator->() const noexcept { return get(); }
  [[nodiscard]] T& operator*() const noexcept { return *get(); }

 private:
  struct Reuse {};
  struct Box final : Kept {
    template <class... Args>
    explicit Box(Args&&... args) : value(std::forward<Args>(args)...) {}
    T value;
  };
  Lent(Reuse, const Workers& workers) : workers_(workers), box_(std::move(spare())), reuses_(true) {
    if (!box_) box_ = std::make_unique<Box>();
  }
  static std::unique_ptr<Box>& spare() noexcept {
    thread_local std::unique_ptr<Box> box;
    return box;
  }

  const Workers& workers_;
  std::unique_ptr<Box> box_;
  bool reuses_ = false;
};

}  // namespace sluice::cpu

#pragma once

#include <pthread.h>

#include <stdexcept>

namespace sluice::test {

/// While it lives this process gets no new thread, as where a limit is reached: its stack would take more than all
/// addresses that there are.
class NoThreads {
 public:
  NoThreads() {
    pthread_attr_t none;
    ::pthread_attr_init(&none);
    const bool set = ::pthread_getattr_default_np(&before_) == 0 &&
                     ::pthread_attr_setstacksize(&none, std::size_t{1} << 47) == 0 &&
                     ::pthread_setattr_default_np(&none) == 0;
    ::pthread_attr_destroy(&none);
    if (!set) throw std::runtime_error("the size of stacks cannot be set");
  }
  ~NoThreads() {
    ::pthread_setattr_default_np(&before_);
    ::pthread_attr_destroy(&before_);
  }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  pthread_attr_t before_{};
};

}  // namespace sluice::test

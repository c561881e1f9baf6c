#pragma once

#include <cstddef>

namespace sluice::test {

/// The `which`-th allocation from now on fails, of all threads, counted from 0. In executables that link
/// failing_new.cpp, which brings an operator new of its own.
void fail_allocation(long which) noexcept;
/// Likewise, of those of the calling thread that take `least` bytes or more; negative: none fails.
void fail_own_allocation(long which, std::size_t least = 0) noexcept;
/// From now on all succeed. True if one failed since, whether or not a caller noticed.
bool one_failed() noexcept;

}  // namespace sluice::test

#pragma once

namespace sluice::test {

/// Built with a sanitizer, which takes ten times as long: tests that go through every combination of their parameters
/// leave out there what touches the same code in the same order.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace sluice::test

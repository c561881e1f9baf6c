#pragma once

#include <algorithm>
#include <cstdint>

#include "sluice/admission.hpp"

namespace sluice::scheduler {

/// Memory that a request takes while it runs.
struct MemoryNeed {
  std::uint64_t pages = 0;
  std::uint64_t near_pages = 0;

  MemoryNeed& operator+=(const MemoryNeed& more) noexcept {
    pages += more.pages;
    near_pages += more.near_pages;
    return *this;
  }
  MemoryNeed& operator-=(const MemoryNeed& less) noexcept {
    pages -= less.pages;
    near_pages -= less.near_pages;
    return *this;
  }
  [[nodiscard]] friend MemoryNeed operator+(MemoryNeed a, const MemoryNeed& b) noexcept { return a += b; }
};

/// These options, max_tokens being what there is room for.
/// @throws Error{Errc::invalid_argument} naming the first field that breaks its range
[[nodiscard]] AdmissionOptions resolved(const AdmissionOptions& options);

/// Of a request with as many tokens.
[[nodiscard]] MemoryNeed need_of(const AdmissionOptions& options, std::uint64_t tokens) noexcept;

/// Tokens of the request whose keys and values are needed, at most.
[[nodiscard]] inline std::uint64_t last_tokens(const AdmissionRequest& request) noexcept {
  return std::uint64_t{request.prompt_tokens} + std::max(request.max_new_tokens, 1u) - 1;
}

/// `options` are resolved.
/// @throws Error{Errc::invalid_argument}, Error{Errc::out_of_capacity} if it could not run to its end though it were
/// alone
void require_can_run(const AdmissionOptions& options, const AdmissionRequest& request);

}  // namespace sluice::scheduler

#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "sluice/admission.hpp"
#include "tests/support/catch.hpp"

/// What a caller of an Admission knows, kept the simplest way.
namespace sluice::test {

/// Fails the test; cheaper than REQUIRE where millions hold.
inline void law(bool holds, const char* what) {
  if (!holds) FAIL(what);
}

/// Pages of a host pool as sequences hold them. Those of prompts have names, by which others find them.
class NaivePool {
 public:
  using Page = std::shared_ptr<void>;
  using Name = std::pair<std::uint32_t, std::uint32_t>;  ///< prompts that begin alike, and which of their pages

  [[nodiscard]] std::uint64_t held() const { return held_; }
  [[nodiscard]] Page take() {
    ++held_;
    return {nullptr, [this](void*) { --held_; }};
  }
  [[nodiscard]] Page find(Name name) const {
    const auto at = named_.find(name);
    return at == named_.end() ? nullptr : at->second.lock();
  }
  void name(Name name, const Page& page) {
    if (find(name) == nullptr) named_[name] = page;
  }

 private:
  std::uint64_t held_ = 0;
  std::map<Name, std::weak_ptr<void>> named_;
};

/// What requests take of what the options share out.
struct NaiveRoom {
  const AdmissionOptions& options;

  [[nodiscard]] std::uint64_t pages_of(std::uint64_t tokens) const {
    return (tokens + options.page_tokens - 1) / options.page_tokens;
  }
  [[nodiscard]] std::uint64_t near_of(std::uint64_t tokens) const {
    const std::uint64_t most = options.near_pages_per_sequence;
    return most == 0 ? pages_of(tokens) : std::min(most, pages_of(tokens));
  }
  [[nodiscard]] bool fits(std::uint64_t pages, std::uint64_t near) const {
    return pages <= options.pages && (options.near_pages == 0 || near <= options.near_pages);
  }
};

/// A request as its caller knows it.
struct NaiveRequest {
  AdmissionRequest asked;
  std::uint32_t alike = 0;      ///< prompts of the same number begin alike
  std::uint32_t generated = 0;  ///< tokens that it was given
  bool runs = false;
  std::uint32_t prompt = 0;    ///< tokens when it was admitted
  std::uint32_t has = 0;       ///< tokens of its sequence
  TurnItem item{.tokens = 0};  ///< of the open turn; no tokens: none
  std::vector<NaivePool::Page> pages{};

  [[nodiscard]] std::uint32_t tokens() const { return asked.prompt_tokens + generated; }
  /// Whose keys and values are of use in the end.
  [[nodiscard]] std::uint32_t last_tokens() const {
    return asked.prompt_tokens + std::max(asked.max_new_tokens, 1u) - 1;
  }
  [[nodiscard]] std::uint32_t wants() const { return has < prompt ? prompt : has + 1; }
};

}  // namespace sluice::test

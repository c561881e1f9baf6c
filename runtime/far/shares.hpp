#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "sluice/units.hpp"

namespace sluice::runtime {

/// The items of one question after the other, shared out among threads, each to one. Questions are numbered one by one
/// and known modulo 2^32. Who comes late to a question finds that nothing is left of it.
class Shares {
 public:
  /// How many items question `asked` has: what the first to ask got from `count`, which may be wrong if the question is
  /// over by then. kNone if it is: others have answered it.
  template <class Count>
  [[nodiscard]] std::uint32_t total(std::uint64_t asked, const Count& count) {
    std::uint64_t known = total_.load(std::memory_order_acquire);
    if (age(known, asked) <= 0) return age(known, asked) == 0 ? low(known) : kNone;
    // Should others have answered all of it meanwhile, what is counted may be the next question's; but then they have
    // said how many items there are, and the exchange fails.
    const std::uint64_t counted = asked << 32 | count();
    // Also where nothing is claimed: questions are compared by how far they are apart.
    std::uint64_t claims = claims_.load(std::memory_order_relaxed);
    while (age(claims, asked) > 0 && !claims_.compare_exchange_weak(claims, asked << 32, std::memory_order_acq_rel)) {
    }
    if (total_.compare_exchange_strong(known, counted, std::memory_order_acq_rel)) return low(counted);
    return age(known, asked) == 0 ? low(known) : kNone;
  }

  /// The next item of question `asked`, which has `total`; kNone if there is none left. From here until it is finished
  /// the question stands.
  [[nodiscard]] std::uint32_t claim(std::uint64_t asked, std::uint32_t total) noexcept {
    std::uint64_t claims = claims_.load(std::memory_order_relaxed);
    while (true) {
      if (age(claims, asked) != 0 || low(claims) >= total) return kNone;
      if (claims_.compare_exchange_weak(claims, claims + 1, std::memory_order_acq_rel, std::memory_order_relaxed))
        return low(claims);
    }
  }

  /// One that was claimed is done. Whether it was the last of all.
  [[nodiscard]] bool finish(std::uint32_t total) noexcept {
    if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 != total) return false;
    finished_.store(0, std::memory_order_relaxed);
    return true;
  }

 private:
  static constexpr std::uint32_t low(std::uint64_t word) noexcept { return static_cast<std::uint32_t>(word); }
  /// How many questions `asked` comes after the one that a word is about.
  static constexpr std::int32_t age(std::uint64_t word, std::uint64_t asked) noexcept {
    return static_cast<std::int32_t>(low(asked) - static_cast<std::uint32_t>(word >> 32));
  }

  std::atomic<std::uint64_t> total_{0};   ///< question in the upper half, its items in the lower
  std::atomic<std::uint64_t> claims_{0};  ///< likewise, with its next item
  std::atomic<std::uint32_t> finished_{0};
};

/// The parts of the lists of one question after the other, each to one thread, from when a list is opened: lists need
/// not wait for each other. Questions are numbered and known as those of Shares.
class ListShares {
 public:
  explicit ListShares(std::size_t lists) : lists_(lists) {}

  /// The list's `parts` parts can be claimed: 1 to 65,535. While the question stands and is not closed.
  void open(std::uint64_t asked, std::uint32_t list, std::uint32_t parts) noexcept {
    unfinished_.fetch_add(parts, std::memory_order_relaxed);
    lists_[list].word.store(asked << 32 | parts << kPartBits, std::memory_order_release);
    opened_.fetch_add(1, std::memory_order_release);
  }
  /// Lists that were opened, of all questions: another number whenever there may be more to claim.
  [[nodiscard]] std::uint64_t opened() const noexcept { return opened_.load(std::memory_order_acquire); }

  struct Share {
    std::uint32_t part = 0;
    std::uint32_t parts = 0;  ///< of the list; 0: none is left, or the list is not open
  };
  /// From here until the part is finished the question stands.
  [[nodiscard]] Share claim(std::uint64_t asked, std::uint32_t list) noexcept {
    std::atomic<std::uint64_t>& word = lists_[list].word;
    std::uint64_t claims = word.load(std::memory_order_acquire);
    while (true) {
      const auto parts = static_cast<std::uint32_t>(claims) >> kPartBits;
      const auto part = static_cast<std::uint32_t>(claims) & kPartMask;
      if (claims >> 32 != (asked & 0xFFFF'FFFFu) || part >= parts) return {};
      if (word.compare_exchange_weak(claims, claims + 1, std::memory_order_acq_rel, std::memory_order_acquire))
        return {.part = part, .parts = parts};
    }
  }
  /// A part that was claimed is done. Whether nothing is left of the question, which is closed.
  [[nodiscard]] bool finish() noexcept { return emptied(unfinished_.fetch_sub(1, std::memory_order_acq_rel) - 1); }
  /// All lists are open that will be. Whether nothing is left of the question.
  [[nodiscard]] bool close() noexcept {
    return emptied(unfinished_.fetch_add(kClosed, std::memory_order_acq_rel) + kClosed);
  }

 private:
  static constexpr int kPartBits = 16;
  static constexpr std::uint32_t kPartMask = (1u << kPartBits) - 1;
  static constexpr std::uint32_t kClosed = 1u << 31;
  /// One thread finds it so: the last of a question.
  [[nodiscard]] bool emptied(std::uint32_t unfinished) noexcept {
    if (unfinished != kClosed) return false;
    unfinished_.store(0, std::memory_order_relaxed);
    return true;
  }

  /// In a line of its own: threads that claim parts of different lists do not wait for each other.
  struct alignas(64) Claims {
    std::atomic<std::uint64_t> word{0};  ///< question in the upper half, then the list's parts, then the next
  };
  std::vector<Claims> lists_;
  alignas(64) std::atomic<std::uint32_t> unfinished_{0};  ///< parts of lists that are open, and kClosed
  alignas(64) std::atomic<std::uint64_t> opened_{0};
};

}  // namespace sluice::runtime

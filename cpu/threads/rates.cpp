#include "cpu/threads/rates.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/threads/lent.hpp"
#include "sluice/error.hpp"

namespace sluice::cpu {
namespace {

/// Work that one thread takes up at a time when memory is filled or read.
constexpr std::uint64_t kPieceBytes = 256 * KiB;
/// Of several passes the fastest counts: whatever disturbs one makes it slower.
constexpr int kReadPasses = 3;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double gbps(std::uint64_t bytes, double seconds) { return static_cast<double>(bytes) / std::max(seconds, 1e-9) / 1e9; }

/// Memory that is not touched before it is filled; in huge pages if the system has some, as the host pool is,
/// and because small ones would take longer to fault in than everything else here. Lent, for bodies refer to it.
class Block {
 public:
  explicit Block(std::uint64_t bytes) : bytes_(div_up(bytes, kHugePage) * kHugePage) {
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(kHugePage, bytes_)));
    if (data_ == nullptr) bytes_ = 0;
#ifdef MADV_HUGEPAGE
    if (data_ != nullptr) (void)::madvise(data_.get(), bytes_, MADV_HUGEPAGE);
#endif
  }
  [[nodiscard]] std::byte* data() const noexcept { return data_.get(); }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

  /// Copies `pattern` over the block again and again. Never zeros: zeros are faster than data.
  void fill(const Workers& workers, std::vector<std::uint32_t> pattern) {
    pattern_ = std::move(pattern);
    for_each_piece(workers,
                   [this, bytes = pattern_.size() * sizeof(std::uint32_t)](std::uint64_t begin, std::uint64_t end) {
                     for (; begin < end; begin += bytes) {
                       std::memcpy(data() + begin, pattern_.data(), std::min<std::uint64_t>(bytes, end - begin));
                     }
                   });
  }

  template <class Body>
  void for_each_piece(const Workers& workers, const Body& body) const {
    workers.parallel_for(static_cast<std::uint32_t>(div_up(bytes_, kPieceBytes)),
                         [body, bytes = bytes_](std::uint32_t i) {
                           const std::uint64_t begin = i * kPieceBytes;
                           body(begin, std::min(begin + kPieceBytes, bytes));
                         });
  }

 private:
  static constexpr std::uint64_t kHugePage = 2 * MiB;
  struct Free {
    void operator()(std::byte* data) const noexcept { std::free(data); }
  };
  std::unique_ptr<std::byte, Free> data_;
  std::uint64_t bytes_;
  std::vector<std::uint32_t> pattern_;
};

std::vector<std::uint32_t> random_pattern(std::size_t words) {
  std::vector<std::uint32_t> pattern(words);
  std::uint32_t random = 12345;
  for (std::uint32_t& word : pattern) word = random = random * 1664525u + 1013904223u;
  return pattern;
}

/// Reads every byte; the sum keeps the compiler from leaving it out.
std::uint64_t read_sum(const std::byte* data, std::uint64_t bytes) noexcept {
  std::uint64_t sum = 0;
  const std::uint64_t words = bytes / sizeof(std::uint64_t);
#pragma omp simd reduction(+ : sum)
  for (std::uint64_t i = 0; i < words; ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + i * sizeof word, sizeof word);
    sum += word;
  }
  return sum;
}

}  // namespace

double measure_read_gbps(const Workers& workers, std::uint64_t bytes) {
  const Lent<Block> memory(workers, bytes);
  if (memory->bytes() == 0) {
    throw Error(Errc::out_of_capacity,
                "cannot allocate " + std::to_string(bytes) + " bytes to measure the read rate over");
  }
  memory->fill(workers, random_pattern(16384));
  double best = 0.0;
  const Lent<std::atomic<std::uint64_t>> sum(workers, 0u);
  for (int pass = 0; pass < kReadPasses; ++pass) {
    const auto start = Clock::now();
    memory->for_each_piece(workers, [data = memory->data(), to = sum.get()](std::uint64_t begin, std::uint64_t end) {
      to->fetch_add(read_sum(data + begin, end - begin), std::memory_order_relaxed);
    });
    best = std::max(best, gbps(memory->bytes(), seconds_since(start)));
  }
  return best;
}

}  // namespace sluice::cpu

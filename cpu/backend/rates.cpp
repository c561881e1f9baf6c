#include "cpu/backend/rates.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/backend/backend.hpp"
#include "cpu/backend/verbs.hpp"
#include "cpu/threads/lent.hpp"
#include "sluice/error.hpp"

namespace sluice::cpu {
namespace {

/// Beyond the last-level cache of most machines, and still filled within milliseconds.
constexpr std::uint64_t kRatesBytes = 64 * MiB;
constexpr std::uint64_t kLeastBytes = 4 * MiB;
/// Work that one thread takes up at a time when memory is filled, read or copied.
constexpr std::uint64_t kPieceBytes = 256 * KiB;
/// Of several passes the fastest counts: whatever disturbs one makes it slower.
constexpr int kReadPasses = 3;
constexpr int kRatePasses = 2;

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
  void fill(const Workers& workers, std::vector<std::byte> pattern) {
    pattern_ = std::move(pattern);
    for_each_piece(workers, [this](std::uint64_t begin, std::uint64_t end) {
      for (; begin < end; begin += pattern_.size()) {
        std::memcpy(data() + begin, pattern_.data(), std::min<std::uint64_t>(pattern_.size(), end - begin));
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
  std::vector<std::byte> pattern_;
};

/// Moderate random numbers as elements of `type`; any of them is a sane key, value or query.
std::vector<std::byte> random_pattern(DType type, std::size_t elements) {
  std::vector<float> values(elements);
  std::uint32_t random = 12345;
  for (float& value : values) {
    random = random * 1664525u + 1013904223u;
    value = static_cast<float>(random >> 8) * 0x1.0p-23f - 1.f;
  }
  std::vector<std::byte> pattern(elements * bytes_of(type));
  kernels_for(fastest_kernels(), type).narrow(values.data(), pattern.data(), elements);
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

/// One KV head's pages over all of a block, attended by as many tasks as there are threads. Lent: tasks point to what
/// is here.
class RateProbe {
 public:
  RateProbe(const Workers& workers, sluice::Backend& backend, const AttentionShape& shape, const PageLayout& layout,
            const Block& memory)
      : backend_(backend), shape_(shape), layout_(layout), memory_(memory) {
    pages_ = static_cast<std::uint32_t>(memory.bytes() / layout.page_bytes());
    for (std::uint32_t i = 0; i < pages_; ++i) frames_.push_back(i);
    const std::vector<std::byte> q = random_pattern(DType::f32, std::size_t{shape.group()} * shape.head_dim);
    q_.resize(q.size() / sizeof(float));
    std::memcpy(q_.data(), q.data(), q.size());
    tasks_.resize(std::max(1u, std::min(workers.threads(), pages_)));
    out_.resize(tasks_.size() * q_.size());
    lse_.resize(tasks_.size() * shape.group());
  }

  /// All pages, as runs.
  [[nodiscard]] double runs_gbps() {
    runs_.clear();
    for (std::uint32_t page = 0; page < pages_; ++page) {
      runs_.push_back({.page = page, .begin = 0, .end = static_cast<std::uint16_t>(layout_.page_tokens)});
    }
    return attend_gbps(runs_, {});
  }

  /// About one row in eight, at uneven distances, of the first half: reading all pages has just put the second
  /// half into the cache in its place.
  [[nodiscard]] double tokens_gbps() {
    tokens_.clear();
    std::uint32_t random = 1;
    for (std::uint64_t token = 0; token < std::uint64_t{pages_} / 2 * layout_.page_tokens;) {
      tokens_.push_back(static_cast<std::uint32_t>(token));
      random = random * 1664525u + 1013904223u;
      token += 1 + (random >> 28);
    }
    return attend_gbps({}, tokens_);
  }

 private:
  double attend_gbps(std::span<const PageRun> runs, std::span<const std::uint32_t> tokens) {
    const auto share = [this](auto all, std::size_t i) {
      const std::size_t begin = all.size() * i / tasks_.size();
      return all.subspan(begin, all.size() * (i + 1) / tasks_.size() - begin);
    };
    for (std::size_t i = 0; i < tasks_.size(); ++i) {
      tasks_[i] = {.q = q_.data(),
                   .kv = {.base = memory_.data(), .frames = frames_.data(), .layout = layout_},
                   .runs = share(runs, i),
                   .tokens = share(tokens, i),
                   .members = {},
                   .scores = {},
                   .out = {.out = &out_[i * q_.size()], .lse = &lse_[i * shape_.group()]}};
    }
    const std::uint64_t rows = runs.size() * layout_.page_tokens + tokens.size();
    const auto start = Clock::now();
    backend_.attend(tasks_, shape_, nullptr);
    return gbps(rows * 2 * layout_.row_bytes(), seconds_since(start));
  }

  sluice::Backend& backend_;
  AttentionShape shape_;
  PageLayout layout_;
  const Block& memory_;  ///< lent as well
  std::uint32_t pages_ = 0;
  std::vector<std::uint32_t> frames_;
  std::vector<PageRun> runs_;
  std::vector<std::uint32_t> tokens_;
  std::vector<float> q_;
  std::vector<AttendTask> tasks_;
  std::vector<float> out_;
  std::vector<float> lse_;
};

/// Pages copied one by one, in an order that no prefetcher guesses, by the one thread that a stream has.
double copy_gbps(const Block& memory, std::uint64_t page_bytes) {
  const std::uint64_t pages = memory.bytes() / page_bytes / 2;
  const std::uint64_t copies = std::max<std::uint64_t>(1, std::min(pages, 8 * MiB / page_bytes));
  const auto start = Clock::now();
  for (std::uint64_t i = 0; i < copies; ++i) {
    std::memcpy(memory.data() + i * page_bytes, memory.data() + (pages + i * 7 % pages) * page_bytes, page_bytes);
  }
  return gbps(copies * page_bytes, seconds_since(start));
}

}  // namespace

double measure_read_gbps(const Workers& workers, std::uint64_t bytes) {
  const Lent<Block> memory(workers, bytes);
  if (memory->bytes() == 0) {
    throw Error(Errc::out_of_capacity, "cannot allocate " + std::to_string(bytes) + " bytes to measure the read rate over");
  }
  memory->fill(workers, random_pattern(DType::f32, 16384));
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

CostRates measure_rates(const Workers& workers, Backend& backend, const AttentionShape& shape, const PageLayout& layout) {
  CostRates rates;
  std::uint64_t bytes = kRatesBytes;
  const Lent<Block> lent(workers, bytes);
  Block& memory = *lent;
  while (memory.bytes() == 0 && bytes > kLeastBytes) memory = Block(bytes /= 2);
  if (memory.bytes() < 2 * layout.page_bytes()) return rates;
  memory.fill(workers, random_pattern(layout.dtype, 16384));
  const Lent<RateProbe> probe(workers, workers, backend, shape, layout, memory);
  rates.far_runs_gbps = rates.far_tokens_gbps = 0.0;
  for (int pass = 0; pass < kRatePasses; ++pass) {
    rates.far_runs_gbps = std::max(rates.far_runs_gbps, probe->runs_gbps());
    rates.far_tokens_gbps = std::max(rates.far_tokens_gbps, probe->tokens_gbps());
  }
  rates.near_gbps = rates.far_runs_gbps;  // The host device's memory is the same memory.
  rates.link_gbps = copy_gbps(memory, layout.page_bytes());
  return rates;
}

}  // namespace sluice::cpu

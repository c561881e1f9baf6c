// What progressive attention asks of a backend: the masses of runs, and the verdict on them.

#include <cmath>
#include <vector>

#include "tests/support/backend_under_test.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"
#include "tests/support/reference.hpp"

namespace sluice::test {
namespace {

constexpr float kUntouched = 1234.f;

/// Tasks of one problem over several selections, each with masses of its own.
class MassTasks {
 public:
  MassTasks(BackendUnderTest& under_test, const Problem& problem) : under_test_(under_test), problem_(problem) {
    placed_ = place(under_test, problem);
  }

  /// `runs` and `tokens` must outlive the call of `run`.
  AttendTask& add(std::span<const PageRun> runs, std::span<const std::uint32_t> tokens = {}) {
    const std::uint32_t group = problem_.options().group;
    AttendTask task;
    task.q = placed_.q;
    task.kv = placed_.kv;
    task.runs = runs;
    task.tokens = tokens;
    task.masses = under_test_.array(runs.size() * group + 1, kUntouched).data();
    task.out = {.out = under_test_.array(std::size_t{group} * problem_.options().head_dim, kNotANumber).data(),
                .lse = under_test_.array(group, kNotANumber).data()};
    tasks_.push_back(task);
    return tasks_.back();
  }

  void run() {
    under_test_.backend().attend(tasks_, problem_.shape(), under_test_.stream());
    under_test_.finish();
  }

  /// Every mass is that of its run, and the outputs are what they are without masses.
  void require() const {
    for (const AttendTask& task : tasks_) {
      std::vector<Attended> all = attended(task.tokens);
      std::vector<double> masses;
      for (const PageRun& run : task.runs) {
        const std::uint32_t first = run.page * problem_.options().page_tokens;
        const std::vector<Attended> rows = attended(first + run.begin, first + run.end);
        all.insert(all.end(), rows.begin(), rows.end());
        const Attention one = reference::attend(problem_, rows);
        masses.insert(masses.end(), one.lse.begin(), one.lse.end());
      }
      const Attention whole = reference::attend(problem_, all);
      const double within = 8 * tolerance(problem_);  // What a device needs, see device_tolerance.
      if (task.masses != nullptr) {
        masses.push_back(kUntouched);
        REQUIRE(max_abs_diff(std::span<const float>(task.masses, masses.size()), masses) <= within);
      }
      REQUIRE(max_abs_diff(std::span<const float>(task.out.lse, whole.lse.size()), whole.lse) <= within);
      REQUIRE(max_abs_diff(std::span<const float>(task.out.out, whole.out.size()), whole.out) <= within);
    }
  }

 private:
  BackendUnderTest& under_test_;
  const Problem& problem_;
  Placed placed_;
  std::vector<AttendTask> tasks_;
};

/// Whole pages, ragged ones and empty ones, in no order.
std::vector<PageRun> random_runs(const Problem& problem, std::uint64_t seed) {
  Random random(seed);
  std::vector<PageRun> runs = runs_over(problem.options().tokens, problem.options().page_tokens);
  for (std::size_t i = 0; i + 1 < runs.size(); ++i) {
    std::swap(runs[i], runs[i + random.below(static_cast<std::uint32_t>(runs.size() - i))]);
  }
  for (PageRun& run : runs) {
    if (random.below(2) == 0) continue;
    run.begin = static_cast<std::uint16_t>(random.below(run.end));
    run.end = static_cast<std::uint16_t>(run.begin + random.below(run.end - run.begin + 1u));
  }
  return runs;
}

}  // namespace

TEST_CASE("attending writes the mass of every run beside the output", "[backend][progress]") {
  struct Case {
    DType dtype;
    std::uint32_t tokens, head_dim, group, page_tokens;
    double outlier;
  };
  const auto c =
      GENERATE(Case{DType::bf16, 1, 128, 4, 16, 1.0}, Case{DType::f16, 37, 64, 1, 8, 1.0},
               Case{DType::f32, 700, 80, 3, 32, 1.0}, Case{DType::bf16, 333, 128, 7, 24, 1.0},
               Case{DType::bf16, 2'000, 64, 12, 256, 1.0}, Case{DType::f16, 900, 128, 32, 16, 1.0},
               Case{DType::bf16, 5'000, 128, 4, 32, 1.0}, Case{DType::bf16, 600, 128, 4, 32, 40.0});
  CAPTURE(to_string(c.dtype), c.tokens, c.head_dim, c.group, c.page_tokens, c.outlier);
  const auto under_test = backend_under_test();
  const Problem problem({.dtype = c.dtype,
                         .tokens = c.tokens,
                         .head_dim = c.head_dim,
                         .group = c.group,
                         .page_tokens = c.page_tokens,
                         .seed = c.tokens,
                         .outlier = c.outlier});
  if (!under_test->supports(problem.shape(), problem.layout())) return;
  const auto whole = runs_over(c.tokens, c.page_tokens);
  const auto ragged = random_runs(problem, 1);
  const std::vector<PageRun> empty{{.page = 0, .begin = 0, .end = 0}};
  MassTasks tasks(*under_test, problem);
  tasks.add(whole);
  tasks.add(ragged);
  tasks.add(empty);
  tasks.add({});
  tasks.add(std::span(whole).first(1));
  tasks.run();
  tasks.require();
}

TEST_CASE("masses beside single tokens, and beside tasks that want none", "[backend][progress]") {
  const auto under_test = backend_under_test();
  const Problem problem({.tokens = 1'500, .head_dim = 128, .group = 4, .page_tokens = 16});
  const auto runs = runs_over(704, 16);
  std::vector<std::uint32_t> tokens;
  for (std::uint32_t token = 704; token < 1'500; token += 3) tokens.push_back(token);
  MassTasks tasks(*under_test, problem);
  tasks.add(runs, tokens);
  tasks.add(runs, tokens).masses = nullptr;
  tasks.add({}, tokens);
  tasks.add(std::span(runs).first(3)).masses = nullptr;
  tasks.run();
  tasks.require();
}

TEST_CASE("masses of many tasks at once", "[backend][progress]") {
  const auto under_test = backend_under_test();
  const Problem problem({.tokens = 600, .head_dim = 64, .group = 3, .page_tokens = 8});
  std::vector<std::vector<PageRun>> runs;
  for (std::uint64_t seed = 0; seed < 150; ++seed) runs.push_back(random_runs(problem, seed));
  MassTasks tasks(*under_test, problem);
  for (const auto& each : runs) tasks.add(each);
  tasks.run();
  tasks.require();
}

TEST_CASE("a page that weighs nothing still has its mass", "[backend][progress]") {
  const auto under_test = backend_under_test();
  Problem problem({.tokens = 64, .head_dim = 64, .group = 2, .page_tokens = 16});
  for (std::uint32_t c = 0; c < 64; ++c) {  // Scores of some +200 on page 0 and -200 on page 2.
    for (std::uint32_t h = 0; h < 2; ++h) problem.set_q(h, c, 5.f);
    for (std::uint32_t row = 0; row < 16; ++row) {
      problem.set_k(row, c, 5.0 + row / 64.0);
      problem.set_k(32 + row, c, -5.0 - row / 64.0);
    }
  }
  const auto runs = runs_over(64, 16);
  MassTasks tasks(*under_test, problem);
  const float* const masses = tasks.add(runs).masses;
  tasks.run();
  tasks.require();
  REQUIRE(masses[0] > 190.f);
  REQUIRE(masses[4] < -190.f);
}

}  // namespace sluice::test

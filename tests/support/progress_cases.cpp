// What progressive attention asks of a backend: the masses of runs, and the verdict on them.

#include <cmath>
#include <vector>

#include "tests/support/backend_under_test.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"
#include "tests/support/reference.hpp"
#include "tests/support/sanitized.hpp"

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
  const auto c = GENERATE(Case{DType::bf16, 1, 128, 4, 16, 1.0}, Case{DType::f16, 37, 64, 1, 8, 1.0},
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

namespace {

/// Log masses as they come from attention, and as they should not: ties, nothing, and what is no number.
float random_mass(Random& random, bool hard) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float special[] = {kNotANumber, -kInf, 3.f, 3.f, -300.f, 300.f};
  if (hard && random.below(8) == 0) return special[random.below(6)];
  return static_cast<float>(2.0 * random.normal());
}

/// One KV head that is verified microbatch by microbatch, beside the reference.
struct Verified {
  std::vector<reference::Progress> expected;  ///< [group]
  std::span<ProgressState> states;
  std::span<float> masses;
  std::span<float> extra;
  std::span<float> bounds;
  std::span<std::uint64_t> verdict;
  ProgressTask task;
};

/// What the reference makes of the task: the least share, and the states beside those of the backend.
double require_states(Verified& head, std::uint32_t group) {
  double least = 1.0;
  for (std::uint32_t h = 0; h < group; ++h) {
    CAPTURE(h);
    reference::Progress& expected = head.expected[h];
    if (head.task.extra != nullptr) reference::add_mass(expected, head.extra[h]);
    std::vector<double> masses;
    for (std::uint32_t page = 0; page < head.task.pages; ++page) masses.push_back(head.masses[page * group + h]);
    reference::add_pages(expected, head.task.rule, masses, head.task.full);
    const double bound = head.task.bounds == nullptr ? kEmptyLse : head.task.bounds[h];
    const double share = reference::progress_share(expected, head.task.left, bound);
    const ProgressState& state = head.states[h];
    const double found[] = {state.mass, state.unseen, state.share};
    const double wanted[] = {expected.mass, expected.unseen, share};
    for (int i = 0; i < 3; ++i) {
      CAPTURE(i, found[i], wanted[i]);
      REQUIRE((found[i] == wanted[i] || std::abs(found[i] - wanted[i]) <= 2e-5 * std::max(1.0, std::abs(wanted[i]))));
    }
    least = std::min(least, share);
  }
  return least;
}

}  // namespace

TEST_CASE("the verdict on microbatches is that of the formula", "[backend][progress]") {
  const auto [rule, group, heads, hard] =
      GENERATE(grid(std::array{ProgressRule::least, ProgressRule::mean, ProgressRule::median, ProgressRule::certified},
                    std::array{1u, 4u, 32u}, std::array{1u, 90u}, std::array{false, true}));
  CAPTURE(static_cast<int>(rule), group, heads, hard);
  const auto under_test = backend_under_test();
  const AttentionShape shape{.layers = 1, .q_heads = group, .kv_heads = 1, .head_dim = 64};
  Random random(group + heads);
  std::vector<Verified> all(heads);
  for (Verified& head : all) {
    head.expected.resize(group);
    head.states = under_test->array(group, ProgressState{.mass = kNotANumber, .unseen = kNotANumber});
    head.masses = under_test->array<float>(std::size_t{group} * 67);
    head.extra = under_test->array<float>(group);
    head.bounds = under_test->array<float>(group);
    head.verdict = under_test->array<std::uint64_t>(1);
    for (float& lse : head.extra) lse = random_mass(random, hard);
    head.task = {.states = head.states.data(),
                 .masses = head.masses.data(),
                 .bounds = rule == ProgressRule::certified ? head.bounds.data() : nullptr,
                 .left = 40 + random.below(1'000),
                 .mass = 0.5f,
                 .rule = rule,
                 .verdict = head.verdict.data()};
  }
  std::uint32_t raised = 0;
  for (std::uint32_t round = 1; round <= 5; ++round) {
    CAPTURE(round);
    std::vector<ProgressTask> tasks;
    for (Verified& head : all) {
      for (float& mass : head.masses) mass = random_mass(random, hard);
      for (float& bound : head.bounds) bound = random_mass(random, false) + 2.f;
      head.task.first = round == 1;
      head.task.extra = round == 1 ? head.extra.data() : nullptr;
      head.task.pages = random.below(round == 2 ? 68 : 6);
      head.task.full = head.task.pages - (head.task.pages != 0 ? random.below(2) : 0);
      head.task.left = round == 5 ? 0 : head.task.left / (round + 1) + 1;
      head.task.tag = 100 + round;
      tasks.push_back(head.task);
    }
    under_test->backend().verify(tasks, shape, under_test->stream());
    under_test->finish();
    for (Verified& head : all) {
      const double least = require_states(head, group);
      REQUIRE(head.verdict[0] >> 1 == 100 + round);
      if (std::abs(least - 0.5) < 1e-3) continue;  // Either verdict is right.
      REQUIRE(head.verdict[0] == verdict_word(100 + round, least > 0.5));
      raised += least > 0.5 ? 1 : 0;
    }
  }
  REQUIRE(raised >= heads);  // No page is left in the last round.
}

TEST_CASE("all of the mass is enough only when no page is left", "[backend][progress]") {
  const auto under_test = backend_under_test();
  const AttentionShape shape{.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 64};
  const auto states = under_test->array<ProgressState>(2);
  const auto verdict = under_test->array<std::uint64_t>(1);
  const std::vector<float> some{50.f, 60.f, -900.f, kEmptyLse};  // What is left weighs nothing that float32 can tell.
  const auto masses = under_test->copy_of(some);
  for (const std::uint32_t left : {1u, 0u}) {
    const ProgressTask task{.states = states.data(),
                            .masses = masses.data(),
                            .pages = 2,
                            .full = 2,
                            .left = left,
                            .mass = 1.f,
                            .first = true,
                            .verdict = verdict.data(),
                            .tag = 5};
    under_test->backend().verify({&task, 1}, shape, under_test->stream());
    under_test->finish();
    REQUIRE(states[0].share == 1.f);
    REQUIRE(states[1].share == 1.f);
    REQUIRE(verdict[0] == verdict_word(5, left == 0));
  }
}

}  // namespace sluice::test

// The attention kernels of every instruction set against the reference.

#include <cmath>
#include <string>

#include "cpu/stages/row_list.hpp"
#include "tests/cpu/kernel_cases.hpp"
#include "tests/support/random.hpp"

namespace sluice::test {
namespace {

/// One call of an attend kernel. The outputs start as NaN and are followed by a row that must stay as it is.
class Attend {
 public:
  Attend(const Problem& problem, std::span<const std::uint32_t> tokens)
      : problem_(problem),
        rows_(tokens.size() + 1),
        scales_(tokens.size() + 1),
        out_(problem.options().group * problem.options().head_dim + 16, kNan),
        lse_(problem.options().group + 1, kNan) {
    cpu::list_rows(problem.kv(), tokens, rows_.data());
    if (problem.layout().scaled()) cpu::list_scales(problem.kv(), tokens, scales_.data());
    out_[out_size()] = lse_.back() = 1234.f;
    args_ = {.q = problem.q(),
             .scale = problem.shape().score_scale(),
             .softcap = problem.options().softcap,
             .k = rows_.data(),
             .v_offset = problem.layout().half_bytes(),
             .scales = scales_.data(),
             .count = static_cast<std::uint32_t>(tokens.size()),
             .group = problem.options().group,
             .head_dim = problem.options().head_dim,
             .out = out_.data(),
             .lse = lse_.data()};
  }
  cpu::AttendRows& args() { return args_; }
  void run(const cpu::Kernels& kernels) {
    kernels.element[static_cast<int>(problem_.options().dtype)].attend(args_);
    REQUIRE(out_[out_size()] == 1234.f);
    REQUIRE(lse_.back() == 1234.f);
  }
  [[nodiscard]] std::span<const float> out() const { return std::span(out_).first(out_size()); }
  [[nodiscard]] std::span<const float> lse() const { return std::span(lse_).first(lse_.size() - 1); }
  void require(const Attention& expected, double within) const {
    REQUIRE(max_abs_diff(out(), expected.out) <= within);
    REQUIRE(max_abs_diff(lse(), expected.lse) <= within);
  }

 private:
  [[nodiscard]] std::size_t out_size() const { return out_.size() - 16; }

  const Problem& problem_;
  std::vector<const std::byte*> rows_;
  std::vector<const float*> scales_;
  std::vector<float> out_;
  std::vector<float> lse_;
  cpu::AttendRows args_;
};

}  // namespace

TEST_CASE("every variant attends like the reference", "[cpu][kernels]") {
  for_each_shape([](ProblemOptions options) {
    options.tokens = 150;
    options.seed = options.head_dim + options.group;
    const Problem problem(options);
    const double within = tolerance(problem);
    for (const double share : {0.0, 0.01, 0.2, 1.0}) {
      const std::vector<std::uint32_t> tokens = random_tokens(options.tokens, share, 5);
      CAPTURE(tokens.size());
      const Attention expected = reference::attend(problem, attended(tokens));
      for_each_variant([&](const cpu::Kernels& kernels) {
        Attend attend(problem, tokens);
        attend.run(kernels);
        attend.require(expected, within);
      });
    }
  });
}

TEST_CASE("scores are scaled and soft-capped as a model says, those that are given are not", "[cpu][kernels]") {
  const auto softcap = GENERATE(0.f, 0.5f, 20.f);
  CAPTURE(softcap);
  for_each_shape([&](ProblemOptions options) {
    options.tokens = 90;
    options.scale = 0.7f;
    options.softcap = softcap;
    options.outlier = 20.0;
    const Problem problem(options);
    const std::vector<std::uint32_t> tokens = random_tokens(options.tokens, 0.8, 10);
    const Attention expected = reference::attend(problem, attended(tokens));
    const std::vector<float> scores = scores_of(problem, tokens);
    options.softcap = 0.f;  // A cap makes no difference larger.
    const double within = tolerance(Problem(options)) + 1e-6 * softcap;
    for_each_variant([&](const cpu::Kernels& kernels) {
      std::vector<float> seen(scores.size());
      Attend attend(problem, tokens);
      attend.args().seen = seen.data();
      attend.run(kernels);
      attend.require(expected, within);
      REQUIRE(max_abs_diff(seen, std::vector<double>(scores.begin(), scores.end())) <= within);
      Attend scored(problem, tokens);
      scored.args().scores = scores.data();
      scored.run(kernels);
      scored.require(expected, within);
    });
  });
}

TEST_CASE("masked pairs and given scores weigh what they should", "[cpu][kernels]") {
  const auto softcap = GENERATE(0.f, 1.f);
  CAPTURE(softcap);
  for_each_shape([&](ProblemOptions options) {
    options.softcap = softcap;
    options.tokens = 70;
    const Problem problem(options);
    const std::vector<std::uint32_t> tokens = random_tokens(options.tokens, 0.7, 9);
    std::vector<std::uint32_t> members;
    std::vector<Attended> pairs;
    Random random(11);
    for (const std::uint32_t token : tokens) {
      // Head 0 attends nothing, the others about half.
      members.push_back(static_cast<std::uint32_t>(random.next()) & ~1u);
      pairs.push_back({.token = token, .members = members.back()});
    }
    const Attention expected = reference::attend(problem, pairs);
    const std::vector<float> scores = scores_of(problem, tokens);
    const double within = tolerance(problem);
    for_each_variant([&](const cpu::Kernels& kernels) {
      Attend attend(problem, tokens);
      attend.args().members = members.data();
      attend.run(kernels);
      attend.require(expected, within);
      Attend scored(problem, tokens);
      scored.args().members = members.data();
      scored.args().scores = scores.data();
      scored.args().q = nullptr;
      scored.run(kernels);
      scored.require(expected, within);
    });
  });
}

TEST_CASE("an outlier, minus infinity and NaN stay where they are", "[cpu][kernels]") {
  const auto group = GENERATE(1u, 3u, 4u, 6u);
  CAPTURE(group);
  const std::vector<std::uint32_t> tokens = [] {
    std::vector<std::uint32_t> all(100);
    for (std::uint32_t i = 0; i < 100; ++i) all[i] = i;
    return all;
  }();
  for_each_variant([&](const cpu::Kernels& kernels) {
    SECTION(std::string("one key is 10,000 times longer ") + kernels.name) {
      const Problem problem({.dtype = DType::f32, .tokens = 100, .head_dim = 64, .group = group, .outlier = 1e4});
      Attend attend(problem, tokens);
      attend.run(kernels);
      attend.require(reference::attend(problem, attended(tokens)), tolerance(problem));
    }
    SECTION(std::string("all scores are minus infinity ") + kernels.name) {
      const Problem problem({.tokens = 100, .group = group});
      const std::vector<float> scores(100 * group, -kInf);
      Attend attend(problem, tokens);
      attend.args().scores = scores.data();
      attend.run(kernels);
      attend.require(reference::attend(problem, {}), 0.0);
    }
    SECTION(std::string("NaN in one query spoils that head only ") + kernels.name) {
      Problem problem({.tokens = 100, .group = group});
      const Attention expected = reference::attend(problem, attended(tokens));
      problem.set_q(group - 1, 5, kNan);
      Attend attend(problem, tokens);
      attend.run(kernels);
      const std::size_t sound = std::size_t{group - 1} * 64;
      REQUIRE(max_abs_diff(attend.out().first(sound), std::span(expected.out).first(sound)) <= tolerance(problem));
      REQUIRE(std::isnan(attend.lse().back()));
    }
  });
}

}  // namespace sluice::test

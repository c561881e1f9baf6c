#include "cpu/kernels/kernels.hpp"

#include <cmath>
#include <cstdlib>
#include <limits>

#include "cpu/backend/row_list.hpp"
#include "cpu/float16.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"
#include "tests/support/reference.hpp"

namespace sluice::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3};
constexpr std::uint32_t kHeadDims[] = {16, 64, 80, 128, 256};
constexpr std::uint32_t kGroups[] = {1, 3, 4, 8, 16};

/// Calls `body` with every variant that this CPU can run.
template <class Body>
void for_each_variant(const Body& body) {
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    CAPTURE(kernels->name);
    body(*kernels);
  }
}

template <class Body>
void for_each_shape(const Body& body) {
  for (const DType dtype : kTypes) {
    for (const std::uint32_t head_dim : kHeadDims) {
      for (const std::uint32_t group : kGroups) {
        CAPTURE(to_string(dtype), head_dim, group);
        body(ProblemOptions{.dtype = dtype, .head_dim = head_dim, .group = group});
      }
    }
  }
}

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

std::vector<float> scores_of(const Problem& problem, std::span<const std::uint32_t> tokens) {
  std::vector<float> scores;
  for (const std::uint32_t token : tokens) {
    for (std::uint32_t head = 0; head < problem.options().group; ++head) {
      scores.push_back(static_cast<float>(reference::score(problem, head, token)));
    }
  }
  return scores;
}

}  // namespace

TEST_CASE("16-bit conversions agree with the definition of the formats", "[cpu][kernels]") {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto word = static_cast<std::uint16_t>(bits);
    const auto* bytes = reinterpret_cast<const std::byte*>(&word);
    for (const DType type : {DType::f16, DType::bf16}) {
      const double exact = load_element(bytes, type, 0);
      const float value = type == DType::f16 ? cpu::f16_to_float(word) : cpu::bf16_to_float(word);
      const std::uint16_t back = type == DType::f16 ? cpu::float_to_f16(value) : cpu::float_to_bf16(value);
      if (std::isnan(exact)) {
        if (!std::isnan(value) || !std::isnan(load_element(reinterpret_cast<const std::byte*>(&back), type, 0))) FAIL(bits);
      } else if (value != exact || back != word) {
        FAIL(bits);
      }
    }
  }
  SUCCEED();
}

TEST_CASE("every variant widens exactly and narrows to the nearest even", "[cpu][kernels]") {
  std::vector<float> values{0.f, -0.f, kInf, -kInf, kNan, 1e-45f, -1e-40f, 6e-8f, 3e-8f, 2.98e-8f, 6.1e-5f, 65504.f, 65519.f,
                            65520.f, 1e30f, 3.4e38f, -3.4e38f, 1.00390625f, 1.01171875f, 1.00048828125f, 1.00146484375f};
  Random random(3);
  while (values.size() < 4096) {
    values.push_back(static_cast<float>(random.normal() * std::exp2(random.uniform() * 60.0 - 40.0)));
  }
  for_each_variant([&](const cpu::Kernels& kernels) {
    for (const DType type : kTypes) {
      if (!is_tensor_type(type)) continue;
      CAPTURE(to_string(type));
      std::vector<std::byte> narrow(values.size() * 4);
      std::vector<float> wide(values.size());
      kernels.element[static_cast<int>(type)].narrow(values.data(), narrow.data(), values.size());
      kernels.element[static_cast<int>(type)].widen(narrow.data(), wide.data(), values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        std::byte expected[4] = {};
        store_element(expected, type, 0, values[i]);
        const double exact = load_element(expected, type, 0);
        CAPTURE(i, values[i], wide[i], exact);
        if (std::isnan(exact) ? !std::isnan(wide[i]) : wide[i] != exact || std::signbit(wide[i]) != std::signbit(exact)) {
          FAIL("rounded differently");
        }
      }
    }
  });
}

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

TEST_CASE("every variant scores tokens like the reference", "[cpu][kernels]") {
  for_each_shape([](ProblemOptions options) {
    options.tokens = 90;
    const Problem problem(options);
    for (const double share : {0.02, 0.5, 1.0}) {
      const std::vector<std::uint32_t> tokens = random_tokens(options.tokens, share, 21);
      std::vector<const std::byte*> rows(tokens.size() + 1);
      std::vector<const float*> scales(tokens.size() + 1);
      cpu::list_rows(problem.kv(), tokens, rows.data());
      if (problem.layout().scaled()) cpu::list_scales(problem.kv(), tokens, scales.data());
      const std::vector<float> expected = scores_of(problem, tokens);
      for_each_variant([&](const cpu::Kernels& kernels) {
        std::vector<float> out(expected.size() + 1, kNan);
        out.back() = 1234.f;
        kernels.element[static_cast<int>(options.dtype)].score({.q = problem.q(),
                                                                .scale = problem.shape().score_scale(),
                                                                .softcap = options.softcap,
                                                                .k = rows.data(),
                                                                .scales = scales.data(),
                                                                .count = static_cast<std::uint32_t>(tokens.size()),
                                                                .group = options.group,
                                                                .head_dim = options.head_dim,
                                                                .out = out.data()});
        REQUIRE(out.back() == 1234.f);
        out.pop_back();
        REQUIRE(max_abs_diff(out, expected) <= tolerance(problem));
      });
    }
  });
}

TEST_CASE("every variant digests and scores pages like the reference", "[cpu][kernels]") {
  for_each_shape([](ProblemOptions options) {
    options.tokens = 37 * options.page_tokens;
    const Problem problem(options);
    const std::uint32_t pages = 37;
    const PageLayout made = problem.layout().near();
    const std::size_t digest_bytes = 2 * made.row_bytes();
    for_each_variant([&](const cpu::Kernels& kernels) {
      const cpu::ElementKernels& element = kernels.element[static_cast<int>(options.dtype)];
      for (const DigestKind kind : {DigestKind::box, DigestKind::cuboid_mean}) {
        const auto digest = kind == DigestKind::box ? element.digest_box : element.digest_cuboid_mean;
        // Digests lie by frame; those of other frames are NaN.
        std::vector<std::byte> digests((2 * pages + 1) * digest_bytes, std::byte{0xff});
        std::vector<double> expected(options.group * pages);
        for (std::uint32_t page = 0; page < pages; ++page) {
          std::byte* const to = digests.data() + problem.frames()[page] * digest_bytes;
          const std::uint32_t first = page * options.page_tokens;
          digest({.k = problem.kv().page(page),
                  .scales = problem.layout().scaled() ? problem.kv().scales(first) : nullptr,
                  .out = to,
                  .rows = options.page_tokens,
                  .head_dim = options.head_dim});
          const std::vector<double> exact = reference::digest(problem, first, first + options.page_tokens, kind);
          for (std::size_t i = 0; i < exact.size(); ++i) {
            const double unit = made.dtype == DType::bf16 ? 0x1.0p-8 : made.dtype == DType::f16 ? 0x1.0p-11 : 4e-7;
            const double got = load_element(to, made.dtype, i);
            if (!(std::abs(got - exact[i]) <= (kind == DigestKind::box ? 0.0 : unit * 4.0))) FAIL(got << " for " << exact[i]);
          }
          for (std::uint32_t head = 0; head < options.group; ++head) {
            for (std::uint32_t c = 0; c < options.head_dim; ++c) {
              const double hi = load_element(to, made.dtype, c);
              const double lo = load_element(to, made.dtype, options.head_dim + c);
              expected[head * pages + page] += std::max(problem.q(head, c) * hi, problem.q(head, c) * lo);
            }
          }
        }
        std::vector<float> out(expected.size(), kNan);
        const cpu::ElementKernels& of_digests = kernels.element[static_cast<int>(made.dtype)];
        of_digests.score_digests({.q = problem.q(),
                                  .digests = digests.data(),
                                  .frames = problem.frames().data(),
                                  .count = pages,
                                  .group = options.group,
                                  .head_dim = options.head_dim,
                                  .out = out.data(),
                                  .out_stride = pages});
        REQUIRE(max_abs_diff(out, expected) <= 1e-6 * 2 * options.head_dim);
      }
    });
  });
}

TEST_CASE("variants are found by name and the environment decides", "[cpu][kernels]") {
  REQUIRE(std::string(cpu::available_kernels().front()->name) == "generic");
  for_each_variant([](const cpu::Kernels& kernels) { REQUIRE(&cpu::find_kernels(kernels.name) == &kernels); });
  try {
    (void)cpu::find_kernels("z80");
    FAIL("no such variant");
  } catch (const Error& error) {
    REQUIRE(error.code() == Errc::unsupported);
    REQUIRE(std::string(error.what()).find("generic") != std::string::npos);
  }
  // Decided once per process, so a wrong name comes first.
  ::setenv("SLUICE_CPU_ISA", "z80", 1);
  REQUIRE_THROWS_AS(cpu::fastest_kernels(), Error);
  ::setenv("SLUICE_CPU_ISA", "generic", 1);
  REQUIRE(std::string(cpu::fastest_kernels().name) == "generic");
  ::unsetenv("SLUICE_CPU_ISA");
}

}  // namespace sluice::test

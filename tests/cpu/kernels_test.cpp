// Kernels of every instruction set but those of attention, which have a file of their own, and how one is chosen.

#include <cmath>
#include <cstdlib>

#include "cpu/float16.hpp"
#include "cpu/stages/row_list.hpp"
#include "sluice/error.hpp"
#include "sluice/page_rules.hpp"
#include "tests/cpu/kernel_cases.hpp"
#include "tests/support/random.hpp"

namespace sluice::test {
namespace {

constexpr std::uint32_t kDigestPages = 37;

/// Digests of kDigestPages pages, each where its frame says; those of other frames are NaN.
std::vector<std::byte> digests_of(const Problem& problem, const cpu::Kernels& kernels, DigestKind kind) {
  const ProblemOptions& options = problem.options();
  const cpu::ElementKernels& element = kernels.element[static_cast<int>(options.dtype)];
  const auto digest = kind == DigestKind::box ? element.digest_box : element.digest_cuboid_mean;
  const std::size_t digest_bytes = 2 * problem.layout().near().row_bytes();
  std::vector<std::byte> digests((2 * kDigestPages + 1) * digest_bytes, std::byte{0xff});
  for (std::uint32_t page = 0; page < kDigestPages; ++page) {
    digest({.k = problem.kv().page(page),
            .scales = problem.layout().scaled() ? problem.kv().scales(page * options.page_tokens) : nullptr,
            .out = digests.data() + problem.frames()[page] * digest_bytes,
            .rows = options.page_tokens,
            .head_dim = options.head_dim});
  }
  return digests;
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

TEST_CASE("every variant digests pages like the reference", "[cpu][kernels]") {
  for_each_shape([](ProblemOptions options) {
    options.tokens = kDigestPages * options.page_tokens;
    const Problem problem(options);
    const DType made = problem.layout().near().dtype;
    const double unit = made == DType::bf16 ? 0x1.0p-8 : made == DType::f16 ? 0x1.0p-11 : 4e-7;
    for_each_variant([&](const cpu::Kernels& kernels) {
      for (const DigestKind kind : {DigestKind::box, DigestKind::cuboid_mean}) {
        const std::vector<std::byte> digests = digests_of(problem, kernels, kind);
        for (std::uint32_t page = 0; page < kDigestPages; ++page) {
          const std::uint32_t first = page * options.page_tokens;
          const std::vector<double> exact = reference::digest(problem, first, first + options.page_tokens, kind);
          for (std::size_t i = 0; i < exact.size(); ++i) {
            const double got = load_element(digests.data(), made, problem.frames()[page] * exact.size() + i);
            if (!(std::abs(got - exact[i]) <= (kind == DigestKind::box ? 0.0 : unit * 4.0)))
              FAIL(got << " for " << exact[i]);
          }
        }
      }
    });
  });
}

TEST_CASE("every variant scores digests like the definition", "[cpu][kernels]") {
  for_each_shape([](ProblemOptions options) {
    options.tokens = kDigestPages * options.page_tokens;
    const Problem problem(options);
    const DType made = problem.layout().near().dtype;
    for_each_variant([&](const cpu::Kernels& kernels) {
      for (const DigestKind kind : {DigestKind::box, DigestKind::cuboid_mean}) {
        const std::vector<std::byte> digests = digests_of(problem, kernels, kind);
        std::vector<double> expected;
        for (std::uint32_t head = 0; head < options.group; ++head) {
          for (std::uint32_t page = 0; page < kDigestPages; ++page) {
            const std::size_t hi = std::size_t{problem.frames()[page]} * 2 * options.head_dim;
            double sum = 0.0;
            for (std::uint32_t c = 0; c < options.head_dim; ++c)
              sum += std::max(problem.q(head, c) * load_element(digests.data(), made, hi + c),
                              problem.q(head, c) * load_element(digests.data(), made, hi + options.head_dim + c));
            expected.push_back(sum);
          }
        }
        std::vector<float> out(expected.size(), kNan);
        kernels.element[static_cast<int>(made)].score_digests({.q = problem.q(),
                                                               .digests = digests.data(),
                                                               .frames = problem.frames().data(),
                                                               .count = kDigestPages,
                                                               .group = options.group,
                                                               .head_dim = options.head_dim,
                                                               .out = out.data(),
                                                               .out_stride = kDigestPages});
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

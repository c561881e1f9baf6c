#include "cpu/backend/backend.hpp"

#include <cmath>
#include <vector>

#include "cpu/backend/rates.hpp"
#include "sluice/error.hpp"
#include "tests/cpu/backend_cases.hpp"
#include "tests/support/catch.hpp"

namespace sluice::test {
TEST_CASE("shapes without kernels are named and refused before anything is written", "[cpu][backend]") {
  cpu::Backend backend(workers(1));
  const Problem problem({.tokens = 20});
  REQUIRE(backend.unsupported_reasons(problem.shape(), problem.layout()).empty());
  const AttentionShape odd{.layers = 1, .q_heads = 66, .kv_heads = 2, .head_dim = 72};
  const auto reasons = backend.unsupported_reasons(odd, problem.layout());
  REQUIRE(reasons.size() == 3);
  REQUIRE(reasons[0].find("head_dim 72") != std::string::npos);
  REQUIRE(reasons[1].find("33 query heads") != std::string::npos);
  REQUIRE(reasons[2].find("pages of head_dim 64") != std::string::npos);

  OwnPartial out(problem);
  AttendTask task = attend_task(problem, out);
  try {
    backend.attend({&task, 1}, odd, nullptr);
    FAIL("odd shape was accepted");
  } catch (const Error& error) {
    REQUIRE(error.code() == Errc::unsupported);
  }
  REQUIRE(std::isnan(out.lse[0]));
  backend.attend({}, odd, nullptr);
}

TEST_CASE("the measured read rate is a usable rate", "[cpu][backend]") {
  const double gbps = cpu::measure_read_gbps(workers(1), 8 * MiB);
  REQUIRE(std::isfinite(gbps));
  REQUIRE(gbps > 0.0);
}

}  // namespace sluice::test

// The main of test executables that need a GPU. Without one it says so and returns 77, which ctest reports as
// skipped; a listing of the tests, which the build makes, works everywhere.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
#endif

#include <iostream>

#include "sluice/cuda.hpp"

namespace {

constexpr int kSkipped = 77;

/// Whether the command line asks for tests to be run rather than listed. The two versions of Catch2 have different
/// ways to list.
template <class Config>
bool runs_tests(const Config& config) {
  bool lists = config.showHelp || config.listTests || config.listTags || config.listReporters;
  if constexpr (requires { config.listTestNamesOnly; }) lists = lists || config.listTestNamesOnly;
  if constexpr (requires { config.listListeners; }) lists = lists || config.listListeners;
  return !lists;
}

}  // namespace

int main(int argc, char* argv[]) {
  Catch::Session session;
  const int refused = session.applyCommandLine(argc, argv);
  if (refused != 0) return refused;
  if (runs_tests(session.configData()) && sluice::cuda_devices() == 0) {
    std::cerr << "skipped: no usable GPU\n";
    return kSkipped;
  }
  const int failed = session.run();
  return failed == kSkipped ? kSkipped + 1 : failed;
}

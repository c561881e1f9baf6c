#include "tests/tools/cli_process.hpp"

namespace sluice::test {

std::string cli_path() { return SLUICE_CLI; }

}  // namespace sluice::test

#include "tests/support/data.hpp"

std::string sluice::test::test_data() { return SLUICE_TEST_DATA; }

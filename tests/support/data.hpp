#pragma once

#include <string>

namespace sluice::test {

/// The folder tests/data. A function, so that its path is compiled into one file, and the objects of all others are the
/// same in every clone.
std::string test_data();

}  // namespace sluice::test

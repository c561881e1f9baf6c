#pragma once

// Debian 12 and Ubuntu 22.04 ship Catch2 v2, Ubuntu 24.04 ships v3. Tests include only this header.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif

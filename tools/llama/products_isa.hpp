#pragma once

#include "tools/llama/products.hpp"

namespace sluice::tools {

/// One per translation unit; constant-initialised, so valid before any code runs. The latter two exist on
/// x86-64 only.
extern const Products kProductsGeneric;
extern const Products kProductsAvx2;
extern const Products kProductsAvx512;

}  // namespace sluice::tools

#include "tools/llama/products_eigen.hpp"
#include "tools/llama/products_isa.hpp"

namespace sluice::tools {

const Products kProductsGeneric{.isa = "generic", .multiply = multiply, .swiglu = swiglu};

}  // namespace sluice::tools

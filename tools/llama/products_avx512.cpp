#define Eigen EigenAvx512
#include "tools/llama/products_eigen.hpp"
#include "tools/llama/products_isa.hpp"

namespace sluice::tools {

const Products kProductsAvx512{.isa = "avx512", .multiply = multiply, .swiglu = swiglu};

}  // namespace sluice::tools

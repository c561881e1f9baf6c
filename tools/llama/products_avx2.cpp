#define Eigen EigenAvx2
#include "tools/llama/products_eigen.hpp"
#include "tools/llama/products_isa.hpp"

namespace sluice::tools {

const Products kProductsAvx2{.isa = "avx2", .multiply = multiply, .swiglu = swiglu};

}  // namespace sluice::tools

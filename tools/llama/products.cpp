#include "tools/llama/products.hpp"

#include <vector>

#include "tools/llama/products_isa.hpp"

namespace sluice::tools {
namespace {

std::vector<const Products*> find_usable() {
  std::vector<const Products*> usable{&kProductsGeneric};
#ifdef SLUICE_LLAMA_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (avx2) usable.push_back(&kProductsAvx2);
  if (avx2 && avx512) usable.push_back(&kProductsAvx512);
#endif
  return usable;
}

}  // namespace

std::span<const Products* const> usable_products() {
  static const std::vector<const Products*> usable = find_usable();
  return usable;
}

const Products& best_products() { return *usable_products().back(); }

}  // namespace sluice::tools

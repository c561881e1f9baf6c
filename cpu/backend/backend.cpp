#include "cpu/backend/backend.hpp"

#include "cpu/backend/verbs.hpp"

namespace sluice::cpu {

Backend::Backend(const Workers& workers, const Kernels* kernels)
    : workers_(workers), kernels_(kernels != nullptr ? *kernels : fastest_kernels()) {}

std::string Backend::isa() const { return kernels_.name; }

std::vector<std::string> Backend::unsupported_reasons(const AttentionShape& shape, const PageLayout& layout) const {
  return cpu::unsupported_reasons(shape, layout);
}

}  // namespace sluice::cpu

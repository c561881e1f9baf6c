// Included by one translation unit per instruction set, and by nothing else. Eigen's templates compile to
// the unit's own instructions, so two units must not share their names: a unit with flags of its own renames the
// namespace (`#define Eigen EigenAvx2`) before it includes this.
#pragma once

#define EIGEN_DONT_PARALLELIZE  // threads are the model's; an OpenMP build must not add its own
#include <Eigen/Core>
#include <algorithm>
#include <cstring>

#include "tools/llama/products.hpp"

namespace sluice::tools {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Rows = Eigen::Map<Matrix, Eigen::Unaligned, Eigen::OuterStride<>>;
using ConstRows = Eigen::Map<const Matrix, Eigen::Unaligned, Eigen::OuterStride<>>;
using Column = Eigen::Map<Eigen::VectorXf>;
using ConstColumn = Eigen::Map<const Eigen::VectorXf>;

void multiply_row(const ProductArgs& a, std::uint32_t row) {
  const Eigen::Map<const Matrix> w(a.w, a.outs, a.inner);
  const ConstColumn x(a.x + row * a.x_stride, a.inner);
  Column y(a.y + row * a.y_stride, a.outs);
  if (a.into == Into::overwrite) y.setZero();
  y.noalias() += w * x;
}

void multiply(const ProductArgs& a) {
  if (a.rows <= kVectorRows) {
    for (std::uint32_t row = 0; row < a.rows; ++row) multiply_row(a, row);
    return;
  }
  const ConstRows x(a.x, a.rows, a.inner, Eigen::OuterStride<>(static_cast<Eigen::Index>(a.x_stride)));
  const Eigen::Map<const Matrix> w(a.w, a.outs, a.inner);
  Rows y(a.y, a.rows, a.outs, Eigen::OuterStride<>(static_cast<Eigen::Index>(a.y_stride)));
  if (a.into == Into::overwrite) {
    y.noalias() = x * w.transpose();
  } else {
    y.noalias() += x * w.transpose();
  }
}

/// In blocks of fixed size: over a whole row, Eigen would compute the elements before the first aligned one and
/// after the last packet with another exp, and the result would depend on where the row lies.
void swiglu(float* gate, const float* up, std::uint32_t count) {
  using Block = Eigen::Array<float, 32, 1>;
  for (std::uint32_t at = 0; at < count; at += Block::RowsAtCompileTime) {
    const std::uint32_t size = std::min<std::uint32_t>(count - at, Block::RowsAtCompileTime);
    Block g = Block::Zero();
    Block u = Block::Zero();
    std::memcpy(g.data(), gate + at, size * sizeof(float));
    std::memcpy(u.data(), up + at, size * sizeof(float));
    g = g / (1.f + (-g).exp()) * u;
    std::memcpy(gate + at, g.data(), size * sizeof(float));
  }
}

}  // namespace
}  // namespace sluice::tools

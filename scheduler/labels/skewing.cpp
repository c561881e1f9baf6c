#include "scheduler/labels/skewing.hpp"

// A name of its own: the library is linked into programs that may compile Eigen with other instructions.
#define Eigen EigenSluice
#include <Eigen/Eigenvalues>

#include "scheduler/labels/key_blocks.hpp"

namespace sluice::scheduler {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// Those that are finite. [rows, d]
Matrix finite_rows(std::span<const float> rows, Eigen::Index d) {
  const auto size = static_cast<std::size_t>(d);
  Matrix finite(static_cast<Eigen::Index>(rows.size() / size), d);
  Eigen::Index count = 0;
  for (std::size_t first = 0; first < rows.size(); first += size) {
    if (!is_finite(rows.data() + first, size)) continue;
    finite.row(count++) = Eigen::Map<const Eigen::RowVectorXf>(rows.data() + first, d).cast<double>();
  }
  finite.conservativeResize(count, d);
  return finite;
}

}  // namespace

std::vector<double> skewing_matrix(std::span<const float> queries, std::uint32_t head_dim) {
  const Eigen::Index d = head_dim;
  const Matrix rows = finite_rows(queries, d);
  // Of the sums of products of channels the eigenvectors are the right singular vectors; eigenvalues rise.
  Eigen::MatrixXd gram = Eigen::MatrixXd::Zero(d, d);
  if (rows.rows() != 0) gram.selfadjointView<Eigen::Lower>().rankUpdate(rows.transpose());
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(gram);
  std::vector<double> sorted(static_cast<std::size_t>(d * d));
  Eigen::Map<Matrix>(sorted.data(), d, d) = solver.eigenvectors().rowwise().reverse().transpose();
  return sorted;
}

}  // namespace sluice::scheduler

#include <array>
#include <string>

#include "sluice/cuda.hpp"
#include "sluice/error.hpp"

namespace sluice {
namespace {

constexpr std::array<TransferPath, 5> kPaths{TransferPath::automatic, TransferPath::copy_engine, TransferPath::batch,
                                             TransferPath::gather, TransferPath::staged};
}  // namespace

TransferPath parse_transfer_path(std::string_view text) {
  std::string names;
  for (const TransferPath path : kPaths) {
    if (text == to_string(path)) return path;
    names += (names.empty() ? "" : ", ") + std::string(to_string(path));
  }
  throw Error(Errc::invalid_argument, "unknown transfer path '" + std::string(text) + "'; have " + names);
}

}  // namespace sluice

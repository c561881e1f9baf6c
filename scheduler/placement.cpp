#include "sluice/engine_options.hpp"

#include <string>

#include "sluice/error.hpp"

namespace sluice {

PlacementMode parse_placement(std::string_view text) {
  std::string known;
  for (const PlacementMode mode : {PlacementMode::hybrid, PlacementMode::stream}) {
    if (text == to_string(mode)) return mode;
    known += known.empty() ? "" : ", ";
    known += to_string(mode);
  }
  throw Error(Errc::invalid_argument, "unknown placement \"" + std::string(text) + "\"; there are " + known);
}

}  // namespace sluice

#include "sluice/device.hpp"

#include <string>

#include "sluice/error.hpp"

namespace sluice {

Handover parse_handover(std::string_view text) {
  std::string known;
  for (const Handover each : {Handover::automatic, Handover::device, Handover::stream, Handover::host}) {
    if (text == to_string(each)) return each;
    known += (known.empty() ? "" : ", ") + std::string(to_string(each));
  }
  throw Error(Errc::invalid_argument, "unknown handover '" + std::string(text) + "'; have " + known);
}

}  // namespace sluice

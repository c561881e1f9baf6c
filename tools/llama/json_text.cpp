#include "tools/llama/json_text.hpp"

#include <set>
#include <vector>

#include "sluice/error.hpp"

namespace sluice::tools {
namespace {

using nlohmann::json;

constexpr std::size_t kShownBytes = 100;

}  // namespace

json parse_json(std::string_view text, const std::string& origin, int most_depth) {
  std::vector<std::set<std::string>> names;
  const auto inspect = [&](int depth, json::parse_event_t event, json& value) {
    if (depth > most_depth) throw Error(Errc::corrupt, origin + ": JSON is nested too deeply; is it the right file?");
    if (event == json::parse_event_t::object_start) names.emplace_back();
    if (event == json::parse_event_t::object_end) names.pop_back();
    if (event == json::parse_event_t::key && !names.back().insert(value.get<std::string>()).second) {
      throw Error(Errc::corrupt,
                  origin + ": '" + shortened(value.get<std::string>()) + "' appears twice; remove one of them");
    }
    return true;
  };
  try {
    return json::parse(text, inspect);
  } catch (const json::exception& e) {
    throw Error(Errc::corrupt, origin + ": malformed JSON: " + shortened(e.what()) + "; fetch the file again");
  }
}

std::string shortened(std::string_view text) {
  if (text.size() <= kShownBytes) return std::string(text);
  std::size_t end = kShownBytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0u) == 0x80u) --end;  // not within a UTF-8 character
  return std::string(text.substr(0, end)) + "...";
}

std::string shown(const json& value) { return shortened(value.dump(-1, ' ', false, json::error_handler_t::replace)); }

}  // namespace sluice::tools

#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace sluice::tools {

/// Deeper than any file that is read here; far below what a recursive walk over a document survives.
inline constexpr int kMostJsonDepth = 16;

/// Parses JSON and refuses what nlohmann would let pass: nesting deeper than `most_depth` and a name given twice in
/// one object, where the last would win.
/// @param origin  what the text is, for messages
/// @throws Error{Errc::corrupt}
[[nodiscard]] nlohmann::json parse_json(std::string_view text, const std::string& origin,
                                        int most_depth = kMostJsonDepth);

/// Text for a message, cut after some characters.
[[nodiscard]] std::string shortened(std::string_view text);
/// A value for a message: its JSON, cut likewise.
[[nodiscard]] std::string shown(const nlohmann::json& value);

}  // namespace sluice::tools

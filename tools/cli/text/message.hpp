#pragma once

#include <string>
#include <string_view>

namespace sluice::tools {

/// Most bytes of a message: room for a cause, a path and a remedy.
inline constexpr std::size_t kMessageBytes = 1000;

/// `text` as one line that no terminal obeys: control characters and bytes that are not UTF-8 are escaped as \n, \x1b.
/// Of a longer text the middle is left out, because the cause stands at its beginning and the remedy at its end.
[[nodiscard]] std::string printable(std::string_view text, std::size_t most = kMessageBytes);

/// Writes `sluice: ` and the text as one line to standard error. Whoever does not take it misses a message, not a result.
void say(std::string_view text) noexcept;

}  // namespace sluice::tools

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/llama/config.hpp"

namespace sluice::tools {

/// Token id = byte value; two more ids begin and end a text.
class ByteTokenizer {
 public:
  static constexpr int kBos = 256;
  static constexpr int kEos = 257;

  /// Whether a model was trained on bytes: 320 ids, of which 256 begins a text (see tests/data/testbed).
  [[nodiscard]] static bool fits(const ModelConfig& config) noexcept;

  /// BOS, then the bytes.
  [[nodiscard]] static std::vector<int> encode(std::string_view text);
  /// The bytes; ids above 255 stand for no text.
  [[nodiscard]] static std::string decode(std::span<const int> ids);
};

/// Offset of the first byte that is not part of valid UTF-8 (overlong forms and surrogates included).
[[nodiscard]] std::optional<std::size_t> invalid_utf8(std::string_view text) noexcept;

/// @param origin  what the text is, for the message, e.g. "--prompt"
/// @throws Error{Errc::invalid_argument} naming the byte offset if the text is not UTF-8.
void require_utf8(std::string_view text, const std::string& origin);

/// Reads token ids separated by white space or commas, or a JSON array of numbers.
/// @param origin  what the text is, for messages
/// @throws Error{Errc::invalid_argument} naming position and value of what is not an id in [0, vocab_size), or if
///         there is none.
[[nodiscard]] std::vector<int> parse_token_ids(std::string_view text, std::uint32_t vocab_size,
                                               const std::string& origin);

/// As parse_token_ids, from what read_input takes.  @throws also as read_input
[[nodiscard]] std::vector<int> read_token_file(const std::string& name, std::uint32_t vocab_size);

}  // namespace sluice::tools

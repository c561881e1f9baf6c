#include "tools/llama/tokenizer.hpp"

#include <algorithm>
#include <charconv>
#include <system_error>

#include "sluice/error.hpp"
#include "tools/llama/files.hpp"

namespace sluice::tools {
namespace {

constexpr std::string_view kSpace = " \t\r\n\f\v";

/// Length of the UTF-8 character at the front of `rest`; 0 if it is not one (RFC 3629, table 3-7 of Unicode).
std::size_t utf8_length(std::string_view rest) noexcept {
  const auto byte = [&](std::size_t i) { return i < rest.size() ? static_cast<unsigned char>(rest[i]) : 0u; };
  const auto continues = [&](std::size_t i) { return (byte(i) & 0xC0u) == 0x80u; };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return continues(1) ? 2 : 0;
  if (lead >= 0xE0 && lead <= 0xEF) {
    const bool overlong = lead == 0xE0 && byte(1) < 0xA0;
    const bool surrogate = lead == 0xED && byte(1) > 0x9F;
    return continues(1) && continues(2) && !overlong && !surrogate ? 3 : 0;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    const bool overlong = lead == 0xF0 && byte(1) < 0x90;
    const bool beyond = lead == 0xF4 && byte(1) > 0x8F;
    return continues(1) && continues(2) && continues(3) && !overlong && !beyond ? 4 : 0;
  }
  return 0;
}

/// Drops the brackets of a JSON array, if there are any.
std::string_view without_brackets(std::string_view text, const std::string& origin) {
  const auto first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos || text[first] != '[') return text;
  const auto last = text.find_last_not_of(kSpace);
  if (text[last] != ']') throw Error(Errc::invalid_argument, origin + ": '[' without ']' at the end");
  return text.substr(first + 1, last - first - 1);
}

int parse_id(std::string_view word, std::uint32_t vocab_size, const std::string& where) {
  std::uint64_t id = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), id);
  const bool whole = error == std::errc{} && end == word.data() + word.size();
  if (!whole || id >= vocab_size) {
    throw Error(Errc::invalid_argument, where + " '" + std::string(word.substr(0, 40)) + "' is not an id in [0, " +
                                            std::to_string(vocab_size) + ")");
  }
  return static_cast<int>(id);
}

}  // namespace

bool ByteTokenizer::fits(const ModelConfig& config) noexcept {
  return config.vocab_size == 320 &&
         std::find(config.bos_token_ids.begin(), config.bos_token_ids.end(), kBos) != config.bos_token_ids.end();
}

std::vector<int> ByteTokenizer::encode(std::string_view text) {
  std::vector<int> ids{kBos};
  ids.reserve(text.size() + 1);
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

std::string ByteTokenizer::decode(std::span<const int> ids) {
  std::string text;
  for (const int id : ids) {
    if (id >= 0 && id < kBos) text.push_back(static_cast<char>(id));
  }
  return text;
}

std::optional<std::size_t> invalid_utf8(std::string_view text) noexcept {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = utf8_length(text.substr(at));
    if (length == 0) return at;
    at += length;
  }
  return std::nullopt;
}

void require_utf8(std::string_view text, const std::string& origin) {
  if (const auto at = invalid_utf8(text)) {
    throw Error(Errc::invalid_argument,
                origin + " is not UTF-8 at byte " + std::to_string(*at) + "; convert it, or give token ids instead");
  }
}

std::vector<int> parse_token_ids(std::string_view text, std::uint32_t vocab_size, const std::string& origin) {
  const std::string_view list = without_brackets(text, origin);
  std::vector<int> ids;
  bool after_comma = true;  // a comma must stand between two ids
  for (std::size_t at = 0; at < list.size();) {
    if (kSpace.find(list[at]) != std::string_view::npos) {
      ++at;
    } else if (list[at] == ',') {
      if (after_comma)
        throw Error(Errc::invalid_argument, origin + ": no id before comma, after id " + std::to_string(ids.size()));
      after_comma = true;
      ++at;
    } else {
      const std::size_t end = std::min(list.find_first_of(" \t\r\n\f\v,", at), list.size());
      ids.push_back(
          parse_id(list.substr(at, end - at), vocab_size, origin + ": entry " + std::to_string(ids.size() + 1)));
      after_comma = false;
      at = end;
    }
  }
  if (ids.empty()) throw Error(Errc::invalid_argument, origin + ": holds no token ids");
  if (after_comma) throw Error(Errc::invalid_argument, origin + ": ends with a comma");
  return ids;
}

std::vector<int> read_token_file(const std::string& name, std::uint32_t vocab_size) {
  return parse_token_ids(read_input(name), vocab_size, name == "-" ? "standard input" : name);
}

}  // namespace sluice::tools

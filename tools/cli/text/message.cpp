#include "tools/cli/text/message.hpp"

#include <array>
#include <cstdio>
#include <optional>

#include "tools/llama/tokenizer.hpp"

namespace sluice::tools {
namespace {

void escape(char c, std::string& out) {
  if (c == '\n' || c == '\r' || c == '\t') {
    out += c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
    return;
  }
  std::array<char, 8> text{};
  std::snprintf(text.data(), text.size(), "\\x%02x", static_cast<unsigned>(static_cast<unsigned char>(c)));
  out += text.data();
}

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

/// The controls beyond ASCII, U+0080 to U+009F, are two bytes.
bool is_wide_control(std::string_view text) {
  return text.size() >= 2 && text[0] == '\xc2' && static_cast<unsigned char>(text[1]) < 0xa0;
}

void escape_utf8(std::string_view text, std::string& out) {
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool wide = is_wide_control(text.substr(i));
    if (!wide && !is_control(text[i])) {
      out += text[i];
      continue;
    }
    escape(text[i], out);
    if (wide) escape(text[++i], out);
  }
}

bool inside_character(const std::string& text, std::size_t at) {
  return at < text.size() && (static_cast<unsigned char>(text[at]) & 0xc0u) == 0x80u;
}

}  // namespace

std::string printable(std::string_view text, std::size_t most) {
  std::string out;
  while (const std::optional<std::size_t> bad = invalid_utf8(text)) {
    escape_utf8(text.substr(0, *bad), out);
    escape(text[*bad], out);
    text.remove_prefix(*bad + 1);
  }
  escape_utf8(text, out);
  if (out.size() <= most) return out;
  constexpr std::size_t kMark = 40;  // of the note in the middle, at most
  const std::size_t kept = most > kMark ? most - kMark : 0;
  std::size_t head = kept / 2;
  std::size_t tail = out.size() - (kept - head);
  while (head > 0 && inside_character(out, head)) --head;
  while (inside_character(out, tail)) ++tail;
  return out.substr(0, head) + " [... " + std::to_string(tail - head) + " bytes ...] " + out.substr(tail);
}

void say(std::string_view text) noexcept {
  try {
    const std::string line = "sluice: " + printable(text) + "\n";
    std::fwrite(line.data(), 1, line.size(), stderr);
  } catch (...) {
    std::fputs("sluice: out of memory\n", stderr);
  }
}

}  // namespace sluice::tools

// Prompts: token ids in range that are read back however they are written, and text that is UTF-8 or is refused.

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz.hpp"
#include "tools/llama/tokenizer.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

void check_ids(std::string_view text, std::uint32_t vocab_size) {
  std::vector<int> ids;
  if (!accepts([&] { ids = tools::parse_token_ids(text, vocab_size, "--prompt-tokens"); })) return;
  FUZZ_REQUIRE(!ids.empty());
  for (const int id : ids) FUZZ_REQUIRE(id >= 0 && static_cast<std::uint32_t>(id) < vocab_size);
  std::string lines;
  for (const int id : ids) lines += std::to_string(id) + "\n";
  FUZZ_REQUIRE(tools::parse_token_ids(lines, vocab_size, "lines") == ids);
  FUZZ_REQUIRE(tools::parse_token_ids(nlohmann::json(ids).dump(), vocab_size, "JSON") == ids);
}

/// nlohmann::json has a UTF-8 decoder of its own.
bool json_takes(std::string_view text) {
  try {
    (void)nlohmann::json(text).dump();
    return true;
  } catch (const nlohmann::json::type_error&) {
    return false;
  }
}

void check_text(std::string_view text) {
  const auto invalid = tools::invalid_utf8(text);
  FUZZ_REQUIRE(invalid.has_value() != json_takes(text));
  FUZZ_REQUIRE(accepts([&] { tools::require_utf8(text, "--prompt"); }) == !invalid.has_value());
  if (invalid) {
    FUZZ_REQUIRE(*invalid < text.size());
    FUZZ_REQUIRE(!tools::invalid_utf8(text.substr(0, *invalid)));
  }
  FUZZ_REQUIRE(tools::ByteTokenizer::decode(tools::ByteTokenizer::encode(text)) == text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = text_of(data, size);
  for (const std::uint32_t vocab_size : {1u, 320u, 128'256u, 0x7fff'ffffu}) check_ids(text, vocab_size);
  check_text(text);
  return 0;
}

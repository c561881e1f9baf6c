#include <fstream>
#include <string>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/tools/llama_failure.hpp"
#include "tests/tools/llama_golden.hpp"
#include "tools/llama/tokenizer.hpp"

namespace {

using namespace sluice::tools;
using sluice::Errc;
using sluice::test::failure_of;
using sluice::test::mentions;

std::string message_of(const std::string& ids, std::uint32_t vocab_size = 320) {
  const auto failure = failure_of([&] { (void)parse_token_ids(ids, vocab_size, "ids.txt"); });
  CHECK(failure.code == Errc::invalid_argument);
  return failure.message;
}

}  // namespace

TEST_CASE("every byte survives encode and decode, and BOS comes first", "[llama][tokenizer]") {
  std::string text;
  for (int byte = 0; byte < 256; ++byte) text.push_back(static_cast<char>(byte));
  const auto ids = ByteTokenizer::encode(text);
  REQUIRE(ids.size() == 257);
  CHECK(ids.front() == 256);
  CHECK(ids[1] == 0);
  CHECK(ids.back() == 255);
  CHECK(ByteTokenizer::decode(ids) == text);
  CHECK(ByteTokenizer::encode("") == std::vector<int>{256});
  CHECK(ByteTokenizer::decode(std::vector<int>{-1, 'a', 256, 257, 319, 'b'}) == "ab");
}

TEST_CASE("the testbed is recognised as a byte model, others are not", "[llama][tokenizer]") {
  auto config = load_config(sluice::test::testbed() / "config.json");
  CHECK(ByteTokenizer::fits(config));
  config.vocab_size = 128'256;
  CHECK_FALSE(ByteTokenizer::fits(config));
  config.vocab_size = 320;
  config.bos_token_ids = {1};
  CHECK_FALSE(ByteTokenizer::fits(config));
}

TEST_CASE("valid UTF-8 passes, invalid UTF-8 is found at its byte", "[llama][tokenizer]") {
  for (const char* text : {"", "plain", "\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "\xED\x9F\xBF", "\xEE\x80\x80",
                           "\xF4\x8F\xBF\xBF", "\xC2\x80"}) {
    CHECK_FALSE(invalid_utf8(text).has_value());
  }
  for (const char* bad :
       {"\x80", "\xBF", "\xC0\x80", "\xC1\xBF", "\xC3", "\xC3(", "\xE0\x80\x80", "\xE2\x82", "\xED\xA0\x80",
        "\xF0\x80\x80\x80", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "\xF0\x9F\x98"}) {
    const std::string text = "\xC3\xA9 ok " + std::string(bad);
    CHECK(invalid_utf8(text) == 6);
  }
  CHECK_NOTHROW(require_utf8("\xC3\xA9", "--prompt"));
  CHECK(mentions(failure_of([&] { require_utf8("ab\xFF", "--prompt"); }).message, {"--prompt", "byte 2"}));
}

TEST_CASE("token ids are read in all three notations", "[llama][tokenizer]") {
  const std::vector<int> ids = {256, 0, 319};
  for (const char* text :
       {"256 0 319", "256,0,319", " 256 ,\t0,\n319\n", "[256, 0, 319]", "\n[256,0,319]\n", "256\r\n0\r\n319"}) {
    CAPTURE(text);
    CHECK(parse_token_ids(text, 320, "ids.txt") == ids);
  }
}

TEST_CASE("what is not a token id is named", "[llama][tokenizer]") {
  CHECK(mentions(message_of("1 2 320"), {"ids.txt", "entry 3", "320"}));
  CHECK(mentions(message_of("1 -2"), {"entry 2", "-2"}));
  CHECK(mentions(message_of("1 2.5"), {"2.5"}));
  CHECK(mentions(message_of("1 0x10"), {"0x10"}));
  CHECK(mentions(message_of("99999999999999999999999"), {"entry 1"}));
  CHECK(mentions(message_of("4294967297", 0xffffffffu), {"entry 1"}));
  CHECK(mentions(message_of("1,,2"), {"comma"}));
  CHECK(mentions(message_of(",1"), {"comma"}));
  CHECK(mentions(message_of("1,"), {"comma"}));
  CHECK(mentions(message_of("[1, 2"), {"]"}));
  CHECK(mentions(message_of("[1, [2]]"), {"entry 2"}));
  CHECK(mentions(message_of("[]"), {"no token ids"}));
  CHECK(mentions(message_of("  \n"), {"no token ids"}));
}

TEST_CASE("a token file that cannot be read is io or not_found", "[llama][tokenizer]") {
  const auto code_of = [](const std::filesystem::path& file) {
    return failure_of([&] { (void)read_token_file(file, 320); }).code;
  };
  CHECK(code_of("/nonexistent/ids.txt") == Errc::not_found);
  CHECK(code_of(sluice::test::testbed()) == Errc::io);
}

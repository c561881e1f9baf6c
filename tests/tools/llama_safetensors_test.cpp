#include <array>
#include <cmath>
#include <cstring>
#include <fstream>
#include <random>
#include <string>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/tools/llama_failure.hpp"
#include "tests/tools/llama_golden.hpp"
#include "tests/tools/llama_model_files.hpp"
#include "tools/llama/model.hpp"
#include "tools/llama/safetensors.hpp"

namespace {

using namespace sluice;
using namespace sluice::tools;
using sluice::test::failure_of;
using sluice::test::mentions;
using sluice::test::safetensors_file;
using sluice::test::TemporaryDirectory;
namespace fs = std::filesystem;

TensorMap parse(const std::string& file) {
  return parse_safetensors(std::as_bytes(std::span(file)), file.size(), "m.safetensors");
}

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

const std::string kHeader = R"({"__metadata__":{"format":"pt"},"a":)" + entry("F32", "[2,3]", "[0,24]") + R"(,"b":)" +
                            entry("BF16", "[4]", "[24,32]") + R"(,"c":)" + entry("F16", "[]", "[32,34]") + "}";
constexpr std::size_t kDataBytes = 34;

std::string message_of(const std::string& header, std::size_t data_bytes, Errc code = Errc::corrupt) {
  const auto failure = failure_of([&] { (void)parse(safetensors_file(header, data_bytes)); });
  CHECK(failure.code == code);
  return failure.message;
}

std::optional<Errc> code_of(const fs::path& path) {
  return failure_of([&] { const Checkpoint checkpoint(path); }).code;
}

}  // namespace

TEST_CASE("a well-formed file gives every tensor its bytes", "[llama][safetensors]") {
  const std::string file = safetensors_file(kHeader, kDataBytes);
  const TensorMap tensors = parse(file);
  REQUIRE(tensors.size() == 3);
  const StoredTensor& b = tensors.find("b")->second;
  CHECK(b.dtype == DType::bf16);
  CHECK(b.shape == std::vector<std::uint64_t>{4});
  CHECK(b.offset == file.size() - kDataBytes + 24);
  CHECK(b.bytes == 8);
  CHECK(tensors.find("c")->second.shape.empty());
  CHECK(parse(safetensors_file("{}", 0)).empty());
  CHECK(parse(safetensors_file(R"({"e":)" + entry("F32", "[0,7]", "[0,0]") + "}", 0)).size() == 1);
}

TEST_CASE("values become the float32 that they denote", "[llama][safetensors]") {
  const auto convert = [](DType dtype, std::vector<std::uint16_t> bits) {
    std::vector<float> out(bits.size());
    to_float(dtype, std::as_bytes(std::span(bits)), out);
    return out;
  };
  CHECK(convert(DType::bf16, {0x3F80, 0xC000, 0x0000, 0x7F80, 0x0001}) ==
        std::vector<float>{1.f, -2.f, 0.f, INFINITY, std::ldexp(1.f, -133)});
  CHECK(convert(DType::f16, {0x3C00, 0xC000, 0x7BFF, 0x0001, 0xFC00}) ==
        std::vector<float>{1.f, -2.f, 65504.f, std::ldexp(1.f, -24), -INFINITY});
  CHECK(std::isnan(convert(DType::f16, {0x7E00}).front()));
  CHECK(std::isnan(convert(DType::bf16, {0x7FC0}).front()));
  std::vector<float> short_of_one(1);
  const std::vector<float> two = {1.f, 2.f};
  CHECK_THROWS_AS(to_float(DType::f32, std::as_bytes(std::span(two)), short_of_one), Error);
}

TEST_CASE("a lying header is named with file, tensor and cause", "[llama][safetensors]") {
  const auto one = [](const std::string& text) { return R"({"a":)" + text + "}"; };
  CHECK(mentions(message_of(one(entry("F32", "[2]", "[0,12]")), 12), {"m.safetensors", "'a'", "8 bytes", "12"}));
  CHECK(mentions(message_of(one(entry("F32", "[3]", "[0,12]")), 8), {"m.safetensors", "'a'", "truncated"}));
  CHECK(mentions(message_of(one(entry("F32", "[3]", "[12,0]")), 12), {"m.safetensors", "'a'", "begin <= end"}));
  CHECK(mentions(message_of(one(entry("F32", "[3]", "[0]")), 12), {"m.safetensors", "'a'", "data_offsets"}));
  CHECK(mentions(message_of(one(entry("F32", "[-3]", "[0,12]")), 12), {"m.safetensors", "'a'", "-3"}));
  CHECK(mentions(message_of(one(entry("F32", "[1.5]", "[0,12]")), 12), {"m.safetensors", "'a'", "1.5"}));
  CHECK(mentions(message_of(one(entry("F32", "3", "[0,12]")), 12), {"m.safetensors", "'a'", "shape"}));
  CHECK(mentions(message_of(one(entry("F32", "[4611686018427387904,4]", "[0,0]")), 0),
                 {"m.safetensors", "'a'", "overflows"}));
  CHECK(mentions(message_of(one(entry("F32", "[3]", "[18446744073709551612,18446744073709551615]")), 12),
                 {"m.safetensors", "'a'", "truncated"}));
  CHECK(mentions(message_of(one(entry("I64", "[1]", "[0,8]")), 8, Errc::unsupported),
                 {"m.safetensors", "'a'", "I64", "convert"}));
  CHECK(mentions(message_of(one(R"({"shape":[1],"data_offsets":[0,4]})"), 4), {"m.safetensors", "'a'", "dtype"}));
  CHECK(mentions(message_of(one("7"), 4), {"m.safetensors", "'a'", "object"}));
  CHECK(mentions(message_of(one(entry("F32", "[1]", "[4,8]")), 8), {"m.safetensors", "'a'", "gap"}));
  CHECK(mentions(message_of(one(entry("F32", "[1]", "[0,4]")), 8), {"after the last tensor"}));
  const std::string a = R"("a":)" + entry("F32", "[2]", "[0,8]");
  CHECK(mentions(message_of("{" + a + R"(,"b":)" + entry("F32", "[2]", "[4,12]") + "}", 12), {"'b'", "overlaps"}));
  CHECK(mentions(message_of("{" + a + "," + a + "}", 8), {"m.safetensors", "'a'", "twice"}));
  CHECK(mentions(message_of(R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4), {"twice"}));
}

TEST_CASE("bytes that are no header are corrupt, however deep or short", "[llama][safetensors]") {
  CHECK(mentions(message_of("", 0), {"JSON"}));
  CHECK(mentions(message_of("[]", 0), {"object"}));
  CHECK(mentions(message_of("{\"a\":", 0), {"JSON"}));
  CHECK(mentions(message_of("{\"\xff\":1}", 0), {"JSON"}));
  CHECK(mentions(message_of(std::string(100'000, '['), 0), {"deep"}));
  std::string file = safetensors_file(kHeader, kDataBytes);
  for (std::size_t length = 0; length < file.size(); ++length) {
    CAPTURE(length);
    REQUIRE_THROWS_AS(parse(file.substr(0, length)), Error);
  }
  for (const std::uint64_t length : {std::uint64_t{1} << 20, ~std::uint64_t{0}, ~std::uint64_t{7}}) {
    std::memcpy(file.data(), &length, sizeof length);
    REQUIRE_THROWS_AS(parse(file), Error);
  }
}

TEST_CASE("1,000 mutated headers load the same tensors or throw Error", "[llama][safetensors]") {
  const std::string file = safetensors_file(kHeader, kDataBytes);
  const TensorMap original = parse(file);
  std::mt19937_64 random(20);
  int loaded = 0;
  int refused = 0;
  for (int i = 0; i < 1'000; ++i) {
    std::string mutant = file;
    for (std::uint64_t edits = 1 + random() % 3; edits > 0; --edits) {
      mutant[random() % (mutant.size() - kDataBytes)] = static_cast<char>(random());
    }
    try {
      const TensorMap tensors = parse(mutant);
      for (const auto& [name, expected] : original) {
        const auto it = tensors.find(name);
        if (it == tensors.end()) throw Error(Errc::not_found, "renamed, as Checkpoint::find would say");
        CAPTURE(i, name, mutant.substr(8, mutant.size() - kDataBytes - 8));
        REQUIRE(it->second.dtype == expected.dtype);
        REQUIRE(it->second.shape == expected.shape);
        REQUIRE(it->second.bytes == expected.bytes);
        REQUIRE(file.substr(expected.offset, expected.bytes) == mutant.substr(it->second.offset, expected.bytes));
      }
      ++loaded;
    } catch (const Error&) {
      ++refused;
    }
  }
  CHECK(loaded > 0);  // a change inside __metadata__ is harmless
  CHECK(refused > 800);
}

TEST_CASE("shards and index must agree", "[llama][safetensors]") {
  const std::string one = R"({"a":)" + entry("F32", "[1]", "[0,4]") + "}";
  const std::string two = R"({"b":)" + entry("F32", "[1]", "[0,4]") + "}";
  const auto index = [](const std::string& map) { return R"({"metadata":{},"weight_map":)" + map + "}"; };
  const std::string kIndex = "model.safetensors.index.json";
  TemporaryDirectory dir;
  CHECK(code_of(dir.path()) == Errc::not_found);
  CHECK(code_of(dir.file("absent.safetensors")) == Errc::not_found);

  dir.write("1.safetensors", safetensors_file(one, 4));
  dir.write(kIndex, index(R"({"a":"1.safetensors","b":"2.safetensors"})"));
  CHECK(code_of(dir.path()) == Errc::not_found);  // a shard is missing
  dir.write("2.safetensors", safetensors_file(one, 4));
  CHECK(code_of(dir.path()) == Errc::corrupt);  // a twice
  dir.write("2.safetensors", safetensors_file(R"({"c":)" + entry("F32", "[1]", "[0,4]") + "}", 4));
  CHECK(code_of(dir.path()) == Errc::not_found);  // b nowhere
  dir.write("2.safetensors", safetensors_file(two, 4));
  const Checkpoint checkpoint(dir.path());
  CHECK(checkpoint.tensors().size() == 2);
  const StoredTensor& a = checkpoint.find("a", std::vector<std::uint64_t>{1});
  REQUIRE(a.bytes == 4);
  std::array<std::byte, 4> stored{};
  checkpoint.read(a, 0, stored);
  CHECK(stored == std::array<std::byte, 4>{std::byte{0}, std::byte{37}, std::byte{74}, std::byte{111}});
  CHECK_THROWS_AS(checkpoint.read(a, 1, stored), Error);
  CHECK(checkpoint.equal(a, checkpoint.find("b", std::vector<std::uint64_t>{1})));
  CHECK(mentions(failure_of([&] {
                   (void)checkpoint.find("a", std::vector<std::uint64_t>{1, 1});
                 }).message,
                 {"[1]", "[1, 1]"}));
  CHECK(mentions(failure_of([&] { (void)checkpoint.find("z", std::vector<std::uint64_t>{1}); }).message,
                 {"'z'", "missing"}));

  for (const char* bad : {"7", R"({"a":7})", R"({"a":"../1.safetensors"})", R"({"a":"/etc/passwd"})", R"({"a":""})",
                          R"({"a":"1.safetensors\u0000"})", R"({"a":"1.safetensors","a":"1.safetensors"})"}) {
    CAPTURE(bad);
    dir.write(kIndex, index(bad));
    CHECK(code_of(dir.path()) == Errc::corrupt);
  }
  dir.write(kIndex, "{");
  CHECK(code_of(dir.path()) == Errc::corrupt);
  dir.write("model.safetensors", safetensors_file(one, 4));
  CHECK(Checkpoint(dir.path()).tensors().size() == 1);  // the single file wins over the index
  dir.write("model.safetensors", "");
  CHECK(code_of(dir.path()) == Errc::corrupt);
}

TEST_CASE("a model whose config.json lies about the tensors is refused without asking for the memory",
          "[llama][safetensors]") {
  TemporaryDirectory dir;
  for (const char* name :
       {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"}) {
    fs::create_symlink(test::testbed() / name, dir.file(name));
  }
  const auto config = nlohmann::json::parse(std::ifstream(test::testbed() / "config.json"));
  const auto code_with = [&](const char* field, const nlohmann::json& value) {
    auto changed = config;
    changed[field] = value;
    dir.write("config.json", changed.dump());
    return failure_of([&] { const Model model(dir.path()); }).code;
  };
  CHECK_FALSE(code_with("vocab_size", 320).has_value());
  CHECK(code_with("vocab_size", (1u << 31) - 1) == Errc::corrupt);
  CHECK(code_with("intermediate_size", 1 << 29) == Errc::corrupt);
  CHECK(code_with("hidden_size", 385) == Errc::corrupt);
  CHECK(code_with("num_key_value_heads", 4) == Errc::corrupt);
  CHECK(code_with("num_hidden_layers", 9) == Errc::not_found);
  CHECK(code_with("num_hidden_layers", 7) == Errc::unsupported);  // what is left over
  CHECK(code_with("tie_word_embeddings", false) == Errc::not_found);
}

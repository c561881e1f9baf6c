// model.safetensors.index.json beside two shards: what is accepted holds every tensor that it lists.

#include <cstring>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/fuzz/fuzz.hpp"
#include "tests/fuzz/scratch.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tools/llama/safetensors.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

std::string shard(const std::string& header, std::size_t data_bytes) {
  std::uint64_t length = header.size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file + header + std::string(data_bytes, '\x3f');
}

/// Three tensors in two shards.
const TemporaryDirectory& model() {
  static const TemporaryDirectory scratch(scratch_root());
  static const bool written = [] {
    (void)scratch.write("a.safetensors", shard(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                                               R"("y":{"dtype":"BF16","shape":[1,3],"data_offsets":[8,14]}})",
                                               14));
    (void)scratch.write("b.safetensors", shard(R"({"z":{"dtype":"F16","shape":[],"data_offsets":[0,2]}})", 2));
    return true;
  }();
  (void)written;
  return scratch;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = text_of(data, size);
  (void)model().write("model.safetensors.index.json", text);
  std::optional<tools::Checkpoint> checkpoint;
  if (!accepts([&] { checkpoint.emplace(model().path()); })) return 0;

  const auto document = nlohmann::json::parse(text);
  for (const auto& [name, file] : document.at("weight_map").items()) {
    FUZZ_REQUIRE(checkpoint->contains(name));
    FUZZ_REQUIRE(std::string(file).ends_with(".safetensors"));
  }
  for (const auto& [name, tensor] : checkpoint->tensors()) {
    FUZZ_REQUIRE(name == "x" || name == "y" || name == "z");
    FUZZ_REQUIRE(&checkpoint->find(name, tensor.shape) == &tensor);
    const std::vector<std::uint64_t> other{tensor.bytes + 1};
    FUZZ_REQUIRE(!accepts([&] { (void)checkpoint->find(name, other); }));
  }
  return 0;
}

// Headers of safetensors files: tensors that are accepted lie in the file, tile its data and have their shape's size.

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz.hpp"
#include "tools/llama/safetensors.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

void check(std::string_view file) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(file.data(), file.size()));
  tools::TensorMap tensors;
  if (!accepts([&] { tensors = tools::parse_safetensors(bytes, bytes.size(), "model.safetensors"); })) return;
  std::size_t total = 0;
  for (const auto& [name, tensor] : tensors) {
    std::uint64_t elements = 1;
    for (const std::uint64_t extent : tensor.shape) elements *= extent;
    FUZZ_REQUIRE(tensor.bytes == elements * bytes_of(tensor.dtype));
    total += tensor.bytes;
    if (tensor.bytes == 0) continue;
    FUZZ_REQUIRE(tensor.offset >= sizeof(std::uint64_t));
    FUZZ_REQUIRE(tensor.offset + tensor.bytes <= bytes.size());
    const auto stored = bytes.subspan(tensor.offset, tensor.bytes);
    std::vector<float> values(elements);
    tools::to_float(tensor.dtype, stored, values);
    values.push_back(0.f);
    FUZZ_REQUIRE(!accepts([&] { tools::to_float(tensor.dtype, stored, values); }));
  }
  std::uint64_t header = 0;
  std::memcpy(&header, file.data(), sizeof header);
  FUZZ_REQUIRE(sizeof header + header + total == file.size());
}

/// The same with a length that is true: up to the last brace. Mutated headers would seldom get past theirs.
std::string framed(std::string_view text) {
  const std::size_t begin = std::min(text.find('{'), text.size());
  const std::size_t last = text.find_last_of('}');
  const std::size_t end = last == std::string_view::npos || last < begin ? begin : last + 1;
  const std::uint64_t length = end - begin;
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file.append(text.substr(begin));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = text_of(data, size);
  check(text);
  check(framed(text));
  return 0;
}

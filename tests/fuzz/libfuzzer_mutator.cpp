// libFuzzer's own mutations, with those of JSON's structure beside them.

#include <cstring>

#include "tests/fuzz/mutate.hpp"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned int seed) {
  sluice::test::Random random(seed);
  if (random.below(2) == 0) {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    const auto changed = sluice::test::mutate_json(text, random, {});
    if (changed && changed->size() <= max_size) {
      std::memcpy(data, changed->data(), changed->size());
      return changed->size();
    }
  }
  return LLVMFuzzerMutate(data, size, max_size);
}

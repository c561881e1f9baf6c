// Sizes, shares, counts and lists of the command line: what is accepted is in range and means what it says.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "sluice/policy.hpp"
#include "tests/fuzz/fuzz.hpp"
#include "tools/cli/text/values.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

bool is_digits(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

bool close(double a, double b, double relative, double absolute = 0.0) {
  return std::abs(a - b) <= relative * std::max(a, b) + absolute;
}

void check_size(std::string_view text) {
  std::uint64_t bytes = 0;
  if (!accepts([&] { bytes = tools::parse_size(text, "--size"); })) return;
  FUZZ_REQUIRE(bytes < (1ull << 63));
  // Decimal, whatever zeros are in front.
  if (is_digits(text)) FUZZ_REQUIRE(close(std::stod(std::string(text)), static_cast<double>(bytes), 1e-15));
  if (bytes >= (1ull << 62)) return;  // three digits may be as many as are refused
  const std::uint64_t again = tools::parse_size(tools::format_size(bytes), "--size");
  FUZZ_REQUIRE(
      close(static_cast<double>(again), static_cast<double>(bytes), 0.005, 1.0));  // three digits, and whole bytes
}

void check_counts(std::string_view text) {
  std::vector<std::uint32_t> counts;
  if (!accepts([&] { counts = tools::parse_counts(text, "--tokens"); })) return;
  FUZZ_REQUIRE(!counts.empty());
  std::string list;
  for (const std::uint32_t count : counts) {
    FUZZ_REQUIRE(count >= 1 && count <= (1u << 31));
    list += std::to_string(count) + ",";
  }
  FUZZ_REQUIRE(tools::parse_counts(list, "--tokens") == counts);
}

void check_lists(std::string_view text) {
  std::vector<std::string> items;
  if (accepts([&] { items = tools::split_list(text, "--list"); })) {
    FUZZ_REQUIRE(!items.empty());
    for (const std::string& item : items) FUZZ_REQUIRE(!item.empty() && item.find(',') == std::string::npos);
  }
  const auto parsed = [](std::string_view policies) {
    std::vector<PolicySpec> specs;
    for (const std::string& item : tools::split_policies(policies)) specs.push_back(parse_policy(item));
    return specs;
  };
  std::vector<PolicySpec> specs;
  if (!accepts([&] { specs = parsed(text); })) return;
  std::string list;
  for (const PolicySpec& spec : specs) list += to_string(spec) + ";";
  std::vector<PolicySpec> again = parsed(list);
  FUZZ_REQUIRE(again.size() == specs.size());
  for (std::size_t i = 0; i < specs.size(); ++i) again[i].name = specs[i].name;
  FUZZ_REQUIRE(again == specs);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = text_of(data, size);
  check_size(text);
  check_counts(text);
  check_lists(text);
  double share = 0.0;
  if (accepts([&] { share = tools::parse_share(text, "--share"); })) FUZZ_REQUIRE(share >= 0.0 && share <= 1.0);
  DType type{};
  if (accepts([&] { type = tools::parse_dtype(text, "--dtype"); })) FUZZ_REQUIRE(to_string(type) == text);
  return 0;
}

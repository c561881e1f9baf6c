#include "tools/cli/bench/serve_load.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <random>

#include "sluice/error.hpp"
#include "tools/cli/text/values.hpp"
#include "tools/llama/files.hpp"

namespace sluice::tools {
namespace {

/// std's distributions differ from library to library; its engines do not.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : engine_(seed) {}
  double gap() { return -std::log(1.0 - uniform()); }
  std::uint32_t length(std::uint32_t mean, double spread) {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    const double normal = radius * std::cos(2.0 * std::numbers::pi * uniform());
    const double length = mean * std::exp(spread * normal - 0.5 * spread * spread);
    return static_cast<std::uint32_t>(std::clamp(std::round(length), 1.0, kLongestLength * double{1.0} * mean));
  }

 private:
  /// In [0, 1).
  double uniform() { return static_cast<double>(engine_() >> 11) * 0x1.0p-53; }
  std::mt19937_64 engine_;
};

}  // namespace

std::vector<LoadRequest> make_load(const LoadOptions& options) {
  std::vector<LoadRequest> given;
  if (!options.lengths.empty()) given = parse_lengths(read_input(options.lengths), options.lengths);
  Draw draw(options.seed);
  std::vector<LoadRequest> load;
  double arrival = 0.0;
  for (std::uint32_t i = 0; i < options.requests; ++i) {
    LoadRequest next{.arrival = arrival, .prompt = 1, .answer = 1};
    arrival += draw.gap();
    next.prompt = given.empty() ? draw.length(options.prompt, options.spread) : given[i % given.size()].prompt;
    next.answer = given.empty() ? draw.length(options.answer, options.spread) : given[i % given.size()].answer;
    load.push_back(next);
  }
  return load;
}

std::span<const LoadRequest> coming_within(std::span<const LoadRequest> load, double rate, double seconds) noexcept {
  if (rate == 0.0 || seconds == 0.0) return load;
  const auto come = [&](const LoadRequest& request) { return request.arrival < seconds * rate; };
  const auto end = std::ranges::partition_point(load, come);
  return load.first(std::max<std::size_t>(1, static_cast<std::size_t>(end - load.begin())));
}

std::vector<LoadRequest> parse_lengths(std::string_view text, const std::string& name) {
  constexpr CountRange kTokens{.least = 1, .most = 1u << 30};
  std::vector<LoadRequest> requests;
  for (std::size_t number = 1; !text.empty(); ++number) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty() || (number == 1 && line == "prompt,answer")) continue;
    const std::string where = name + ", line " + std::to_string(number);
    const std::size_t comma = line.find(',');
    if (comma == std::string_view::npos)
      throw Error(Errc::invalid_argument, where + ": '" + std::string(line) +
                                              "' is not prompt,answer; write two counts "
                                              "of tokens, e.g. 512,64");
    LoadRequest request;
    request.prompt = static_cast<std::uint32_t>(parse_count(line.substr(0, comma), where, kTokens));
    request.answer = static_cast<std::uint32_t>(parse_count(line.substr(comma + 1), where, kTokens));
    requests.push_back(request);
  }
  if (requests.empty())
    throw Error(Errc::invalid_argument, name + " has no lengths; write a line of prompt,answer for each request");
  return requests;
}

}  // namespace sluice::tools

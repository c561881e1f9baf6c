#include "tests/soak/options.hpp"

#include <charconv>
#include <limits>
#include <map>
#include <stdexcept>

#include "tests/soak/ground.hpp"

namespace sluice::test {
namespace {

std::uint64_t whole_number(const std::string& text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size())
    throw std::runtime_error("'" + text + "' is not a whole number");
  return value;
}

std::optional<int> gpu_of(const std::string& device) {
  const std::string cuda = "cuda";
  if (device == "host") return std::nullopt;
  if (device == cuda) return 0;
  if (!device.starts_with(cuda + ":")) throw std::runtime_error("--device is host, cuda or cuda:N, not " + device);
  const std::uint64_t number = whole_number(device.substr(cuda.size() + 1));
  if (number > static_cast<std::uint64_t>(std::numeric_limits<int>::max()))
    throw std::runtime_error("there is no GPU " + device);
  return static_cast<int>(number);
}

}  // namespace

SoakOptions read_options(const std::vector<std::string>& arguments) {
  SoakOptions options;
  const std::map<std::string, std::uint64_t*> numbers{
      {"--seconds", &options.seconds}, {"--rounds", &options.rounds},    {"--turns", &options.turns},
      {"--steps", &options.steps},     {"--seed", &options.seed},        {"--round", &options.round},
      {"--stop-ms", &options.stop_ms}, {"--every-ms", &options.every_ms}};
  const std::map<std::string, bool*> flags{{"--flat", &options.flat}, {"--keep-going", &options.keep_going}};
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = arguments[i];
    if (const auto flag = flags.find(name); flag != flags.end()) {
      *flag->second = true;
      continue;
    }
    if (++i == arguments.size()) throw std::runtime_error(name + " needs a value, or there is no such option");
    const std::string& value = arguments[i];
    if (const auto number = numbers.find(name); number != numbers.end()) {
      *number->second = whole_number(value);
    } else if (name == "--device") {
      options.gpu = gpu_of(value);
    } else if (name == "--only") {
      options.only = value;
    } else if (name == "--without") {
      options.without.push_back(value);
    } else {
      throw std::runtime_error("there is no option " + name);
    }
  }
  // A GPU does not stop: what it waits for is late by its own clock.
  const auto most = static_cast<std::uint64_t>(kSoakTimeout.count() / 2);
  if (options.gpu && options.stop_ms > most)
    throw std::runtime_error("--stop-ms is at most " + std::to_string(most) + " with a GPU, which goes on meanwhile");
  return options;
}

}  // namespace sluice::test

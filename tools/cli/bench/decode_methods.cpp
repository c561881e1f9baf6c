// What `sluice bench decode` is asked to measure.
#include "tools/cli/bench/decode_methods.hpp"

#include <algorithm>

#include "sluice/error.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {

DecodeMethod parse_method(const std::string& name) {
  if (name == "dense") return {.name = name, .dense = true, .placement = {}, .policy = {}};
  const std::size_t slash = name.find('/');
  if (slash == std::string::npos)
    throw Error(Errc::invalid_argument,
                "--methods: '" + name + "' lacks its placement; write dense or PLACEMENT/POLICY, e.g. hybrid/sluice");
  const std::string placement = name.substr(0, slash);
  const bool all_near = placement == "near";
  return {.name = name,
          .all_near = all_near,
          .placement = all_near ? PlacementMode::hybrid : parse_placement(placement),
          .policy = parse_policy(name.substr(slash + 1))};
}

std::vector<DecodeMethod> parse_methods(const std::string& text) {
  std::vector<DecodeMethod> methods;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(';', at), text.size());
    methods.push_back(parse_method(text.substr(at, end - at)));
    at = end + 1;
  }
  if (methods.empty())
    throw Error(Errc::invalid_argument, "--methods: the list is empty; name at least one, e.g. hybrid/sluice");
  return methods;
}

std::vector<std::uint64_t> parse_kv_sizes(const std::string& text) {
  std::vector<std::uint64_t> sizes;
  if (text.empty()) return {0};
  for (const std::string& size : split_list(text, "--kv-size")) sizes.push_back(parse_size(size, "--kv-size", 1));
  return sizes;
}

}  // namespace sluice::tools

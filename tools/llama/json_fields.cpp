#include "tools/llama/json_fields.hpp"

#include <cmath>
#include <utility>

#include "tools/llama/json_text.hpp"

namespace sluice::tools {

using nlohmann::json;

Fields::Fields(const json& object, std::string origin) : object_(object), origin_(std::move(origin)) {
  if (!object_.is_object()) throw Error(Errc::corrupt, origin_ + ": must be a JSON object, is " + shown(object_));
}

const json* Fields::find(const char* name) const {
  const auto it = object_.find(name);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

std::optional<std::uint32_t> Fields::count(const char* name) const {
  const json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number_unsigned() || value->get<std::uint64_t>() < 1 || value->get<std::uint64_t>() >= (1ull << 31)) {
    fail(name, "must be a positive integer below 2^31, is " + shown(*value));
  }
  return value->get<std::uint32_t>();
}

std::uint32_t Fields::required_count(const char* name) const {
  const auto value = count(name);
  if (!value) fail(name, "is missing; is this the config.json of a Llama?");
  return *value;
}

std::optional<double> Fields::positive(const char* name) const {
  const json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number() || !std::isfinite(value->get<double>()) || value->get<double>() <= 0) {
    fail(name, "must be a positive number, is " + shown(*value));
  }
  return value->get<double>();
}

double Fields::required_positive(const char* name) const {
  const auto value = positive(name);
  if (!value) fail(name, "is missing");
  return *value;
}

bool Fields::flag(const char* name) const {
  const json* value = find(name);
  if (value == nullptr) return false;
  if (!value->is_boolean()) fail(name, "must be true or false, is " + shown(*value));
  return value->get<bool>();
}

std::optional<std::string> Fields::text(const char* name) const {
  const json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) fail(name, "must be a string, is " + shown(*value));
  return value->get<std::string>();
}

std::vector<int> Fields::token_ids(const char* name, std::uint32_t vocab_size) const {
  const json* value = find(name);
  if (value == nullptr) return {};
  std::vector<int> ids;
  for (const json& id : value->is_array() ? *value : json::array({*value})) {
    if (!id.is_number_unsigned() || id.get<std::uint64_t>() >= vocab_size) {
      fail(name, "must hold ids below vocab_size " + std::to_string(vocab_size) + ", has " + shown(id));
    }
    ids.push_back(id.get<int>());
  }
  return ids;
}

void Fields::fail(const std::string& name, const std::string& why, Errc code) const {
  throw Error(code, origin_ + ": '" + shortened(name) + "' " + why);
}

}  // namespace sluice::tools

#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "sluice/error.hpp"

namespace sluice::tools {

/// Fields of one JSON object, with messages that name file and field. A null counts as absent, as in Python's configs.
/// The object must outlive it.
class Fields {
 public:
  /// @throws Error{Errc::corrupt} unless it is an object.
  Fields(const nlohmann::json& object, std::string origin);

  [[nodiscard]] const nlohmann::json& object() const noexcept { return object_; }
  [[nodiscard]] const nlohmann::json* find(const char* name) const;

  /// An integer in [1, 2^31).
  [[nodiscard]] std::optional<std::uint32_t> count(const char* name) const;
  [[nodiscard]] std::uint32_t required_count(const char* name) const;
  /// A finite number above 0.
  [[nodiscard]] std::optional<double> positive(const char* name) const;
  [[nodiscard]] double required_positive(const char* name) const;
  /// False if absent.
  [[nodiscard]] bool flag(const char* name) const;
  [[nodiscard]] std::optional<std::string> text(const char* name) const;
  /// None, one id or a list of ids in [0, vocab_size).
  [[nodiscard]] std::vector<int> token_ids(const char* name, std::uint32_t vocab_size) const;

  [[noreturn]] void fail(const std::string& name, const std::string& why, Errc code = Errc::corrupt) const;

 private:
  const nlohmann::json& object_;
  std::string origin_;
};

}  // namespace sluice::tools

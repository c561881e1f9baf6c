#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace sluice::tools {

/// Keeps keys in the order in which they were written, so that a report reads from the general to the detail.
using Json = nlohmann::ordered_json;

/// Version of the JSON layout below. Raised when a key changes its meaning or goes; not when one is added.
inline constexpr int kSchemaVersion = 1;

enum class Format : std::uint8_t { md, json, csv };

/// How a number is shown in Markdown. JSON and CSV always hold the plain value; a share is in [0, 1].
struct Column {
  enum class Show : std::uint8_t { plain, percent };
  std::string key;    ///< in JSON and CSV; ends in its unit
  std::string title;  ///< in Markdown
  int digits = 0;     ///< decimals in Markdown
  Show show = Show::plain;
  bool hidden = false;  ///< from pairs, as null is: it says nothing about this row
};

/// Rows of equal length. A null cell means "not measured".
struct Table {
  enum class Layout : std::uint8_t { rows, pairs };  ///< Markdown; pairs: one line per column, for a single row
  std::string key;                                   ///< in JSON
  std::string title{};                               ///< in Markdown; may be empty
  std::vector<Column> columns{};
  std::vector<std::vector<Json>> rows{};
  Layout layout = Layout::rows;
  bool in_json = true;  ///< else further keys of the report have what it shows
};

/// What a subcommand found, with everything that is needed to find it again.
struct Report {
  std::string command;  ///< e.g. "bench cpu"
  Json config;          ///< every option that decided the result, the seed included
  std::vector<Table> tables{};
  Json extra = Json::object();  ///< further top-level keys of the JSON form
};

/// JSON: one object {schema_version, tool, version, command, host, config, <extra...>, results: {table: [row]}};
/// without results where no table is in JSON.
/// Markdown: one table after the other, those without rows left out. CSV: the first table alone, header line first,
/// because no reader of CSV expects a second one behind it.
/// Bytes that are not UTF-8 become U+FFFD in JSON.
[[nodiscard]] std::string render(const Report& report, Format format);
/// Numbers as in JSON; null, NaN and infinity are empty.
[[nodiscard]] std::string to_csv(const Table& table);

/// @throws Error{Errc::invalid_argument} that lists the formats.
[[nodiscard]] Format parse_format(std::string_view text);

/// Median and other percentiles by linear interpolation; 0 for no samples. `fraction` in [0, 1].
[[nodiscard]] double percentile(std::vector<double> samples, double fraction);

}  // namespace sluice::tools

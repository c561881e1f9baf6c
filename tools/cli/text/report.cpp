#include "tools/cli/text/report.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "sluice/error.hpp"
#include "tools/cli/text/facts.hpp"
#include "tools/cli/text/message.hpp"

namespace sluice::tools {
namespace {

std::string fixed(double value, int digits) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

/// A bar would end the Markdown cell, a newline the table.
std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : printable(text, text.npos)) out.append(c == '|' ? "\\" : "").push_back(c);
  return out;
}

std::string shown(const Json& cell, const Column& column) {
  if (cell.is_null()) return "-";
  if (cell.is_string()) return escaped(cell.get<std::string>());
  if (cell.is_boolean()) return cell.get<bool>() ? "yes" : "no";
  const bool percent = column.show == Column::Show::percent;
  if (cell.is_number_integer() && !percent) return cell.dump();
  return percent ? fixed(100.0 * cell.get<double>(), column.digits) + "%" : fixed(cell.get<double>(), column.digits);
}

/// JSON and CSV have no infinity and no NaN; both mean "not a result".
Json finite(const Json& cell) {
  return cell.is_number_float() && !std::isfinite(cell.get<double>()) ? Json(nullptr) : cell;
}

std::string csv_field(const Json& cell) {
  if (finite(cell).is_null()) return "";
  if (!cell.is_string()) return cell.dump();
  const auto text = cell.get<std::string>();
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

/// A grid of text, its first row the header. `left[c]`: column c holds words and is aligned left.
std::string grid(const std::vector<std::vector<std::string>>& cells, const std::vector<bool>& left) {
  std::vector<std::size_t> width(left.size(), 3);
  for (const auto& row : cells) {
    for (std::size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], row[c].size());
  }
  std::string out;
  for (std::size_t r = 0; r < cells.size(); ++r) {
    for (std::size_t c = 0; c < left.size(); ++c) {
      const std::string pad(width[c] - cells[r][c].size(), ' ');
      out.append("| ").append(left[c] ? cells[r][c] + pad : pad + cells[r][c]).append(" ");
    }
    out += "|\n";
    for (std::size_t c = 0; r == 0 && c < left.size(); ++c) {
      out.append("|").append(width[c] + 1, '-').append(left[c] ? "-" : ":");
    }
    if (r == 0) out += "|\n";
  }
  return out;
}

std::string markdown(const Table& table) {
  std::vector<std::vector<std::string>> cells;
  std::vector<bool> left;
  if (table.layout == Table::Layout::pairs) {
    cells.push_back({"measure", "value"});
    left = {true, false};
    for (std::size_t c = 0; c < table.columns.size(); ++c) {
      const Json& cell = table.rows.front()[c];
      if (!cell.is_null() && !table.columns[c].hidden)
        cells.push_back({table.columns[c].title, shown(cell, table.columns[c])});
    }
  } else {
    cells.resize(table.rows.size() + 1);
    for (std::size_t c = 0; c < table.columns.size(); ++c) {
      cells[0].push_back(table.columns[c].title);
      bool words = false;
      for (std::size_t r = 0; r < table.rows.size(); ++r) {
        cells[r + 1].push_back(shown(table.rows[r][c], table.columns[c]));
        words |= table.rows[r][c].is_string();
      }
      left.push_back(words);
    }
  }
  return (table.title.empty() ? "" : table.title + "\n\n") + grid(cells, left);
}

Json to_objects(const Table& table) {
  Json rows = Json::array();
  for (const auto& row : table.rows) {
    Json object = Json::object();
    for (std::size_t c = 0; c < row.size(); ++c) object[table.columns[c].key] = finite(row[c]);
    rows.push_back(std::move(object));
  }
  return rows;
}

}  // namespace

std::string to_csv(const Table& table) {
  std::string out;
  for (std::size_t c = 0; c < table.columns.size(); ++c) out.append(c == 0 ? "" : ",").append(table.columns[c].key);
  out += '\n';
  for (const auto& row : table.rows) {
    for (std::size_t c = 0; c < row.size(); ++c) out.append(c == 0 ? "" : ",").append(csv_field(row[c]));
    out += '\n';
  }
  return out;
}

namespace {

std::string json(const Report& report) {
  Json document = {{"schema_version", kSchemaVersion}, {"tool", "sluice"},     {"version", version()},
                   {"command", report.command},        {"host", host_facts()}, {"config", report.config}};
  for (const auto& [key, value] : report.extra.items()) document[key] = value;
  Json results = Json::object();
  for (const Table& table : report.tables) {
    if (table.in_json) results[table.key] = to_objects(table);
  }
  if (!results.empty() || report.tables.empty()) document["results"] = std::move(results);
  return document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace

std::string render(const Report& report, Format format) {
  if (format == Format::json) return json(report);
  if (format == Format::csv) return report.tables.empty() ? "" : to_csv(report.tables.front());
  std::string out;
  for (const Table& table : report.tables) {
    if (table.rows.empty()) continue;
    if (!out.empty()) out += '\n';
    out += markdown(table);
  }
  return out;
}

Format parse_format(std::string_view text) {
  if (text == "md") return Format::md;
  if (text == "json") return Format::json;
  if (text == "csv") return Format::csv;
  throw Error(Errc::invalid_argument, "-o: unknown format '" + std::string(text) + "'; have md, json, csv");
}

double percentile(std::vector<double> samples, double fraction) {
  if (samples.empty()) return 0.0;
  std::sort(samples.begin(), samples.end());
  const double at = fraction * static_cast<double>(samples.size() - 1);
  const auto low = static_cast<std::size_t>(at);
  const std::size_t high = std::min(low + 1, samples.size() - 1);
  return std::lerp(samples[low], samples[high], at - static_cast<double>(low));
}

}  // namespace sluice::tools

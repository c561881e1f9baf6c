#include <sstream>
#include <string>

#include "tools/cli/manual/manual.hpp"

namespace sluice::tools {
namespace {

/// Text that troff shows as it is.
std::string plain(const std::string& text) {
  std::string out;
  bool line_begins = true;
  for (const char c : text) {
    if (line_begins && (c == '.' || c == '\'')) out += "\\&";
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else {
      out += c;
    }
    line_begins = c == '\n';
  }
  return out;
}

/// As it is broken into lines.
std::string verbatim(const std::string& text) { return ".nf\n" + plain(text) + "\n.fi\n"; }

/// "-o, --format FORMAT"
std::string heading_of(const CLI::Option& option) {
  std::string names;
  for (const std::string& name : option.get_snames()) names += (names.empty() ? "" : ", ") + ("-" + name);
  for (const std::string& name : option.get_lnames()) names += (names.empty() ? "" : ", ") + ("--" + name);
  if (names.empty()) names = option.get_name();
  return option.get_items_expected_max() > 0 ? names + ' ' + option.get_type_name() : names;
}

void add_options(const CLI::App& app, std::ostream& out) {
  for (const CLI::Option* option : app.get_options()) {
    out << ".TP\n.B " << plain(heading_of(*option)) << "\n" << plain(option->get_description());
    if (!option->get_default_str().empty()) out << " (default: " << plain(option->get_default_str()) << ")";
    out << '\n';
  }
}

void add_command(const CLI::App& app, const std::string& path, std::ostream& out) {
  out << ".SS " << plain(path) << "\n" << plain(app.get_description()) << "\n";
  add_options(app, out);
  if (!app.get_footer().empty()) out << ".PP\n" << verbatim(app.get_footer());
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    add_command(*command, path + ' ' + command->get_name(), out);
}

}  // namespace

std::string man_page(const CLI::App& app, const std::string& version) {
  std::ostringstream out;
  out << ".TH SLUICE 1 \"\" \"sluice " << plain(version) << "\"\n"
      << ".SH NAME\nsluice \\- long-context LLM decoding with the KV cache in host memory\n"
      << ".SH SYNOPSIS\n.B sluice\n.I command\n[\\fIoption\\fR ...]\n"
      << ".SH DESCRIPTION\n" << verbatim(app.get_description()) << ".SH OPTIONS\n";
  add_options(app, out);
  out << ".SH COMMANDS\n";
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    add_command(*command, "sluice " + command->get_name(), out);
  return out.str();
}

}  // namespace sluice::tools

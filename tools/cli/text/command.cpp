#include "tools/cli/text/command.hpp"

#include <algorithm>
#include <exception>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include <CLI/CLI.hpp>

#include "tools/cli/text/interrupt.hpp"
#include "tools/cli/text/message.hpp"

namespace sluice::tools {
namespace {

/// Writes texts to files. What took hours must not be lost because the disk has filled up meanwhile: what a file does
/// not take is printed.
class Delivery {
 public:
  template <class Commit>
  void put(const std::string& text, const Commit& commit) {
    try {
      commit(text);
    } catch (const Error& error) {
      const bool first = !failure_;
      if (first) failure_ = error;
      write_stdout((first ? "" : "\n") + text);
    }
  }
  /// @throws Error if something was printed
  void end() const {
    if (failure_)
      throw Error(failure_->code(),
                  std::string(failure_->what()) + ". What was to be written there went to standard output instead");
  }

 private:
  std::optional<Error> failure_;
};

/// The tables of a CSV report but for the first.
void deliver_further(const Report& report, const OutputTarget& target, Delivery& delivery) {
  std::string left_out;
  for (std::size_t i = 1; i < report.tables.size(); ++i) {
    const Table& table = report.tables[i];
    if (target.is_file()) {
      delivery.put(to_csv(table), [&](const std::string& text) { target.beside(table.key).commit(text); });
    } else if (!table.rows.empty()) {
      left_out += (left_out.empty() ? "" : ", ") + table.key;
    }
  }
  if (left_out.empty()) return;
  say("CSV is one table per file, and these are left out: " + left_out +
      "; --output FILE.csv writes each to FILE-TABLE.csv beside it, and -o json holds all");
}

bool is_empty(const Report& report) {
  return std::ranges::all_of(report.tables, [](const Table& table) { return table.rows.empty(); });
}

}  // namespace

ExitCode exit_code_of(Errc code) noexcept {
  switch (code) {
    case Errc::invalid_argument:
    case Errc::not_found:
    case Errc::corrupt: return kUsage;
    case Errc::unsupported: return kUnsupported;
    case Errc::out_of_capacity:
    case Errc::io:
    case Errc::device:
    case Errc::timeout:
    case Errc::internal: return kFailed;
  }
  return kFailed;
}

CLI::Option* shows_default(CLI::Option* option, const std::string& value) { return option->default_str(value); }

CLI::Option* add_count(CLI::App& app, const std::string& name, std::function<void(std::uint64_t)> set,
                       const std::string& help, CountRange range) {
  const auto read = [name, range, set = std::move(set)](const std::string& text) {
    set(parse_count(text, name, range));
  };
  const bool any = range.most == std::numeric_limits<std::uint32_t>::max();
  const std::string shown = any ? "" : " in [" + std::to_string(range.least) + ", " + std::to_string(range.most) + "]";
  return app.add_option_function<std::string>(name, read, help)->type_name("COUNT" + shown);
}

CLI::Option* add_number(CLI::App& app, const std::string& name, std::function<void(double)> set,
                        const std::string& help, NumberRange range) {
  const auto read = [name, range, set = std::move(set)](const std::string& text) {
    set(parse_number(text, name, range));
  };
  return app.add_option_function<std::string>(name, read, help)->type_name("NUMBER");
}

CLI::Option* add_number(CLI::App& app, const std::string& name, float& target, const std::string& help,
                        NumberRange range) {
  const std::function<void(double)> set = [&target](double value) { target = static_cast<float>(value); };
  return add_number(app, name, set, help, range)->default_str(shortest(target));
}

CLI::Option* add_number(CLI::App& app, const std::string& name, double& target, const std::string& help,
                        NumberRange range) {
  const std::function<void(double)> set = [&target](double value) { target = value; };
  return add_number(app, name, set, help, range)->default_str(shortest(target));
}

CLI::Option* add_seed(CLI::App& app, std::uint64_t& target, const std::string& help) {
  const auto read = [&target](const std::string& text) { target = parse_seed(text, "--seed"); };
  return app.add_option_function<std::string>("--seed", read, help)
      ->type_name("SEED")
      ->default_str(std::to_string(target));
}

CLI::Option* add_size(CLI::App& app, const std::string& name, std::uint64_t& target, const std::string& help,
                      std::uint64_t least) {
  const auto read = [name, &target, least](const std::string& text) { target = parse_size(text, name, least); };
  return app.add_option_function<std::string>(name, read, help)->type_name("BYTES");
}

CLI::Option* add_dtype(CLI::App& app, const std::string& name, DType& target, const std::string& help) {
  const auto read = [name, &target](const std::string& text) { target = parse_dtype(text, name); };
  return app.add_option_function<std::string>(name, read, help)
      ->type_name("f32|f16|bf16")
      ->default_str(to_string(target));
}

CLI::Option* add_kv_dtype(CLI::App& app, const std::string& name, DType& target, const std::string& help) {
  const auto read = [name, &target](const std::string& text) { target = parse_kv_dtype(text, name); };
  return app.add_option_function<std::string>(name, read, help)
      ->type_name("f32|f16|bf16|fp8_e4m3")
      ->default_str(to_string(target));
}

CLI::Option* add_sinks(CLI::App& app, std::vector<double>& shares) {
  const auto read = [&shares](const std::string& text) { shares = parse_shares(text, "--sinks"); };
  return app
      .add_option_function<std::string>(
          "--sinks", read,
          "Share of the synthetic attention that the first 4 tokens hold, e.g. 0.7; query "
          "heads take the shares of a comma list in turn [default: no sinks]")
      ->type_name("LIST");
}

void deliver_text(const std::string& text, const OutputTarget& target) {
  if (!target.is_file()) return target.commit(text);
  Delivery delivery;
  delivery.put(text, [&](const std::string& all) { target.commit(all); });
  delivery.end();
}

ExitCode deliver(Report report, Format format, const OutputTarget& target) {
  const bool cut = interrupted();
  if (cut) report.extra["interrupted"] = true;
  if (cut && target.is_file() && is_empty(report)) {
    say("nothing was finished; no result is written, and a file that was there is as it was");
    return kInterrupted;
  }
  const std::string text = render(report, format);
  Delivery delivery;
  if (target.is_file()) {
    delivery.put(text, [&](const std::string& all) { target.commit(all); });
  } else {
    target.commit(text);
  }
  if (format == Format::csv) deliver_further(report, target, delivery);
  delivery.end();
  return cut ? kInterrupted : kOk;
}

ExitCode deliver_beside(Report report, Format format, const OutputTarget& target, const std::string& text,
                        const OutputTarget& beside) {
  const bool nothing = text.empty() || (interrupted() && is_empty(report));
  std::exception_ptr failed;
  ExitCode code = kFailed;
  try {
    code = deliver(std::move(report), format, target);
  } catch (const Error&) {
    failed = std::current_exception();
  }
  try {
    if (!nothing) beside.commit(text);
  } catch (const Error& error) {
    if (!failed) throw;
    say(error.what());  // The report's failure is the one that the command ends with.
  }
  if (failed) std::rethrow_exception(failed);
  return code;
}

void refuse_empty_values(CLI::App& app) {
  const auto check = [](const std::string& value) {
    return std::string(value.empty() ? "the value is empty; give it one, or leave the option out" : "");
  };
  for (CLI::Option* const option : app.get_options()) {
    const std::string kind = option->get_type_name();
    if (option->get_expected_max() > 0 && !kind.empty() && kind != "TEXT" && kind != "LIST") option->check(check, "", "");
  }
  for (CLI::App* const command : app.get_subcommands({})) refuse_empty_values(*command);
}

void add_output(CLI::App& app, OutputOptions& target) {
  const auto read = [&target](const std::string& text) { target.format = parse_format(text); };
  app.add_option_function<std::string>("-o,--format", read, "Format of the result")
      ->type_name("md|json|csv")
      ->default_str("md");
  app.add_option("--output", target.path,
                 "Write the result to this file, which appears whole or not at all; with -o csv, further tables to "
                 "FILE-TABLE.csv beside it")
      ->type_name("FILE");
}

}  // namespace sluice::tools

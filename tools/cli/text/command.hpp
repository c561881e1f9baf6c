#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "sluice/error.hpp"
#include "sluice/tensor.hpp"
#include "tools/cli/text/output.hpp"
#include "tools/cli/text/values.hpp"

// CLI11's header takes the compiler seconds; what adds options or parses them includes it.
namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace sluice::tools {

/// What the process returns. Scripts rely on it.
enum ExitCode : int {
  kOk = 0,
  kFailed = 1,         ///< a check or a run failed, or a result could not be written
  kUsage = 2,          ///< a wrong option, or input that cannot be used
  kUnsupported = 3,    ///< valid, but not on this machine or in this build
  kInterrupted = 130,  ///< Ctrl-C or SIGTERM; what was finished by then is reported
};

[[nodiscard]] ExitCode exit_code_of(Errc code) noexcept;

/// Each adds one subcommand; its callback leaves the exit code behind. Everything it needs lives in the callback.
void add_run(CLI::App& app, int& exit_code);
void add_eval(CLI::App& app, int& exit_code);
void add_bench(CLI::App& app, int& exit_code);
void add_link(CLI::App& app, int& exit_code);
void add_doctor(CLI::App& app, int& exit_code);
void add_policies(CLI::App& app, int& exit_code);
void add_plot(CLI::App& app, int& exit_code);
void add_plan(CLI::App& app, int& exit_code);
void add_manual(CLI::App& app, int& exit_code);

/// Options whose values are numbers, read by values.hpp: CLI11's own readers take octal and wrap around. `set` gets the
/// value; a target holds the default, which the help shows, and must outlive parsing.
CLI::Option* add_count(CLI::App& app, const std::string& name, std::function<void(std::uint64_t)> set,
                       const std::string& help, CountRange range = {});
CLI::Option* add_number(CLI::App& app, const std::string& name, std::function<void(double)> set,
                        const std::string& help, NumberRange range = {});
CLI::Option* add_seed(CLI::App& app, std::uint64_t& target, const std::string& help);
CLI::Option* add_number(CLI::App& app, const std::string& name, float& target, const std::string& help,
                        NumberRange range = {});
CLI::Option* add_number(CLI::App& app, const std::string& name, double& target, const std::string& help,
                        NumberRange range = {});
/// The option, whose help shows this as its default.
CLI::Option* shows_default(CLI::Option* option, const std::string& value);
template <std::integral Count>
CLI::Option* add_count(CLI::App& app, const std::string& name, Count& target, const std::string& help,
                       CountRange range = {}) {
  const auto set = [&target](std::uint64_t value) { target = static_cast<Count>(value); };
  return shows_default(add_count(app, name, std::function<void(std::uint64_t)>(set), help, range),
                       std::to_string(target));
}

/// Options whose values have units. `target` holds the default, which the help shows, and must outlive parsing.
/// A size of 0 is refused unless `least` is 0: it would be taken for none given.
CLI::Option* add_size(CLI::App& app, const std::string& name, std::uint64_t& target, const std::string& help,
                      std::uint64_t least = 1);
CLI::Option* add_dtype(CLI::App& app, const std::string& name, DType& target, const std::string& help);
/// The same of keys and values in an engine's memory, which may have scales.
CLI::Option* add_kv_dtype(CLI::App& app, const std::string& name, DType& target, const std::string& help);
/// `--sinks LIST` of every command that has synthetic attention.
CLI::Option* add_sinks(CLI::App& app, std::vector<double>& shares);
/// Writes a text to its target. What a file does not take goes to standard output.
/// @throws Error{Errc::io}, then too
void deliver_text(const std::string& text, const OutputTarget& target);
/// Writes a report to its target and returns the command's exit code: after Ctrl-C or SIGTERM the report says that it
/// was `interrupted`, and so does the code. CSV is one table per file: the first goes to the target, every other one to
/// a file beside it, or is named on standard error where there is no file.
[[nodiscard]] ExitCode deliver(Report report, Format format, const OutputTarget& target);
/// The same, and behind it a text for a file of its own, unless there is none: neither file's failure takes the other
/// along.
[[nodiscard]] ExitCode deliver_beside(Report report, Format format, const OutputTarget& target, const std::string& text,
                                      const OutputTarget& beside);

/// Refuses an empty value of every option that names its kind of value, such as FILE: it would be taken for none given.
/// Of all subcommands, and so behind those that add them. Lists, which say LIST or nothing, may be empty.
void refuse_empty_values(CLI::App& app);

/// `-o FORMAT` and `--output FILE`.
void add_output(CLI::App& app, OutputOptions& target);

}  // namespace sluice::tools

#pragma once

#include <cstdint>
#include <string>

#include <CLI/CLI.hpp>

#include "sluice/error.hpp"
#include "sluice/tensor.hpp"
#include "tools/cli/output.hpp"

namespace sluice::tools {

/// What the process returns. Scripts rely on it.
enum ExitCode : int {
  kOk = 0,
  kFailed = 1,       ///< a check or a run failed, or a result could not be written
  kUsage = 2,        ///< a wrong option, or input that cannot be used
  kUnsupported = 3,  ///< valid, but not on this machine or in this build
};

[[nodiscard]] ExitCode exit_code_of(Errc code) noexcept;

/// Each adds one subcommand; its callback leaves the exit code behind. Everything it needs lives in the callback.
void add_run(CLI::App& app, int& exit_code);
void add_eval(CLI::App& app, int& exit_code);
void add_bench(CLI::App& app, int& exit_code);
void add_link(CLI::App& app, int& exit_code);
void add_doctor(CLI::App& app, int& exit_code);
void add_policies(CLI::App& app, int& exit_code);

/// Options whose values have units. `target` holds the default, which the help shows, and must outlive parsing.
CLI::Option* add_size(CLI::App& app, const std::string& name, std::uint64_t& target, const std::string& help);
CLI::Option* add_dtype(CLI::App& app, const std::string& name, DType& target, const std::string& help);
/// `-o FORMAT` and `--output FILE`.
void add_output(CLI::App& app, OutputOptions& target);

}  // namespace sluice::tools

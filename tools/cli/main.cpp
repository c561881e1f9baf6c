#include <csignal>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include <CLI/CLI.hpp>

#include "tools/cli/text/command.hpp"
#include "tools/cli/text/facts.hpp"
#include "tools/cli/text/message.hpp"

namespace sluice::tools {
namespace {

int fail(const std::string& message, ExitCode code) {
  say("error: " + message);
  return code;
}

/// The subcommand that was being parsed.
struct ParsedCommand {
  const CLI::App* app;
  std::string name = "sluice";  ///< for "run `sluice bench cpu --help`"
};

ParsedCommand parsed_command(const CLI::App& app) {
  ParsedCommand parsed{&app};
  while (!parsed.app->get_subcommands().empty()) {
    parsed.app = parsed.app->get_subcommands().front();
    parsed.name += ' ' + parsed.app->get_name();
  }
  return parsed;
}

/// The names of its subcommands, with commas between them.
std::string commands_of(const CLI::App& app) {
  std::string names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    names += (names.empty() ? "" : ", ") + command->get_name();
  return names;
}

/// An unknown word is reported before the required option that is missing because of it.
std::string cause(const CLI::App& app, const CLI::App& parsed, const CLI::ParseError& error) {
  const std::vector<std::string> unknown = app.remaining(true);
  const std::string commands = commands_of(parsed);
  if (unknown.empty()) {
    const bool missing = !commands.empty() && dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
    return missing ? "a command is missing; there are " + commands : error.what();
  }
  if (commands.empty() || unknown.front().starts_with('-')) return "unknown argument '" + unknown.front() + "'";
  return "there is no command '" + unknown.front() + "'; there are " + commands;
}

int run(int argc, char** argv) {
  CLI::App app(
      "Long-context LLM decoding with the KV cache in host memory.\n"
      "Results go to standard output, progress and messages to standard error.\n"
      "Exit codes: 0 ok, 1 failed check or run, 2 wrong usage or input, 3 unsupported here, 130 interrupted by Ctrl-C "
      "or SIGTERM.",
      "sluice");
  app.require_subcommand(1);
  app.failure_message(CLI::FailureMessage::simple);
  app.add_flag_callback(
      "-V,--version",
      [] {
        write_stdout(std::string("sluice ") + version() + "\n");
        throw CLI::Success();
      },
      "Print the version and exit");
  int exit_code = kOk;
  add_run(app, exit_code);
  add_eval(app, exit_code);
  add_bench(app, exit_code);
  add_link(app, exit_code);
  add_doctor(app, exit_code);
  add_policies(app, exit_code);
  add_plan(app, exit_code);
  add_plot(app, exit_code);
  add_manual(app, exit_code);
  refuse_empty_values(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // Help and version are no errors. CLI11 itself would print the help without a look at what became of it.
    if (dynamic_cast<const CLI::CallForHelp*>(&error) != nullptr) write_stdout(app.help());
    if (error.get_exit_code() == 0) return kOk;
    const ParsedCommand parsed = parsed_command(app);
    return fail(cause(app, *parsed.app, error) + "; run `" + parsed.name + " --help` for the options", kUsage);
  }
  return exit_code;
}

}  // namespace
}  // namespace sluice::tools

int main(int argc, char** argv) {
  // hwloc itself reports a missing /sys on stderr; Topology copes, and `doctor` tells. A user's own setting stays.
  (void)::setenv("HWLOC_HIDE_ERRORS", "2", 0);
  // A file that would pass `ulimit -f` is a write that failed, with its message and nothing left behind.
  (void)std::signal(SIGXFSZ, SIG_IGN);
  using namespace sluice::tools;
  try {
    return run(argc, argv);
  } catch (const sluice::Error& error) {
    return fail(error.what(), exit_code_of(error.code()));
  } catch (const std::bad_alloc&) {
    return fail("out of memory; use a shorter prompt or length, or a smaller pool", kFailed);
  } catch (const std::filesystem::filesystem_error& error) {
    return fail(std::string(error.what()) + "; use a path that you may read and write", kFailed);
  } catch (const std::system_error& error) {
    return fail(std::string(error.what()) +
                    "; out of threads or memory? Use fewer --threads, or raise the limits (ulimit -u, ulimit -v)",
                kFailed);
  } catch (const std::exception& error) {
    return fail(std::string("unexpected: ") + error.what() + "; please report this", kFailed);
  }
}

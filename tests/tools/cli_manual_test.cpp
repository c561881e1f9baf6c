// `sluice manual`: everything that --help knows, for man and for shells.
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/tools/cli_process.hpp"

using sluice::test::contains;
using sluice::test::is_one_error;
using sluice::test::Outcome;
using sluice::test::read_file;
using sluice::test::TemporaryDirectory;

namespace {

const std::vector<std::string> kCommands{"run",       "eval", "bench", "bench gpu", "bench decode", "bench cpu",
                                         "bench prefill", "link", "plan",  "doctor",    "policies",     "manual"};

/// Long options, as a command's help shows them.
std::vector<std::string> options_of(const std::string& command) {
  const Outcome help = sluice::test::sluice(command + " --help");
  REQUIRE(help.code == 0);
  std::vector<std::string> options;
  std::size_t at = help.out.find("Options:");
  while ((at = help.out.find("\n  -", at)) != std::string::npos) {
    const std::size_t end = help.out.find('\n', ++at);
    const std::string line = help.out.substr(at, end - at);
    const std::size_t name = line.find("--");
    if (name == std::string::npos || name >= 6) continue;
    options.push_back(line.substr(name, line.find_first_of(" ,", name) - name));
  }
  return options;
}

/// What bash offers behind these words, of which the last is being typed.
std::string offered(const std::string& script, const std::string& words) {
  const TemporaryDirectory scratch;
  const std::string path = scratch.write("test.bash", "source '" + script + "'\nCOMP_WORDS=(" + words +
                                                          ")\nCOMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n_sluice\nprintf "
                                                          "'%s\\n' \"${COMPREPLY[@]}\"\n");
  REQUIRE(std::system(("bash -u '" + path + "' >'" + scratch.file("out") + "' 2>&1").c_str()) == 0);
  return read_file(scratch.file("out"));
}

}  // namespace

TEST_CASE("the manual has every command and every option", "[cli]") {
  const Outcome man = sluice::test::sluice("manual man");
  REQUIRE(man.code == 0);
  REQUIRE(man.out.rfind(".TH SLUICE 1", 0) == 0);
  const Outcome fish = sluice::test::sluice("manual fish");
  for (const std::string& command : kCommands) {
    CAPTURE(command);
    REQUIRE(contains(man.out, ".SS sluice " + command + "\n"));
    for (const std::string& option : options_of(command)) {
      CAPTURE(option);
      std::string escaped;
      for (const char c : option) escaped += c == '-' ? "\\-" : std::string(1, c);
      REQUIRE(contains(man.out, escaped));
      REQUIRE(contains(fish.out, " -l " + option.substr(2) + ' '));
    }
  }
  // Nothing in a line's place that troff would obey, but what the page means.
  for (std::size_t at = 0; (at = man.out.find("\n.", at)) != std::string::npos; ++at) {
    const std::string request = man.out.substr(at + 2, 2);
    CAPTURE(man.out.substr(at, 60));
    REQUIRE((request == "TH" || request == "SH" || request == "SS" || request == "TP" || request == "PP" ||
             request == "nf" || request == "fi" || request == "B " || request == "I "));
  }
}

TEST_CASE("bash completes commands, their options, and files", "[cli]") {
  const TemporaryDirectory scratch;
  const Outcome bash = sluice::test::sluice("manual bash");
  REQUIRE(bash.code == 0);
  const std::string script = scratch.write("sluice.bash", bash.out);
  REQUIRE(contains(offered(script, "sluice ''"), "bench\n"));
  REQUIRE(offered(script, "sluice ev") == "eval\n");
  REQUIRE(offered(script, "sluice bench g") == "gpu\n");
  REQUIRE(offered(script, "sluice bench gpu --warm") == "--warm-up\n");
  REQUIRE(offered(script, "sluice bench gpu --length 8K --warm") == "--warm-up\n");
  REQUIRE_FALSE(contains(offered(script, "sluice policies --"), "--warm-up"));
  const std::string file = scratch.write("weights.safetensors", "");
  REQUIRE(offered(script, "sluice run --model " + file.substr(0, file.size() - 4)) == file + "\n");
}

TEST_CASE("zsh reads what bash reads, and other shells are refused", "[cli]") {
  const std::string bash = sluice::test::sluice("manual bash").out;
  const std::string zsh = sluice::test::sluice("manual zsh").out;
  REQUIRE(zsh.rfind("#compdef sluice\n", 0) == 0);
  REQUIRE(contains(zsh, bash));
  const Outcome other = sluice::test::sluice("manual tcsh");
  REQUIRE(other.code == 2);
  REQUIRE(is_one_error(other));
}

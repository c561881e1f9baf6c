#include <array>
#include <cstdio>
#include <memory>

#include <CLI/CLI.hpp>

#include "cpu/kernels/kernels.hpp"
#include "cpu/machine/topology.hpp"
#include "cpu/threads/rates.hpp"
#include "cpu/threads/workers.hpp"
#include "sluice/cuda.hpp"
#include "sluice/error.hpp"
#include "sluice/units.hpp"
#include "tools/cli/plan/machine.hpp"
#include "tools/cli/text/command.hpp"
#include "tools/cli/text/facts.hpp"
#include "tools/cli/text/recommended.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {
namespace {

/// Below this a pool of a useful size does not fit beside a small model.
constexpr std::uint64_t kUsefulMemory = 1 * GiB;
constexpr std::uint64_t kReadBytes = 256 * MiB;

/// What was looked at, and what to do about it if something lacks.
class Findings {
 public:
  void ok(const std::string& what, const std::string& found) { add(what, "ok", found, ""); }
  void note(const std::string& what, const std::string& found, const std::string& remedy) {
    add(what, "note", found, remedy);
  }
  void missing(const std::string& what, const std::string& found, const std::string& remedy) {
    add(what, "missing", found, remedy);
    usable_ = false;
  }
  [[nodiscard]] bool usable() const noexcept { return usable_; }
  [[nodiscard]] Table table() const {
    return {.key = "doctor",
            .columns = {{"what", "what"}, {"state", "state"}, {"found", "found"}, {"remedy", "what to do"}},
            .rows = rows_};
  }

 private:
  void add(const std::string& what, const char* state, const std::string& found, const std::string& remedy) {
    rows_.push_back({what, state, found, remedy});
  }
  std::vector<std::vector<Json>> rows_;
  bool usable_ = true;
};

void look_at_memory(Findings& findings) {
  const MemoryFacts memory = memory_facts();
  const std::string found = format_size(memory.available) + " of " + format_size(memory.total) + " available";
  if (memory.available == MemoryFacts::kNoLimit) {
    findings.note("memory", "the kernel does not say", "mount /proc, or choose --host-size yourself");
  } else if (memory.available < kUsefulMemory) {
    findings.missing("memory", found, "free some, or raise the control group's memory.max: the host pool needs it");
  } else {
    findings.ok("memory", found);
  }
  if (memory.locked_limit == MemoryFacts::kNoLimit) {
    findings.ok("locked memory limit", "none");
  } else {
    findings.note("locked memory limit", format_size(memory.locked_limit),
                  "matters only for pinning with a GPU; raise by `ulimit -l unlimited`");
  }
}

void look_at_cpu(Findings& findings) {
  findings.ok("cpu", cpu_model());
  try {
    const cpu::Topology topology;
    findings.ok("topology", topology.summary());
    const cpu::Workers workers(topology, {});
    findings.ok("worker threads", std::to_string(workers.threads()));
    std::string variants;
    for (const cpu::Kernels* kernels : cpu::available_kernels()) {
      variants += (variants.empty() ? "" : ", ") + std::string(kernels->name);
    }
    findings.ok("kernels", std::string(cpu::fastest_kernels().name) + " chosen of " + variants);
    std::array<char, 64> rate{};
    std::snprintf(rate.data(), rate.size(), "%.1f GB/s", cpu::measure_read_gbps(workers, kReadBytes));
    findings.ok("memory read rate", rate.data());
  } catch (const Error& error) {
    findings.missing("host backend", error.what(), "the message names the cause");
  }
}

/// Who waits for the CPU's part of a layer unless an engine is told.
void look_at_handover(Findings& findings, const DeviceInfo& info) {
  const std::string streams = !info.stream_waits     ? "; its streams cannot wait for a word"
                              : !info.captures_waits ? "; streams that wait cannot be captured by this driver"
                                                     : "";
  if (info.handover_reason.empty())
    findings.ok("handover", to_string(info.handover) + streams);
  else
    findings.note("handover", to_string(info.handover) + (": " + info.handover_reason) + streams,
                  "a GPU of its own is faster: there a kernel waits for the CPU's part of a layer");
}

/// A GPU is never missing: the embedded host device runs the same pipeline on the CPU. Null then.
std::shared_ptr<Device> look_at_gpu(Findings& findings) {
  try {
    std::shared_ptr<Device> device = make_cuda_device();
    findings.ok("cuda device", device->info().name + ", " + format_size(device->info().memory_bytes) + ", " +
                                   std::to_string(cuda_devices()) + " usable");
    look_at_handover(findings, device->info());
    return device;
  } catch (const Error& error) {
    findings.note("cuda device", error.what(), "none needed: the embedded host device runs the same pipeline");
    return nullptr;
  }
}

/// Cores that this process may use: as many threads as an engine has without a GPU. One, if they cannot be read.
std::uint32_t usable_cores() {
  try {
    return cpu::Workers(cpu::Topology(), {}).threads();
  } catch (const Error&) {
    return 1;
  }
}

int run(const OutputOptions& output, const std::string& machine) {
  require_distinct({{"--output", output.path}, {"--machine", machine, !machine.empty()}});
  const OutputTarget target(output.path);
  const OutputTarget machine_target(machine);
  Findings findings;
  look_at_cpu(findings);
  look_at_memory(findings);
  const std::shared_ptr<Device> device = look_at_gpu(findings);
  Report report{.command = "doctor", .config = Json::object()};
  report.extra = {{"usable", findings.usable()}};
  report.tables.push_back(findings.table());
  const std::uint64_t available = memory_facts().available;
  report.tables.push_back(recommended_options({.host_available = available == MemoryFacts::kNoLimit ? 0 : available,
                                               .cores = usable_cores(),
                                               .device_memory = device == nullptr ? 0 : device->info().memory_bytes}));
  (void)deliver(report, output.format, target);
  if (!machine.empty()) machine_target.commit(to_json(this_machine(device, 0, Effort::thorough)).dump(2) + "\n");
  return findings.usable() ? kOk : kUnsupported;
}

}  // namespace

void add_doctor(CLI::App& app, int& exit_code) {
  auto output = std::make_shared<OutputOptions>();
  auto machine = std::make_shared<std::string>();
  auto* command = app.add_subcommand("doctor", "Say what this machine has, what is missing, and options to begin with");
  command
      ->add_option("--machine", *machine,
                   "Measure this machine, too, and describe it there for `sluice plan`: a minute and a half with a GPU")
      ->type_name("FILE");
  add_output(*command, *output);
  command->footer("Exit code 0 if Sluice can be used here, 3 if not.");
  command->callback([output, machine, &exit_code] { exit_code = run(*output, *machine); });
}

}  // namespace sluice::tools

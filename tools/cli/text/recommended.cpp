#include "tools/cli/text/recommended.hpp"

#include <algorithm>
#include <string>

#include "sluice/units.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {
namespace {

/// Keys and values of a token of Llama-3.1-8B in 16 bits: 32 layers, 8 KV heads of 128.
constexpr std::uint64_t kTokenBytes = 128 * KiB;

/// How many have room: 147,000, in thousands from there on.
std::string tokens_of(std::uint64_t bytes) {
  const std::uint64_t tokens = bytes / kTokenBytes;
  std::string text = std::to_string(tokens < 1000 ? tokens : tokens / 1000 * 1000);
  for (std::size_t at = text.size(); at > 3; at -= 3) text.insert(at - 3, ",");
  return text + " tokens";
}

}  // namespace

std::uint64_t recommended_host_bytes(const MachineRoom& room) noexcept {
  const std::uint64_t share = room.host_available / 4 * 3;
  const std::uint64_t unit = share >= GiB ? GiB : MiB;
  return share / unit * unit;
}

Table recommended_options(const MachineRoom& room) {
  const std::uint64_t host = recommended_host_bytes(room);
  const std::uint64_t near = room.device_memory / 4 / MiB * MiB;
  const std::uint32_t threads = std::max(room.cores - (room.device_memory != 0 ? 1u : 0u), 1u);
  const std::string size = format_size(host);
  Table table{
      .key = "recommended",
      .title = "Options to begin with",
      .columns = {{"what", "what"}, {"run", "sluice run"}, {"serve", "python -m sluice serve"}, {"why", "why"}}};
  const std::string server_size =
      host % GiB == 0 ? std::to_string(host / GiB) + "GiB" : std::to_string(host / MiB) + "MiB";
  if (room.host_available != 0) {
    table.rows.push_back({"keys and values in host memory", "--host-size " + size, "--host-bytes " + server_size,
                          "three quarters of what is available: " + tokens_of(host) + " of Llama-3.1-8B in bf16"});
  } else {
    table.rows.push_back({"keys and values in host memory", "--host-size SIZE", "--host-bytes SIZE",
                          "three quarters of what is available, which the kernel does not say here"});
  }
  if (room.device_memory != 0) {
    table.rows.push_back({"keys and values near", "--near-size " + format_size(near),
                          "--near-bytes " + std::to_string(near / MiB) + "MiB",
                          "a quarter of the GPU's memory, to begin with; more is less work for the CPU"});
  } else {
    table.rows.push_back({"keys and values near", "--near 0%", "--near-bytes 0",
                          "without a GPU near memory is ordinary memory, and gains nothing"});
  }
  const std::string count = std::to_string(threads);
  table.rows.push_back({"threads of host work", "--threads " + count, "--option threads=" + count,
                        room.device_memory != 0 ? "one core stays for the thread that drives the GPU"
                                                : "one for each core that this process may use"});
  return table;
}

}  // namespace sluice::tools

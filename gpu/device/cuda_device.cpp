#include "gpu/device/cuda_device.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "gpu/device/buffers.hpp"
#include "gpu/device/cuda_error.hpp"
#include "gpu/device/driver.hpp"
#include "gpu/device/handles.hpp"
#include "sluice/error.hpp"
#include "sluice/step/handover_facts.hpp"

namespace sluice::gpu {
namespace {

/// Why no GPU is shown, and what to do about it. A driver that is not there is "insufficient" to CUDA, too.
std::string no_gpu(cudaError_t status) {
  int driver = 0;
  if (status == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0)
    return "there is no NVIDIA driver; install one for CUDA 13 or newer (in a container, pass the GPU on), or use the CPU";
  if (status == cudaErrorNoDevice)
    return "the driver shows none; look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use the CPU";
  return describe(status) + "; install a driver for CUDA 13 or newer, or use the CPU";
}

cudaDeviceProp properties_of(int ordinal) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    throw Error(Errc::unsupported, "CUDA device: no GPU can be used: " + no_gpu(status));
  }
  if (ordinal < 0 || ordinal >= count)
    throw Error(Errc::device, "CUDA device: there is no GPU " + std::to_string(ordinal) + "; CUDA shows " +
                                  std::to_string(count) + ", counted from 0 (see CUDA_VISIBLE_DEVICES)");
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, ordinal), "read the properties of the GPU");
  return properties;
}

void require_usable(const cudaDeviceProp& properties, int ordinal) {
  if (properties.major < kLeastMajor)
    throw Error(Errc::unsupported, std::string("CUDA device: ") + properties.name + " has compute capability " +
                                       std::to_string(properties.major) + "." + std::to_string(properties.minor) +
                                       "; 8.0 or newer is needed");
  int same_address = 0;
  check(cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem, ordinal),
        "ask how the GPU addresses host memory");
  if (same_address == 0)
    throw Error(Errc::unsupported, std::string("CUDA device: ") + properties.name +
                                       " cannot use host addresses here, as under WSL 2 or some virtual GPUs; use the "
                                       "host device");
  check(cudaSetDevice(ordinal), "make the GPU current");
}

std::string pci_bus_id_of(int ordinal) {
  char bus[32] = {};
  check(cudaDeviceGetPCIBusId(bus, sizeof bus, ordinal), "read the GPU's place on the bus");
  return bus;
}

/// By ordinal; empty for one that does not say.
std::vector<std::string> visible_bus_ids() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "count the GPUs");
  std::vector<std::string> ids(static_cast<std::size_t>(count));
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    char bus[32] = {};
    if (cudaDeviceGetPCIBusId(bus, sizeof bus, ordinal) == cudaSuccess)
      ids[static_cast<std::size_t>(ordinal)] = bus;
    else
      (void)cudaGetLastError();
  }
  return ids;
}

/// Of the device's memory, by its clock and width; 0 if CUDA does not say.
double peak_memory_gbps(int ordinal) noexcept {
  int kilohertz = 0;
  int bits = 0;
  if (cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, ordinal) != cudaSuccess ||
      cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, ordinal) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0.0;
  }
  return 2.0 * kilohertz * bits / 8 * 1e-6;  // Two transfers per cycle.
}

bool has_attribute(cudaDeviceAttr attribute, int ordinal) noexcept {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, attribute, ordinal) == cudaSuccess) return value != 0;
  (void)cudaGetLastError();  // A driver that does not know it.
  return false;
}

/// Whether a stream that waits for a word can be captured: by a graph of such a wait, which is not run.
bool captures_waits() {
  const PinnedMemory word = make_pinned_memory(sizeof(std::uint64_t), "pin a word");
  const StreamHandle stream = make_stream(0);
  // Relaxed: what other threads do meanwhile is no part of it, and not forbidden.
  if (cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeRelaxed) != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  const cudaError_t waits =
      Driver::instance().wait_for_bits(stream.get(), reinterpret_cast<const std::uint64_t*>(word.get()), 1);
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream.get(), &graph);
  std::size_t nodes = 0;
  bool able = waits == cudaSuccess && ended == cudaSuccess &&
              cudaGraphGetNodes(graph, nullptr, &nodes) == cudaSuccess && nodes == 1;
  cudaGraphExec_t exec = nullptr;
  able = able && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess;
  if (exec != nullptr) (void)cudaGraphExecDestroy(exec);
  if (graph != nullptr) (void)cudaGraphDestroy(graph);
  (void)cudaGetLastError();
  return able;
}

HandoverFacts handover_facts(int ordinal, bool memory_operations) {
  return {.shared = has_attribute(cudaDevAttrMpsEnabled, ordinal),
          .kernel_limit = has_attribute(cudaDevAttrKernelExecTimeout, ordinal),
          .stream_waits = memory_operations,
          .captures_waits = memory_operations && captures_waits()};
}

KernelLimits load_kernels_for(const cudaDeviceProp& properties) {
  try {
    return load_all_kernels();
  } catch (const Error& error) {
    throw Error(error.code(), std::string("CUDA device: cannot load the kernels for ") + properties.name + " (" +
                                  error.what() + "); build with -DCMAKE_CUDA_ARCHITECTURES=" +
                                  std::to_string(properties.major) + std::to_string(properties.minor));
  }
}

}  // namespace

CudaDevice::CudaDevice(const CudaDeviceOptions& options) {
  if (options.flag_timeout.count() < 0)
    throw Error(Errc::invalid_argument, "CUDA device: flag_timeout is negative; give it 0 or more milliseconds");
  const cudaDeviceProp properties = properties_of(options.ordinal);
  require_usable(properties, options.ordinal);
  const std::uint64_t limit = options.memory_bytes != 0
                                  ? std::min<std::uint64_t>(options.memory_bytes, properties.totalGlobalMem)
                                  : properties.totalGlobalMem;
  info_ = {.name = properties.name,
           .memory_bytes = limit,
           .captures = true,
           .pci_bus_id = pci_bus_id_of(options.ordinal),
           .visible_bus_ids = visible_bus_ids()};
  peak_memory_gbps_ = peak_memory_gbps(options.ordinal);
  multiprocessors_ = static_cast<std::uint32_t>(properties.multiProcessorCount);
  limits_ = load_kernels_for(properties);
  forward_verbs_ = std::make_unique<ForwardVerbs>(options.ordinal, multiprocessors_, limits_, options.link_rows);
  core_ = std::make_shared<DeviceCore>(options, limit);
  const HandoverFacts handover = handover_facts(options.ordinal, core_->memory_operations);
  info_.handover = advised_handover(handover);
  info_.handover_reason = handover_reason(handover);
  info_.stream_waits = handover.stream_waits;
  info_.captures_waits = handover.captures_waits;
}

CudaDevice::~CudaDevice() = default;

std::unique_ptr<Buffer> CudaDevice::allocate(std::uint64_t bytes) {
  core_->activate();
  return gpu::allocate_device(core_, bytes);
}

std::unique_ptr<Buffer> CudaDevice::allocate_pinned(std::uint64_t bytes) {
  core_->activate();
  return gpu::allocate_pinned(core_, bytes);
}

std::unique_ptr<Registration> CudaDevice::register_host(std::span<std::byte> memory) {
  core_->activate();
  return gpu::register_host(core_, memory);
}

std::unique_ptr<Stream> CudaDevice::create_stream(const std::string& name) { return create_queue(name); }

std::unique_ptr<QueueStream> CudaDevice::create_queue(const std::string& name) {
  core_->activate();
  return std::make_unique<QueueStream>(core_, name);
}

std::unique_ptr<Event> CudaDevice::create_event() {
  core_->activate();
  return std::make_unique<CudaEvent>(core_);
}

DeviceRates CudaDevice::rates(std::uint64_t page_bytes) const {
  // A straight line through two counts of pages: what each further page costs.
  constexpr std::uint32_t kFew = 8;
  constexpr std::uint32_t kMany = 512;
  constexpr double kAttention = 0.8;  // Of the peak: what dense attention reaches on one H200 from 128K tokens on.
  const PathChooser& chooser = core_->chooser;
  PathChooser::Batch batch{.load = TransferLoad::idle, .block_bytes = page_bytes, .blocks = kMany};
  const TransferPath path = core_->path == TransferPath::automatic ? chooser.choose(batch) : core_->path;
  const double many_us = chooser.device_us(path, batch);
  batch.blocks = kFew;
  const double page_us = (many_us - chooser.device_us(path, batch)) / (kMany - kFew);
  DeviceRates rates{.near_gbps = kAttention * peak_memory_gbps_};
  if (!std::isfinite(page_us) || page_us <= 0.0) return rates;  // A profile without this path.
  rates.link_gbps = static_cast<double>(page_bytes) / page_us * 1e-3;
  return rates;
}

CudaDeviceFacts facts_of(int ordinal) {
  CudaDeviceFacts facts{.name = properties_of(ordinal).name};
  check(cudaDriverGetVersion(&facts.driver), "read the driver's version");
  facts.pci_bus_id = pci_bus_id_of(ordinal);
  return facts;
}

CudaDevice& cuda_device(Device& device, const char* operation) {
  auto* const found = dynamic_cast<CudaDevice*>(&device);
  if (found == nullptr)
    throw Error(Errc::invalid_argument, std::string(operation) + ": '" + device.info().name +
                                            "' is no CUDA device; use one of make_cuda_device");
  return *found;
}

}  // namespace sluice::gpu

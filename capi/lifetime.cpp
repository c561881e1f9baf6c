// Engines come and go.
#include <exception>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "capi/engine.hpp"
#include "capi/options.hpp"
#include "sluice/cuda.hpp"

namespace sluice::capi {
namespace {

Place place_of(const sluice_engine_options& options) {
  const bool cuda = options.device_type == SLUICE_DEVICE_CUDA;
  require(cuda || options.device_type == SLUICE_DEVICE_CPU,
          "sluice_engine_options.device_type is " + std::to_string(options.device_type) +
              "; it must be SLUICE_DEVICE_CPU (1) or SLUICE_DEVICE_CUDA (2)");
  require(cuda || (options.device_id == 0 && options.device_bytes == 0),
          "sluice_engine_options.device_id is " + std::to_string(options.device_id) + " and device_bytes " +
              std::to_string(options.device_bytes) +
              ", and the host device has neither; leave them 0, or set device_type to SLUICE_DEVICE_CUDA");
  return {.device_type = options.device_type, .device_id = options.device_id};
}

/// Null: the host device.
std::shared_ptr<Device> device_of(const sluice_engine_options& options, const Place& place) {
  if (place.device_type != SLUICE_DEVICE_CUDA) return nullptr;
  return make_cuda_device({.ordinal = place.device_id, .memory_bytes = options.device_bytes});
}

std::unique_ptr<sluice_engine> create(const sluice_engine_options& options, const Place& place) {
  const EngineOptions chosen = to_engine(options);
  std::vector<std::string> policies(options.policies, options.policies + options.policy_count);
  return std::make_unique<sluice_engine>(chosen, std::move(policies), device_of(options, place), place,
                                         options.device_bytes);
}

/// Runs `call` on a thread of its own and passes on what it throws. The CUDA device that is current belongs to a
/// thread, and so to the caller: what is built and freed here makes its own current.
template <class Call>
void elsewhere(const Call& call) {
  std::exception_ptr failure;
  std::thread([&] {
    try {
      call();
    } catch (...) {
      failure = std::current_exception();
    }
  }).join();
  if (failure) std::rethrow_exception(failure);
}

/// With a GPU as `elsewhere` does, else here.
template <class Call>
void where_it_belongs(const Place& place, const Call& call) {
  if (place.device_type == SLUICE_DEVICE_CUDA) {
    elsewhere(call);
  } else {
    call();
  }
}

}  // namespace
}  // namespace sluice::capi

using namespace sluice;

uint32_t sluice_cuda_devices(void) { return cuda_devices(); }

sluice_status sluice_engine_create(const sluice_engine_options* options, sluice_engine** engine) {
  return capi::guarded([&] {
    capi::require_pointer(engine, "engine");
    *engine = nullptr;
    const sluice_engine_options given = capi::read_options(options);
    const capi::Place place = capi::place_of(given);
    std::unique_ptr<sluice_engine> made;
    capi::where_it_belongs(place, [&] { made = capi::create(given, place); });
    *engine = made.release();
  });
}

sluice_status sluice_engine_options_memory_needed(const sluice_engine_options* options, sluice_memory* memory) {
  return capi::guarded([&] {
    const sluice_engine_options given = capi::read_options(options);
    const capi::Place place = capi::place_of(given);
    const EngineOptions chosen = capi::to_engine(given);
    capi::require_sized(memory, "sluice_memory");
    EngineMemoryUse needed;
    capi::where_it_belongs(place, [&] { needed = memory_needed(chosen, capi::device_of(given, place).get()); });
    capi::write_sized(capi::memory_of(needed), memory, "sluice_memory");
  });
}

sluice_status sluice_engine_options_near_within(const sluice_engine_options* options, uint64_t device_bytes,
                                                uint64_t* near_bytes) {
  return capi::guarded([&] {
    const sluice_engine_options given = capi::read_options(options);
    const capi::Place place = capi::place_of(given);
    EngineOptions chosen = capi::to_engine(given);
    capi::require_pointer(near_bytes, "near_bytes");
    std::optional<std::uint64_t> near;
    std::uint64_t others = 0;
    capi::where_it_belongs(place, [&] {
      const std::shared_ptr<Device> device = capi::device_of(given, place);
      near = near_bytes_within(chosen, device_bytes, device.get());
      chosen.near_bytes = 0;
      if (!near) others = memory_needed(chosen, device.get()).device();
    });
    if (!near)
      throw Error(Errc::out_of_capacity, "device_bytes is " + std::to_string(device_bytes) +
                                             ", and without near rows the engine takes " + std::to_string(others) +
                                             "; give it more, or less host_bytes, of which copies of keys are a share");
    *near_bytes = *near;
  });
}

void sluice_engine_destroy(sluice_engine* engine) {
  if (engine == nullptr) return;
  if (engine->place.device_type == SLUICE_DEVICE_CUDA) {
    // Without a thread to be had the engine goes here; the device that is current may change then.
    if (capi::guarded([&] { capi::elsewhere([&] { delete engine; }); }) == SLUICE_OK) return;
  }
  delete engine;
}

sluice_status sluice_engine_pin_caller(sluice_engine* engine) {
  return capi::guarded([&] { capi::engine_of(engine).pin_caller(); });
}

sluice_status sluice_engine_unpin_caller(sluice_engine* engine) {
  return capi::guarded([&] { capi::engine_of(engine).unpin_caller(); });
}

sluice_status sluice_engine_get_sizes(const sluice_engine* engine, sluice_engine_sizes* sizes) {
  return capi::guarded([&] {
    capi::write_sized(capi::from_sizes(capi::engine_of(engine).sizes()), sizes, "sluice_engine_sizes");
  });
}

sluice_status sluice_engine_get_options(const sluice_engine* engine, sluice_engine_options* options) {
  return capi::guarded([&] {
    sluice_engine_options out = capi::from_engine(capi::engine_of(engine).options());
    out.device_type = engine->place.device_type;
    out.device_id = engine->place.device_id;
    out.device_bytes = engine->device_bytes;
    out.policy_count = engine->policies.size();
    out.policies = engine->policies.empty() ? nullptr : engine->policies.data();
    capi::write_sized(out, options, "sluice_engine_options");
  });
}

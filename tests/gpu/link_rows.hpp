#pragma once

// Few far rows that the device attends itself, over the link, so that nobody is asked for them.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gpu/kernels/compiled.hpp"
#include "sluice/cuda.hpp"
#include "tests/gpu/forward_graph.hpp"
#include "tests/support/engine_plain.hpp"

namespace sluice::test::links {

using namespace plain;

inline constexpr std::uint32_t kRoom = 32;  ///< far rows that a thread block has room for: short sequences have one

/// A device that attends so many far rows of a layer.
inline EngineRig rig_of(std::uint32_t link_rows) {
  EngineRig rig = engine_rig();
  rig.device = make_cuda_device({.link_rows = link_rows});
  rig.queue = rig.device->create_stream("caller");
  rig.stream = rig.queue->native_handle();
  return rig;
}

/// Far rows of a KV head that are attended so, at most.
inline std::uint32_t most_of(std::uint32_t link_rows, std::uint32_t lists) {
  return gpu::compiled_for() >= gpu::Compiled::clusters ? std::min(link_rows / lists, kRoom) : 0;
}

inline std::string windows_of(std::uint32_t sinks, std::uint32_t recent) {
  return "near=0,sinks=" + std::to_string(sinks) + ",recent=" + std::to_string(recent);
}

inline std::vector<float> decode(Engine& engine, const EngineRig& rig, Teller& teller, ForwardTensors& tensors,
                                 ForwardGraph* graph = nullptr) {
  tensors.set(0, *teller.story, teller.at++);
  const Batch batch = engine.plan(one_each({&teller.id, 1}), engine.options().largest, rig.stream);
  graph != nullptr ? graph->replay() : tensors.attend(engine, rig.stream);
  engine.finish(batch);
  rig.synchronize();
  return tensors.out(0);
}

}  // namespace sluice::test::links

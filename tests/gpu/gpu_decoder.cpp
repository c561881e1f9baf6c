// The process of suspended_test.cpp, a program of its own as CUDA does not survive a fork:
//     gpu_decoder SEED ANSWER_TIMEOUT_MS
// It decodes, every forward a graph that is replayed, until standard input is closed, and says on standard output what
// it does; see tests/support/decoder_process.hpp.
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <thread>

#include "sluice/cuda.hpp"
#include "tests/gpu/forward_graph.hpp"
#include "tests/support/decoder_process.hpp"

using namespace sluice;
using namespace sluice::test;

int main(int argc, char* argv[]) {
  if (argc != 3) {
    std::cerr << "usage: gpu_decoder SEED ANSWER_TIMEOUT_MS\n";
    return 2;
  }
  const auto number = [&](int at) { return std::strtoul(argv[at], nullptr, 10); };
  try {
    EngineRig rig{.device = make_cuda_device({.link_rows = 0}), .queue = {}, .kv_dtype = DType::bf16, .on_gpu = true};
    rig.queue = rig.device->create_stream("caller");
    rig.stream = rig.queue->native_handle();
    const std::vector<DecodedLine> lines = decoded_lines(rig, number(1));
    EngineOptions options = decoding_options(rig, lines);
    options.answer_timeout = std::chrono::milliseconds(number(2));
    // So slow that the device waits for an answer most of the time.
    options.before_answer = [] { std::this_thread::sleep_for(std::chrono::microseconds(300)); };
    const auto prepare = [&rig](Engine& engine, ForwardTensors& tensors) -> DecodingHooks::Enqueue {
      const auto graph = std::make_shared<ForwardGraph>(engine, tensors, static_cast<cudaStream_t>(rig.stream));
      return [graph] { graph->replay(); };
    };
    decode_for_parent(rig, options, lines, {.prepare = prepare, .again = {}}, STDIN_FILENO, STDOUT_FILENO);
  } catch (const std::exception& error) {
    report_failure(error.what(), STDOUT_FILENO);
  }
}

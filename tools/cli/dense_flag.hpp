#pragma once

#include <string>

#include "sluice/device.hpp"
#include "sluice/shape.hpp"
#include "sluice/tensor.hpp"
#include "tools/cli/text/command.hpp"

namespace sluice::tools {

/// `--dense`: up to which length a policy attends everything, which is written behind it, see PolicySpec::dense_tokens.
void add_dense(CLI::App& app, std::string& dense);

/// The policy with what `dense` says behind it: `sluice | dense=0,until=1000`. `auto` is what scheduler::
/// advised_dense_tokens says where the CPU attends (`device` is null), and nothing on a GPU. As it is with `off`, where
/// nothing is advised, and, unless `dense` is a number, if it says so itself.
/// @throws Error{Errc::invalid_argument} for what is none of these, or if the policy takes no such length
[[nodiscard]] std::string with_dense(const std::string& policy, const std::string& dense, const Device* device,
                                     const AttentionShape& shape, DType kv_dtype);

}  // namespace sluice::tools

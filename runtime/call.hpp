#pragma once

#include <cstdint>
#include <new>
#include <string>
#include <system_error>

#include "sluice/error.hpp"
#include "sluice/tensor.hpp"

/// What calls of the public interface have in common.
namespace sluice {

/// Made before it is needed: there is no memory for it then.
inline const Error kNoMemory(Errc::out_of_capacity,
                             "this process gets no more host memory; shorten the sequences, use fewer, or raise its "
                             "limit (ulimit -v, memory.max)");

[[nodiscard]] inline std::string text(std::uint64_t number) { return std::to_string(number); }

inline void require(bool condition, const std::string& message) {
  if (!condition) throw Error(Errc::invalid_argument, message);
}

template <class View>
void require_tensor(const View& view, const char* name, std::uint32_t tokens, std::uint32_t heads,
                    std::uint32_t head_dim) {
  const auto text = [](std::uint32_t a, std::uint32_t b, std::uint32_t c) {
    return "[" + std::to_string(a) + ", " + std::to_string(b) + ", " + std::to_string(c) + "]";
  };
  require(view.tokens == tokens && view.heads == heads && view.head_dim == head_dim,
          std::string(name) + " is " + text(view.tokens, view.heads, view.head_dim) + "; this call needs " +
              text(tokens, heads, head_dim));
  require(view.data != nullptr, std::string(name) + ".data is null; give it the address of its first element");
  require(view.dtype != DType::fp8_e4m3,
          std::string(name) +
              ".dtype is fp8_e4m3, which has a scale for each row; give f32, f16 or bf16, which "
              "EngineOptions::kv_dtype = fp8_e4m3 rounds as it stores them");
  require(is_tensor_type(view.dtype), std::string(name) + ".dtype is " +
                                          std::to_string(static_cast<unsigned>(view.dtype)) +
                                          ", which is no value of sluice::DType");
}

/// Runs a call of the public interface, from which only Error may come. What the standard library throws is short of
/// memory or of a thread, or a defect of ours, which is said.
template <class Call>
decltype(auto) translated(Call&& call) {
  try {
    return call();
  } catch (const Error&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw kNoMemory;
  } catch (const std::system_error& error) {
    throw Error(Errc::out_of_capacity, std::string("the operating system refused a thread or another resource: ") +
                                           error.what() +
                                           "; raise its limit (ulimit -u, pids.max) or use fewer threads");
  } catch (const std::exception& error) {
    throw Error(Errc::internal, std::string("unexpected: ") + error.what() + "; please report this");
  } catch (...) {
    throw Error(Errc::internal, "an exception that is no std::exception; please report this");
  }
}

}  // namespace sluice

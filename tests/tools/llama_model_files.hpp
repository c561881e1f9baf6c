#pragma once

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/temporary_directory.hpp"

namespace sluice::test {

/// A safetensors file with this header; its data are `data_bytes` bytes of a pattern.
inline std::string safetensors_file(const std::string& header, std::size_t data_bytes) {
  const std::uint64_t length = header.size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  file += header;
  for (std::size_t i = 0; i < data_bytes; ++i) file.push_back(static_cast<char>(i * 37));
  return file;
}

/// A complete Llama of two layers as files, to be changed before it is written. Weights are small numbers.
struct TinyModel {
  TinyModel() {
    const std::uint64_t hidden = 16;
    const std::uint64_t inner = 24;
    tensors["model.embed_tokens.weight"] = {32, hidden};
    tensors["model.norm.weight"] = {hidden};
    tensors["lm_head.weight"] = {32, hidden};
    for (const std::string at : {"model.layers.0.", "model.layers.1."}) {
      for (const char* norm : {"input_layernorm.weight", "post_attention_layernorm.weight"})
        tensors[at + norm] = {hidden};
      tensors[at + "self_attn.q_proj.weight"] = {64, hidden};
      for (const char* name : {"self_attn.k_proj.weight", "self_attn.v_proj.weight"}) tensors[at + name] = {32, hidden};
      tensors[at + "self_attn.o_proj.weight"] = {hidden, 64};
      for (const char* name : {"mlp.gate_proj.weight", "mlp.up_proj.weight"}) tensors[at + name] = {inner, hidden};
      tensors[at + "mlp.down_proj.weight"] = {hidden, inner};
    }
    config = {{"architectures", {"LlamaForCausalLM"}},
              {"model_type", "llama"},
              {"hidden_size", hidden},
              {"intermediate_size", inner},
              {"num_hidden_layers", 2},
              {"num_attention_heads", 4},
              {"num_key_value_heads", 2},
              {"head_dim", 16},
              {"vocab_size", 32},
              {"max_position_embeddings", 64}};
  }

  void write(const std::filesystem::path& directory) const {
    std::ofstream(directory / "config.json") << config.dump();
    nlohmann::json header = nlohmann::json::object();
    std::string data;
    for (const auto& [name, shape] : tensors) {
      const std::size_t begin = data.size();
      std::uint64_t count = 1;
      for (const std::uint64_t extent : shape) count *= extent;
      const auto scale = scales.find(name) == scales.end() ? 1.f : scales.at(name);
      for (std::uint64_t i = 0; i < count; ++i) append(data, scale * 0.01f * static_cast<float>(i % 7));
      header[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {begin, data.size()}}};
    }
    std::string file = safetensors_file(header.dump(), 0) + data;
    std::ofstream(directory / "model.safetensors", std::ios::binary) << file;
  }

  nlohmann::json config;
  std::map<std::string, std::vector<std::uint64_t>> tensors;  ///< name and shape
  std::map<std::string, float> scales;                        ///< of tensors whose values differ from the others'
  std::string dtype = "BF16";                                 ///< or F32

 private:
  void append(std::string& data, float value) const {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    const std::uint32_t kept = dtype == "F32" ? bits : bits >> 16;
    data.append(reinterpret_cast<const char*>(&kept), dtype == "F32" ? 4 : 2);
  }
};

}  // namespace sluice::test

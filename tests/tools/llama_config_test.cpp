#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>
#include <string>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/tools/llama_failure.hpp"
#include "tests/tools/llama_golden.hpp"
#include "tools/llama/config.hpp"

namespace {

using namespace sluice::tools;
using nlohmann::json;
using sluice::Errc;
using sluice::test::Failure;
using sluice::test::failure_of;
using sluice::test::mentions;

json minimal() {
  return {{"model_type", "llama"},  {"hidden_size", 64},        {"intermediate_size", 128},
          {"num_hidden_layers", 2}, {"num_attention_heads", 4}, {"vocab_size", 100}};
}

json llama3_scaling() {
  return {{"rope_type", "llama3"},
          {"factor", 8.0},
          {"low_freq_factor", 1.0},
          {"high_freq_factor", 4.0},
          {"original_max_position_embeddings", 8192}};
}

ModelConfig parse(const json& document) { return parse_config(document.dump(), "c.json"); }

Failure parse_failure(const std::string& text) {
  return failure_of([&] { (void)parse_config(text, "c.json"); });
}

/// The failure after one field was replaced.
Failure failure_with(const char* field, const json& value) {
  json document = minimal();
  document[field] = value;
  return parse_failure(document.dump());
}

}  // namespace

TEST_CASE("the testbed's config.json is read field by field", "[llama][config]") {
  const ModelConfig config = load_config(sluice::test::testbed() / "config.json");
  CHECK(config.shape() == sluice::AttentionShape{.layers = 8, .q_heads = 8, .kv_heads = 2, .head_dim = 64});
  CHECK(config.hidden_size == 384);
  CHECK(config.intermediate_size == 1024);
  CHECK(config.vocab_size == 320);
  CHECK(config.max_position_embeddings == 32768);
  CHECK(config.rms_norm_eps == 1e-5);
  CHECK(config.rope_theta == 5e5);
  CHECK_FALSE(config.rope_scaling.has_value());
  CHECK(config.tie_word_embeddings);
  CHECK(config.bos_token_ids == std::vector<int>{256});
  CHECK(config.is_eos(257));
  CHECK_FALSE(config.is_eos(256));
}

TEST_CASE("absent and null fields take Hugging Face's defaults", "[llama][config]") {
  json document = minimal();
  for (const char* field : {"num_key_value_heads", "head_dim", "rope_scaling", "bos_token_id"})
    document[field] = nullptr;
  for (const json& text : {minimal(), document}) {
    const ModelConfig config = parse(text);
    CHECK(config.num_key_value_heads == 4);
    CHECK(config.head_dim == 16);
    CHECK(config.rms_norm_eps == 1e-6);
    CHECK(config.rope_theta == 1e4);
    CHECK_FALSE(config.tie_word_embeddings);
    CHECK(config.bos_token_ids.empty());
  }
}

TEST_CASE("end-of-text ids may be a list, RoPE may be in rope_parameters", "[llama][config]") {
  json document = minimal();
  document["eos_token_id"] = {7, 8};
  document["rope_parameters"] = llama3_scaling();
  document["rope_parameters"]["rope_theta"] = 5e5;
  const ModelConfig config = parse(document);
  CHECK(config.is_eos(7));
  CHECK(config.is_eos(8));
  CHECK(config.rope_theta == 5e5);
  CHECK(config.rope_scaling == RopeScaling{});
}

TEST_CASE("a field that is missing, of the wrong type or contradicting is named", "[llama][config]") {
  const json complete = minimal();
  for (const auto& [name, value] : complete.items()) {
    if (name == "model_type") continue;
    json document = complete;
    document.erase(name);
    const Failure missing = parse_failure(document.dump());
    CHECK(missing.code == Errc::corrupt);
    CHECK(mentions(missing.message, {"c.json", "'" + name + "'", "missing"}));
    for (const json& bad : {json(0), json(-3), json(1.5), json("64"), json(true), json::array(), json(1ull << 31)}) {
      CAPTURE(name, bad.dump());
      const Failure failure = failure_with(name.c_str(), bad);
      CHECK(failure.code == Errc::corrupt);
      CHECK(mentions(failure.message, {"'" + name + "'"}));
    }
  }
  CHECK(mentions(failure_with("num_key_value_heads", 3).message, {"num_key_value_heads"}));
  CHECK(mentions(failure_with("head_dim", 15).message, {"head_dim"}));
  CHECK(mentions(failure_with("head_dim", 1 << 30).message, {"head_dim"}));
  CHECK(mentions(failure_with("num_attention_heads", 65).message, {"head_dim"}));  // 64 / 65 leaves no dimension
  CHECK(mentions(failure_with("rms_norm_eps", 0).message, {"rms_norm_eps"}));
  CHECK(mentions(failure_with("rope_theta", "x").message, {"rope_theta"}));
  CHECK(mentions(failure_with("eos_token_id", {1, 100}).message, {"eos_token_id"}));
  CHECK(mentions(failure_with("tie_word_embeddings", 1).message, {"tie_word_embeddings"}));
}

TEST_CASE("what this host cannot compute is unsupported, not computed wrongly", "[llama][config]") {
  CHECK(failure_with("model_type", "gemma2").code == Errc::unsupported);
  CHECK(failure_with("hidden_act", "gelu").code == Errc::unsupported);
  CHECK(failure_with("attention_bias", true).code == Errc::unsupported);
  CHECK(failure_with("mlp_bias", true).code == Errc::unsupported);
  CHECK(failure_with("rope_scaling", {{"type", "yarn"}, {"factor", 4.0}}).code == Errc::unsupported);
  for (const char* field : {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}) {
    json scaling = llama3_scaling();
    scaling.erase(field);
    const Failure failure = failure_with("rope_scaling", scaling);
    CHECK(failure.code == Errc::corrupt);
    CHECK(mentions(failure.message, {field}));
  }
  CHECK(mentions(failure_with("rope_scaling", 8).message, {"rope_scaling"}));
}

TEST_CASE("a model of another or of no named type is refused", "[llama][config]") {
  json document = minimal();
  document.erase("model_type");
  CHECK(parse_failure(document.dump()).code == Errc::unsupported);
  CHECK(mentions(parse_failure(document.dump()).message, {"'model_type'", "missing"}));
  for (const char* type : {"gemma2", "qwen2", "Llama", ""}) {
    CAPTURE(type);
    CHECK(failure_with("model_type", type).code == Errc::unsupported);
  }
  CHECK(failure_with("architectures", {"LlamaForSequenceClassification"}).code == Errc::unsupported);
  CHECK(failure_with("architectures", {"GPT2LMHeadModel"}).code == Errc::unsupported);
  CHECK(failure_with("architectures", {"LlamaForCausalLM"}).code == std::nullopt);
  CHECK(failure_with("architectures", json::array()).code == std::nullopt);
  CHECK(failure_with("architectures", nullptr).code == std::nullopt);
  CHECK(failure_with("model_type", "mistral").code == std::nullopt);
}

TEST_CASE("a key that changes what a layer computes is refused by name and value", "[llama][config]") {
  struct Case {
    const char* key;
    json value;
    json neutral;
  };
  for (const auto& [key, value, neutral] : {
           Case{"quantization_config", {{"quant_method", "gptq"}, {"bits", 4}}, nullptr},
           Case{"compression_config", {{"format", "pack-quantized"}}, nullptr},
           Case{"sliding_window", 1024, nullptr},
           Case{"sliding_window", 1, 2048},  // as long as the context: it hides nothing
           Case{"partial_rotary_factor", 0.5, 1.0},
           Case{"attn_logit_softcapping", 50.0, nullptr},
           Case{"final_logit_softcapping", 30.0, nullptr},
           Case{"use_qk_norm", true, false},
           Case{"residual_multiplier", 0.22, 1.0},
           Case{"logits_scaling", 8, 1},
           Case{"num_local_experts", 8, nullptr},
           Case{"layer_types", {"full_attention", "sliding_attention"}, {"full_attention", "full_attention"}},
       }) {
    CAPTURE(key, value.dump());
    const Failure failure = failure_with(key, value);
    CHECK(failure.code == Errc::unsupported);
    CHECK(mentions(failure.message, {"'" + std::string(key) + "'", value.is_object()  ? "{"
                                                                   : value.is_array() ? "sliding_attention"
                                                                                      : value.dump()}));
    CHECK(failure_with(key, neutral).code == std::nullopt);
  }
}

TEST_CASE("two descriptions of RoPE must agree, and an empty one hides nothing", "[llama][config]") {
  json document = minimal();
  document["rope_scaling"] = json::object();
  document["rope_parameters"] = llama3_scaling();
  CHECK(parse(document).rope_scaling == RopeScaling{});
  document["rope_scaling"] = llama3_scaling();
  CHECK(parse(document).rope_scaling == RopeScaling{});
  document["rope_scaling"]["factor"] = 4.0;
  CHECK(mentions(parse_failure(document.dump()).message, {"rope_scaling", "rope_parameters"}));
  document["rope_scaling"] = {{"rope_type", "default"}};
  CHECK(mentions(parse_failure(document.dump()).message, {"rope_scaling", "rope_parameters"}));

  document = minimal();
  document["rope_theta"] = 1e4;
  document["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 5e5}};
  CHECK(mentions(parse_failure(document.dump()).message, {"rope_theta"}));
  document["rope_theta"] = 5e5;
  CHECK(parse(document).rope_theta == 5e5);

  // What would be passed over in silence.
  CHECK(mentions(failure_with("rope_scaling", {{"factor", 8.0}}).message, {"'rope_scaling'", "'factor'"}));
  json scaling = llama3_scaling();
  scaling["attention_factor"] = 1.5;
  CHECK(failure_with("rope_scaling", scaling).code == Errc::unsupported);
  CHECK(mentions(failure_with("rope_scaling", scaling).message, {"'attention_factor'", "1.5"}));
  scaling = llama3_scaling();
  scaling["type"] = "linear";
  CHECK(mentions(failure_with("rope_scaling", scaling).message, {"'type'"}));
  CHECK(failure_with("rope_parameters", {{"full_attention", llama3_scaling()}}).code == Errc::unsupported);
}

TEST_CASE("numbers beyond any model are refused before anything is sized by them", "[llama][config]") {
  for (const char* field : {"num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
                            "vocab_size", "max_position_embeddings"}) {
    CAPTURE(field);
    const Failure failure = failure_with(field, 2147483647);
    CHECK(failure.code == Errc::corrupt);
    CHECK(mentions(failure.message, {field, "2147483647"}));
  }
}

TEST_CASE("JSON nested without end is an error wherever it stands, and no message repeats it", "[llama][config]") {
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  const std::string objects = [] {
    std::string text;
    for (int i = 0; i < 100'000; ++i) text += "{\"a\":";
    return text + "1" + std::string(100'000, '}');
  }();
  for (const std::string& nested : {deep, objects, std::string(100'000, '[')}) {
    for (const char* field : {"hidden_size", "rope_theta", "tie_word_embeddings", "model_type", "eos_token_id",
                              "rope_scaling", "quantization_config", "nobody_reads_this"}) {
      std::string text = minimal().dump();
      text.back() = ',';
      const Failure failure = parse_failure(text + "\"" + field + "\":" + nested + "}");
      CAPTURE(field);
      CHECK(failure.code == Errc::corrupt);
      CHECK(failure.message.size() < 400);
    }
    CHECK(parse_failure(nested).code == Errc::corrupt);
  }
  CHECK(failure_with("hidden_size", std::string(1'000'000, 'x')).message.size() < 400);
  CHECK(failure_with("hidden_size", json(std::vector<int>(100'000, 7))).message.size() < 400);
}

TEST_CASE("a key given twice is refused: readers disagree about which one counts", "[llama][config]") {
  std::string text = minimal().dump();
  text.back() = ',';
  CHECK(mentions(parse_failure(text + R"("hidden_size":128})").message, {"'hidden_size'", "twice"}));
}

TEST_CASE("text that is no JSON object is corrupt", "[llama][config]") {
  for (const char* text : {"", "{", "[1]", "3", "{\"hidden_size\": }", "\xff\xfe"})
    CHECK(parse_failure(text).code == Errc::corrupt);
}

TEST_CASE("Llama-3 scaling follows its published formula", "[llama][config]") {
  json document = minimal();
  document["head_dim"] = 128;
  document["rope_theta"] = 500'000.0;
  const std::vector<double> plain = rope_frequencies(parse(document));
  document["rope_scaling"] = llama3_scaling();
  const std::vector<double> scaled = rope_frequencies(parse(document));
  REQUIRE(plain.size() == 64);
  REQUIRE(scaled.size() == 64);

  int kept = 0;
  int stretched = 0;
  for (std::size_t i = 0; i < plain.size(); ++i) {
    CHECK(plain[i] == Approx(1.0 / std::pow(500'000.0, 2.0 * static_cast<double>(i) / 128.0)).epsilon(1e-14));
    // As in Meta's llama-models: by wavelength, three cases.
    const double wavelength = 2.0 * std::numbers::pi / plain[i];
    double expected = 0;
    if (wavelength < 8192.0 / 4.0) {
      expected = plain[i];
      ++kept;
    } else if (wavelength > 8192.0 / 1.0) {
      expected = plain[i] / 8.0;
      ++stretched;
    } else {
      const double smooth = (8192.0 / wavelength - 1.0) / (4.0 - 1.0);
      expected = (1.0 - smooth) * plain[i] / 8.0 + smooth * plain[i];
    }
    CHECK(scaled[i] == Approx(expected).epsilon(1e-12));
  }
  CHECK(kept > 0);
  CHECK(stretched > 0);
  CHECK(kept + stretched < 64);
}

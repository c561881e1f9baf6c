#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/tools/llama_failure.hpp"
#include "tests/tools/llama_golden.hpp"
#include "tests/tools/llama_model_files.hpp"
#include "tools/llama/generation_config.hpp"
#include "tools/llama/model.hpp"
#include "tools/llama/presets.hpp"

namespace {

using namespace sluice;
using namespace sluice::tools;
using nlohmann::json;
using sluice::test::failure_of;
using sluice::test::mentions;
using sluice::test::TemporaryDirectory;
using sluice::test::TinyModel;

GenerationConfig parse(const json& document) { return parse_generation_config(document.dump(), "g.json", 100); }

}  // namespace

TEST_CASE("generation_config.json gives the sampler its defaults", "[llama][generation]") {
  const GenerationConfig instruct = parse({{"bos_token_id", 1},
                                           {"do_sample", true},
                                           {"eos_token_id", {7, 8}},
                                           {"temperature", 0.6},
                                           {"top_p", 0.9},
                                           {"transformers_version", "4.40.0"}});
  CHECK(instruct.eos_token_ids == std::vector<int>{7, 8});
  CHECK(instruct.temperature == 0.6f);
  CHECK(instruct.top_p == 0.9f);
  CHECK_FALSE(instruct.top_k.has_value());
  CHECK(instruct.ignored.empty());
  CHECK(parse({{"do_sample", true}, {"top_k", 20}}).top_k == 20u);
  CHECK(parse({{"do_sample", true}, {"top_k", -1}}).top_k == 0u);
  CHECK(parse({{"do_sample", true}, {"top_k", nullptr}, {"temperature", nullptr}}).temperature == 1.f);
  CHECK(parse({{"eos_token_id", 3}}).eos_token_ids == std::vector<int>{3});
  CHECK(parse(json::object()) == GenerationConfig{});
}

TEST_CASE("without do_sample the likeliest token is chosen, whatever else the file says", "[llama][generation]") {
  for (const json& off : {json(nullptr), json(false)}) {
    const GenerationConfig config =
        parse({{"do_sample", off}, {"temperature", 0.6}, {"top_p", 0.9}, {"top_k", 5}, {"eos_token_id", 3}});
    CHECK(config == GenerationConfig{.eos_token_ids = {3}});
  }
}

TEST_CASE("what the sampler lacks is listed, unless it changes nothing", "[llama][generation]") {
  const GenerationConfig config =
      parse({{"repetition_penalty", 1.1}, {"min_p", 0}, {"num_beams", 1}, {"typical_p", 1.0}});
  CHECK(config.ignored == std::vector<std::string>{"repetition_penalty"});
}

TEST_CASE("a generation_config.json that cannot be followed names the field", "[llama][generation]") {
  const auto failure_with = [](const char* field, const json& value) {
    json document = {{"do_sample", true}};
    document[field] = value;
    return failure_of([&] { (void)parse(document); });
  };
  struct Case {
    const char* field;
    json value;
  };
  for (const auto& [field, value] : {Case{"temperature", -1}, Case{"temperature", 101}, Case{"temperature", "hot"},
                                     Case{"top_p", 0}, Case{"top_p", 1.5}, Case{"top_k", -2}, Case{"top_k", 1.5},
                                     Case{"eos_token_id", 100}, Case{"eos_token_id", -1}, Case{"do_sample", 1}}) {
    CAPTURE(field, value.dump());
    const auto failure = failure_with(field, value);
    CHECK(failure.code == Errc::corrupt);
    CHECK(mentions(failure.message, {"g.json", field}));
  }
  CHECK(failure_of([] { (void)parse_generation_config("[", "g.json", 100); }).code == Errc::corrupt);
}

TEST_CASE("a model reads its generation_config.json, whose end-of-text ids count", "[llama][generation]") {
  const TemporaryDirectory scratch;
  TinyModel files;
  files.config["eos_token_id"] = 2;
  files.write(scratch.path());
  CHECK(Model(scratch.path(), {.threads = 1}).config().eos_token_ids == std::vector<int>{2});
  CHECK(Model(scratch.path(), {.threads = 1}).generation() == GenerationConfig{});
  scratch.write("generation_config.json", R"({"do_sample":true,"temperature":0.5,"eos_token_id":[3,4]})");
  const Model model(scratch.path(), {.threads = 1});
  CHECK(model.config().eos_token_ids == std::vector<int>{3, 4});
  CHECK(model.generation().temperature == 0.5f);
  scratch.write("generation_config.json", R"({"eos_token_id":32})");
  CHECK(failure_of([&] { const Model damaged(scratch.path()); }).code == Errc::corrupt);
}

TEST_CASE("a model tells how far it has loaded", "[llama][generation]") {
  const TemporaryDirectory scratch;
  TinyModel().write(scratch.path());
  std::vector<std::uint64_t> done;
  std::uint64_t all = 0;
  const auto progress = [&](std::uint64_t now, std::uint64_t total) {
    done.push_back(now);
    all = total;
  };
  const Model model(scratch.path(), {.threads = 1, .progress = progress});
  CHECK(all == model.parameters() * sizeof(float));
  REQUIRE(done.size() > 10);
  CHECK(std::is_sorted(done.begin(), done.end()));
  CHECK(done.back() == all);
  done.clear();
  CHECK(Model::random(llama_tiny(), 1, {.threads = 1, .progress = progress}).parameters() * sizeof(float) == all);
  CHECK(done.back() == all);
  // A user who does not want to wait any longer.
  struct Enough {};
  CHECK_THROWS_AS(Model(scratch.path(), {.threads = 1, .progress = [](std::uint64_t, std::uint64_t) { throw Enough(); }}),
                  Enough);
}

TEST_CASE("a KV cache may follow the checkpoint's type", "[llama][generation]") {
  const TemporaryDirectory scratch;
  TinyModel files;
  files.write(scratch.path());
  CHECK(Model(scratch.path(), {.threads = 1}).kv_dtype() == DType::bf16);
  files.dtype = "F32";
  files.write(scratch.path());
  CHECK(Model(scratch.path(), {.threads = 1}).kv_dtype() == DType::f32);
  CHECK(Model::random(llama_tiny(), 1, {.threads = 1}).kv_dtype() == DType::bf16);
}

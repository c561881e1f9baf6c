#include "tools/llama/sampler.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "sluice/error.hpp"

namespace sluice::tools {

Likeliest likeliest(std::span<const float> logits) noexcept {
  Likeliest best;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) continue;
    if (best.token < 0 || logits[i] > best.logit) best = {.token = static_cast<std::int32_t>(i), .logit = logits[i]};
  }
  return best;
}

int token_of(const Likeliest& choice) {
  if (choice.token < 0) throw Error(Errc::invalid_argument, "no logit is a number; did the model overflow?");
  return choice.token;
}

int argmax(std::span<const float> logits) { return token_of(likeliest(logits)); }

Sampler::Sampler(const SamplerOptions& options) : options_(options), random_(options.seed) {
  if (!(options.temperature >= 0.f && options.temperature <= 100.f)) {
    throw Error(Errc::invalid_argument, "temperature must be in [0, 100], is " + std::to_string(options.temperature));
  }
  if (!(options.top_p > 0.f && options.top_p <= 1.f)) {
    throw Error(Errc::invalid_argument, "top_p must be in (0, 1], is " + std::to_string(options.top_p));
  }
}

int Sampler::next(std::span<const float> logits) {
  const int best = argmax(logits);
  if (options_.temperature == 0.f) return best;
  const double top = logits[static_cast<std::size_t>(best)];
  if (!std::isfinite(top))
    throw Error(Errc::invalid_argument, "the largest logit is infinite; did the model overflow?");

  choices_.clear();
  double mass = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double weight = std::exp((logits[i] - top) / options_.temperature);
    if (!(weight > 0)) continue;  // NaN too
    choices_.push_back({weight, static_cast<int>(i)});
    mass += weight;
  }
  std::sort(choices_.begin(), choices_.end(), [](const Choice& a, const Choice& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
  });

  if (options_.top_k != 0 && options_.top_k < choices_.size()) {
    choices_.resize(options_.top_k);
    mass = 0;
    for (const Choice& choice : choices_) mass += choice.weight;
  }

  // The shortest prefix that holds top_p of the mass; the likeliest token is always in it.
  double kept = 0;
  std::size_t count = 0;
  while (count < choices_.size() && (count == 0 || kept < options_.top_p * mass)) kept += choices_[count++].weight;

  // 53 random bits make a double in [0, 1) alike everywhere; std::uniform_real_distribution is up to the library.
  double remaining = static_cast<double>(random_() >> 11) * 0x1p-53 * kept;
  std::size_t pick = 0;
  while (pick + 1 < count && remaining >= choices_[pick].weight) remaining -= choices_[pick++].weight;
  return choices_[pick].token;
}

}  // namespace sluice::tools

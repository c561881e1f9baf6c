#include "tests/soak/model.hpp"

#include <algorithm>
#include <cmath>
#include <set>

namespace sluice::test {
namespace {

const char* name_of(Call::Kind kind) {
  switch (kind) {
    case Call::Kind::prompt: return "prompt";
    case Call::Kind::decode: return "decode";
    case Call::Kind::import: return "import";
    case Call::Kind::truncate: return "truncate to";
    case Call::Kind::fork: return "fork at";
    case Call::Kind::park: return "parked and resumed at";
  }
  return "";
}

}  // namespace

void RoundStats::add(const RoundStats& other) noexcept {
  sequences += other.sequences;
  forwards += other.forwards;
  decoded += other.decoded;
  replayed += other.replayed;
  delays += other.delays;
  holds += other.holds;
  checked += other.checked;
  alone += other.alone;
  rounded += other.rounded;
  unlike += other.unlike;
  late += other.late;
  broken += other.broken;
  unchosen += other.unchosen;
  slips += other.slips;
  unbuilt += other.unbuilt;
  failed += other.failed;
  cancelled += other.cancelled;
  refused += other.refused;
  resumed += other.resumed;
  seconds += other.seconds;
}

std::string Sequence::name() const { return "sequence " + std::to_string(id.value) + " (" + policy + ")"; }

std::string Sequence::story() const {
  std::string text = name() + ", begun as " + first_policy + ":";
  auto lost = vain.begin();
  const auto tell_lost = [&](std::size_t before) {
    for (; lost != vain.end() && lost->call <= before; ++lost)
      text += std::string(" [in vain: ") + name_of(lost->prefill ? Call::Kind::prompt : Call::Kind::decode) + " " +
              std::to_string(lost->tokens) + "]";
  };
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const Call& call = calls[i];
    tell_lost(i);
    const bool grows = !call.tokens.empty();
    text += std::string(" ") + name_of(call.kind) + " " + std::to_string(grows ? call.tokens.size() : call.count);
    if (call.kind == Call::Kind::import) text += " with " + std::to_string(call.count) + " queries";
    if (!call.policy.empty()) text += " as " + call.policy;
    text += ",";
  }
  text.back() = '.';
  tell_lost(calls.size());
  return text;
}

bool has_decoded(const Sequence& sequence) {
  return std::ranges::find(sequence.calls, Call::Kind::decode, &Call::kind) != sequence.calls.end();
}

bool begins_again(const Sequence& sequence, std::size_t call) {
  bool prompt = false;
  while (call-- > 0) {
    const Call& before = sequence.calls[call];
    if (before.kind == Call::Kind::decode) return prompt;
    if (before.kind == Call::Kind::park || !before.policy.empty()) return false;
    prompt |= before.kind == Call::Kind::prompt || before.kind == Call::Kind::import;
  }
  return false;
}

void PageModel::fork(SequenceId parent, SequenceId child, std::uint32_t tokens) {
  lists_[child.value] = lists_.at(parent.value);
  truncate(child, tokens);
}

void PageModel::truncate(SequenceId id, std::uint32_t tokens) {
  Pages& pages = lists_.at(id.value);
  pages.all.resize(pages_of(tokens));
  pages.passed = std::min(pages.passed, pages_of(tokens));
}

std::size_t PageModel::holders(std::uint64_t page) const {
  std::size_t holders = 0;
  for (const auto& [id, list] : lists_) holders += static_cast<std::size_t>(std::ranges::count(list.all, page));
  return holders;
}

void PageModel::grow(SequenceId id, std::uint32_t planned, std::uint32_t count) {
  std::vector<std::uint64_t>& list = lists_.at(id.value).all;
  const std::uint32_t open = planned / page_tokens_;
  // One that another one has passed is copied where there are no windows, and kept where there are: one block each.
  if (open < list.size() && holders(list[open]) > 1) list[open] = next_++;
  while (list.size() < pages_of(planned + count)) list.push_back(next_++);
}

void PageModel::settle(SequenceId id, std::uint32_t tokens) {
  Pages& pages = lists_.at(id.value);
  if (stacks_.windowed()) pages.passed = std::max(pages.passed, stacks_.passed_pages(tokens));
}

void PageModel::resume(SequenceId id, std::uint32_t tokens, std::uint32_t passed) {
  begin(id);
  grow(id, 0, tokens);
  lists_.at(id.value).passed = passed;
}

std::uint64_t PageModel::used() const {
  std::set<std::uint64_t> all, in_windows;
  for (const auto& [id, list] : lists_) {
    all.insert(list.all.begin(), list.all.end());
    in_windows.insert(list.all.begin() + list.passed, list.all.end());
  }
  return blocks(all.size(), in_windows.size());
}

std::uint64_t PageModel::held(SequenceId id) const {
  const Pages& pages = lists_.at(id.value);
  return blocks(pages.all.size(), pages.all.size() - pages.passed);
}

std::uint64_t PageModel::resumed(std::uint32_t tokens, std::uint32_t passed) const {
  return blocks(pages_of(tokens), pages_of(tokens) - passed);
}

std::uint32_t PageModel::shortest(SequenceId id) const {
  const std::uint32_t kept_from = passed(id) * page_tokens_;
  return kept_from == 0 ? 0 : kept_from + widest_ - 1;
}

std::vector<double> attended(const Pool& pool, std::span<const std::uint32_t> tokens, std::uint32_t layer,
                             std::uint32_t sinks, std::uint32_t recent) {
  const AttentionShape& shape = pool.shape();
  const std::uint32_t d = shape.head_dim;
  const std::size_t n = tokens.size();
  std::vector<double> out(pool.row(), 0.0);
  std::vector<double> weights(n);
  for (std::uint32_t head = 0; head < shape.q_heads; ++head) {
    const std::uint32_t kv = head / shape.group();
    const float* const q = pool.q(layer, tokens.back()) + head * d;
    double sum = 0.0;
    for (std::size_t j = 0; j < n; ++j) {
      weights[j] = 0.0;
      if (j >= sinks && j + recent < n) continue;
      double dot = 0.0;
      for (std::uint32_t c = 0; c < d; ++c) dot += double{q[c]} * pool.k(layer, tokens[j])[kv * d + c];
      sum += weights[j] = std::exp(dot / std::sqrt(static_cast<double>(d)));
    }
    for (std::size_t j = 0; j < n; ++j) {
      for (std::uint32_t c = 0; c < d && weights[j] != 0.0; ++c)
        out[head * d + c] += weights[j] / sum * pool.v(layer, tokens[j])[kv * d + c];
    }
  }
  return out;
}

Window window_of(const PolicySpec& spec, std::uint32_t layer) {
  if (spec.uses(Source::all) || spec.dense(layer)) return {.known = true};
  if (spec.sources != 0) return {};
  return {.known = true, .sinks = spec.near.sink_tokens, .recent = std::max(spec.near.recent_tokens, 1u)};
}

void require_right(const Pool& pool, const Sequence& sequence, std::uint32_t position, std::uint32_t layer,
                   const Window& window, std::span<const float> got, RoundStats& stats) {
  const auto fail = [&](const std::string& what) {
    throw Failure(what + ": layer " + std::to_string(layer) + ", token " + std::to_string(position) + " of " +
                  sequence.story());
  };
  if (!std::ranges::all_of(got, [](float x) { return std::isfinite(x) && std::abs(x) < 1e10f; })) fail("no output");
  if (!window.known) return;
  ++stats.checked;
  const std::span<const std::uint32_t> seen(sequence.tokens.data(), position + 1);
  const std::vector<double> want = attended(pool, seen, layer, window.sinks, window.recent);
  double worst = 0.0;
  for (std::size_t i = 0; i < want.size(); ++i) worst = std::max(worst, std::abs(want[i] - got[i]));
  if (worst > pool.terrain().tolerance) fail("off attention in float64 by " + std::to_string(worst));
}

}  // namespace sluice::test

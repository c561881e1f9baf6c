#include "tests/fuzz/mutate.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace sluice::test {
namespace {

using Json = nlohmann::ordered_json;

/// Nesting at which walking and writing the document, which recurse, are still cheap.
constexpr int kMaxDepth = 64;

/// Numbers at the edges of the types that parsers read them into.
constexpr const char* kEdges[] = {"0",
                                  "-0",
                                  "-1",
                                  "1",
                                  "7",
                                  "010",
                                  "0x10",
                                  "1.5",
                                  "1e5",
                                  "1e308",
                                  "1e-320",
                                  "1e999",
                                  "-1e308",
                                  "255",
                                  "256",
                                  "65535",
                                  "65536",
                                  "2147483647",
                                  "2147483648",
                                  "4294967295",
                                  "4294967296",
                                  "4294967297",
                                  "9007199254740993",
                                  "9223372036854775807",
                                  "9223372036854775808",
                                  "18446744073709551615",
                                  "18446744073709551616",
                                  "nan",
                                  "inf",
                                  "0.99999999"};

template <class Items>
const auto& any_of(const Items& items, Random& random) {
  return items[random.below(static_cast<std::uint32_t>(std::size(items)))];
}

/// A position in [0, size].
std::size_t position(std::size_t size, Random& random) { return random.below(static_cast<std::uint32_t>(size) + 1); }

int depth_of(std::string_view text) {
  int depth = 0;
  int deepest = 0;
  for (const char c : text) {
    if (c == '[' || c == '{') deepest = std::max(deepest, ++depth);
    if (c == ']' || c == '}') --depth;
  }
  return deepest;
}

void collect(Json& node, std::vector<Json*>& nodes) {
  nodes.push_back(&node);
  if (node.is_structured()) {
    for (Json& child : node) collect(child, nodes);
  }
}

Json nested(std::uint32_t levels, Random& random) {
  Json value = nullptr;
  for (std::uint32_t i = 0; i < levels; ++i)
    value = random.below(2) == 0 ? Json::array({std::move(value)}) : Json::object({{"a", std::move(value)}});
  return value;
}

Json any_value(Random& random, const std::vector<std::string>& words) {
  switch (random.below(9)) {
    case 0: return nullptr;
    case 1: return random.below(2) == 0;
    case 2: return std::string(random.below(2) == 0 ? 0 : 200, 'x');
    case 3: return Json::array();
    case 4: return Json::object();
    case 5: return nested(1 + random.below(40), random);
    case 6: return random.next();
    case 7: {
      const Json number = Json::parse(any_of(kEdges, random), nullptr, false);
      return number.is_discarded() ? Json(-1) : number;
    }
    default: return words.empty() ? Json("") : Json::parse(any_of(words, random), nullptr, false);
  }
}

/// A key or an element less, or one that is there once more.
void change_children(Json& node, Random& random) {
  const auto count = static_cast<std::uint32_t>(node.size());
  if (count == 0) return;
  const auto at = std::next(node.begin(), random.below(count));
  const bool less = random.below(2) == 0;
  if (less) {
    node.erase(at);
  } else if (node.is_array()) {
    node.push_back(Json(*at));
  } else {
    const Json copy = *at;
    node[at.key() + (random.below(2) == 0 ? "_" : "")] = copy;
  }
}

}  // namespace

std::optional<std::string> mutate_json(std::string_view text, Random& random, const std::vector<std::string>& words) {
  const std::size_t begin = text.find_first_of("{[");
  const std::size_t last = text.find_last_of("}]");
  if (begin == std::string_view::npos || last == std::string_view::npos || last < begin) return std::nullopt;
  const std::string_view inner = text.substr(begin, last + 1 - begin);
  if (depth_of(inner) > kMaxDepth) return std::nullopt;
  Json document = Json::parse(inner, nullptr, false);
  if (document.is_discarded()) return std::nullopt;

  std::vector<Json*> nodes;
  collect(document, nodes);
  Json& node = *any_of(nodes, random);
  switch (random.below(4)) {
    case 0: {
      Json value = any_value(random, words);
      node = value.is_discarded() ? Json(any_of(words, random)) : std::move(value);
      break;
    }
    case 1: node.is_structured() ? change_children(node, random) : void(node = any_value(random, {})); break;
    case 2: node = Json(*any_of(nodes, random)); break;
    default: node = random.below(2) == 0 ? Json::array({node}) : Json::object({{"a", node}}); break;
  }
  const auto replace = Json::error_handler_t::replace;  // words need not be UTF-8
  const std::string changed = document.dump(random.below(4) == 0 ? 1 : -1, ' ', false, replace);
  return std::string(text.substr(0, begin)) + changed + std::string(text.substr(last + 1));
}

void Mutator::mutate_bytes(std::string& text, Random& random) const {
  const std::size_t at = position(text.size(), random);
  const std::size_t length = std::min<std::size_t>(1 + random.below(random.below(8) == 0 ? 64 : 4), text.size() - at);
  switch (random.below(5)) {
    case 0:
      if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << random.below(8)));
      break;
    case 1: text.erase(at, length); break;
    case 2: text.insert(at, text.substr(at, length)); break;
    case 3: text.insert(at, 1 + random.below(3), static_cast<char>(random.next())); break;
    default: {  // the front of one input and the back of another
      const std::string& other = any_of(corpus_, random);
      text = text.substr(0, at) + other.substr(position(other.size(), random));
      break;
    }
  }
}

void Mutator::mutate_words(std::string& text, Random& random) const {
  const bool edge = words_.empty() || random.below(3) == 0;
  const std::string word = edge ? any_of(kEdges, random) : any_of(words_, random);
  constexpr std::string_view kDigits = "0123456789";
  const std::size_t digit = text.find_first_of(kDigits, position(text.size(), random));
  if (edge && digit != std::string::npos && random.below(4) != 0) {
    const std::size_t end = std::min(text.find_first_not_of("0123456789.eE+-", digit), text.size());
    text.replace(digit, end - digit, word);
    return;
  }
  const std::size_t at = position(text.size(), random);
  const std::size_t replaced = random.below(2) == 0 ? 0 : std::min(word.size(), text.size() - at);
  text.replace(at, replaced, word);
}

void Mutator::mutate(std::string& text, Random& random) const {
  switch (random.below(4)) {
    case 0: return mutate_bytes(text, random);
    case 1: return mutate_words(text, random);
    default:
      if (auto changed = mutate_json(text, random, words_)) {
        text = std::move(*changed);
      } else {
        random.below(2) == 0 ? mutate_words(text, random) : mutate_bytes(text, random);
      }
  }
}

std::string Mutator::make(std::uint64_t number) const {
  if (number < corpus_.size()) return corpus_[number];
  Random random(Random(seed_).next() + number);
  std::string text = any_of(corpus_, random);
  for (std::uint32_t left = 1 + random.below(random.below(4) == 0 ? 12 : 3); left > 0; --left) {
    mutate(text, random);
    if (text.size() > kMaxInput) text.resize(kMaxInput);
  }
  return text;
}

}  // namespace sluice::test

"""Texts that teach the tasks of `sluice eval`: long contexts, then questions about them until the text is full.

The formats are those of tools/llama/tasks*.cpp, byte for byte; tools/lab/train/tests holds the two together. A text asks
many questions where a prompt of eval asks one: that is what makes a model learn to look up. It asks none twice, as the
first answer would be found more easily than the fact; when all are asked, another text follows.
"""

import bisect
import dataclasses
import math
import random
import string

ADJECTIVES = (
    "amber bold calm dusty early fancy gentle hidden icy jolly keen lunar misty noble olive proud quiet rusty silver "
    "tidy urban vivid warm young zesty crimson distant electric frozen golden hollow ivory lively mellow narrow orange "
    "purple rapid silent tiny"
).split()
NOUNS = (
    "otter falcon harbor canyon lantern meadow pepper rocket saddle temple anchor basket candle dragon engine forest "
    "garden hammer island jacket kettle ladder magnet needle orchid pillow quarry ribbon shadow tunnel violin walnut "
    "yogurt zipper beacon cactus dolphin ember feather glacier"
).split()
SENTENCES = (
    "The grass is green. ",
    "The sky is blue. ",
    "The sun is yellow. ",
    "Here we go. ",
    "There and back again. ",
)

# Weights of a byte's loss, in tenths. What a question has one answer to is what a text is for; most other bytes are
# drawn at random or known by heart.
ANSWER, READING, ELSE = 10, 3, 1
LEAST_TEXT = 256  # Bytes. What is over is cut off.


@dataclasses.dataclass
class Haystack:
    """Filler text and the places where a piece may be put between."""

    text: str
    places: list

    @classmethod
    def of_sentences(cls, rnd, size):
        parts, places, at = [], [], 0
        while at < size:
            places.append(at)
            parts.append(rnd.choice(SENTENCES))
            at += len(parts[-1])
        return cls("".join(parts), places)

    @classmethod
    def of_lines(cls, text):
        places = [0]
        for line in text.splitlines(keepends=True):
            places.append(places[-1] + len(line))
        return cls(text, places[:-1])

    def take(self, rnd, size):
        """About so much of it, of whole sentences or lines; "" for less than the first of them."""
        begin = rnd.randrange(len(self.places))
        end = bisect.bisect_right(self.places, self.places[begin] + size) - 1
        return self.text[self.places[begin] : self.places[end]]


class Text:
    """What is being written, and where its answers are."""

    def __init__(self):
        self.parts, self.size, self.answers = [], 0, []

    def add(self, part):
        self.parts.append(part)
        self.size += len(part)

    def ask(self, rnd, size, questions):
        """Asks in random order, until the text has this size or all are asked. :param questions: (question, answer)"""
        rnd.shuffle(questions)
        for question, answer in questions:
            if self.size >= size:
                break
            self.add(question)
            self.answers.append((self.size, self.size + len(answer)))
            self.add(answer)


def adjective_noun(rnd):
    return f"{rnd.choice(ADJECTIVES)}-{rnd.choice(NOUNS)}"


def characters(rnd, alphabet, count):
    return "".join(rnd.choices(alphabet, k=count))


def digits(rnd, count):
    return str(rnd.randrange(10 ** (count - 1), 10**count))


def value(rnd):
    kind = rnd.randrange(3)
    if kind == 0:
        return digits(rnd, 7)
    return adjective_noun(rnd) if kind == 1 else characters(rnd, "0123456789abcdef", 8)


def unused(used, draw):
    """A text that is not in `used`, which has it then. `draw` gets the number of the attempt."""
    for attempt in range(64):
        text = draw(attempt)
        if text not in used:
            used.add(text)
            return text
    raise ValueError("no unused text left")


def needle_keys(rnd, used, count):
    """Keys of needles; sometimes such that differ in a word or a digit."""
    keys = []
    if rnd.random() < 0.3:
        words = [rnd.sample(ADJECTIVES, 4), rnd.sample(NOUNS, 4)]
        tens, ones = rnd.sample("123456789", 3), rnd.sample(string.digits, 3)
        for _ in range(min(count, 24)):
            draw = lambda _: f"{rnd.choice(words[0])}-{rnd.choice(words[1])}-{rnd.choice(tens)}{rnd.choice(ones)}"
            keys.append(unused(used, draw))
        # None of these without its number, of which it would be the beginning.
        used.update(f"{a}-{n}" for a in words[0] for n in words[1])
    while len(keys) < count:
        letters = lambda attempt: adjective_noun(rnd) if attempt < 32 else characters(rnd, "abcdefghijklmnop", 12)
        base = unused(used, letters)
        keys.append(base if rnd.random() < 0.5 else f"{base}-{digits(rnd, 2)}")
    return keys


def filled(rnd, text, pieces, size, haystack):
    """The pieces in order, in filler, so that the text has about this size."""
    filler = max(0, size - text.size - sum(map(len, pieces)))
    for piece in pieces:
        text.add(haystack.take(rnd, rnd.uniform(0.0, 2.0) * filler / (len(pieces) + 1)))
        text.add(piece)
    text.add(haystack.take(rnd, max(0, size - text.size)))


def body(rnd, size):
    """Bytes of a text before its questions."""
    return int(size * rnd.uniform(0.3, 0.65 if size < 1024 else 0.85))


def needles(rnd, size, haystack, used):
    """niah, niah_long, multikey, multi, near and turns."""
    text, before = Text(), body(rnd, size)
    spacing = math.exp(rnd.uniform(math.log(20), math.log(max(40, min(1200, size // 10)))))
    count = max(1, int(before / (70 + spacing)))
    several = rnd.random() < 0.5
    pairs, values = [], {}
    for key in needle_keys(rnd, used, count):
        times = rnd.randint(2, 4) if several and rnd.random() < 0.35 else 1
        for _ in range(times):
            pairs.append((key, digits(rnd, 7) if several else value(rnd)))
    pairs = pairs[:count]
    rnd.shuffle(pairs)
    for key, said in pairs:
        values.setdefault(key, []).append(said)
    filled(rnd, text, [f"\nOne of the special magic values for {k} is: {v}.\n" for k, v in pairs], before, haystack)
    singles = [key for key, said in values.items() if len(said) == 1]
    long_form = rnd.random() < 0.3
    questions = []
    for key in singles:
        question = f"\nQ: What is the special magic value for {key}?\nA:"
        if long_form and rnd.random() < 0.5:
            question = (
                f"\nWhat is the special magic value for {key} mentioned in the text? "
                f"The special magic value for {key} is"
            )
        questions.append((question, f" {values[key][0]}\n"))
    questions = questions[: len(questions) // 2] if several else questions
    for key, said in values.items():
        if len(said) > 1:
            questions.append((f"\nQ: What are all the special magic values for {key}?\nA:", f" {', '.join(said)}\n"))
    for _ in range(len(singles) // 4 if several else 0):
        three = rnd.sample(singles, min(3, len(singles)))
        if len(three) == 3:
            question = f"\nQ: What are the special magic values for {three[0]}, {three[1]} and {three[2]}?\nA:"
            questions.append((question, f" {', '.join(values[key][0] for key in three)}\n"))
    text.ask(rnd, size, questions)
    return text


def pairs(rnd, size, _, used):
    """kv: in some texts the first questions come between the pairs."""
    text, before = Text(), body(rnd, size)
    keys, values = [], {}
    between = rnd.random() < 0.4
    near = characters(rnd, "0123456789abcdef", 6) if rnd.random() < 0.2 else ""

    def draw(attempt):
        if attempt < 32 and near:
            at = rnd.randrange(6)
            return (rnd.choice(keys) if keys else near)[:at] + rnd.choice("0123456789abcdef") + near[at + 1 :]
        if attempt >= 32 or rnd.random() < 0.5:
            return characters(rnd, "0123456789abcdef", 6)
        return adjective_noun(rnd)

    question = lambda key: (f"get {key} ->", f" {values[key]}\n")
    while text.size < before or not keys:
        key = unused(used, draw)
        keys.append(key)
        values[key] = value(rnd)
        text.add(f"set {key} = {values[key]}\n")
        if between and text.size > before / 4 and rnd.random() < 0.4:
            text.ask(rnd, size, [question(keys.pop(rnd.randrange(len(keys))))])
    text.ask(rnd, size, [question(key) for key in keys])
    return text


def track(rnd, size, haystack, used):
    text, before = Text(), body(rnd, size)
    count = 1 + int(rnd.random() ** 3 * before / 120)
    name = lambda: unused(used, lambda _: characters(rnd, string.ascii_uppercase, 4))
    chains, pieces = [], []
    for _ in range(count):
        first, second, number = name(), name(), digits(rnd, 5)
        chains.append((second, number))
        at = sorted(rnd.randint(0, len(pieces)) for _ in range(2))
        pieces.insert(at[0], f"\nVAR {first} = {number}\n")
        pieces.insert(at[1] + 1, f"\nVAR {second} = VAR {first}\n")
    filled(rnd, text, pieces, before, haystack)
    text.ask(rnd, size, [(f"\nVALUE OF VAR {second} IS", f" {number}\n") for second, number in chains])
    return text


def copy(rnd, size, haystack, _):
    text, before = Text(), int(size * rnd.uniform(0.4, 0.7))
    most = max(6, min(64, size // 60))
    passages = []
    for _ in range(1 + int(rnd.random() * before / 1000)):
        passages.append([adjective_noun(rnd) for _ in range(rnd.randint(6, most))])
    filled(rnd, text, ["\n" + " ".join(words) + "\n" for words in passages], before, haystack)
    cut = lambda words, cue: ("\nREPEAT:\n" + " ".join(words[:cue]), " " + " ".join(words[cue:]) + "\n")
    text.ask(rnd, size, [cut(words, rnd.randint(2, 4)) for words in passages])
    return text


def new_city(rnd, used):
    """Of no table before in the same text, if there is one left."""
    for _ in range(16):
        city = adjective_noun(rnd)
        if f"city={city}" not in used:
            break
    return city


def table(rnd, size, _, used):
    """table and count."""
    text, before = Text(), body(rnd, size)
    records, codes = [], {}
    often = [new_city(rnd, used) for _ in range(max(1, int(before / 50 / rnd.uniform(2, 8))))]
    while text.size < before or not records:
        city = rnd.choice(often) if rnd.random() < 0.6 else new_city(rnd, used)
        code = characters(rnd, string.digits, 5)
        owner = unused(used, lambda _: characters(rnd, string.ascii_lowercase, 5))
        head = f"row {len(records) + 1:04}: city={city} code={code}"
        records.append((owner, head))
        codes.setdefault(city, []).append(code)
        text.add(f"{head} owner={owner}\n")
    used.update(f"city={city}" for city in codes)
    questions = [(f"find owner={owner} ->", f" {head}\n") for owner, head in records if rnd.random() < 0.6]
    for city, found in codes.items():
        if len(found) <= 5 and rnd.random() < (0.9 if len(found) > 1 else 0.2):
            questions.append((f"all city={city} ->", f" {', '.join(found)}\n"))
        if len(found) <= 9 and rnd.random() < (0.5 if len(found) > 1 else 0.15):
            questions.append((f"count city={city} ->", f" {len(found)}\n"))
    text.ask(rnd, size, questions)
    return text


def reading(rnd, size, haystack, _):
    text = Text()
    while text.size < size:
        text.add(haystack.take(rnd, size + 4096))
    return text


KINDS = {"needles": needles, "kv": pairs, "table": table, "copy": copy, "track": track, "reading": reading}
SHARES = {"needles": 0.32, "kv": 0.26, "table": 0.2, "copy": 0.1, "track": 0.08, "reading": 0.04}


class TextMaker:
    """Makes texts of a size; the same ones for the same seed."""

    def __init__(self, source="", kinds=tuple(SHARES)):
        """:param source: text for haystacks beside the five sentences, "" for none"""
        rnd = random.Random(0)
        self.sentences = Haystack.of_sentences(rnd, 1 << 20)
        self.lines = Haystack.of_lines(source) if source else self.sentences
        self.shares = {kind: SHARES[kind] for kind in kinds}

    def write(self, seed, size, kind=None):
        """:return: (bytes of this size, weights of their losses in tenths, [begin, end) of the whole answers in it)"""
        rnd = random.Random(seed)
        parts, weights, answers, used = [], bytearray(), [], set()
        while len(weights) < size:
            drawn = kind or rnd.choices(list(self.shares), weights=list(self.shares.values()))[0]
            left, at = max(size - len(weights), LEAST_TEXT), len(weights)
            haystack = self.lines if rnd.random() < 0.3 or drawn == "reading" else self.sentences
            text = KINDS[drawn](rnd, left, haystack, used)
            parts += text.parts
            weights += bytes([READING if drawn == "reading" else ELSE]) * text.size
            for begin, end in text.answers:
                weights[at + begin : at + end] = bytes([ANSWER]) * (end - begin)
                if at + end <= size:
                    answers.append((at + begin, at + end))
        return "".join(parts).encode("latin-1")[:size], bytes(weights[:size]), answers

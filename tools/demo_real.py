"""Lets a real model answer questions about a long text whose keys and values lie in host memory.

usage: demo_real.py MODEL [--tokens N]

MODEL is SmolLM2-135M-Instruct, as tools/models.sh makes it. The texts are Python's own documentation and library, in
each of which one line is hidden. Every prompt is read once; the question behind it is read, and answered, under each of
several policies: `sluice` attends few tokens, `full` all of them (dense attention), `streaming` the newest ones. Exit
codes: 0 if `sluice` is right wherever `full` is, 1 if not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import transformers
from sluice.evaluation.answers import Answer, Rules, answer
from sluice.evaluation.decoding import Setup, under
from sluice.evaluation.inputs import Task, Tokenizer
from sluice.evaluation.making import Maker, Texts, constant, niah
from sluice.evaluation.sources import CODE, PROSE, text_of

POLICIES = ("sluice", "full", "streaming")
QUESTION_TOKENS = 24  #: the last of a prompt, which choose as decoded tokens do
TEXT = 200_000  #: characters of a text from which a part is taken
ROW = "  {:<10} {:<10} {:>6} {:>16} {:>11} {:>10} {:>11} {:>10}"
LEGEND = """
Tokens and bytes are shares of what dense attention reads. near: in device memory, also of the 4-bit copies of keys by
which `sluice` chooses; far: in host memory, by the CPU; link: in host memory, by the device. Without a GPU all are
memory of this machine."""


def prompts(vocabulary: Tokenizer, tokens: int) -> list[Task]:
    texts = Texts(text_of(PROSE)[:TEXT], text_of(CODE)[:TEXT])
    prose, code, words = vocabulary.encode(texts.prose), vocabulary.encode(texts.code), texts.words()
    made = []
    for line, (name, make) in enumerate({"documentation": niah, "library": constant}.items(), 1):
        prompt, wanted = make(Maker(vocabulary, prose, code, words, tokens, f"demo {name}"))
        made.append(Task(line, name, tokens, vocabulary.encode(prompt), wanted))
    return made


def row(policy: str, given: Answer, said: str) -> str:
    reading = given.reading
    tokens = "all" if reading.whole else f"{reading.attended:.1%}"
    near = reading.near + reading.choice
    return ROW.format(policy, said, "right" if given.right else "wrong", tokens, f"{near:.1%}", f"{reading.far:.1%}",
                      f"{reading.link:.1%}", f"{reading.bytes:.1%}")


def ask(setup: Setup, vocabulary: Tokenizer, task: Task) -> bool:
    """Whether `sluice` is right wherever `full` is."""
    rules = Rules(QUESTION_TOKENS, None, False, lambda: vocabulary)
    end = len(task.prompt) - QUESTION_TOKENS
    question = vocabulary.decode(task.prompt[end:]).strip().splitlines()[-1]
    print(f"\n{len(task.prompt)} tokens of Python's {task.name} hide one line. \"... {question}\" It is "
          f"{task.answer.strip()}.\n")
    print(ROW.format("policy", "answer", "", "tokens attended", "near bytes", "far bytes", "link bytes", "all bytes"))
    right = {}
    with under(setup, POLICIES, QUESTION_TOKENS) as subject, subject.prefix(task.prompt[:end]) as prefix:
        for policy in POLICIES:
            with prefix.under(policy) as session:
                given = answer(session, task.prompt[end:], task, rules)
            right[policy] = given.right
            words = vocabulary.decode(given.output).split() or ["-"]
            print(row(policy, given, words[0][: len(task.answer.strip())]), flush=True)
    return right["sluice"] or not right["full"]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096, help="of each prompt, 1,024 to 8,000 (4,096)")
    options = parser.parse_args(arguments)
    if not 1024 <= options.tokens <= 8000:
        parser.error(f"--tokens is {options.tokens}; give 1,024 to 8,000, as many as the model takes with an answer")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    vocabulary = Tokenizer(options.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype="float32").eval()
    setup = Setup(model, 2048, 1 << 30, {"near_bytes": 0, "answer_timeout_ms": 60_000})
    kept = [ask(setup, vocabulary, task) for task in prompts(vocabulary, options.tokens)]
    print(LEGEND)
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

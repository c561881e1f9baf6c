"""The command eval of python -m sluice."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sluice.errors import InvalidArgument, Unsupported
from sluice.evaluation.failures import Failures
from sluice.evaluation.inputs import BYTES, Bytes, Task, Tokenizer, Vocabulary, Window, read_tasks, read_windows
from sluice.evaluation.policies import split_policies, with_floor
from sluice.evaluation.sources import CODE, PROSE, text_of
from sluice.options import DENSE_AUTO
from sluice.serving.arguments import (add_model, check_adapter, check_folder, check_options, device_of, number,
                                      options_of)
from sluice.serving.ranks import Launch

if TYPE_CHECKING:
    from sluice.evaluation.answers import Rules
    from sluice.evaluation.decoding import Setup


def add_command(commands: Any) -> None:
    """Adds the command to a parser's."""
    command = commands.add_parser("eval", help="policies against a model's own attention, on texts and tasks",
                                  description="Holds policies against the attention and the cache that a model has in "
                                  "transformers: on a text, on tasks, or on both.")
    add_model(command, "5%% of --host-bytes, less where little is free")
    add = command.add_argument
    add("--policies", default="full;sluice", help="comma list; a comma followed by key=value goes on with the policy "
        "before it, ; always ends it; full is there always, as the floor (%(default)s)")
    add("--dense-tokens", type=number(int, 0, DENSE_AUTO), default=0, metavar="N", help="sequences of up to N tokens "
        "attend everything, whatever the policy says (%(default)s)")
    add("--tokenizer", help='another folder\'s, or "bytes": every byte of a text is a token (the model\'s)')
    add("--text", metavar="FILE", help="perplexity, and how far policies move the next token's distribution; prose, "
        "code: the reference of Python's language, and modules of its library")
    add("--tokens", type=number(int, 2), default=4096, help="of a window of the text (%(default)s)")
    add("--windows", type=number(int, 1), default=8, help="that do not overlap (%(default)s)")
    add("--score", type=number(int, 1), default=64, help="last tokens of a window that are scored: each is foretold by "
        "a token that chooses as if decoded, as the policy says (%(default)s)")
    add("--tasks", metavar="FILE", help='a JSON object on each line, {"task": name, "length": tokens, "prompt": ..., '
        '"answer": ...}; prompt and answer are texts or lists of token ids')
    add("--chat", action="store_true", help="prompts of tasks are what a user says in the model's chat template")
    add("--decode-prompt", type=number(int, 1), default=24, help="last tokens of a task's prompt that are read under "
        "the policy (%(default)s)")
    add("--max-tokens", type=number(int, 1), help="of an answer (what the right one takes; 8 more if it is text)")
    add("--match", choices=("begins", "contains"), default="begins", help="an answer is right if it begins with the "
        "task's, or contains it (%(default)s)")
    add("--make-tasks", metavar="FILE", help="write tasks of retrieval and tracing for --tasks, whose prompts are "
        "parts of --text (prose) and --code, and no more")
    add("--token-ids", action="store_true", help="tasks that are made are token ids, as the command sluice reads them "
        "for models whose tokens are no bytes")
    add("--code", metavar="FILE", default=CODE, help="of --make-tasks (%(default)s)")
    add("--lengths", type=lengths, default=[4096], help="of prompts that are made, in tokens, a comma list (4096)")
    add("--count", type=number(int, 1), default=16, help="of each of six tasks and each length (%(default)s)")
    add("--seed", type=number(int, 0, 2**63 - 1), default=0, help="of the windows' places, of the bootstrap, and of "
        "tasks that are made (%(default)s)")
    add("--json", metavar="FILE", help="also all that was found, token by token and answer by answer; -: on standard "
        "output, instead of the tables")
    command.set_defaults(call=evaluate)


def lengths(text: str) -> list[int]:
    return [number(int, 256)(part) for part in text.split(",")]


def make_tasks(arguments: argparse.Namespace) -> int:
    from sluice.evaluation import report
    from sluice.evaluation.making import Texts, as_ids, made_tasks

    if arguments.token_ids and arguments.chat:
        raise InvalidArgument("--token-ids with --chat: answers of token ids are judged token by token, and one in a "
                              "chat may begin in several ways; leave out --token-ids, and give --chat with --tasks")
    check_folder(arguments.model)
    with report.target(arguments.make_tasks, "--make-tasks") as target:
        texts = Texts(text_of(arguments.text or PROSE), text_of(arguments.code))
        vocabulary = _vocabulary(arguments, _config(arguments) if arguments.token_ids else None)
        made = made_tasks(vocabulary, texts, arguments.lengths, arguments.count, arguments.seed)
        if arguments.token_ids:
            made = (as_ids(line, vocabulary) for line in made)
        lines = [json.dumps(line) + "\n" for line in made]
        written = target.write_text("".join(lines))
        if written and arguments.make_tasks != "-":
            print(f"{len(lines)} tasks in {arguments.make_tasks}")
        return int(not written)


def evaluate(arguments: argparse.Namespace) -> int:
    if arguments.make_tasks:
        return make_tasks(arguments)
    if arguments.token_ids:
        raise InvalidArgument("--token-ids says how tasks are written; give --make-tasks FILE, too")
    if not (arguments.text or arguments.tasks):
        raise InvalidArgument("there is nothing to evaluate on; give --text FILE, --tasks FILE or both; "
                              "--make-tasks FILE makes tasks")
    if Launch.of_environment().ranks > 1:
        raise Unsupported("eval runs in one process; start it without torchrun")
    policies = with_floor(split_policies(arguments.policies))
    options = {"dense_tokens": arguments.dense_tokens, **options_of(arguments)}
    for policy in policies:
        check_options(options, policy)
    check_folder(arguments.model)
    check_adapter(arguments.adapter)

    from sluice.evaluation import report

    with report.target(arguments.json) as target:
        results = run(arguments, policies, options)
        written = target.write(results)
        if written and arguments.json != "-":
            print("\n".join(tables(results)), end="")
    return int(not written or any(results.get(part, {}).get("failed") for part in ("text", "tasks")))


def tables(results: dict[str, Any]) -> list[str]:
    from sluice.evaluation.report import task_table, text_table

    made = [text_table(results["text"]["results"])] if "text" in results else []
    return made + ([task_table(results["tasks"]["results"])] if "tasks" in results else [])


def run(arguments: argparse.Namespace, policies: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """All that was asked for, as --json has it. What can be refused is before anything runs."""
    from sluice._transformers_support import longest
    from sluice.evaluation.answers import Rules
    from sluice.evaluation.decoding import ROWS, check, groups
    from sluice.evaluation.report import Progress
    from sluice.serving.load import end_ids

    config = _config(arguments)
    vocabulary = functools.cache(lambda: _vocabulary(arguments, config))
    windows = read_windows(arguments.text, vocabulary(), arguments.tokens, arguments.windows,
                           arguments.seed) if arguments.text else []
    tasks = read_tasks(arguments.tasks, vocabulary, arguments.chat) if arguments.tasks else []
    rules = Rules(arguments.decode_prompt, arguments.max_tokens, arguments.match == "contains", vocabulary)
    most = _check_sizes(arguments, windows, tasks, rules, longest(config), config.vocab_size)
    setup = _load(arguments, config, options)
    rows = max(arguments.score if windows else 1, ROWS if tasks else 1)
    together = groups(setup, policies, rows)
    for group in together:
        check(setup, group, most, rows)
    rules = dataclasses.replace(rules, ends=end_ids(setup.model, vocabulary().tokenizer if arguments.chat else None))
    progress = Progress((len(windows) + len(tasks)) * (1 + len(policies)))
    try:
        return {"command": "eval", "config": _config_of(arguments, setup, policies), "versions": _versions(),
                **_text(arguments, setup, windows, together, progress),
                **_tasks(setup, tasks, rules, together, progress)}
    finally:
        progress.clear()


def _load(arguments: argparse.Namespace, config: Any, options: dict[str, Any]) -> Setup:
    from sluice.evaluation.decoding import Setup, own_attention
    from sluice.serving.load import load_model

    model = load_model(arguments.model, arguments.dtype, arguments.trust_remote_code, arguments.adapter,
                       **own_attention(config))
    model = model.to(device_of(arguments)).eval()
    if arguments.near_bytes is not None:
        options = {**options, "near_bytes": arguments.near_bytes}
    return Setup(model, arguments.prefill_rows, arguments.host_bytes, options)


def _config(arguments: argparse.Namespace) -> Any:
    from sluice.serving.load import load_config

    return load_config(arguments.model, arguments.trust_remote_code).get_text_config(decoder=True)


def _vocabulary(arguments: argparse.Namespace, config: Any) -> Vocabulary:
    if arguments.tokenizer == BYTES:
        return Bytes(getattr(config, "bos_token_id", None))
    return Tokenizer(arguments.tokenizer or arguments.model, arguments.trust_remote_code)


def _check_sizes(arguments: argparse.Namespace, windows: Sequence[Window], tasks: Sequence[Task], rules: Rules,
                 context: int, vocabulary_size: int) -> int:
    """Tokens of the longest sequence.
    @throws InvalidArgument of windows and tasks that the model has no room for, or whose tokens are none of its"""
    most = 0
    if windows:
        if arguments.score >= arguments.tokens:
            raise InvalidArgument(f"--score is {arguments.score} and --tokens {arguments.tokens}; windows must have a "
                                  "token more than are scored")
        most = arguments.tokens - 1  # The last one is foretold, and not read.
    sequences = [(f"--tokens is {arguments.tokens}: a window", most, window.ids) for window in windows]
    for task in tasks:
        tokens = len(task.prompt) + rules.limit(task) - 1
        sequences.append((f"{arguments.tasks}, line {task.line}: prompt and answer", tokens, task.prompt))
    for what, tokens, ids in sequences:
        if tokens > context:
            raise InvalidArgument(f"{what} takes {tokens} tokens of context, and the model has {context}; shorten it")
        if max(ids) >= vocabulary_size:
            raise InvalidArgument(f"{what} has token {max(ids)}, and those of the model are below {vocabulary_size}; "
                                  "are they of another tokenizer?")
    return max(tokens for _, tokens, _ in sequences)


def _text(arguments: argparse.Namespace, setup: Setup, windows: Sequence[Window], groups: Sequence[Sequence[str]],
          progress: Any) -> dict[str, Any]:
    from sluice.evaluation.texts import score_windows, summaries

    if not windows:
        return {}
    failures = Failures(progress.clear)
    scores = score_windows(setup, windows, arguments.score, groups, progress.told, failures)
    return {"text": {"results": summaries(scores, arguments.seed), "failed": failures.reasons}}


def _tasks(setup: Setup, tasks: Sequence[Task], rules: Rules, groups: Sequence[Sequence[str]],
           progress: Any) -> dict[str, Any]:
    from sluice.evaluation.answers import answer_tasks, items, summaries

    if not tasks:
        return {}
    failures = Failures(progress.clear)
    answers = answer_tasks(setup, tasks, rules, groups, progress.told, failures)
    return {"tasks": {"results": summaries(tasks, answers), "items": items(tasks, answers, rules),
                      "failed": failures.reasons}}


def _config_of(arguments: argparse.Namespace, setup: Setup, policies: Sequence[str]) -> dict[str, Any]:
    """All arguments, and what came of those that were left out."""
    said = {name: value for name, value in vars(arguments).items() if name not in ("call", "command", "json")}
    return {**said, "policies": policies, "option": dict(arguments.option), "device": str(setup.model.device),
            "dtype": str(setup.model.dtype).removeprefix("torch."), "dense": setup.model.config._attn_implementation}


def _versions() -> dict[str, str]:
    import torch
    import transformers

    from sluice._library import library

    return {"sluice": library().version, "python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__}

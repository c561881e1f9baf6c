"""Greedy answers to tasks, under a policy and under the model's own attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.evaluation.decoding import Prefix, Session, Setup, chooses_on_cpu, dense, under
from sluice.evaluation.failures import Failures
from sluice.evaluation.inputs import Task, Vocabulary
from sluice.evaluation.intervals import mcnemar, wilson
from sluice.evaluation.reading import Reading, mean, told

ALL = "all"  # The name of all tasks of a length.
_SPARE = 8  # Tokens more than a text's, which a model may cut in another way.


@dataclass(frozen=True)
class Rules:
    """How answers are made and judged."""

    decode_prompt: int  #: last tokens of a prompt, the question, that are read under the policy
    max_tokens: int | None  #: of an answer; None: what the right one takes
    contains: bool  #: the right answer may come anywhere; else the answer begins with it
    vocabulary: Callable[[], Vocabulary]  #: loads it, where an answer is text
    ends: frozenset[int] = frozenset()  #: tokens with which the model ends an answer

    def limit(self, task: Task) -> int:
        """Tokens of an answer, at most."""
        if self.max_tokens is not None:
            return self.max_tokens
        if isinstance(task.answer, list):
            return len(task.answer)
        return len(self.vocabulary().encode(task.answer)) + _SPARE

    def right(self, task: Task, output: Sequence[int]) -> bool:
        """Of a text without the blanks around it."""
        if isinstance(task.answer, str):
            said, wanted = self.vocabulary().decode(output).strip(), task.answer.strip()
            return wanted in said if self.contains else said.startswith(wanted)
        size = len(task.answer)
        places = range(len(output) - size + 1) if self.contains else (0,)
        return any(list(output[place : place + size]) == task.answer for place in places)


@dataclass(frozen=True)
class Answer:
    """To one task under one attention."""

    output: list[int]
    right: bool
    reading: Reading | None  #: over the question and the answer; None: not known


def answer(session: Session, question: Sequence[int], task: Task, rules: Rules) -> Answer:
    """Greedy, token by token."""
    output = _decode(session, list(question), [], task, rules)
    return Answer(output, rules.right(task, output), session.reading)


def answer_beside(prefix: Prefix, policy: str, question: Sequence[int], task: Task, rules: Rules,
                  of_dense: Sequence[int]) -> Answer:
    """The same as `answer`, by fewer forwards: dense attention's answer is read at once, and what the policy says to
    each of its tokens shows how far it gives the same one. Only what it says from there on is decoded."""
    limit = rules.limit(task)
    foretold = [*question, *of_dense[: limit - 1]]
    with prefix.under(policy) as session:
        said = session.read(foretold)[len(question) - 1 :].argmax(1).tolist()
        reading = session.reading
    place = next((index for index, token in enumerate(said) if list(of_dense[index : index + 1]) != [token]), limit)
    if place == limit or len(of_dense) == place and said[place] in rules.ends:
        return Answer(list(of_dense), rules.right(task, of_dense), reading)
    output = list(of_dense[:place])
    if said[place] not in rules.ends:
        output.append(said[place])
        if len(output) < limit:
            with prefix.under(policy) as session:
                output = _decode(session, [*question, *output], output, task, rules)
    return Answer(output, rules.right(task, output), reading)


def _decode(session: Session, ids: list[int], output: list[int], task: Task, rules: Rules) -> list[int]:
    """The answer that begins with `output`, whose tokens are the last of `ids`."""
    while True:
        token = int(session.read(ids)[-1].argmax())
        if token in rules.ends:
            return output
        output, ids = [*output, token], [token]
        if len(output) == rules.limit(task):
            return output


def answer_tasks(setup: Setup, tasks: Sequence[Task], rules: Rules, groups: Sequence[Sequence[str]],
                 said: Callable[[str], None], failures: Failures) -> dict[str, list[Answer]]:
    """All tasks under dense attention, by the name "dense", and under every policy that does not fail. Policies of a
    group have an engine in common. Calls `said` after each."""
    def parts(task: Task) -> tuple[list[int], list[int]]:
        before = max(len(task.prompt) - rules.decode_prompt, 0)
        return task.prompt[:before], task.prompt[before:]

    answers: dict[str, list[Answer]] = {name: [] for name in ("dense", *(name for group in groups for name in group))}
    with dense(setup) as subject:
        for task in tasks:
            prompt, question = parts(task)
            with subject.prefix(prompt) as prefix, prefix.under("dense") as session:
                answers["dense"].append(answer(session, question, task, rules))
            said("dense")
    for group in groups:
        with failures.of_all(group), under(setup, group) as subject:
            for task, of_dense in zip(tasks, answers["dense"]):
                prompt, question = parts(task)
                left = [policy for policy in group if policy not in failures.reasons]
                if not left:
                    break
                with subject.prefix(prompt) as prefix:
                    for policy in left:
                        with failures.of(policy):
                            answers[policy].append(_answer(prefix, policy, question, task, rules, of_dense.output))
                            said(policy)
    return {name: given for name, given in answers.items() if name not in failures.reasons}


def _answer(prefix: Prefix, policy: str, question: Sequence[int], task: Task, rules: Rules,
            of_dense: Sequence[int]) -> Answer:
    if not chooses_on_cpu(policy):
        return answer_beside(prefix, policy, question, task, rules, of_dense)
    with prefix.under(policy) as session:  # Token by token it is decoded anyway.
        return answer(session, question, task, rules)


def summaries(tasks: Sequence[Task], answers: dict[str, list[Answer]]) -> list[dict[str, Any]]:
    """By task and length, in the order of the file, every attention's share of right answers, and over all tasks of a
    length."""
    cells: dict[tuple[str, int], list[int]] = {}
    for index, task in enumerate(tasks):
        cells.setdefault((task.name, task.length), []).append(index)
    for length in dict.fromkeys(task.length for task in tasks):
        of_length = [index for index, task in enumerate(tasks) if task.length == length]
        if len({tasks[index].name for index in of_length}) > 1:
            cells[ALL, length] = of_length
    return [_summary(name, length, policy, [given[index] for index in chosen],
                     [answers["dense"][index] for index in chosen])
            for (name, length), chosen in cells.items() for policy, given in answers.items()]


def _summary(name: str, length: int, policy: str, given: Sequence[Answer],
             of_dense: Sequence[Answer]) -> dict[str, Any]:
    pairs = [(theirs.right, ours.right) for theirs, ours in zip(of_dense, given)]
    right, lost, won = sum(ours for _, ours in pairs), pairs.count((True, False)), pairs.count((False, True))
    return {
        "task": name,
        "length": length,
        "policy": policy,
        "prompts": len(given),
        "right": right,
        "accuracy": right / len(given),
        "accuracy_95": wilson(right, len(given)),
        "only_dense": lost,
        "only_policy": won,
        "p_value": mcnemar(lost, won),
        "same_answer": sum(ours.output == theirs.output for ours, theirs in zip(given, of_dense)) / len(given),
        **told(mean([each.reading for each in given])),
    }


def items(tasks: Sequence[Task], answers: dict[str, list[Answer]], rules: Rules) -> list[dict[str, Any]]:
    """Every task and what came of it."""
    def output(task: Task, given: Answer, of_dense: Answer) -> dict[str, Any]:
        text = {"text": rules.vocabulary().decode(given.output)} if isinstance(task.answer, str) else {}
        return {"ids": given.output, **text, "right": given.right, **told(given.reading),
                "first_other": first_other(given.output, of_dense.output)}

    return [{"line": task.line, "task": task.name, "length": task.length, "prompt_tokens": len(task.prompt),
             "answer": task.answer,
             "outputs": {policy: output(task, given[index], answers["dense"][index])
                         for policy, given in answers.items()}} for index, task in enumerate(tasks)]


def first_other(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two answers part; None: they do not."""
    if list(one) == list(other):
        return None
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))

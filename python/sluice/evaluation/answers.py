"""Greedy answers to tasks, under a policy and under the model's own attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from sluice.evaluation.decoding import Setup, Subject, dense, under
from sluice.evaluation.failures import Failures
from sluice.evaluation.inputs import Task, Vocabulary
from sluice.evaluation.intervals import mcnemar, wilson

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
    attended: float | None  #: share of the tokens, as Session has it


def answer(subject: Subject, task: Task, rules: Rules) -> Answer:
    before = max(len(task.prompt) - rules.decode_prompt, 0)
    with subject.session(task.prompt[:before]) as session:
        logits = torch.empty(0)
        for token in task.prompt[before:]:
            logits = session.decode(token)
        output: list[int] = []
        while True:
            token = int(logits.argmax())
            if token in rules.ends:
                break
            output.append(token)
            if len(output) == rules.limit(task):
                break
            logits = session.decode(token)
        return Answer(output, rules.right(task, output), session.share)


def answer_tasks(setup: Setup, tasks: Sequence[Task], rules: Rules, policies: Sequence[str],
                 told: Callable[[str], None], failures: Failures) -> dict[str, list[Answer]]:
    """All tasks under dense attention, by the name "dense", and under every policy that does not fail. Calls `told`
    after each."""
    def answers_of(name: str, attention: AbstractContextManager[Subject]) -> list[Answer]:
        given: list[Answer] = []
        with attention as subject:
            for task in tasks:
                given.append(answer(subject, task, rules))
                told(name)
        return given

    answers = {"dense": answers_of("dense", dense(setup))}
    for policy in policies:
        with failures.of(policy):
            answers[policy] = answers_of(policy, under(setup, policy))
    return answers


def summaries(tasks: Sequence[Task], answers: dict[str, list[Answer]]) -> list[dict[str, Any]]:
    """By task and length, in the order of the file, every attention's share of right answers."""
    cells: dict[tuple[str, int], list[int]] = {}
    for index, task in enumerate(tasks):
        cells.setdefault((task.name, task.length), []).append(index)
    return [_summary(name, length, policy, [given[index] for index in chosen],
                     [answers["dense"][index] for index in chosen])
            for (name, length), chosen in cells.items() for policy, given in answers.items()]


def _summary(name: str, length: int, policy: str, given: Sequence[Answer],
             of_dense: Sequence[Answer]) -> dict[str, Any]:
    pairs = [(theirs.right, ours.right) for theirs, ours in zip(of_dense, given)]
    right, lost, won = sum(ours for _, ours in pairs), pairs.count((True, False)), pairs.count((False, True))
    shares = [each.attended for each in given if each.attended is not None]
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
        "attended": sum(shares) / len(shares) if shares else None,
    }


def items(tasks: Sequence[Task], answers: dict[str, list[Answer]], rules: Rules) -> list[dict[str, Any]]:
    """Every task and what came of it."""
    def told(task: Task, given: Answer, of_dense: Answer) -> dict[str, Any]:
        text = {"text": rules.vocabulary().decode(given.output)} if isinstance(task.answer, str) else {}
        return {"ids": given.output, **text, "right": given.right, "attended": given.attended,
                "first_other": first_other(given.output, of_dense.output)}

    return [{"line": task.line, "task": task.name, "length": task.length, "prompt_tokens": len(task.prompt),
             "answer": task.answer,
             "outputs": {policy: told(task, given[index], answers["dense"][index])
                         for policy, given in answers.items()}} for index, task in enumerate(tasks)]


def first_other(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two answers part; None: they do not."""
    if list(one) == list(other):
        return None
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))

"""Forwards that torch compiles give the tokens of any other forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import sluice
import sluice.serving.attention
import torch
import transformers
from sluice.serving.loop import Loop
from sluice.serving.model import PackedModel
from small import KV, bare_model, expected, greedy, prompt_ids, run, tokenizer
from test_windows import gemma2, gpt_oss

MODELS = {"llama": lambda: bare_model("llama"), "sinks": gpt_oss, "softcap": gemma2}


@pytest.fixture
def serve() -> Iterator[Callable[..., Loop]]:
    made: list[PackedModel] = []

    def loop(model: transformers.PreTrainedModel, **options: object) -> Loop:
        made.append(PackedModel(copy.deepcopy(model), "full", 8 << 20, context=256, sequences=4, prefill_rows=64,
                                threads=1, pin_threads=False, answer_timeout_ms=30_000,
                                **{**KV, "compile": True, **options}))
        return Loop(made[-1], tokenizer())

    yield loop
    for each in made:
        each.close()


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_tokens_are_the_same(serve: Callable[..., Loop], make: Callable[[], transformers.PreTrainedModel],
                             monkeypatch: pytest.MonkeyPatch) -> None:
    model, ran = make(), []
    # What torch compiles attends by an operation of its own: that it runs shows that it was compiled.
    attend = sluice.serving.attention._attend
    monkeypatch.setattr(sluice.serving.attention, "_attend", lambda *call: ran.append("plain") or attend(*call))
    loop = serve(model)
    assert (loop._model.compile_failed, loop._model.graphs_failed) == (None, None)
    assert loop._model.graph_captures == 3
    wants = {length: expected(model, prompt_ids(length, length), 12) for length in (1, 17, 65)}
    told = run(loop, [greedy(each, prompt_ids(each, each)) for each in wants])
    assert {each: told.tokens(each) for each in wants} == wants
    status = loop.status()
    assert 0 < status.graph_replays < status.forwards and status.failed_forwards == 0
    layers = model.config.num_hidden_layers
    assert len(ran) == layers * (1 + status.forwards - status.graph_replays)  # And the token that is tried out.


def test_without_a_compiler(serve: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> object:
        def call(**_: object) -> object:
            raise RuntimeError("no compiler\nwas found")
        return call

    monkeypatch.setattr(torch, "compile", broken)
    loop = serve(bare_model("llama"))
    assert loop._model.compile_failed == "RuntimeError: no compiler was found"
    assert loop._model.graphs_failed is None and loop.status().graph_captures == 3
    assert run(loop, [greedy(1, prompt_ids(20))]).tokens(1) == expected(bare_model("llama"), prompt_ids(20), 12)


def test_what_is_compiled_has_a_fixed_size() -> None:
    with pytest.raises(sluice.InvalidArgument, match="compile: .* graphs is off"):
        PackedModel(copy.deepcopy(bare_model("llama")), compile=True, graphs="off")

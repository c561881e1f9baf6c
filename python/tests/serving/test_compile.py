"""Forwards that torch compiles, all of them before any request, give the tokens of any other forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import sluice
import torch
import transformers
from sluice.serving.loop import Loop
from sluice.serving.model import PackedModel
from small import DEVICE, KV, bare_model, expected, greedy, prompt_ids, run, tokenizer
from test_windows import gemma2, gpt_oss, model_of
from torch._dynamo.utils import counters

# Of two layers, of which each is another one for the compiler: it takes seconds for a layer.
MODELS = {"llama": lambda: model_of("Llama", num_hidden_layers=2), "softcap": lambda: gemma2(2)}
if DEVICE == "cpu":
    MODELS["sinks"] = lambda: gpt_oss(2)


@pytest.fixture
def serve() -> Iterator[Callable[..., Loop]]:
    torch._dynamo.reset()  # It compiles a function of transformers only so often, for all models of a process.
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
    model = make()
    loop = serve(model)
    assert (loop._model.compile_failed, loop._model.graphs_failed) == (None, None)
    assert loop._model.graph_captures == 3
    rows: list[tuple[int, bool]] = []
    plainly, compiled = loop._model._run_plainly, counters["stats"]["unique_graphs"]

    def watched(bucket: sluice.Bucket, ids: list[int], *rest: object) -> torch.Tensor:
        logits = plainly(bucket, ids, *rest)
        rows.append((len(ids), loop._model._ran_compiled))
        return logits

    monkeypatch.setattr(loop._model, "_run_plainly", watched)
    wants = {length: expected(model, prompt_ids(length, length), 12) for length in (1, 17, 65)}
    told = run(loop, [greedy(each, prompt_ids(each, each)) for each in wants])
    told.events.update(run(loop, [greedy(100, prompt_ids(1, 1))]).events)  # A forward of one row.
    assert {each: told.tokens(each) for each in wants} == wants and told.tokens(100) == wants[1]
    assert max(rows)[0] > 17 and min(rows) == (1, False) and all(ran == (count > 1) for count, ran in rows)
    assert counters["stats"]["unique_graphs"] == compiled
    status = loop.status()
    assert status.graph_replays == status.forwards - len(rows) > 0 and status.failed_forwards == 0


@pytest.mark.parametrize("at_once", [True, False])
def test_without_a_compiler(serve: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    def call(**_: object) -> object:
        raise RuntimeError("no compiler\nwas found")

    def broken(*_: object, **__: object) -> object:
        return call() if at_once else call

    monkeypatch.setattr(torch, "compile", broken)
    loop = serve(bare_model("llama"))
    assert loop._model.compile_failed == "RuntimeError: no compiler was found"
    assert loop._model.graphs_failed is None and loop.status().graph_captures == 3
    assert run(loop, [greedy(1, prompt_ids(20))]).tokens(1) == expected(bare_model("llama"), prompt_ids(20), 12)


def test_a_model_that_torch_does_not_compile(serve: Callable[..., Loop]) -> None:
    with torch._dynamo.config.patch(disable=True):
        loop = serve(bare_model("llama"))
    assert loop._model.compile_failed.startswith("Unsupported: torch runs this model as it is")
    assert loop._model.graphs_failed is None and loop.status().graph_captures == 3
    assert run(loop, [greedy(1, prompt_ids(20))]).tokens(1) == expected(bare_model("llama"), prompt_ids(20), 12)


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU")
def test_experts_that_wait_for_the_gpu(serve: Callable[..., Loop]) -> None:
    """As those of gpt-oss do in f32: it is said so, and answers are the same."""
    loop = serve(gpt_oss())
    assert "synchroniz" in loop._model.compile_failed and "synchroniz" in loop._model.graphs_failed
    told = run(loop, [greedy(1, prompt_ids(65))])
    assert told.tokens(1) == expected(gpt_oss(), prompt_ids(65), 12) and loop.status().graph_replays == 0


def test_what_is_compiled_has_a_fixed_size() -> None:
    with pytest.raises(sluice.InvalidArgument, match="compile: .* graphs is off"):
        PackedModel(copy.deepcopy(bare_model("llama")), compile=True, graphs="off")

"""Forwards of decoded tokens at fixed sizes, and replayed from CUDA graphs, give the tokens of any other forward."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import sluice
import torch
from sluice.serving import model as serving_model
from sluice.serving.graphs import PaddedForwards, Padding, Staging, Uncaptured, padded_tokens
from sluice.serving.loop import Loop
from sluice.serving.model import PackedModel
from small import ATOL, DEVICE, KV, Breaks, bare_model, expected, greedy, prompt_ids, run, tokenizer

REQUESTS = [greedy(length, prompt_ids(length, length), 8 + length % 7) for length in (1, 16, 17, 40, 65)]
POLICIES = ("full", "exact | int4 | top_k=16 | near=0,sinks=4,recent=16",
            "exact | top_k=16 | near=0,sinks=4,recent=16",
            "exact | int3 | sample=8 | near=0,sinks=4,recent=16",
           # These learn from what was decoded; the latter leaves out most of so few tokens.
           "lfps", "history | top_k=16 | near=0,sinks=4,recent=16 | bypass=0.85")
ON_CUDA = pytest.mark.skipif(DEVICE == "cpu", reason="there are CUDA graphs on a GPU alone")


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_the_same(make_loop: Callable[..., Loop], kind: str, policy: str) -> None:
    without = make_loop(kind, policy, graphs="off", sequences=5)
    wants = run(without, REQUESTS)
    assert (without.status().graph_captures, without.status().graph_replays) == (0, 0)
    loop = make_loop(kind, policy, graphs="on", sequences=5)
    told = run(loop, REQUESTS)  # Of different lengths: all sizes come, with and without padding.
    assert {each.number: told.tokens(each.number) for each in REQUESTS} == \
        {each.number: wants.tokens(each.number) for each in REQUESTS}
    status = loop.status()
    assert loop._model.graphs_failed is None and [size.rows for size in loop._model._padded.sizes] == [1, 2, 4, 5]
    assert status.graph_captures == 4
    assert 0 < status.graph_replays < status.forwards  # Prompts are read without.
    assert status.stats["unplanned"] == 0 and status.failed_forwards == 0


def test_every_size_gives_the_tokens_of_generate(make_loop: Callable[..., Loop]) -> None:
    wants = [expected(bare_model("llama"), prompt_ids(20, seed), 10) for seed in range(8)]
    for together in (1, 2, 3, 5, 8):
        told = run(make_loop(graphs="on"), [greedy(seed, prompt_ids(20, seed), 10) for seed in range(together)])
        assert [told.tokens(seed) for seed in range(together)] == wants[:together]


def test_probabilities_and_draws_are_the_same(make_loop: Callable[..., Loop]) -> None:
    requests = [greedy(seed, prompt_ids(20, seed), 10, temperature=1.0, seed=seed, logprobs=2, presence_penalty=0.5)
                for seed in range(3)]
    told, wants = (run(make_loop(graphs=graphs), requests) for graphs in ("on", "off"))
    for each in requests:
        got, want = ([token for event in run.events[each.number] for token in event.tokens] for run in (told, wants))
        assert [token.token for token in got] == [token.token for token in want]
        assert [token.logprob for token in got] == pytest.approx([token.logprob for token in want], abs=ATOL)


def test_a_replay_that_fails_is_repeated(make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop(graphs="on")
    finish, calls = loop._engine.finish, []

    def failing(number: int) -> None:
        calls.append(number)
        if len(calls) % 3 == 0:
            loop._engine.cancel(number)
            raise sluice.DeviceError("the far part was not answered in time")
        finish(number)

    monkeypatch.setattr(loop._engine, "finish", failing)
    assert run(loop, [greedy(1, prompt_ids(20))]).tokens(1) == expected(bare_model("llama"), prompt_ids(20), 12)
    assert loop.status().failed_forwards > 2


def test_what_cannot_be_captured_runs_without(make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Uncaptured", "CudaGraphs"):
        monkeypatch.setattr(serving_model, name, Breaks)
    loop = make_loop(graphs="on")
    assert loop._model.graphs_failed == "RuntimeError: not permitted when capturing"
    assert run(loop, [greedy(1, prompt_ids(20))]).tokens(1) == expected(bare_model("llama"), prompt_ids(20), 12)
    status = loop.status()
    assert (status.graph_captures, status.graph_replays, status.failed_forwards) == (0, 0, 0)


def test_attention_that_fails_in_a_capture_is_not_replayed(make_loop: Callable[..., Loop],
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a forward goes on after it, as those of ranks do."""
    class Runs(Breaks):
        def record(self, warm_up: Callable[[], None], forward: Callable[[], None]) -> Callable[[], None]:
            forward()
            return forward

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("attend is broken")

    monkeypatch.setattr(PackedModel, "_goes_on", True)
    for name in ("Uncaptured", "CudaGraphs"):
        monkeypatch.setattr(serving_model, name, Runs)
    with monkeypatch.context() as patch:
        patch.setattr(sluice.Engine, "attend", broken)
        loop = make_loop(graphs="on")
    assert loop._model.graphs_failed == "RuntimeError: attend is broken" and loop.status().graph_captures == 0
    assert run(loop, [greedy(1, prompt_ids(40))]).tokens(1) == expected(bare_model("llama"), prompt_ids(40), 12)


def test_auto_is_for_gpus(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    run(loop, [greedy(1, prompt_ids(20))])
    assert (loop.status().graph_replays > 0) == (DEVICE != "cpu")
    with pytest.raises(sluice.InvalidArgument, match='graphs is "maybe"'):
        PackedModel(copy.deepcopy(bare_model("llama")), graphs="maybe")


def test_sizes() -> None:
    def compute(size: Padding, ids: torch.Tensor, positions: torch.Tensor, attends: bool) -> torch.Tensor:
        assert len(ids) == len(positions) == size.rows
        seen.append((size, attends))
        return torch.stack([ids, positions], 1).float()

    device = torch.device(DEVICE)
    for largest, rows in ((1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))):
        for most, tokens in ((256, (256,)), (4096, (4096,)), (4112, (4096, 4112)), (16400, (4096, 16384, 16400))):
            seen: list[tuple[Padding, bool]] = []
            made = PaddedForwards(Padding(largest, most), Staging(3 * largest, device), compute, Uncaptured())
            assert list(made.sizes) == [(row, token) for token in tokens for row in rows]
            assert seen == [(size, False) for size in reversed(made.sizes)]
            assert made.size(largest, most) == (largest, most)
            assert made.size(largest + 1, 1) is made.size(1, most + 1) is None
    assert made.size(3, 4096) == (4, 4096) and made.size(1, 4097) == (1, 16384)
    four = Padding(4, 4096)
    assert made.run(four, [7, 8, 9], [1, 2, 3], [0, 1, 2]).tolist() == [[7, 1], [8, 2], [9, 3]]
    assert made.run(four, [5, 6], [3, 4], [1]).tolist() == [[6, 4]]
    assert made._logits[:4].tolist() == [[5, 3], [6, 4], [0, 0], [0, 0]]  # Nothing of the forward before.


def test_sequences_that_attend_everything_have_a_size_of_their_own() -> None:
    for whole, tokens in ((0, (4096, 16384, 20000)), (1008, (1008, 4096, 16384, 20000)), (4096, (4096, 16384, 20000)),
                          (18000, (4096, 16384, 18000, 20000)), (20000, (4096, 16384, 20000))):
        assert padded_tokens(20000, whole) == tokens


def test_a_forward_is_made_for_its_longest_sequence(make_loop: Callable[..., Loop],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[sluice.Bucket] = []
    plan = sluice.Engine.plan
    monkeypatch.setattr(sluice.Engine, "plan", lambda engine, items, bucket, *rest:
                        planned.append(bucket) or plan(engine, items, bucket, *rest))
    loop = make_loop(graphs="on", sequences=2, context=8192, host_bytes=32 << 20, prefill_rows=2048)
    most = loop._engine.options.largest.max_tokens
    assert most == 8192
    long, short = prompt_ids(4090, 1), prompt_ids(20, 2)
    told = run(loop, [greedy(1, long, 12), greedy(2, short, 12)])
    assert (told.tokens(1), told.tokens(2)) == tuple(expected(bare_model("llama"), ids, 12) for ids in (long, short))
    decoded = [bucket.max_tokens for bucket in planned if not bucket.prefills]
    # The longer one has 4091 tokens with the first that it decodes, and 4101 with the last.
    assert decoded.count(most) == 4101 - 4096 and set(decoded) == {4096, most}
    assert {bucket.max_tokens for bucket in planned if bucket.prefills} == {4096}


def test_staging_puts_columns_behind_each_other() -> None:
    staging = Staging(8, torch.device(DEVICE))
    assert [column.tolist() for column in staging.put([1, 2], range(3), [])] == [[1, 2], [0, 1, 2], []]
    assert [column.tolist() for column in staging.put([5], [6, 7])] == [[5], [6, 7]]
    assert [column.tolist() for column in staging.places(1, 2)] == [[5], [6, 7]]


@ON_CUDA
def test_a_forward_that_waits_for_the_device_runs_without_graphs() -> None:
    model = copy.deepcopy(bare_model("llama"))

    def wait(module: torch.nn.Module, inputs: tuple) -> None:
        inputs[0].sum().item()

    model.model.layers[1].register_forward_pre_hook(wait)
    same_without_graphs(model, "synchroniz")


@ON_CUDA
def test_a_capture_that_breaks_off_leaves_the_device_in_order() -> None:
    model = copy.deepcopy(bare_model("llama"))

    def break_off(*_: object) -> None:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()

    model.model.layers[1].register_forward_pre_hook(break_off)
    before = torch.cuda.current_stream()
    same_without_graphs(model, "captur")
    assert torch.cuda.current_stream() == before


def same_without_graphs(model: torch.nn.Module, words: str) -> None:
    packed = PackedModel(model, "full", 8 << 20, context=256, graphs="on", threads=1, pin_threads=False, **KV)
    try:
        assert words in packed.graphs_failed
        loop = Loop(packed, tokenizer())
        assert run(loop, [greedy(1, prompt_ids(20))]).tokens(1) == expected(bare_model("llama"), prompt_ids(20), 12)
        assert loop.status().graph_replays == 0 and loop.status().failed_forwards == 0
    finally:
        packed.close()

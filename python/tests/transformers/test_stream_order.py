"""What `generate` computes does not depend on when: forwards whose kernels are late, whose host is late, beside other
streams that use the memory which a forward has just given back."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from sluice.transformers import Enabled
from tiny import ON_CPU, enabled, greedy, left_padded, llama
from transformers import PreTrainedModel

POLICIES = ("full", "exact | int4 | top_k=16 | near=0,sinks=2,recent=6")
SEEDS = range(20)
MOST_CYCLES = 2_000_000  # About a millisecond of a GPU.


@contextmanager
def late(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """Before and after modules the stream or the host is late, now and then, and freed memory is written to."""
    dice = random.Random(seed)

    def disturb(*_: object) -> None:
        what = dice.randrange(6)
        if what == 0:
            time.sleep(dice.uniform(0, 0.002))
        elif what == 1 and not ON_CPU:
            torch.cuda._sleep(dice.randrange(MOST_CYCLES))
        elif what == 2:
            for size in (64, 4096, 65536):
                torch.full((size,), float("nan"))  # Where queries and keys have been, as likely as not.

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(disturb).remove)
            hooks.callback(module.register_forward_hook(disturb).remove)
        yield


@contextmanager
def neighbour() -> Iterator[None]:
    """Another thread fills memory on a stream of its own."""
    ended = threading.Event()

    def churn() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not ended.is_set():
                for size in (128, 8192, 1 << 20):
                    torch.full((size,), float("nan"), device="cuda")
                stream.synchronize()

    thread = threading.Thread(target=churn)
    if not ON_CPU:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if not ON_CPU:
            thread.join()


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    """[new tokens, batch, vocabulary]; synchronised, so that nothing of it is under way."""
    ids, mask = left_padded()
    out = greedy(model, ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True)
    return torch.stack(out.logits).float().cpu()


@pytest.fixture(params=POLICIES, ids=("full", "top_k"))
def served(request: pytest.FixtureRequest) -> Iterator[tuple[PreTrainedModel, Enabled]]:
    model = llama()
    near = {} if ON_CPU else {"near_bytes": 1 << 20}  # On a GPU some of what is attended is near, and comes there late.
    with enabled(model, request.param, **near) as here:
        yield model, here


@pytest.mark.parametrize("seed", SEEDS if not ON_CPU else SEEDS[:3])
def test_late_kernels_and_hosts(served: tuple[PreTrainedModel, Enabled], seed: int) -> None:
    model, here = served
    want = logits_of(model)
    assert want.isfinite().all()
    with ExitStack() as disturbed:
        disturbed.enter_context(late(model, seed))
        disturbed.enter_context(neighbour())
        if not ON_CPU and seed % 2:
            disturbed.enter_context(torch.cuda.stream(torch.cuda.Stream()))
        got = logits_of(model)
    # Where a key is attended changes the order of sums, and no more.
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_a_stream_for_each_answer(served: tuple[PreTrainedModel, Enabled]) -> None:
    """Threads that answer at the same time, each on a stream of its own."""
    model, _ = served
    want, got, failures = logits_of(model), [], []

    def answer() -> None:
        try:
            torch.set_default_device("cpu" if ON_CPU else "cuda")  # Of a thread.
            with ExitStack() as own:
                if not ON_CPU:
                    own.enter_context(torch.cuda.stream(torch.cuda.Stream()))
                for _ in range(3):
                    got.append(logits_of(model))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=answer) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(got) == 9
    for each in got:
        torch.testing.assert_close(each, want, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(ON_CPU, reason="there is no GPU")
def test_another_stream_would_show(served: tuple[PreTrainedModel, Enabled], monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that does not keep to the caller's stream is found out by the tests above."""
    model, here = served
    want, side = logits_of(model), torch.cuda.Stream()
    plan, attend = here.engine.plan, here.engine.attend
    monkeypatch.setattr(here.engine, "plan", lambda items, bucket, stream: plan(items, bucket, side))
    monkeypatch.setattr(here.engine, "attend", lambda *tensors, stream: attend(*tensors, stream=side))
    with late(model, 1):
        got = logits_of(model)
    torch.cuda.synchronize()
    assert not torch.allclose(got, want, rtol=1e-3, atol=1e-3)

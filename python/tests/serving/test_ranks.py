"""How ranks agree, and who is refused, without torchrun."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe

import numpy as np
import pytest
import sluice
from sluice.errors import OutOfCapacity, Unsupported
from sluice.serving.ranks import Disagreed, Launch, Ranks, RanksLost, _check_device
from sluice.serving.sharded import ShardedModel
from waiting import DEADLINE_S

Pair = tuple[Ranks, Ranks]


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Who says nothing for as many seconds as a test gives, or for as long as one that hangs, is lost."""
    first, second = Pipe()
    silence = getattr(request, "param", DEADLINE_S)
    ranks = Ranks(Launch(0, 2), {1: first}, silence), Ranks(Launch(1, 2), {0: second}, silence)
    yield ranks
    for each in ranks:
        each.close()


def both(first: Callable[[], object], second: Callable[[], object]) -> list[object]:
    """What two ranks return or raise."""
    told: list[object] = [None, None]

    def call(at: int, what: Callable[[], object]) -> None:
        try:
            told[at] = what()
        except Exception as error:
            told[at] = error

    other = threading.Thread(target=call, args=(1, second))
    other.start()
    call(0, first)
    other.join(DEADLINE_S)
    return told


def test_ranks_agree(pair: Pair) -> None:
    a, b = pair
    a.tell("go on")
    assert b.hear() == "go on"
    assert both(lambda: a.agree(3), lambda: b.agree(5)) == [[3, 5], [3, 5]]
    for failing in range(2):
        errors = [OutOfCapacity("no room") if rank == failing else None for rank in range(2)]
        told = both(lambda: a.agree(0, errors[0]), lambda: b.agree(0, errors[1]))
        # The loop makes room for what has none, on whichever rank.
        assert isinstance(told[0], OutOfCapacity) and isinstance(told[1], Disagreed)
        assert str(told[0]) == ("no room", "rank 1: no room")[failing]
    assert both(a.agree, b.agree) == [[0, 0], [0, 0]] and a.lost is None is b.lost


def test_ranks_whose_windows_know_other_parts_of_a_prompt(pair: Pair) -> None:
    """They begin with the same tokens, also where the one that knows more cannot go back to what the other knows."""
    ids = list(range(300))

    class Model(ShardedModel):
        def __init__(self, ranks: Ranks, known: int, slack: int) -> None:
            self._ranks = ranks
            options = sluice.EngineOptions(
                layers=1, q_heads=1, kv_heads=1, head_dim=64, kv_dtype="f32", host_bytes=8 << 20, windows=[40],
                window_slack=slack, policies=["full"], largest=sluice.Bucket(decode_rows=1), threads=1,
                pin_threads=False, import_rows=300)
            self.engine = sluice.Engine(options)
            rows = np.zeros((known, 1, 64), np.float32)
            first = self.engine.begin("full", ids)
            self.engine.import_prefix(first, 0, rows, rows)
            self.engine.end(first)

        def tokens_of_one_that_began(self) -> int:
            sequence = self.engine.begin("full", ids)
            self._settle(sequence)
            return self.engine.tokens(sequence)

    for slack, known, least in ((0, (299, 150), 0), (160, (299, 150), 144), (0, (150, 299), 0), (0, (299, 299), 288)):
        models = [Model(ranks, tokens, slack) for ranks, tokens in zip(pair, known)]
        assert both(*(model.tokens_of_one_that_began for model in models)) == [least, least]
        assert all(ranks.lost is None for ranks in pair)
        for model in models:
            model.engine.close()


@pytest.mark.parametrize("pair", [2], indirect=True)
def test_a_rank_that_is_silent(pair: Pair) -> None:
    a, b = pair
    with pytest.raises(RanksLost, match="rank 1 has said nothing for 2 s"):
        a.agree()
    with pytest.raises(RanksLost, match="rank 1 has said nothing"):
        b.hear()  # Rank 0 has told it.
    for call in (a.agree, lambda: a.tell(1)):
        with pytest.raises(RanksLost, match="rank 1 has said nothing"):
            call()


def test_a_rank_that_ends(pair: Pair) -> None:
    a, b = pair
    b.close()
    assert a.lost == "rank 1 has ended"


def test_a_rank_that_breaks_off(pair: Pair) -> None:
    a, b = pair
    told = both(a.agree, lambda: b.break_off("is out of step"))
    assert [str(each) for each in told] == ["rank 1 is out of step"] * 2
    assert all(isinstance(each, RanksLost) for each in told)


def test_a_rank_that_gives_up(pair: Pair) -> None:
    a, b = pair
    told = both(lambda: a.tell(None), b.agree)
    assert "rank 0 has given up" in str(told[1])


def test_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Launch.of_environment() == Launch(0, 1)
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "3"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert Launch.of_environment() == Launch(3, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(Unsupported, match="--nnodes 1"):
        Launch.of_environment()


def test_devices_of_ranks() -> None:
    _check_device(Launch(0, 2), "cpu", 0)
    _check_device(Launch(0, 2), "cuda", 2)
    for device, gpus, words in (("cuda:1", 2, "CUDA_VISIBLE_DEVICES"), ("cpu", 2, "set CUDA_VISIBLE_DEVICES= to"),
                                ("cuda", 1, "--nproc-per-node 1")):
        with pytest.raises(Unsupported, match=words):
            _check_device(Launch(0, 2), device, gpus)

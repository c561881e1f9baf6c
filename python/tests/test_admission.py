"""Requests take turns on an engine as an admission says, which is that of C++."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import sluice
from conftest import Story, forward

Make = Callable[..., sluice.Engine]

OPTIONS = sluice.AdmissionOptions(decode_rows=3, prefill_rows=16, prefills=2, page_tokens=4, pages=8)


@dataclasses.dataclass
class Request:
    story: Story
    prompt: int
    most: int
    given: int = 0
    sequence: int = 0


class Server:
    """The loop that the class describes, over an engine whose outputs are held against dense attention."""

    def __init__(self, engine: sluice.Engine) -> None:
        self.engine = engine
        self.admission = sluice.Admission(sluice.AdmissionOptions.of(engine))
        self.requests: dict[int, Request] = {}
        self.preempted, self.ended = 0, []

    def submit(self, number: int, request: Request) -> None:
        self.admission.submit(number, request.prompt, request.most)
        self.requests[number] = request

    def turn(self) -> bool:
        engine, requests = self.engine, self.requests
        memory = engine.memory()
        changes = self.admission.admit(memory.far_pages_used * self.admission.options.pages // memory.far_pages)
        for number in changes.preempt:
            engine.end(requests[number].sequence)
        for number in changes.admit:
            request = requests[number]
            request.sequence = engine.begin("full", range(request.prompt + request.given), salt=id(request.story))
            self.admission.begun(number, engine.tokens(request.sequence))
        self.preempted += len(changes.preempt)
        items = self.admission.next(chunk_tokens=40)
        if not items:
            return False
        assert engine.options.largest is not None
        forward(engine, engine.options.largest, *((requests[item.request].sequence, requests[item.request].story,
                                                   item.first, item.tokens, item.prefill) for item in items))
        for item in items:
            requests[item.request].given += item.output
        for number in self.admission.complete():
            assert requests[number].given == requests[number].most
            engine.end(requests[number].sequence)
            self.ended.append(number)
        return True


def test_requests_take_turns(make: Make) -> None:
    page = 2 * 16 * 64 * 4 * 2 * 2  # K and V of 16 tokens, f32, 2 layers and KV heads
    engine = make(host_bytes=7 * page, sequences=4)
    with pytest.raises(sluice.OutOfCapacity, match="112"):
        sluice.Admission(sluice.AdmissionOptions.of(engine)).submit(1, 113, 1)
    server = Server(engine)
    shared = Story(1)
    server.submit(1, Request(Story(2), prompt=40, most=30))
    server.submit(2, Request(shared, prompt=30, most=24))
    server.submit(3, Request(Story(3), prompt=1, most=1))
    server.submit(4, Request(shared, prompt=60, most=0))
    turns = 0
    while server.turn():
        turns += 1
        assert turns < 200
    assert server.preempted > 0 and sorted(server.ended) == [1, 2, 3, 4]
    assert engine.stats().matched_tokens > 0
    assert engine.memory().far_pages_used == 0
    assert server.admission.use() == sluice.AdmissionUse(0, 0, 0, 0)


def test_a_turn() -> None:
    with sluice.Admission(OPTIONS) as admission:
        assert admission.options == dataclasses.replace(OPTIONS, max_tokens=32)
        admission.submit(7, 20, 2)
        admission.submit(2**64 - 1, 3, 0)
        assert admission.admit() == sluice.Changes(preempt=[], admit=[7, 2**64 - 1])
        admission.begun(7, 4)
        assert admission.running() == [7, 2**64 - 1]
        assert admission.next(chunk_tokens=9) == [sluice.TurnItem(7, 8, 4, prefill=True, output=False)]
        admission.fail()
        assert admission.next() == [sluice.TurnItem(7, 16, 4, prefill=True, output=True)]
        assert admission.complete() == []
        assert admission.preempt(2**64 - 1) == [2**64 - 1]
        assert admission.use() == sluice.AdmissionUse(waiting=1, running=1, pages=5, near_pages=0)
        assert admission.admit().admit == []
        assert admission.next() == [sluice.TurnItem(7, 1, 20, prefill=False, output=True)]
        admission.end(2**64 - 1)
        assert admission.complete() == [7]
        assert admission.admit() == sluice.Changes([], []) and admission.next() == []


def test_policies_that_choose_on_the_cpu() -> None:
    with sluice.Admission(dataclasses.replace(OPTIONS, cpu_sequences=1)) as admission:
        for number in range(3):
            admission.submit(number, 4, 1, on_cpu=number != 1)
        assert admission.admit().admit == [0, 1]
    with pytest.raises(sluice.OutOfCapacity, match="cpu_sequences"):
        sluice.Admission(OPTIONS).submit(1, 4, 1, on_cpu=True)


def test_what_is_refused() -> None:
    with pytest.raises(sluice.InvalidArgument, match="AdmissionOptions.pages"):
        sluice.Admission(sluice.AdmissionOptions(pages=0))
    admission = sluice.Admission(OPTIONS)
    with pytest.raises(sluice.OutOfCapacity, match="33 tokens.*32"):
        admission.submit(1, 32, 2)
    with pytest.raises(sluice.NotFound, match="no request 5"):
        admission.end(5)
    with pytest.raises(sluice.InvalidArgument, match="admit"):
        admission.next()
    for call in (lambda: admission.submit(-1, 1, 1), lambda: admission.submit(1, 1 << 32, 1),
                 lambda: admission.admit(held_pages=-1), lambda: admission.next(1 << 32),
                 lambda: sluice.Admission(dataclasses.replace(OPTIONS, pages=1 << 64))):
        with pytest.raises(sluice.InvalidArgument):
            call()
    admission.close()
    admission.close()
    with pytest.raises(sluice.InvalidArgument, match="closed"):
        admission.admit()


def test_options_of_an_engine(make: Make) -> None:
    engine = make("full", "lfps", cpu_sequences=2)
    options = sluice.AdmissionOptions.of(engine)
    assert options == sluice.AdmissionOptions(
        pages=engine.memory().far_pages // (2 * 16 * 64 * 4 * 2 * 2), decode_rows=4, prefill_rows=64, prefills=2,
        sequences=16, cpu_sequences=2, page_tokens=16, max_tokens=engine.options.largest.max_tokens)


def test_slowdown_keeps_chunks_short() -> None:
    options = sluice.AdmissionOptions(pages=4096, decode_rows=2, prefill_rows=1024, slowdown=2.0)
    assert options.slowdown == 2.0
    with sluice.Admission(options) as admission:
        assert admission.options.slowdown == 2.0
        admission.submit(1, 16, 1000)
        chunks = []
        for turn in range(100):
            if turn == 10:
                admission.submit(2, 20_000, 1)
            admission.admit()
            chunk = sum(item.tokens for item in admission.next() if item.prefill)
            chunks.append(chunk)
            admission.complete(0.001 + 0.00001 * chunk)
    assert 80 <= max(chunks[20:]) <= 105
    with pytest.raises(sluice.InvalidArgument, match="slowdown"):
        sluice.Admission(dataclasses.replace(options, slowdown=0.5))

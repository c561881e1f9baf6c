"""The engine's process and the web server's side of it, without a model."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import queue
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
from sluice.serving import process
from sluice.serving.process import Answers, EngineLost, EngineProcess, Ready, Settings
from sluice.serving.requests import Event, Request, Sampling, Status
from waiting import DEADLINE_S, wait_until


class Hopeless:
    """A loop whose requests fail."""

    idle = True
    hopeless: str | None = None

    def submit(self, request: Request) -> None:
        self.hopeless = "it is of no use"

    def step(self) -> list[Event]:
        return [Event(1, error="a forward failed")] if self.hopeless else []

    def status(self) -> Status:
        return Status()

    def close(self) -> None:
        pass


def main_of(connection: Connection, settings: Settings) -> None:
    """The process, with another model: `settings` has which."""
    def load(settings: Settings) -> tuple[Any, Ready]:
        time.sleep(600 if settings.model == "slow" else 0)
        return Hopeless(), Ready(1, {}, 1)

    sys.modules["sluice.serving.load"] = types.SimpleNamespace(load_loop=load)
    process._main(connection, settings)


@pytest.fixture
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineProcess]:
    _main = process._main
    monkeypatch.setattr(process, "_main", main_of)
    made = EngineProcess(Settings(getattr(request, "param", "hopeless")))
    made.start()
    monkeypatch.setattr(process, "_main", _main)
    yield made
    made.close(0.1)


def begin(engine: EngineProcess) -> Answers:
    return engine.answer([[1]], [[Sampling()]])


async def lost(engine: EngineProcess) -> str:
    engine.listen()
    while engine.lost is None:
        await asyncio.sleep(0.01)
    return engine.lost


def test_a_process_ends_with_the_pipe_while_it_loads() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=main_of, args=(theirs, Settings("slow")), daemon=True)
    child.start()
    theirs.close()
    ours.close()
    child.join(DEADLINE_S)
    assert child.exitcode == 1


@pytest.mark.parametrize("engine", ["slow"], indirect=True)
def test_a_process_that_is_not_wanted_any_more_while_it_loads(engine: EngineProcess) -> None:
    engine.close(60)
    assert engine._process.exitcode == 1


def test_a_loop_that_is_hopeless_ends_the_process(engine: EngineProcess) -> None:
    async def ask() -> list[Event]:
        engine.ready()
        engine.listen()
        answers = begin(engine)
        events = [event async for _, event in answers]
        while engine.lost is None:
            await asyncio.sleep(0.01)
        return events

    assert [event.error for event in asyncio.run(ask())] == ["a forward failed"]  # What was told is heard.
    assert engine.lost == "the engine's process has ended with exit code 1"


def test_a_request_that_cannot_be_told(engine: EngineProcess) -> None:
    engine.ready()
    engine._outbox.put([lambda: None])
    wait_until(lambda: engine.lost)
    assert "could not be told" in engine.lost
    with pytest.raises(EngineLost, match="could not be told"):
        begin(engine)


def test_news_that_cannot_be_read(engine: EngineProcess) -> None:
    def broken() -> None:
        raise ValueError("no pickle")

    engine.ready()
    engine._connection = types.SimpleNamespace(recv=broken)
    assert "could not be read: ValueError: no pickle" in asyncio.run(asyncio.wait_for(lost(engine), DEADLINE_S))


def test_a_request_that_the_process_cannot_read(engine: EngineProcess) -> None:
    engine.ready()
    engine._connection.send_bytes(b"no pickle")
    assert "exit code 1" in asyncio.run(asyncio.wait_for(lost(engine), DEADLINE_S))


def test_places_are_free_when_the_engine_says_so() -> None:
    async def take() -> None:
        engine = EngineProcess(Settings("none"))
        answers = engine.answer([[1], [2]], [[Sampling()], [Sampling()]])
        assert engine.outstanding == 2
        engine._take([Event(1, text="a"), Event(1, finish="stop"), Event(2, error="no")], None)
        assert engine.outstanding == 0  # Nobody has taken any of it.
        assert [(at, event.text) async for at, event in answers] == [(0, "a"), (0, ""), (1, "")]
        answers.close()
        assert engine._outbox.qsize() == 1  # The requests: nothing is to be given up.

    asyncio.run(take())


def test_an_interpreter_that_ends_without_closing() -> None:
    """It does not wait for a process that ignores SIGTERM."""
    code = ("import sys; sys.path.insert(0, sys.argv[1])\nfrom sluice.serving import process\nimport test_process\n"
            "process._main = test_process.main_of\n"
            "if __name__ == '__main__':\n"
            "    made = process.EngineProcess(process.Settings('quick')); made.start(); made.ready()")
    subprocess.run([sys.executable, "-c", code, os.path.dirname(__file__)], timeout=DEADLINE_S, check=True)


def test_answers_are_given_up_as_news_of_them_comes() -> None:
    """A task that is cancelled in the same moment does not go on."""
    outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine = types.SimpleNamespace(lost=None, _numbers=iter(range(9)), _outbox=outbox, _queues={})
    heard: list[int] = []

    async def listen(answers: Answers) -> None:
        async for _, event in answers:
            heard.append(event.number)

    async def give_up() -> None:
        answers = Answers(engine, [[1, 2, 3]], [[Sampling()]])
        task = asyncio.create_task(listen(answers))
        engine._queues[0].put_nowait(Event(0, "a"))
        while not heard:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)  # It waits for the next.
        engine._queues[0].put_nowait(Event(0, "b"))
        task.cancel()
        await asyncio.wait((task,), timeout=DEADLINE_S)
        assert task.cancelled()

    asyncio.run(give_up())
    assert heard == [0]

"""Other threads run while a call waits; calls of several threads take turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import sluice
from conftest import Story, buckets, forward

Make = Callable[..., sluice.Engine]


class Counter(threading.Thread):
    """Counts as often as it gets to run."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.count, self.stop = 0, False

    def run(self) -> None:
        while not self.stop:
            self.count += 1
            time.sleep(0.001)

    def __enter__(self) -> Counter:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop = True
        self.join()


def until_it_is_in_a_call(engine: sluice.Engine) -> None:
    """Until another thread is."""
    ends = time.monotonic() + 600
    while engine._lock.acquire(blocking=False):
        engine._lock.release()
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_finish_lets_other_threads_run(make: Make) -> None:
    engine = make(timeout_ms=1000)
    bucket = buckets(engine)[1]
    number = engine.plan([sluice.PlanItem(engine.begin("full"))], bucket)
    with Counter() as counter:
        while counter.count == 0:
            time.sleep(0.001)
        before = counter.count
        with pytest.raises(sluice.Timeout):  # Its layers do not come, so it waits as long as it may.
            engine.finish(number)
        # Without the lock of the interpreter it comes to hundreds; with it, to the one turn before the call.
        assert counter.count - before >= 10
        assert engine.stats().asked == 0


def test_figures_are_told_while_another_thread_waits(make: Make) -> None:
    engine = make(timeout_ms=2000)
    number = engine.plan([sluice.PlanItem(engine.begin("full"))], buckets(engine)[1])
    ended: list[float] = []

    def wait() -> None:
        with pytest.raises(sluice.Timeout):
            engine.finish(number)
        ended.append(time.monotonic())

    waiting = threading.Thread(target=wait)
    waiting.start()
    until_it_is_in_a_call(engine)
    engine.stats()
    told = time.monotonic()
    waiting.join()
    assert told < ended[0]


def test_threads_take_turns(make: Make) -> None:
    engine = make()
    _, decode = buckets(engine)
    failures: list[BaseException] = []
    turn = threading.Lock()  # A forward's layers belong together; what calls do meanwhile does not.

    def serve(seed: int) -> None:
        try:
            a, story = engine.begin("full"), Story(seed)
            for step in range(10):
                with turn:
                    forward(engine, decode, (a, story, step, 1, False))
                engine.memory(), engine.tokens(a), engine.stats(), engine.can_admit(10)
            engine.end(a)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_each_thread_has_its_own_error(make: Make) -> None:
    engine, texts = make(), []

    def fail(sequence: int) -> None:
        for _ in range(200):
            with pytest.raises(sluice.NotFound) as caught:
                engine.tokens(sequence)
            texts.append((sequence, str(caught.value)))

    threads = [threading.Thread(target=fail, args=(1000 + number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 800 and all(f"no sequence {sequence}" in text for sequence, text in texts)


def test_close_waits_for_other_calls(make: Make) -> None:
    engine = make(timeout_ms=300)
    number = engine.plan([sluice.PlanItem(engine.begin("full"))], buckets(engine)[1])
    results: list[object] = []

    def wait() -> None:
        try:
            engine.finish(number)
        except sluice.Error as error:
            results.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until_it_is_in_a_call(engine)
    engine.close()
    waiting.join()
    assert isinstance(results[0], sluice.Timeout)

"""Forwards captured in torch graphs while others are under way: rows are brought near, the CPU answers, and a policy
learns, before the capture begins, in the middle of it and after its end.

    python3 torch_busy_test.py build/release/tests/gpu/libtorch_engine.so

Two sequences are decoded: one learns on the CPU (lfps), of the other rows are brought near again and again. Their next
forward is captured while earlier ones of the same engine run; and another engine's while a thread decodes them. In each
of torch's modes of capture, hidden states must be those without a graph, bit by bit.
"""

import sys
import threading
import time

from torch_rig import HIDDEN, LAYERS, Engine, Model, prompts, torch

MODES = ("global", "thread_local", "relaxed")
LEARNS = "lfps"
COMES_NEAR = "exact | int4 | top_k=64 | near=0,sinks=4,recent=24"
LENGTHS = (1200, 1500)
WARM, AHEAD, BEHIND = 12, 4, 40  # Forwards before the capture, under way meanwhile, and behind it.
MOST = 1000  # Forwards of any engine: all have room for as many, as kernels are cut by that.
PATIENCE = 60  # Seconds of any wait.


class Decoding:
    """Sequences that are decoded in one batch, on a stream of their own."""

    def __init__(self, library, policies, lengths):
        blocks = sum(n + MOST + 16 for n in lengths) // 16 + len(lengths)
        self.engine = Engine(library, len(lengths), blocks, 40, policies, in_flight=AHEAD, threads=3)
        self.model = Model(len(lengths))
        # Torch has 32, and gives them out in turn: those of what lives are different ones.
        self.stream, self.capturing = torch.cuda.Stream(), torch.cuda.Stream()
        self.pool, self.practice = torch.cuda.graph_pool_handle(), None
        torch.manual_seed(3)
        self.inputs = torch.randn(MOST, len(lengths), HIDDEN, device="cuda").bfloat16()
        self.results = torch.full_like(self.inputs, torch.nan)
        self.step = 0
        with torch.cuda.stream(self.stream):
            self.sequences = []
            for policy, (k, v) in zip(policies, prompts(lengths)):
                self.sequences.append(self.engine.begin(policy))
                self.engine.import_prefix(self.sequences[-1], k, v)
        torch.cuda.synchronize()

    def enqueue(self, graph=None):
        """One forward; returns what finishes it. Without a graph it takes memory from torch."""
        with torch.cuda.stream(self.stream):
            self.model.hidden.copy_(self.inputs[self.step])
            forward = self.engine.plan(self.sequences)
            if graph is None:
                self.model.forward(self.engine.attend)
            else:
                graph.replay()
            self.results[self.step].copy_(self.model.result)
        self.step += 1
        return lambda: self.engine.finish(forward)

    def decode(self, count, graph=None):
        for _ in range(count):
            self.enqueue(graph)()

    def capture(self, mode, between=lambda: None, before_end=lambda: None):
        """A forward in a graph. `between` is called in its middle, `before_end` behind it: the stream is captured."""
        graph = torch.cuda.CUDAGraph()

        def attend(layer, *tensors):
            if layer == LAYERS // 2:
                between()
            self.engine.attend(layer, *tensors)

        with torch.cuda.stream(self.capturing):
            # Not torch.cuda.graph, which waits for the whole device first: all would be at rest.
            graph.capture_begin(self.pool, capture_error_mode=mode)
            self.model.forward(attend)
            before_end()
            graph.capture_end()
        return graph

    def practise(self):
        """Captures one that is not replayed, in whose memory others have room: taking some from CUDA may wait until the
        device is idle. And cuBLAS takes memory at its first call on a stream."""
        def compute(stream):
            with torch.cuda.stream(stream):
                self.model.forward(lambda layer, q, k, v, out: out.zero_())
            torch.cuda.synchronize()

        compute(self.capturing)
        self.practice = self.capture("global")
        compute(self.stream)  # The model keeps tensors of its newest forward: no more those of the graph.

    def taken(self):
        """Hidden states of all forwards."""
        self.stream.synchronize()
        return self.results[:self.step].clone()

    def counts(self):
        return {name: self.engine.count(name) for name in ("asked", "promoted", "scored")}

    def learnt(self):
        return self.engine.count("learnt", self.sequences[0])


def wait_for(what, done, failed=lambda: None):
    end = time.monotonic() + PATIENCE
    while not done():
        assert failed() is None, failed()
        assert time.monotonic() < end, f"{what} has not come about in {PATIENCE} s"
        time.sleep(5e-4)


def await_work(decoding):
    """Until rows have come near, and more than a whole forward has been answered. The policy has learnt from the one
    before it: it does not choose before it has."""
    before = decoding.counts()

    def done():
        now = decoding.counts()
        return (now["asked"] >= before["asked"] + 2 * LAYERS and now["promoted"] > before["promoted"]
                and now["scored"] > before["scored"])

    wait_for("work beside a capture", done)


def same_engine(library, mode):
    """The next forward is captured while earlier ones run; without a mode none is, and no graph replayed."""
    decoding = Decoding(library, (LEARNS, COMES_NEAR), LENGTHS)

    def still_run():
        assert decoding.engine.count("asked") < (WARM + AHEAD) * LAYERS, "the forwards have run within the capture"

    decoding.practise()
    decoding.decode(WARM)
    warm = decoding.counts()
    assert warm["asked"] == WARM * LAYERS and warm["promoted"] > 0 and warm["scored"] > 0 and decoding.learnt() > 0
    decoding.engine.pause(3000)
    finishes = [decoding.enqueue() for _ in range(AHEAD)]
    graph = None
    if mode is not None:
        assert decoding.engine.count("asked") <= (WARM + 1) * LAYERS, "the forwards have run before the capture"
        graph = decoding.capture(mode, lambda: await_work(decoding), still_run)
    for finish in finishes:
        finish()
    decoding.engine.pause(0)
    busy = decoding.counts()
    decoding.decode(BEHIND, graph)
    assert decoding.counts()["promoted"] > busy["promoted"] > warm["promoted"], "nothing was brought near"
    assert decoding.engine.count("unplanned") == 0
    return decoding.taken()


def replays_until(decoding, graph, stop, failures):
    """A thread: decodes until it is told to stop, or there is nothing more to decode."""
    try:
        while not stop.is_set():
            assert decoding.step < MOST, "the capture took too long"
            decoding.enqueue(graph)()
    except BaseException as error:
        failures.append(error)


def beside_a_thread(library, mode):
    """Another engine's forward is captured and replayed while a thread decodes; hidden states of both."""
    there = Decoding(library, (LEARNS, COMES_NEAR), LENGTHS)
    here = Decoding(library, (COMES_NEAR,), (700,))
    there.practise()
    here.practise()
    there_graph = there.capture("global")
    there.decode(WARM, there_graph)
    there.engine.pause(200)
    stop, failures = threading.Event(), []
    thread = threading.Thread(target=replays_until, args=(there, there_graph, stop, failures), daemon=True)
    thread.start()

    def await_there():
        begun = there.step
        await_work(there)
        wait_for("a forward of the thread", lambda: there.step > begun + 3, lambda: next(iter(failures), None))

    try:
        await_there()
        graph = here.capture(mode, await_there)
        await_there()
        here.decode(BEHIND, graph)
    finally:
        stop.set()
        thread.join(PATIENCE)
    assert not failures, failures
    assert not thread.is_alive(), "the thread does not come to its end"
    assert there.engine.count("unplanned") == here.engine.count("unplanned") == 0
    return there.taken(), here.taken()


def alone(library, policies, lengths, steps):
    """The same without a graph, and with nothing beside it."""
    decoding = Decoding(library, policies, lengths)
    decoding.decode(steps)
    return decoding.taken()


def main():
    library = sys.argv[1]
    want = same_engine(library, None)
    assert want.isfinite().all()
    assert torch.equal(alone(library, (LEARNS, COMES_NEAR), LENGTHS, len(want)), want), "late answers are other answers"
    for mode in MODES:
        assert torch.equal(same_engine(library, mode), want), f"mode {mode}: other numbers"
        print(f"mode {mode}: captured while forwards of the same engine run")
    here_want = alone(library, (COMES_NEAR,), (700,), BEHIND)
    assert here_want.isfinite().all()
    theirs = {}
    for mode in MODES:
        theirs[mode], here = beside_a_thread(library, mode)
        assert torch.equal(here, here_want), f"mode {mode}: other numbers"
        print(f"mode {mode}: captured while a thread decodes, {len(theirs[mode])} forwards")
    want = alone(library, (LEARNS, COMES_NEAR), LENGTHS, max(map(len, theirs.values())))
    for mode, got in theirs.items():
        assert torch.equal(got, want[:len(got)]), f"mode {mode}: the thread has other numbers"
    print("torch_busy_test: passed")


if __name__ == "__main__":
    main()

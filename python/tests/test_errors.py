"""What is refused, by which class, and what it says."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sluice
from conftest import HEAD_DIM, KV_HEADS, LAYERS, Q_HEADS, Story, buckets, forward, small_options
from sluice import _library, errors

Make = Callable[..., sluice.Engine]


def test_invalid_argument(make: Make) -> None:
    engine = make()
    with pytest.raises(sluice.InvalidArgument, match='"?exakt"?'):
        engine.begin("exakt")
    with pytest.raises(ValueError, match="forward 12"):
        engine.finish(12)
    with pytest.raises(sluice.Error, match="head_dim"):
        sluice.Engine(small_options(head_dim=7))


def test_out_of_capacity(make: Make) -> None:
    engine = make(sequences=1)
    engine.begin("full")
    with pytest.raises(sluice.OutOfCapacity, match="sequences"):
        engine.begin("full")


def test_far_budget(make: Make) -> None:
    exact = "exact | int4 | top_k=all | near=0,sinks=4,recent=8"
    engine = make(exact)
    with pytest.raises(sluice.InvalidArgument, match='"99".*means nothing here'):
        engine.begin("full | far=99")
    with pytest.raises(sluice.Unsupported, match="far=8 or more"):
        engine.begin(exact + " | far=7")
    mixed, decode = buckets(engine)
    outs = {}
    for far in ("", " | far=all", " | far=16"):
        sequence, story = engine.begin(exact + far), Story(5)
        forward(engine, mixed, (sequence, story, 0, 60, True))
        number = engine.plan([sluice.PlanItem(sequence, 1, False)], decode)
        for layer in range(LAYERS):
            q, k, v = (np.zeros((decode.rows, heads, HEAD_DIM), np.float32) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
            q[0], k[0], v[0] = story.q[layer, 60], story.k[layer, 60], story.v[layer, 60]
            outs[far], lse = np.zeros_like(q), np.zeros(q.shape[:2], np.float32)
            engine.attend(decode, layer, q, k, v, outs[far], lse)
        engine.finish(number)
        engine.end(sequence)
    np.testing.assert_array_equal(outs[""], outs[" | far=all"])
    assert np.abs(outs[""] - outs[" | far=16"]).max() > 1e-3


def test_unsupported(make: Make) -> None:
    with pytest.raises(sluice.Unsupported, match="no room for this policy.*; name the policy in EngineOptions.policies"):
        make().begin("pages | int4 | near=0")
    with pytest.raises(sluice.Unsupported, match="engine cannot serve this policy.*near=0"):
        make().begin("lfps | near=5%")
    if sluice.cuda_devices() == 0:
        with pytest.raises(sluice.Unsupported, match="CUDA"):
            make(device="cuda:3")


def test_not_found(make: Make) -> None:
    engine = make()
    for call in (engine.tokens, engine.end, engine.preempt, engine.far_bytes, engine.audit, engine.audit_heads):
        with pytest.raises(sluice.NotFound, match="no sequence 4711"):
            call(4711)
    with pytest.raises(LookupError):
        engine.fork(4711, 0)


def test_timeout_and_device(make: Make) -> None:
    engine = make(timeout_ms=100)
    _, decode = buckets(engine)
    a = engine.begin("full")
    first = engine.plan([sluice.PlanItem(a)], decode)
    with pytest.raises(TimeoutError, match="layer") as caught:
        engine.finish(first)
    assert isinstance(caught.value, sluice.Timeout)
    assert first in engine._forwards
    second = engine.plan([sluice.PlanItem(a)], decode)
    with pytest.raises(sluice.DeviceError, match="before all its layers were enqueued"):
        engine.finish(first)
    assert first not in engine._forwards
    engine.cancel(second)
    assert engine.tokens(a) == 0 and not engine._forwards
    forward(engine, decode, (a, Story(1), 0, 1, False))


def test_every_status_has_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    # Corrupt, io and internal are of no call that a test could make fail.
    library = _library.library()
    monkeypatch.setattr(library, "_last_error", lambda: "why and what to do".encode())
    for status in range(1, 10):
        with pytest.raises(errors.BY_STATUS[status], match="why and what to do") as caught:
            library.check(status)
        assert caught.value.status == status
    with pytest.raises(sluice.Error):
        library.check(77)
    library.check(0)


def test_numbers_that_do_not_fit_are_not_cut_off(make: Make) -> None:
    engine = make()
    a = engine.begin("full")
    for call in (lambda: engine.truncate(a, 1 << 32), lambda: engine.can_admit(-1), lambda: engine.fork(a, -1),
                 lambda: engine.name_tokens(a, 0, [1 << 31]), lambda: engine.watch(a, [1 << 32]),
                 lambda: engine.begin("full", ["x"]), lambda: engine.begin("full", np.zeros((2, 2), np.int64)),
                 lambda: sluice.Bucket(decode_rows=-1), lambda: small_options(threads=1 << 32).resolved(),
                 lambda: small_options(kv_dtype="f64").resolved(), lambda: small_options(device="gpu").resolved(),
                 lambda: engine.attend(sluice.Bucket(), 1 << 32, None, None, None, None)):
        with pytest.raises(sluice.InvalidArgument):
            call()


def test_what_is_of_another_type_is_named(make: Make) -> None:
    engine = make()
    a = engine.begin("full")
    bucket = engine.options.largest
    for call, words in ((lambda: small_options(host_bytes=1e9)._to_struct(), "host_bytes is 1000000000.0; .* whole"),
                        (lambda: small_options(threads="4")._to_struct(), "threads is '4'"),
                        (lambda: small_options(scale="1")._to_struct(), "scale is '1'; .* number"),
                        (lambda: small_options(device=5)._to_struct(), 'device is "5"'),
                        (lambda: small_options(largest=8)._to_struct(), "largest is 8; .* sluice.Bucket"),
                        (lambda: small_options(cores=3)._to_struct(), "cores is 3; .* list"),
                        (lambda: small_options(windows="16")._to_struct(), "windows is '16'; .* list"),
                        (lambda: engine.begin(None), "policy is None"),
                        (lambda: engine.truncate(a, 0.5), "tokens is 0.5"),
                        (lambda: engine.plan([a], bucket), "list of sluice.PlanItem"),
                        (lambda: engine.plan(sluice.PlanItem(a), bucket), "list of sluice.PlanItem")):
        with pytest.raises(sluice.InvalidArgument, match=words):
            call()


def test_use_after_close(make: Make) -> None:
    engine = make()
    a = engine.begin("full")
    bucket = buckets(engine)[1]
    engine.close()
    engine.close()
    rows = np.zeros((4, Q_HEADS, HEAD_DIM), np.float32)
    for call in (lambda: engine.tokens(a), engine.stats, engine.memory, lambda: engine.begin("full"),
                 lambda: engine.plan([], bucket), lambda: engine.finish(1),
                 lambda: engine.attend(bucket, 0, rows, rows, rows, rows),
                 lambda: engine.import_prefix(a, 0, rows, rows), lambda: engine.audit_heads(a)):
        with pytest.raises(sluice.InvalidArgument, match="closed"):
            call()


def test_what_failed_changed_nothing(make: Make) -> None:
    engine = make()
    _, decode = buckets(engine)
    a, story = engine.begin("full"), Story(2)
    short = dataclasses.replace(decode, max_tokens=16)
    for first in range(0, 16, 4):
        forward(engine, short, (a, story, first, 4, False))
    with pytest.raises(sluice.OutOfCapacity, match="17 tokens.*16"):
        engine.plan([sluice.PlanItem(a)], short)
    assert engine.tokens(a) == 16
    forward(engine, decode, (a, story, 16, 1, False))


def test_buckets_are_values() -> None:
    bucket = sluice.Bucket(decode_rows=3, features=sluice.Features.UNBOUNDED)
    for other in (copy.copy(bucket), copy.deepcopy(bucket), pickle.loads(pickle.dumps(bucket))):
        assert other == bucket and hash(other) == hash(bucket) and other._address != bucket._address


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": paths, **environment})


def test_doctor() -> None:
    said = python("-m", "sluice", "doctor")
    assert said.returncode == 0, said.stderr
    assert f"sluice        {sluice.version()}\nABI           9, this package needs 9\nlibrary       /" in said.stdout
    assert Path(said.stdout.split("library")[1].split()[0]).exists()


def test_a_library_that_is_not_there(tmp_path: Path) -> None:
    said = python("-m", "sluice", "doctor", SLUICE_LIBRARY=str(tmp_path / "none.so"))
    assert said.returncode == 1 and "none.so" in said.stdout and "SLUICE_LIBRARY" in said.stdout
    said = python("-m", "sluice", "doctor", SLUICE_LIBRARY="libm.so.6")
    assert said.returncode == 1 and "libm.so.6 is not libsluice.so" in said.stdout

"""Tensors: what is taken in place, what is refused, and how long they are kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import sluice
from conftest import HEAD_DIM, KV_HEADS, LAYERS, Q_HEADS, Story, buckets

Make = Callable[..., sluice.Engine]
Rows = dict[str, np.ndarray]


def rows_of(story: Story, layer: int, dtype: type = np.float32) -> Rows:
    rows = {name: getattr(story, name)[layer, :4].astype(dtype) for name in "qkv"}
    return {**rows, "out": np.zeros_like(rows["q"])}


def attended(engine: sluice.Engine, change: Callable[[Rows], dict[str, object]], dtype: type = np.float32) -> list:
    """A forward of four rows whose tensors are as `change` says; the outputs by layer."""
    bucket, story = buckets(engine)[1], Story(11)
    number = engine.plan([sluice.PlanItem(engine.begin("full"), 4)], bucket)
    outs = []
    for layer in range(LAYERS):
        rows = change(rows_of(story, layer, dtype))
        engine.attend(bucket, layer, rows["q"], rows["k"], rows["v"], rows["out"])
        outs.append(np.array(rows["out"], np.float64))
        np.testing.assert_allclose(outs[-1], story.want(layer, 0, 4)[0], atol=2e-5 if dtype == np.float32 else 0.02)
    engine.finish(number)
    return outs


def padded(array: np.ndarray) -> np.ndarray:
    whole = np.zeros((array.shape[0], array.shape[1] + 1, array.shape[2] + 8), array.dtype)
    whole[:, :-1, :-8] = array
    return whole[:, :-1, :-8]


def heads_first(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.transpose(1, 0, 2)).transpose(1, 0, 2)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("lay", [padded, heads_first])
def test_rows_may_lie_anywhere(make: Make, lay: Callable[[np.ndarray], np.ndarray]) -> None:
    attended(make(), lambda rows: {name: lay(array) for name, array in rows.items()})


@pytest.mark.parametrize("lay", [read_only, lambda array: read_only(padded(array))])
def test_what_is_read_may_be_read_only(make: Make, lay: Callable[[np.ndarray], np.ndarray]) -> None:
    attended(make(), lambda rows: {**{name: lay(rows[name]) for name in "qkv"}, "out": rows["out"]})


def test_halves(make: Make) -> None:
    attended(make(), lambda rows: rows, np.float16)


def bf16_bits(array: np.ndarray) -> np.ndarray:
    return (array.astype(np.float32).view(np.uint32) + 0x8000 >> 16).astype(np.uint16)


def test_bf16_as_bits(make: Make) -> None:
    engine, story = make(), Story(12)
    bucket = buckets(engine)[1]
    for layer in (story.q, story.k, story.v):  # As exact numbers of bf16.
        layer[:] = (bf16_bits(layer).astype(np.uint32) << 16).view(np.float32)
    number = engine.plan([sluice.PlanItem(engine.begin("full"), 4)], bucket)
    for layer in range(LAYERS):
        rows = rows_of(story, layer)
        bits = {name: sluice.bf16(bf16_bits(rows[name])) for name in rows}
        engine.attend(bucket, layer, bits["q"], bits["k"], bits["v"], bits["out"])
        out = (bits["out"].array.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(out, story.want(layer, 0, 4)[0], atol=0.02)
    engine.finish(number)
    with pytest.raises(sluice.InvalidArgument, match="uint16, not of float32"):
        sluice.bf16(rows["q"])


def test_bf16_of_ml_dtypes(make: Make) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    attended(make(), lambda rows: rows, ml_dtypes.bfloat16)


class Exporter:
    """Anything that speaks DLPack, and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, stream: object = None) -> object:
        return self.array.__dlpack__()


def test_dlpack(make: Make) -> None:
    engine = make()
    attended(engine, lambda rows: {**{name: Exporter(rows[name]) for name in "qkv"}, "out": rows["out"]})
    with pytest.raises(sluice.InvalidArgument, match="out is of type Exporter.*for it is written"):
        attended(engine, lambda rows: {**rows, "out": Exporter(rows["out"])})


def overlapping(array: np.ndarray) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(array, strides=(0, *array.strides[1:]))


def odd_strides(array: np.ndarray) -> np.ndarray:
    room = np.zeros(array.nbytes + 64 * 4, np.uint8)
    return np.ndarray(array.shape, array.dtype, room, strides=(array.strides[0] + 2, *array.strides[1:]))


REFUSED: dict[str, tuple[Callable[[np.ndarray], object], str]] = {
    "float64": (lambda array: array.astype(np.float64), r"\.dtype has code 2, 64 bits"),
    "int32": (lambda array: array.astype(np.int32), r"\.dtype has code 0, 32 bits"),
    "uint16, not said to be bf16": (lambda array: array.astype(np.uint16), r"\.dtype has code 1, 16 bits"),
    "byte order": (lambda array: array.astype(">f4"), r"\.dtype is >f4"),
    "objects": (lambda array: array.astype(object), r"\.dtype is object"),
    "complex": (lambda array: array.astype(np.complex64), r"\.dtype "),
    "rank": (lambda array: array[0], r"\.ndim is 2"),
    "rows": (lambda array: array[:3], r" is \[3, .*needs \[4, "),
    "heads": (lambda array: array[:, :1], r" is \[4, 1, 64\]"),
    "head_dim": (lambda array: array[:, :, :32], r" is .*, 32\]"),
    "backwards": (lambda array: array[::-1], r"\.strides\[0\] is -\d+; it must not be negative"),
    "columns": (lambda array: np.asfortranarray(array), r"\.strides\[2\] is \d+;.*contiguous"),
    "strides of half elements": (odd_strides, r"\.strides are .* bytes"),
    "list": (lambda array: array.tolist(), r" is of type list"),
    "none": (lambda array: None, r" is of type NoneType"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_refused(make: Make, name: str, what: str) -> None:
    engine = make()
    change, words = REFUSED[what]
    with pytest.raises(sluice.InvalidArgument, match=f"^{name}{words}"):
        attended(engine, lambda rows: {**rows, name: change(rows[name])})


def test_what_is_written_must_be_its_own_and_writable(make: Make) -> None:
    engine = make(sequences=4, in_flight=4)
    with pytest.raises(sluice.InvalidArgument, match="^out is a read-only array, and it is written"):
        attended(engine, lambda rows: {**rows, "out": read_only(rows["out"])})
    with pytest.raises(sluice.InvalidArgument, match=r"^out\.strides.*overlap"):
        attended(engine, lambda rows: {**rows, "out": overlapping(rows["out"])})
    bucket, rows = buckets(engine)[1], rows_of(Story(11), 0)
    for lse, words in ((np.zeros((4, Q_HEADS), np.float16), "lse.dtype is not f32"),
                       (np.zeros((4, KV_HEADS), np.float32), "lse is"),
                       (np.zeros((4, 2 * Q_HEADS), np.float32)[:, ::2], "lse.strides")):
        with pytest.raises(sluice.InvalidArgument, match=words):
            engine.attend(bucket, 0, *rows.values(), lse)


def test_the_same_rows_for_all_may_be_read(make: Make) -> None:
    engine, story = make(), Story(13)
    bucket, rows = buckets(engine)[1], rows_of(story, 0)
    number = engine.plan([sluice.PlanItem(engine.begin("full"), 4)], bucket)
    for layer in range(LAYERS):
        engine.attend(bucket, layer, overlapping(rows["q"]), overlapping(rows["k"]), overlapping(rows["v"]),
                      rows["out"])
    engine.finish(number)
    # Whatever they ask, all attended values are the same one.
    want = np.repeat(rows["v"][0], Q_HEADS // KV_HEADS, axis=0)
    np.testing.assert_allclose(rows["out"], np.broadcast_to(want, rows["out"].shape), rtol=1e-5)


def alive(engine: sluice.Engine, bucket: sluice.Bucket) -> list[weakref.ref]:
    """Attends one layer, drops all tensors; references to them."""
    rows = rows_of(Story(11), 0)
    engine.attend(bucket, 0, *rows.values())
    return [weakref.ref(array) for array in rows.values()]


def counted(references: list[weakref.ref]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize("failing", [False, True])
def test_nothing_is_kept_where_calls_have_happened(make: Make, failing: bool) -> None:
    engine = make()
    bucket = buckets(engine)[1]
    engine.plan([sluice.PlanItem(engine.begin("full"))], bucket)
    if failing:
        rows = rows_of(Story(11), 0)
        references = [weakref.ref(array) for array in rows.values()]
        with pytest.raises(sluice.InvalidArgument):
            engine.attend(bucket, 1, *rows.values())
        del rows
    else:
        references = alive(engine, bucket)
    assert counted(references) == 0


def test_what_a_stream_may_use_is_kept_until_the_forward_is_over(make: Make) -> None:
    engine = make(timeout_ms=100, in_flight=3)
    engine._asynchronous = True  # As with a GPU.
    bucket = buckets(engine)[1]
    item = [sluice.PlanItem(engine.begin("full"), 4)]
    first = engine.plan(item, bucket)
    kept = alive(engine, bucket)
    rows = rows_of(Story(11), 1)
    engine.attend(bucket, 1, *rows.values())
    second = engine.plan(item, bucket)
    later = alive(engine, bucket)
    assert counted(kept) == counted(later) == 4
    engine.finish(first)
    assert (counted(kept), counted(later)) == (0, 4)
    with pytest.raises(sluice.Timeout):  # It may be waited for again.
        engine.finish(second)
    assert counted(later) == 4
    engine.cancel(second)
    assert counted(later) == 0


def test_what_is_imported_is_kept_until_its_last_layer(make: Make) -> None:
    engine = make()
    engine._asynchronous = True
    a, story = engine.begin("full"), Story(14)
    k, v = story.k[0].copy()[:64], story.v[0].copy()[:64]
    references = [weakref.ref(k), weakref.ref(v)]
    engine.import_prefix(a, 0, k, v)
    del k, v
    assert counted(references) == 2
    engine.import_prefix(a, 1, story.k[1, :64], story.v[1, :64])
    assert counted(references) == 0

"""Device memory for near keys and values where nobody says how much: never more than a GPU has to spare."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import sluice
from sluice._near import SERVED_SHARE, DeviceMemory, default_near_bytes, settle_near

GIB = 1 << 30
TOKEN = 128 << 10  # Bytes of a token's keys and values in Llama-3.1-8B's shape: 32 layers, 8 KV heads of 128.
PAGE = 16 * TOKEN
CONTEXT = 128 << 10
H100 = DeviceMemory(free=60 * GIB, total=80 * GIB)
LISTS = 256 * (20 + 12 * 1024)  # Of what is to come near, of all layers and KV heads.


def options(**changes: object) -> sluice.EngineOptions:
    return sluice.EngineOptions(layers=32, q_heads=32, kv_heads=8, head_dim=128,
                                **{"host_bytes": 32 * GIB, **changes}).resolved()


def test_a_share_of_what_the_host_holds() -> None:
    near = default_near_bytes(options(), CONTEXT, 5 * GIB, H100)
    assert near == int(0.05 * (32 * GIB // PAGE)) * PAGE and near % PAGE == 0
    # Of a shape whose numbers are of 32 bits, twice as much for a token, and as much in all.
    wide = default_near_bytes(options(kv_dtype="f32"), CONTEXT, 5 * GIB, H100)
    assert wide == int(0.05 * (32 * GIB // (2 * PAGE))) * 2 * PAGE


def test_a_server_has_all_near_that_there_is_room_for() -> None:
    table = 4 * 32 * GIB // 512 + LISTS  # What finds near rows.
    own, reserved = 5 * GIB, 8 * GIB
    near = default_near_bytes(options(), CONTEXT, own, H100, SERVED_SHARE)
    most = (H100.free - reserved - own) // 2 - table
    rows = near // 512  # Of one layer and KV head; what is known of each takes 8 bytes.
    assert most - 2 * PAGE < near + 8 * rows <= most and near % PAGE == 0
    assert default_near_bytes(options(host_bytes=8 * GIB), CONTEXT, own, H100, SERVED_SHARE) == 8 * GIB
    assert default_near_bytes(options(sequences=1), 4096, own, H100, SERVED_SHARE) == 4096 * TOKEN


def test_rows_with_scales_take_half_of_the_host_and_as_much_near() -> None:
    # Codes of a byte, and a float32 for each row of 128.
    near = default_near_bytes(options(kv_dtype="fp8_e4m3"), CONTEXT, 5 * GIB, H100)
    assert near == int(0.05 * (32 * GIB // (PAGE // 2 * 132 // 128))) * PAGE


def test_no_more_than_sequences_can_have() -> None:
    assert default_near_bytes(options(sequences=1), 4096, 5 * GIB, H100) == 4096 * TOKEN
    assert default_near_bytes(options(sequences=2), 4090, 5 * GIB, H100) == 2 * 4096 * TOKEN


@pytest.mark.parametrize("host", [1, 8, 64, 512])
def test_much_stays_free(host: int) -> None:
    made, some, bounded = options(host_bytes=host * GIB), 0, 0
    own, table = host * GIB // 7, 4 * host * GIB // 512  # 4-bit copies of keys; and what finds near rows.
    for total, free in itertools.product((8, 24, 80, 141), range(142)):
        memory = DeviceMemory(min(free, total) * GIB, total * GIB)
        near = default_near_bytes(made, CONTEXT, own, memory)
        assert 0 <= near <= 0.05 * host * GIB and near % PAGE == 0
        if near:
            left = memory.free - own - table - near
            assert left >= max(2 * GIB, 0.1 * memory.total) + near
        some, bounded = some + (near > 0), bounded + (0 < near < 0.04 * host * GIB)
    assert some and (bounded or host < 64)


def test_nothing_where_little_is_free() -> None:
    for free, own in ((9 * GIB, 5 * GIB), (4 * GIB, 5 * GIB), (0, 0)):
        assert default_near_bytes(options(), CONTEXT, own, DeviceMemory(free, 80 * GIB)) == 0
    # A host of less than 20 pages has less than a near one.
    assert default_near_bytes(options(host_bytes=19 * PAGE), CONTEXT, 0, H100) == 0


@pytest.mark.parametrize("more", [200_000, 1 << 20, 3_333_333])
def test_a_bound_of_the_device(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The CPU's device has no bound; what is taken of it is counted as of a GPU.
    to_struct = sluice.EngineOptions._to_struct
    monkeypatch.setattr(sluice.EngineOptions, "_to_struct",
                        lambda options: to_struct(dataclasses.replace(options, device_bytes=None)))
    made = sluice.EngineOptions(layers=2, q_heads=4, kv_heads=2, head_dim=64, host_bytes=8 << 20, threads=1,
                                pin_threads=False)
    made.device_bytes = dataclasses.replace(made, near_bytes=0).memory_needed().device + more
    settle_near(made, None, CONTEXT, H100, SERVED_SHARE)
    assert 0 < made.near_bytes <= more
    with sluice.Engine(made) as engine:
        assert engine.memory().device <= made.device_bytes


def test_what_an_engine_would_take_is_what_it_takes() -> None:
    made = sluice.EngineOptions(layers=2, q_heads=4, kv_heads=2, head_dim=64, host_bytes=8 << 20, near_bytes=1 << 20,
                                policies=["quest"], threads=1, pin_threads=False)
    needed = made.memory_needed()
    with sluice.Engine(made) as engine:
        memory = engine.memory()
    names = ("far_pages", "pinned", "near_pages", "codes", "digests", "buffers", "device")
    assert [getattr(needed, name) for name in names] == [getattr(memory, name) for name in names]
    assert needed.device == needed.near_pages + needed.codes + needed.digests + needed.buffers > 1 << 20
    with pytest.raises(sluice.InvalidArgument, match="head_dim"):
        dataclasses.replace(made, head_dim=17).memory_needed()


def test_near_rows_get_what_everything_else_leaves_of_a_budget() -> None:
    made = sluice.EngineOptions(layers=2, q_heads=4, kv_heads=2, head_dim=64, host_bytes=8 << 20, near_bytes=1 << 20,
                                policies=["quest"])
    budget = made.memory_needed().device + (1 << 20)
    made.near_bytes = made.near_bytes_within(budget)
    assert 15 << 17 <= made.near_bytes < 2 << 20  # Tables grow, too.
    assert made.memory_needed().device <= budget
    with pytest.raises(sluice.OutOfCapacity, match="without near rows the engine takes"):
        made.near_bytes_within(1 << 10)
    assert made.near_bytes_within(80 << 30) == made.host_bytes  # All that there can be.


def test_tables_of_near_rows_are_as_counted() -> None:
    """What near memory takes beside itself is what default_near_bytes leaves room for."""
    made = options(host_bytes=GIB)
    without = made.memory_needed().buffers
    made.near_bytes = 40 * PAGE
    tables = 4 * (GIB // PAGE) * PAGE // 512 + 8 * 40 * PAGE // 512 + LISTS
    assert made.memory_needed().buffers - without == pytest.approx(tables, abs=64 << 10)


@pytest.fixture
def needed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A GPU's, without one: 5 GiB and what is near. What was asked for."""
    asked: list[int] = []

    def memory_needed(self: sluice.EngineOptions) -> sluice.Memory:
        asked.append(self.near_bytes)
        return sluice.Memory(**{**dict.fromkeys((field.name for field in dataclasses.fields(sluice.Memory)), 0),
                                "near_pages": self.near_bytes, "codes": 4 * GIB, "buffers": GIB})

    monkeypatch.setattr(sluice.EngineOptions, "memory_needed", memory_needed)
    yield asked


def test_what_is_given_stays(needed: list[int]) -> None:
    for given in (0, 7 * PAGE):
        made = options(device="cuda")
        settle_near(made, given, CONTEXT, H100)
        assert made.near_bytes == given
    assert needed == [0, 7 * PAGE]
    made = options(device="cuda")
    settle_near(made, None, CONTEXT, H100)
    assert made.near_bytes == default_near_bytes(made, CONTEXT, 5 * GIB, H100) > 0


@pytest.mark.parametrize(("given", "free", "words"), [
    (2 * GIB, 6 * GIB, r"takes 7,516,192,768 bytes.* 6,442,450,944 are free: 2,147,483,648 for near.*near_bytes, or"),
    (0, 4 * GIB, "0 for near.*Give it a smaller host_bytes, of which"),
    (None, 4 * GIB, "0 for near.*Give it a smaller host_bytes, of which")])
def test_too_little_device_memory(needed: list[int], given: int | None, free: int, words: str) -> None:
    with pytest.raises(sluice.OutOfCapacity, match=words):
        settle_near(options(device="cuda"), given, CONTEXT, DeviceMemory(free, 80 * GIB))


def test_near_rows_that_a_gpu_cannot_attend(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory_needed(self: sluice.EngineOptions) -> sluice.Memory:
        if self.near_bytes:
            raise sluice.Unsupported("near tokens of a row")
        return sluice.Memory(**dict.fromkeys((field.name for field in dataclasses.fields(sluice.Memory)), 0))

    monkeypatch.setattr(sluice.EngineOptions, "memory_needed", memory_needed)
    made = options(device="cuda")
    settle_near(made, None, CONTEXT, H100)
    assert made.near_bytes == 0
    with pytest.raises(sluice.Unsupported):
        settle_near(made, PAGE, CONTEXT, H100)

"""Prefixes that host memory has no room for go to a folder and come back; nothing else of a folder is touched."""

from __future__ import annotations

import os
import resource
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sluice.serving.disk import Folder, page_digests
from sluice.serving.disk_files import locked
from sluice.serving.loop import Loop
from sluice.serving.sessions import signature_of
from sluice.serving.tier import DiskTier, kind_of
from small import KV_BYTES, SHAPE, bare_model, expected, greedy, prompt_ids, run, same

PAGE = 16
PAGE_BYTES = PAGE * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * 2 * SHAPE["head_dim"] * KV_BYTES
LENGTH, TOKENS = 100, 8
MOST = 64 << 20


@pytest.fixture
def tiered(make_loop: Callable[..., Loop]) -> Iterator[Callable[..., Loop]]:
    """Loops with room for three prompts and a folder for others."""
    def make(path: Path, most: int = MOST, model: str = "", **options: object) -> Loop:
        loop = make_loop(**{"host_bytes": 24 * PAGE_BYTES, "sequences": 2, **options})
        folder = Folder(path, most, model or signature_of(loop.model, "tiny"))
        loop._disk = DiskTier(loop.model.engine, loop.model.policy, folder)
        return loop

    yield make


def ask(loop: Loop, seeds: range, after: Callable[[int], None] = lambda _: None) -> list[tuple[list[int], int]]:
    """Answers to prompts, one after the other, and how many tokens of each were known."""
    told = []
    for seed in seeds:
        heard = run(loop, [greedy(ask.number, prompt_ids(LENGTH, seed), TOKENS)])
        told.append((heard.tokens(ask.number), heard.events[ask.number][0].cached))
        ask.number += 1
        after(seed)
    return told


ask.number = 1


def figures(loop: Loop) -> dict[str, int]:
    return loop.status().disk


def wants(seeds: range) -> list[list[int]]:
    return [expected(bare_model("llama"), prompt_ids(LENGTH, seed), TOKENS) for seed in seeds]


@pytest.mark.parametrize("policy", ["full", "sluice"])
def test_prefixes_come_back(tiered: Callable[..., Loop], make_loop: Callable[..., Loop], tmp_path: Path,
                            policy: str) -> None:
    """The same tokens as without a folder, and nothing is read twice."""
    seeds, loop = range(10), tiered(tmp_path, policy=policy)
    first, again = ask(loop, seeds), ask(loop, seeds)
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in again]
    if policy == "full":
        assert all(same(bare_model("llama"), prompt_ids(LENGTH, seed), got, want)
                   for seed, (got, _), want in zip(seeds, first, wants(seeds)))
    else:
        assert first == ask(make_loop(policy=policy, prefix=False), seeds)
    assert [known for _, known in first] == [0] * 10
    assert [known for _, known in again] == [LENGTH - LENGTH % PAGE] * 10
    told = figures(loop)
    assert told["found"] >= 7 and told["written"] >= 7 and told["refused"] == 0
    assert {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()} == {0o600}


def test_nothing_is_written_while_there_is_room(tiered: Callable[..., Loop], tmp_path: Path) -> None:
    loop = tiered(tmp_path, host_bytes=8 << 20)
    ask(loop, range(5))
    assert figures(loop)["written"] == 0 and [each.name for each in tmp_path.iterdir()] == ["lock"]


def test_they_outlive_their_server_and_belong_to_their_model(tiered: Callable[..., Loop], tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    ask(tiered(tmp_path), range(8))
    files = set(tmp_path.iterdir())
    other = tiered(tmp_path, model="another one")
    assert "of other models, and stay" in capsys.readouterr().err
    assert [known for _, known in ask(other, range(2))] == [0, 0] and files <= set(tmp_path.iterdir())
    assert ask(tiered(tmp_path), range(2)) == [(tokens, LENGTH - LENGTH % PAGE) for tokens in wants(range(2))]


def test_a_conversation_is_written_once(tiered: Callable[..., Loop], tmp_path: Path) -> None:
    """With the folder's bytes its own; what it begins with is no file any more."""
    loop, ids = tiered(tmp_path), prompt_ids(40, 50)
    for turn in range(3):
        run(loop, [greedy(100 + turn, ids, 1)])
        ids = [*ids, *prompt_ids(40, 60 + turn)]
        ask(loop, range(10 * turn, 10 * turn + 6))
    digests = page_digests(ids[:120], PAGE, 0)
    names = {each.stem for each in tmp_path.glob("*.kv")}
    held = [at for at, each in enumerate(digests) if loop._disk._folder.name_of([each]) in names]
    assert held == [6]


def test_damage_costs_a_prefix(tiered: Callable[..., Loop], tmp_path: Path,
                               capsys: pytest.CaptureFixture[str]) -> None:
    want = ask(tiered(tmp_path), range(8))
    kept = sorted(tmp_path.glob("*.kv"))
    for at, each in enumerate(kept):
        content = bytearray(each.read_bytes())
        content[len(content) // 2] ^= 1
        each.write_bytes(content if at % 3 == 0 else content[:100] if at % 3 == 1 else b"")
    (tmp_path / "notes.kv").write_bytes(b"mine")
    broken = sorted(tmp_path.glob("*.ids"))[0]
    broken.write_bytes(b"{")
    loop = tiered(tmp_path)
    assert f"{broken.name} is damaged and is deleted" in capsys.readouterr().err and not broken.exists()
    assert [tokens for tokens, _ in ask(loop, range(8))] == [tokens for tokens, _ in want]
    assert figures(loop)["refused"] >= 3 and "is damaged and is deleted" in capsys.readouterr().err
    assert (tmp_path / "notes.kv").read_bytes() == b"mine"
    assert ask(tiered(tmp_path), range(2))[0][1] > 0  # What was written since is good.


def test_the_limit_holds(tiered: Callable[..., Loop], tmp_path: Path) -> None:
    """At all times, and the oldest give way."""
    loop, sizes = tiered(tmp_path), []
    ask(loop, range(4))
    one = max(each.stat().st_size for each in tmp_path.glob("*.kv")) + 4096

    def measure(_: int) -> None:
        sizes.append(sum(each.stat().st_size for each in tmp_path.iterdir() if each.suffix in (".kv", ".ids")))

    small = tiered(tmp_path, most=3 * one)
    ask(small, range(20), measure)
    assert 0 < sizes[-1] <= 3 * one and max(sizes[4:]) <= 3 * one and figures(small)["bytes"] == sizes[-1]
    names = {loop._disk._folder.name_of(page_digests(prompt_ids(LENGTH, seed), PAGE, 0)): seed for seed in range(20)}
    kept = sorted(names[each.stem] for each in tmp_path.glob("*.kv"))
    assert len(kept) == 3 and kept[0] > 10
    none = tiered(tmp_path / "none", most=1000)
    ask(none, range(8))
    assert figures(none)["written"] == figures(none)["refused"] == 0


def test_two_servers_share_a_folder(tiered: Callable[..., Loop], tmp_path: Path) -> None:
    one, other = tiered(tmp_path), tiered(tmp_path)
    ask(one, range(8))
    assert all(known for _, known in ask(other, range(2)))
    with one._disk._folder.locked() as mine, other._disk._folder.locked() as theirs:
        assert mine and not theirs
        written = figures(other)["written"]
        assert [tokens for tokens, _ in ask(other, range(20, 26))] == wants(range(20, 26))
        assert figures(other)["written"] == written  # Nobody waits.
    for each in tmp_path.glob("*.kv"):
        each.unlink()  # As the other one might.
    assert [tokens for tokens, _ in ask(one, range(8))] == wants(range(8)) and figures(one)["refused"] == 0


def test_a_disk_that_is_full(tiered: Callable[..., Loop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                             capsys: pytest.CaptureFixture[str]) -> None:
    loop = tiered(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        assert [tokens for tokens, _ in ask(loop, range(8))] == wants(range(8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert capsys.readouterr().err.count("cannot be written to") == 1  # It waits before it tries again.
    assert [each.name for each in tmp_path.iterdir()] == ["lock"] and figures(loop)["refused"] == 1
    monkeypatch.setattr(loop._disk, "_paused_until", 0.0)
    ask(loop, range(8))
    assert figures(loop)["written"] > 0


def test_a_folder_that_goes_away(tiered: Callable[..., Loop], tmp_path: Path,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    """Its lock cannot be opened, and answers come all the same."""
    loop = tiered(tmp_path / "disk")
    ask(loop, range(4))
    (tmp_path / "disk").rename(tmp_path / "moved")
    loop._disk.bring = lambda *_: None  # What is written meets it first.
    assert [tokens for tokens, _ in ask(loop, range(8))] == wants(range(8))
    assert figures(loop)["refused"] == 1 and capsys.readouterr().err.count("cannot be written to") == 1


def test_names_that_are_no_files_of_ours(tiered: Callable[..., Loop], tmp_path: Path,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    """Pipes keep nobody waiting; links and folders are left alone; what is within a file may be anything."""
    want, tag = ask(tiered(tmp_path), range(8)), next(tmp_path.glob("*.ids")).stem[:16]
    names = [tmp_path / f"{tag}-{at:032x}.ids" for at in range(5)]
    (tmp_path / "theirs").write_bytes(b"theirs")
    os.mkfifo(names[0])
    names[1].symlink_to(tmp_path / "theirs")
    names[2].mkdir()
    names[3].write_bytes(b'{"version": 1, "tokens": Infinity, "marks": []}\n')
    names[4].write_bytes(b"[" * 4096)
    for each in names:
        each.with_suffix(".kv").symlink_to(tmp_path / "theirs")
    loop = tiered(tmp_path)
    said = capsys.readouterr().err
    assert [f"{each.name} is damaged" in said for each in names] == [False] * 3 + [True] * 2
    assert [os.path.lexists(each) for each in names] == [True] * 3 + [False] * 2
    assert [tokens for tokens, _ in ask(loop, range(8))] == [tokens for tokens, _ in want]
    assert (tmp_path / "theirs").read_bytes() == b"theirs"


def test_a_prefix_that_cannot_be_used_stops_no_other(tiered: Callable[..., Loop], tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    """One that another version wrote, say. It is asked for once, and stays."""
    ask(tiered(tmp_path), range(8))
    ask(tiered(tmp_path / "other", model="another one"), range(8))
    mine = sorted(tmp_path.glob("*.kv"))
    name = next(each for each in mine if list((tmp_path / "other").glob(f"*{each.stem[16:]}.kv")))
    next((tmp_path / "other").glob(f"*{name.stem[16:]}.kv")).replace(name)
    loop = tiered(tmp_path)
    first, again = ask(loop, range(8)), ask(loop, range(8))
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in again] == wants(range(8))
    assert capsys.readouterr().err.count(f"{name.name} is not read, and stays") == 1
    assert figures(loop)["found"] >= 6 and figures(loop)["refused"] == 1


def test_what_cannot_be_written_is_not_kept(tiered: Callable[..., Loop], tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process, such as one that is suspended, has the lock for ever: memory stays, and steps cost no more."""
    loop, listed = tiered(tmp_path), []
    monkeypatch.setattr(loop._disk._folder, "bytes", lambda: listed.append(1) or 0)
    with locked(tmp_path) as mine:
        assert mine
        ask(loop, range(30))
    assert not listed and len(loop._disk._unwritten) <= 6


def test_the_limit_holds_from_the_beginning(tiered: Callable[..., Loop], tmp_path: Path) -> None:
    ask(tiered(tmp_path), range(8))
    sizes = {each: each.stat().st_size + each.with_suffix(".ids").stat().st_size for each in tmp_path.glob("*.kv")}
    most = sum(sizes.values()) // 2
    assert 0 < figures(tiered(tmp_path, most=most))["bytes"] <= most


def test_engines_whose_keys_and_values_are_others(make_loop: Callable[..., Loop]) -> None:
    made = [make_loop(**options).model.engine.options for options in (
        {}, {"kv_dtype": "f16"}, {"prefill_mode": "flex"}, {"prefill_mode": "flex", "prefill_gamma": 0.5})]
    assert len({kind_of(options, "tiny") for options in made}) == len(made)
    assert kind_of(made[0], "tiny") == kind_of(make_loop(prefill_gamma=0.5).model.engine.options, "tiny")


def test_what_a_crash_leaves_is_cleared(tiered: Callable[..., Loop], tmp_path: Path) -> None:
    loop = tiered(tmp_path)
    ask(loop, range(8))
    half, other = sorted(tmp_path.glob("*.kv"))[:2]
    half.with_suffix(".ids").unlink()
    other.unlink()
    for name, age in (("abc123", 3600), ("abc124", 0)):  # The second one may be of a session that is being parked.
        (tmp_path / f".sluice-{name}").write_bytes(b"half")
        os.utime(tmp_path / f".sluice-{name}", (time.time() - age,) * 2)
    (tmp_path / ".sluice-folder").mkdir()
    ask(loop, range(20, 28))
    assert not half.exists() and not other.with_suffix(".ids").exists()
    assert {each.name for each in tmp_path.glob(".sluice-*")} == {".sluice-abc124", ".sluice-folder"}
    assert figures(loop)["refused"] == 0

"""--session of run and chat: what was read once is not read again, and nothing of another model or prompt is used."""

from __future__ import annotations

import copy
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sluice
import torch
from sluice.serving.loop import Loop
from sluice.serving.model import PackedModel
from sluice.serving.sessions import Conversation, Session, locked
from small import bare_model, tokenizer
from test_command import ARGUMENTS, Done, answer_to, command, here  # noqa: F401: a fixture
from waiting import DEADLINE_S

PROMPT = "the cat sat on the mat and the dog ran " * 12
PAGE = 16


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens of prompts each forward reads."""
    seen: list[int] = []
    plan = sluice.Engine.plan
    monkeypatch.setattr(sluice.Engine, "plan", lambda engine, items, *rest: seen.append(
        sum(item.tokens for item in items if item.prefill)) or plan(engine, items, *rest))
    return seen


def test_a_prompt_is_read_once(folder: Path, here: Callable[..., Done], tmp_path: Path, read: list[int]) -> None:
    file, whole = tmp_path / "s", len(tokenizer().encode(PROMPT))
    first = command("run", folder, "--prompt", PROMPT, "--session", str(file))  # A process of its own.
    assert (first.returncode, first.stdout, first.stderr) == (0, answer_to(PROMPT) + "\n", "")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = here("run", "--prompt", PROMPT, "--session", str(file))
    assert (again.returncode, again.stdout, again.stderr) == (0, first.stdout, "")
    assert 0 < sum(read) <= PAGE < whole  # The page that is not full.
    read.clear()
    longer = PROMPT + "the mat the mat " * 5
    more = here("run", "--prompt", longer, "--session", str(file))
    assert (more.returncode, more.stdout) == (0, answer_to(longer) + "\n")
    assert sum(read) <= len(tokenizer().encode(longer)) - whole + PAGE
    read.clear()
    here("run", "--prompt", longer, "--session", str(file))
    assert sum(read) <= PAGE  # The file has the longer one now.


def test_answers_of_one_token_are_kept_too(here: Callable[..., Done], tmp_path: Path, read: list[int]) -> None:
    for _ in range(2):
        read.clear()
        assert here("run", "--prompt", PROMPT, "--session", str(tmp_path / "s"), "--max-tokens", "1").returncode == 0
    assert sum(read) <= PAGE


@pytest.mark.parametrize("tokens", [PAGE - 1, PAGE, PAGE + 1])
def test_prompts_of_about_a_page(here: Callable[..., Done], tmp_path: Path, tokens: int) -> None:
    prompt = "x" * 40
    while len(tokenizer().encode(prompt)) > tokens:
        prompt = prompt[:-1]
    assert len(tokenizer().encode(prompt)) == tokens
    first, again = (here("run", "--prompt", prompt, "--session", str(tmp_path / "s")) for _ in range(2))
    assert first == again and first.returncode == 0 and first.stderr == ""


def test_a_shorter_prompt_does_not_take_its_place(here: Callable[..., Done], tmp_path: Path, read: list[int]) -> None:
    file, short = tmp_path / "s", PROMPT[:120]
    assert here("run", "--prompt", PROMPT, "--session", str(file)).returncode == 0
    was = file.read_bytes()
    done = here("run", "--prompt", short + "x", "--session", str(file))
    assert (done.returncode, done.stdout) == (0, answer_to(short + "x") + "\n")
    assert f"--session {file} stays as it is" in done.stderr and file.read_bytes() == was


def test_a_session_that_has_no_room(here: Callable[..., Done], tmp_path: Path) -> None:
    file = tmp_path / "s"
    assert here("run", "--prompt", PROMPT, "--session", str(file)).returncode == 0
    done = here("run", "--prompt", "a dog", "--session", str(file), "--context", "64")
    assert done.returncode == 1 and f"--session {file} has no room" in done.stderr
    assert "give a larger --context or --host-bytes" in done.stderr


def test_a_line_that_is_too_long_loses_nothing(here: Callable[..., Done], tmp_path: Path) -> None:
    file = tmp_path / "s"
    assert here("chat", "--session", str(file), typed="a dog\nthe mat\n").returncode == 0
    kept = json.loads((tmp_path / "s.json").read_text())["messages"]
    done = here("chat", "--session", str(file), typed="the dog ran " * 4000 + "\nthe cat\n")
    assert done.returncode == 0 and "write less" in done.stderr
    messages = json.loads((tmp_path / "s.json").read_text())["messages"]
    assert messages[:4] == kept and [each["role"] for each in messages[4:]] == ["user", "assistant"]
    # Turns that the context has no room for stay in the file.
    done = here("chat", "--session", str(tmp_path / "t"), "--context", "100",
                typed="\n".join(["the cat sat on the mat"] * 6) + "\n")
    assert done.returncode == 0 and "are left out from here on" in done.stderr
    assert len(json.loads((tmp_path / "t.json").read_text())["messages"]) == 12


def test_what_is_not_of_this_prompt_and_model(folder: Path, here: Callable[..., Done], tmp_path: Path) -> None:
    file = tmp_path / "s"
    assert here("run", "--prompt", PROMPT, "--session", str(file)).returncode == 0
    was = file.read_bytes()
    other = copy.deepcopy(bare_model("llama"))
    with torch.no_grad():
        next(other.parameters()).mul_(0.5)
    other.save_pretrained(tmp_path / "other")
    tokenizer().save_pretrained(tmp_path / "other")
    for arguments in (("--prompt", "a " + PROMPT), ("--prompt", PROMPT, "--policy", "sluice"),
                      ("--prompt", PROMPT, "--model", str(tmp_path / "other"))):
        done = here("run", "--session", str(file), *arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert f"--session {file} is not of this prompt and model: " in done.stderr
        assert "give another file, or remove this one" in done.stderr and file.read_bytes() == was
    file.write_bytes(was[:-100] + bytes(50) + was[-50:])
    done = here("run", "--session", str(file), "--prompt", PROMPT)
    assert (done.returncode, done.stdout) == (2, "") and "is not of this prompt and model" in done.stderr


def test_a_session_that_cannot_be_written(here: Callable[..., Done], tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise sluice.ReadWriteError("no space left on device")

    monkeypatch.setattr(sluice.Engine, "park", full)
    done = here("run", "--prompt", PROMPT, "--session", str(tmp_path / "s"))
    told = f"sluice: --session {tmp_path / 's'} was not written: no space left on device\n"
    # The answer all the same.
    assert (done.returncode, done.stdout, done.stderr) == (1, answer_to(PROMPT) + "\n", told)
    assert not list(tmp_path.iterdir())
    plain = here("chat", typed=PROMPT + "\n")
    done = here("chat", "--session", str(tmp_path / "s"), typed=PROMPT + "\n")
    assert (done.returncode, done.stdout, done.stderr) == (1, plain.stdout, told)
    assert [each.name for each in tmp_path.iterdir()] == ["s.json"]


def test_a_conversation_whose_keys_and_values_are_not_there_any_more(here: Callable[..., Done], tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as of an engine that has failed: that they are not in the file is told."""
    park_known = Session.park_known

    def fails(session: Session, ids: list[int]) -> None:
        monkeypatch.setattr(PackedModel, "begin", refuses)
        park_known(session, ids)

    def refuses(*_: object) -> int:
        raise sluice.DeviceError("the device is lost")

    monkeypatch.setattr(Session, "park_known", fails)
    done = here("chat", "--session", str(tmp_path / "s"), typed="a dog\n")
    assert (done.returncode, done.stderr) == (
        1, f"sluice: --session {tmp_path / 's'} was not written: the device is lost\n")
    assert [each.name for each in tmp_path.iterdir()] == ["s.json"]


def test_messages_that_cannot_be_written_are_written_when_they_can(here: Callable[..., Done], tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    write, tries = Conversation._write, 0

    def full(conversation: Conversation, messages: list[dict[str, str]]) -> None:
        nonlocal tries
        tries += 1
        if tries <= most:
            raise OSError(28, "No space left on device")
        write(conversation, messages)

    monkeypatch.setattr(Conversation, "_write", full)
    for most, code in ((1, 0), (2, 1)):  # Behind the turn, and at the end once more.
        tries = 0
        done = here("chat", "--session", str(tmp_path / str(most)), typed="a dog\n")
        assert (done.returncode, done.stderr.count("No space left on device"), tries) == (code, most, 2)
        assert (tmp_path / f"{most}.json").exists() == (code == 0)


def test_a_conversation_goes_on(here: Callable[..., Done], tmp_path: Path, read: list[int]) -> None:
    lines = (PROMPT, "a dog", "the mat")
    whole = here("chat", "--system", "be brief", typed="\n".join(lines) + "\n")
    assert whole.returncode == 0, whole.stderr
    file, told = tmp_path / "s", ""
    for at, line in enumerate(lines):
        read.clear()
        done = here("chat", "--session", str(file), *(("--system", "be brief") if at == 0 else ()), typed=line + "\n")
        assert (done.returncode, done.stderr) == (0, "")
        told += done.stdout
        assert (sum(read) > len(tokenizer().encode(PROMPT))) == (at == 0)
    assert told == whole.stdout
    messages = json.loads((tmp_path / "s.json").read_text())["messages"]
    assert [each["role"] for each in messages] == ["system"] + 3 * ["user", "assistant"]
    assert [each["content"] for each in messages[1::2]] == [line for line in lines]
    assert {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()} == {0o600}
    assert {each.name for each in tmp_path.iterdir()} == {"s", "s.json"}


def test_without_its_keys_and_values_a_conversation_is_read_anew(here: Callable[..., Done], tmp_path: Path) -> None:
    file = tmp_path / "s"
    here("chat", "--session", str(file), typed=PROMPT + "\n")
    kept = here("chat", "--session", str(file), typed="a dog\n")
    messages = json.loads((tmp_path / "s.json").read_text())["messages"]
    (tmp_path / "s.json").write_text(json.dumps({"messages": messages[:2]}))
    file.unlink()
    assert here("chat", "--session", str(file), typed="a dog\n").stdout == kept.stdout


def test_a_chat_in_which_nothing_is_said(here: Callable[..., Done], tmp_path: Path) -> None:
    done = here("chat", "--session", str(tmp_path / "s"), "--system", "be brief", typed="\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and not list(tmp_path.iterdir())


def test_what_is_no_conversation(here: Callable[..., Done], tmp_path: Path) -> None:
    file, beside = tmp_path / "s", tmp_path / "s.json"
    for text in ("{", "[]", '{"messages": {}}', '{"messages": [{"role": "user"}]}',
                 '{"messages": [{"role": "user", "content": 1}]}'):
        beside.write_text(text)
        done = here("chat", "--session", str(file), typed="a dog\n")
        assert done.returncode == 2 and f"{beside} is no conversation" in done.stderr and beside.read_text() == text
    beside.write_text('{"messages": [{"role": "system", "content": "be brief"}]}')
    done = here("chat", "--session", str(file), "--system", "be long", typed="a dog\n")
    assert done.returncode == 2 and "has begun with another --system" in done.stderr
    beside.unlink()
    assert here("run", "--prompt", PROMPT, "--session", str(file)).returncode == 0
    done = here("chat", "--session", str(file), typed="a dog\n")
    assert done.returncode == 2 and "is no chat's" in done.stderr


def test_what_sessions_do_not_go_with(here: Callable[..., Done], tmp_path: Path,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(tmp_path / "s")
    for arguments, words in ((("--session", file, "--no-prefix-cache"), "leave --no-prefix-cache out"),
                             (("--session", str(tmp_path / "none" / "s")), f"there is no folder {tmp_path / 'none'}")):
        done = here("run", "--prompt", "a dog", *arguments)
        assert done.returncode == 2 and words in done.stderr
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    done = here("run", "--prompt", "a dog", "--session", file)
    assert done.returncode == 2 and "several processes share has none" in done.stderr


def test_two_processes_of_one_session(folder: Path, here: Callable[..., Done], tmp_path: Path, read: list[int]) -> None:
    """The second is refused, and SIGTERM ends the first with all that was said in its files."""
    file = tmp_path / "s"
    words = ("chat", "--model", str(folder), *ARGUMENTS, "--session", str(file))
    first = subprocess.Popen([sys.executable, "-m", "sluice", *words], text=True, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        first.stdin.write(PROMPT + "\n")
        first.stdin.flush()
        assert first.stdout.readline()
        for name, arguments in (("run", ("--prompt", PROMPT)), ("chat", ())):
            done = here(name, "--session", str(file), *arguments, typed="a dog\n")
            assert (done.returncode, done.stdout) == (2, "")
            assert f"--session {file} is in use by process {first.pid}; wait for its end" in done.stderr
        first.send_signal(signal.SIGTERM)
        _, errors = first.communicate(timeout=DEADLINE_S)
    finally:
        first.kill()
    assert (first.returncode, errors) == (128 + signal.SIGTERM, "")
    assert {each.name for each in tmp_path.iterdir()} == {"s", "s.json"}
    read.clear()
    assert here("chat", "--session", str(file), typed="a dog\n").returncode == 0
    assert 0 < sum(read) < len(tokenizer().encode(PROMPT))
    assert len(json.loads((tmp_path / "s.json").read_text())["messages"]) == 4


def test_a_lock_that_was_left_behind(tmp_path: Path) -> None:
    """By a process that was killed: the kernel has let go of it."""
    file, lock = tmp_path / "s", tmp_path / "s.lock"
    lock.write_text("sluice session, process 1\n")
    with locked(file):
        assert lock.read_text() == f"sluice session, process {os.getpid()}\n"
        with pytest.raises(sluice.InvalidArgument, match=f"in use by process {os.getpid()};"), locked(file):
            pass
    assert not lock.exists()
    with locked(None), locked(file):
        pass


@pytest.mark.parametrize("text", ["yarn lockfile v1\n", "", "1234\n", "sluice session, process 1\n more"])
def test_a_file_that_is_no_lock_of_ours(here: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                        text: str) -> None:
    """Such as yarn.lock beside --session yarn: it is neither emptied nor removed, nor is what a link leads to."""
    monkeypatch.setattr("sluice.serving.sessions._EMPTY_S", 0.1)
    for name in ("file", "link", "dangling"):
        lock, other = tmp_path / f"{name}.lock", tmp_path / f"{name}.other"
        if name != "dangling":
            (lock if name == "file" else other).write_text(text)
        if name != "file":
            lock.symlink_to(other)
        before = {each.name: each.is_symlink() or each.read_text() for each in tmp_path.iterdir()}
        done = here("run", "--prompt", "a dog", "--session", str(tmp_path / name))
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{lock} is no lock of a session" in done.stderr and "give another file" in done.stderr
        assert {each.name: each.is_symlink() or each.read_text() for each in tmp_path.iterdir()} == before


def test_what_is_no_file_where_a_lock_should_be(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.lock")
    (tmp_path / "folder.lock").mkdir()
    for name in ("fifo", "folder"):
        with pytest.raises(sluice.InvalidArgument, match="is no lock of a session"), locked(tmp_path / name):
            pass
        assert (tmp_path / f"{name}.lock").exists()


def test_a_lock_that_another_process_has_replaced(tmp_path: Path) -> None:
    """What has come into its place is not removed."""
    file, lock = tmp_path / "s", tmp_path / "s.lock"
    with locked(file):
        lock.unlink()
        lock.write_text("another's")
    assert lock.read_text() == "another's"


def test_many_processes_that_begin_at_once(tmp_path: Path) -> None:
    """One at a time has it, and nobody is told that a lock which is just made is another program's."""
    program = ("import sys, sluice; from pathlib import Path; from sluice.serving.sessions import locked\n"
               "held = Path(sys.argv[1] + '.held')\n"
               "for _ in range(100):\n"
               "    try:\n"
               "        with locked(Path(sys.argv[1])):\n"
               "            held.mkdir(); held.rmdir()\n"
               "    except sluice.InvalidArgument as error:\n"
               "        assert 'in use' in str(error), error\n")
    processes = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "s")], stderr=subprocess.PIPE)
                 for _ in range(4)]
    assert [each.communicate(timeout=DEADLINE_S)[1] for each in processes] == [b""] * 4
    assert not list(tmp_path.iterdir())


def test_a_folder_in_which_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has can be read."""
    def refuses(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", refuses)
    with locked(tmp_path / "s"):
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", [1, 4])
def test_sigterm_in_an_answer(here: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                              step: int) -> None:
    """While the prompt is read, and later: the forward ends, what was told stays, and both files are written."""
    steps, take = 0, Loop.step

    def stops(loop: Loop) -> object:
        nonlocal steps
        steps += 1
        if steps == step:
            signal.raise_signal(signal.SIGTERM)
        return take(loop)

    monkeypatch.setattr(Loop, "step", stops)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        here("chat", "--session", str(tmp_path / "s"), typed=PROMPT + "\na dog\n")
    assert ended.value.code == 128 + signal.SIGTERM and steps == step
    assert signal.getsignal(signal.SIGTERM) is before
    messages = json.loads((tmp_path / "s.json").read_text())["messages"]
    assert [each["role"] for each in messages] == ["user", "assistant"] and (messages[1]["content"] != "") == (step > 1)
    assert {each.name for each in tmp_path.iterdir()} == {"s", "s.json"}

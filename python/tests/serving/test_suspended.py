"""Processes that are suspended and go on: what they wait for has not come too late."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import openai
import pytest
from server import Server
from small import prompt_ids
from test_connections import answer, head, post, reached, rest
from waiting import DEADLINE_S, children, wait_until

LIMIT_S = 6  #: of what is waited for
STOPPED_S = 9
AWAKE_S = 1  #: in which one process runs again and the other does not yet

FRONT = ("from sluice.serving.command import listen\n"
         "from sluice.serving.connections import Deadlines, House, WebServer\n"
         "async def app(scope, receive, send):\n"
         "    if scope['type'] == 'lifespan':\n"
         "        for _ in range(2):\n"
         "            await send({'type': (await receive())['type'] + '.complete'})\n"
         "        return\n"
         "    while (await receive()).get('more_body'):\n"
         "        pass\n"
         "    await send({'type': 'http.response.start', 'status': 200, 'headers': []})\n"
         "    await send({'type': 'http.response.body', 'body': b'{}'})\n"
         f"house, listener = House(9, 4, Deadlines(head={LIMIT_S}, body={LIMIT_S})), listen('127.0.0.1', 0)\n"
         "print(listener.getsockname()[1], flush=True)\n"
         "WebServer(app, house, 1).run([listener])\n")

RANKS = ("import os, sys\n"
         "from multiprocessing import Pipe\n"
         "from sluice.serving.ranks import Launch, Ranks\n"
         "first, second = Pipe()\n"
         "rank = 0 if os.fork() else 1\n"
         f"ranks = Ranks(Launch(rank, 2), {{1 - rank: second if rank else first}}, {LIMIT_S})\n"
         "os.write(1, b'ready\\n')\n"
         "if rank:\n"
         "    sys.stdin.readline()\n"
         "    os.write(1, b'%s\\n' % str(ranks.agree(1)).encode())\n"
         "else:\n"
         "    os.write(1, b'%s\\n' % str(ranks.agree(0)).encode())\n"
         "    os.wait()\n")


@contextlib.contextmanager
def program(text: str) -> Iterator[subprocess.Popen[str]]:
    """In a group of its own."""
    process = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=DEADLINE_S)


def suspend(*pids: int) -> None:
    """They go on one after another."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
        time.sleep(AWAKE_S)


@pytest.mark.parametrize("sent", [head()[:-3], post()[:-5]], ids=["head", "body"])
def test_a_request_that_is_half_there(sent: bytes) -> None:
    whole = post() if sent.startswith(b"POST") else head()
    with program(FRONT) as server:
        port = int(server.stdout.readline())
        wait_until(lambda: reached(port))
        with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:
            connection.sendall(sent)
            time.sleep(AWAKE_S)
            suspend(server.pid)
            connection.sendall(whole[len(sent):])
            connection.shutdown(socket.SHUT_WR)
            assert answer(rest(connection))[0] == 200


def test_ranks_that_wait_for_each_other() -> None:
    with program(RANKS) as first:
        assert [first.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        second, = children(first.pid)
        time.sleep(AWAKE_S)  # The one waits for the other.
        suspend(first.pid, second)
        first.stdin.write("\n")
        first.stdin.flush()
        assert [first.stdout.readline() for _ in range(2)] == ["[0, 1]\n"] * 2


def test_an_answer_that_is_under_way(start: Callable[..., Server]) -> None:
    server = start("--silence", str(LIMIT_S))
    under_way = server.client().completions.create(model="tiny", prompt=prompt_ids(10), max_tokens=8000, stream=True,
                                                   temperature=0, extra_body={"ignore_eos": True})
    next(iter(under_way))
    suspend(server.process.pid, server.engine_pid)
    wait_until(lambda: server.get("/health").status_code == 200)
    with contextlib.suppress(openai.APIConnectionError):
        for _ in zip(range(20), under_way):
            pass
    assert server.metric("sluice_engine_up") == 1 and not any("said nothing" in line for line in server.said)
    under_way.close()

"""Connections of clients that are slow, silent, gone or many: they end, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import select
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from sluice.serving.command import listen
from sluice.serving.connections import Deadlines, House, WebServer
from sluice.serving.requests import Event
from test_api import Engine, Site
from waiting import DEADLINE_S, wait_until

PATIENT = Deadlines(head=DEADLINE_S, body=DEADLINE_S, stall=DEADLINE_S, linger=DEADLINE_S, half_closed=DEADLINE_S)
SHORT = Deadlines(head=1, body=1, stall=1, linger=5, half_closed=0.2)  # Where it is what a test waits for.
ASK = {"model": "tiny", "prompt": "a", "max_tokens": 3}


class Waiting(Engine):
    """Answers when it may, and says whether it was given up."""

    def __init__(self) -> None:
        super().__init__()
        self.may, self.given_up, self.pieces = threading.Event(), 0, 1

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        while not self.may.is_set():
            await asyncio.sleep(0.01)
        for _ in range(self.pieces):
            yield 0, Event(1, self.text, count=1)
        yield 0, Event(1, "", count=1, finish="stop")

    def close(self) -> None:
        self.given_up += 1


class Front:
    """The web server over an engine that is not there, in a thread."""

    def __init__(self, most: int = 99, deadlines: Deadlines = PATIENT, **front: Any) -> None:
        self.site = Site(queue=99, **front)
        self.engine = Waiting()
        self.site.engine.__class__, self.site.engine.__dict__ = Waiting, self.engine.__dict__
        self._listener = listen("127.0.0.1", 0)
        self.address = self._listener.getsockname()
        self.house = House(most, 2, deadlines)
        self._server = WebServer(self.site.app, self.house, 1)
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, DEADLINE_S)

    def close(self) -> None:
        self.engine.may.set()
        self._server.should_exit = True
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def start() -> Iterator[Callable[..., Front]]:
    fronts: list[Front] = []

    def start_one(**options: Any) -> Front:
        fronts.append(Front(**options))
        return fronts[-1]

    yield start_one
    for front in fronts:
        front.close()


def head(method: str = "GET", target: str = "/health", *lines: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {target} HTTP/{version}", "Host: x", *lines, "", ""]).encode()


def post(wants: object = ASK, *lines: str, target: str = "/v1/completions", version: str = "1.1") -> bytes:
    body = json.dumps(wants).encode()
    return head("POST", target, "Content-Type: application/json", f"Content-Length: {len(body)}", *lines,
                version=version) + body


def rest(connection: socket.socket) -> bytes:
    """Up to the connection's end, which must not be a reset."""
    told = b""
    while piece := connection.recv(1 << 16):
        told += piece
    return told


def reached(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def answer(told: bytes) -> tuple[int, Any]:
    """Status and body of the last answer."""
    told = told[told.rindex(b"HTTP/1.1 "):]
    top, _, body = told.partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(body) if body.startswith(b"{") else body


@pytest.mark.parametrize(("sent", "again"), [
    (b"GET /health HTTP/1.1\r\nHost:", b"x"), (b"G", b"E"), (post()[:-5], b""),
    (head("POST", "/v1/completions", "Content-Length: 1000"), b"x"),
    (head("POST", "/v1/completions", "Transfer-Encoding: chunked") + b"1\r\nx\r\n", b"1\r\ny\r\n"),
])
def test_what_is_never_whole_ends(start: Callable[..., Front], sent: bytes, again: bytes) -> None:
    """Also if a byte comes now and then."""
    front = start(deadlines=SHORT)
    with front.connect() as connection:
        connection.sendall(sent)
        while not select.select([connection], [], [], 0.1)[0]:
            connection.sendall(again)
        status, body = answer(rest(connection))
        assert status == 408 and body["error"]["code"] == "request_timeout"
    wait_until(lambda: not front.house._all)
    assert not front.site.engine.asked


def test_silence_ends(start: Callable[..., Front]) -> None:
    """With nothing: there was no request."""
    front = start(deadlines=SHORT)
    with front.connect() as connection:
        assert rest(connection) == b""


def test_a_second_request_that_is_never_whole(start: Callable[..., Front]) -> None:
    front = start(deadlines=SHORT)
    with front.connect() as connection:
        connection.sendall(head())
        assert b"200 OK" in connection.recv(1 << 16)
        connection.sendall(head()[:20])
        assert answer(rest(connection))[0] == 408


def test_a_body_that_is_long_and_steady_is_read(start: Callable[..., Front]) -> None:
    front = start(deadlines=Deadlines(head=DEADLINE_S, body=0.5, body_rate=1000))
    front.engine.may.set()
    sent = post({**ASK, "user": "x" * 4000}, "Connection: close")
    with front.connect() as connection:
        for at in range(0, len(sent), 400):
            connection.sendall(sent[at : at + 400])
            select.select([connection], [], [], 0.1)
        assert answer(rest(connection))[0] == 200


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("options", "status", "code"), [
    ({"api_keys": ("secret",)}, 401, "invalid_api_key"), ({"max_body": 1000}, 413, "body_too_long")])
def test_a_refusal_reaches_a_client_that_sends_all_first(start: Callable[..., Front], options: dict[str, Any],
                                                         status: int, code: str, chunked: bool) -> None:
    front = start(**options)
    for lines in (("Connection: close",), ()):
        with front.connect() as connection:
            if chunked:
                sent = head("POST", "/v1/completions", "Transfer-Encoding: chunked", *lines) + b"10000\r\n" + bytes(
                    1 << 16) + b"\r\n" + b"100000\r\n" + bytes(1 << 20) + b"\r\n0\r\n\r\n"
            else:
                sent = head("POST", "/v1/completions", "Content-Length: 3000000", *lines) + bytes(3_000_000)
            connection.sendall(sent)
            got, body = answer(rest(connection))
            assert got == status and body["error"]["code"] == code


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_closed_its_side_gets_its_answer(start: Callable[..., Front], stream: bool) -> None:
    front = start()
    with front.connect() as connection:
        connection.sendall(post({**ASK, "stream": stream}))
        wait_until(lambda: front.site.engine.asked)
        connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: any(each._half_closed for each in list(front.house._all)))
        front.engine.may.set()
        told = rest(connection)
        status, body = answer(told)
        assert status == 200 and (b"data: [DONE]" in body if stream else body["choices"][0]["text"] == "fine")
    for version in ("1.0", "1.1"):
        with front.connect() as connection:
            connection.sendall(head(version=version))
            connection.shutdown(socket.SHUT_WR)
            assert answer(rest(connection)) == (200, {"status": "ok"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_is_gone_is_noticed(start: Callable[..., Front], version: str, stream: bool) -> None:
    front = start(deadlines=SHORT)
    with front.connect() as connection:
        connection.sendall(post({**ASK, "stream": stream}, version=version))
        wait_until(lambda: front.site.engine.asked)
    wait_until(lambda: front.engine.given_up)
    wait_until(lambda: not front.house._all)


def test_a_client_that_does_not_read_ends(start: Callable[..., Front]) -> None:
    front = start(deadlines=SHORT)
    front.engine.text, front.engine.pieces = "x" * 10_000, 3000
    front.engine.may.set()
    with front.connect() as connection:
        connection.sendall(post({**ASK, "stream": True}))
        wait_until(lambda: front.engine.given_up)
        wait_until(lambda: not front.house._all)


def test_a_full_house(start: Callable[..., Front]) -> None:
    """The routes that tell how the server is are served all the same."""
    front = start(most=3)
    busy = [front.connect() for _ in range(3)]
    for number, connection in enumerate(busy):
        connection.sendall(post(ASK, "Connection: close"))
        wait_until(lambda: len(front.site.engine.asked) == number + 1)
    for target, status in (("/health", 200), ("/v1/models", 503), ("/metrics", 200), ("http://x/health", 200)):
        with front.connect() as connection:
            connection.sendall(head("GET", target, "Connection: close"))
            got, body = answer(rest(connection))
            assert got == status and (status == 200 or body["error"]["code"] == "too_many_connections")
    silent = [front.connect() for _ in range(9)]  # More than are kept: the oldest of them make room.
    with front.connect() as connection:
        connection.sendall(head("GET", "/health", "Connection: close"))
        assert answer(rest(connection))[0] == 200
    front.engine.may.set()
    assert [answer(rest(connection))[0] for connection in busy] == [200] * 3
    for connection in (*busy, *silent):
        connection.close()


def test_silent_connections_make_room(start: Callable[..., Front]) -> None:
    front = start(most=3)
    silent = [front.connect() for _ in range(30)]
    with front.connect() as connection:
        connection.sendall(head("GET", "/v1/models", "Connection: close"))
        assert answer(rest(connection))[0] == 200
    for connection in silent:
        connection.close()


def test_heads_and_targets(start: Callable[..., Front], caplog: pytest.LogCaptureFixture,
                           capfd: pytest.CaptureFixture[str]) -> None:
    """As RFC 9110 and 9112 have them; and nothing that a client without the key may send is logged."""
    front = start(api_keys=("secret",))
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA==")
    for sent, status in ((head("HEAD"), 200), (head("HEAD", "/metrics"), 200), (head("GET", "http://x/health"), 200),
                         (head("GET", "HTTPS://x:80/health?a=b"), 200), (head("GET", "http://x/v1/models"), 401),
                         (head("GET", "http://x/v1/models", "Authorization: Bearer secret"), 200),
                         (head("GET", "http://x"), 401), (head("GET", "ftp://x/health"), 401),
                         (head("GET", "/v1/models", *upgrade), 401), (head("GET", "/health", *upgrade), 200),
                         (head("DELETE"), 405), (b"garbage\r\n\r\n", 400), (b"\x16\x03\x01\x02\x00\x01\x00", 400),
                         (head("GET", "/health", "Transfer-Encoding: chunked") + b"zz\r\n", 400)):
        with front.connect() as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            got, body = answer(rest(connection))
            assert got == status, sent
            assert not (sent.startswith(b"HEAD") and body)
            assert status == 200 or body["error"]["message"]
    assert not caplog.records and capfd.readouterr() == ("", "")  # uvicorn's own logs do not come to the former.


def test_a_client_that_resets_a_connection_that_ends(start: Callable[..., Front], caplog: pytest.LogCaptureFixture,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end cannot be told to it, which is no error of anybody's."""
    front, told = start(deadlines=SHORT, api_keys=("secret",)), []

    def write_eof(transport: asyncio.Transport) -> None:
        told.append(transport)
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr("asyncio.selector_events._SelectorSocketTransport.write_eof", write_eof)
    for sent in (head("POST", "/v1/completions", "Content-Length: 1000"), b"G"):
        with front.connect() as connection:
            connection.sendall(sent)
            with contextlib.suppress(ConnectionError):
                rest(connection)
    wait_until(lambda: not front.house._all)
    assert told and not caplog.records


def test_more_connections_than_descriptors() -> None:
    """They cost neither a core nor a log."""
    program = ("import sys; from sluice.serving.command import listen\n"
               "from sluice.serving.connections import House, WebServer, room_for\n"
               "async def app(scope, receive, send):\n"
               "    if scope['type'] == 'lifespan':\n"
               "        for _ in range(2):\n"
               "            await send({'type': (await receive())['type'] + '.complete'})\n"
               "    await send({'type': 'http.response.start', 'status': 200, 'headers': []})\n"
               "    await send({'type': 'http.response.body', 'body': b'{}'})\n"
               "house, listener = House(room_for(1000, 4), 4), listen('127.0.0.1', 0)\n"
               "print(listener.getsockname()[1], house.most, flush=True)\n"
               "WebServer(app, house, 1).run([listener])\n")
    process = subprocess.Popen(["bash", "-c", 'ulimit -n 64; exec "$@"', "bash", sys.executable, "-c", program],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        port, most = map(int, process.stdout.readline().split())
        wait_until(lambda: reached(port))
        assert 1 <= most < 60
        many = [socket.create_connection(("127.0.0.1", port), DEADLINE_S) for _ in range(200)]
        for connection in many[:30]:
            connection.sendall(b"GET /health")
        for target in ("/health", "/v1/models"):
            with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:
                connection.sendall(head("GET", target, "Connection: close"))
                assert answer(rest(connection))[0] == 200
        for connection in many:
            connection.close()
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert errors == b""

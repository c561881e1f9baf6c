"""HTTP connections that end: each wait for a client has a deadline, and there are no more than may be.

uvicorn's protocol waits for heads and bodies for ever, closes a connection while the client still sends, so that the
answer is lost to a reset, and takes a client that has sent all it had to for one that is gone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from sluice.errors import OutOfCapacity
from sluice.serving.clock import NAP_S, now
from sluice.serving.guard import OPEN, Answer, encoded, origin_form
from sluice.serving.protocol import Refused

_ACCEPTED_AT_ONCE, _BACKLOG = 4, 1024  # Connections: each of the former takes a descriptor before it is counted.
_SPARE = 24  # Descriptors for those, and for what the server opens now and then.
_PEER_CLOSED = 7  # TCP_CLOSE of linux/tcp_states.h.


@dataclass(frozen=True)
class Deadlines:
    """Seconds in which this process runs, that a client has."""

    head: float = 10  #: for a request's line and headers, from the connection on or from their first byte
    body: float = 30  #: for a body, and a second more for each `body_rate` bytes that have come
    body_rate: int = 16 << 10
    stall: float = 60  #: in which it reads nothing of an answer
    linger: float = 2  #: to read an answer that came before the request was whole
    half_closed: float = 1  #: for an answer by HTTP/1.0 when the client has closed its side, by which others give up


class WebServer(uvicorn.Server):
    """uvicorn's, with connections that end."""

    def __init__(self, app: Any, house: House, drain_s: float) -> None:
        """`drain_s`: for answers to end when it is told to."""
        # Its warnings, and asyncio's, are of what anybody may send, and would fill a log.
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        super().__init__(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=drain_s, ws="none",
                                        http=functools.partial(HttpConnection, house), backlog=_ACCEPTED_AT_ONCE))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():  # Those that are not accepted yet wait in the kernel.
            each.listen(_BACKLOG)


class House:
    """All connections of a server. Beside `most`, a few more are kept for /health and /metrics."""

    def __init__(self, most: int, kept: int = 4, deadlines: Deadlines | None = None) -> None:
        self.most, self.kept, self.deadlines = most, kept, deadlines or Deadlines()
        self._all: dict[HttpConnection, None] = {}  # The oldest first.

    def enter(self, connection: HttpConnection) -> bool:
        """Whether all routes are for it. Where there is no room, the connection goes that has waited longest for a
        request, and after these the new one."""
        self._all[connection] = None
        if len(self._all) > self.most:
            idle = next((each for each in self._all if each.waits), connection)
            if idle is not connection or len(self._all) > self.most + self.kept:
                idle.drop()
        return len(self._all) <= self.most

    def leave(self, connection: HttpConnection) -> None:
        self._all.pop(connection, None)

    async def refuse(self, scope: Any, receive: Any, send: Any) -> None:
        """An ASGI application for connections beyond `most`."""
        refused = Refused(503, f"the server has as many connections as it may, {self.most}; try again later",
                          "server_error", "too_many_connections", headers={"Retry-After": "1", "Connection": "close"})
        await Answer(refused.body, refused.status, refused.headers)(scope, receive, send)


def room_for(most: int, kept: int) -> int:
    """As many connections of `most` as the limit of open files has room for, which is raised as far as it may.
    @throws OutOfCapacity if that is none"""
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = used + _SPARE + kept + most
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = most if soft == resource.RLIM_INFINITY else min(most, soft - used - _SPARE - kept)
    if room < 1:
        raise OutOfCapacity(f"this process may have {soft} open files, and needs {used + _SPARE + kept} beside "
                            "connections: raise ulimit -n")
    return room


class _Transport:
    """A connection's transport, whose end is the protocol's to say."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None], ends: Callable[[], bool]) -> None:
        self._transport, self.close, self._ends = transport, close, ends

    def is_closing(self) -> bool:
        return self._ends() or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class HttpConnection(H11Protocol):
    """One connection. A phase says what is waited for: "head" of a request, "body", the server's "answer", or that the
    client sends something again, "idle"; "end" is the client's last moment to read."""

    def __init__(self, house: House, **options: Any) -> None:
        super().__init__(**options)
        self._house, self._deadlines = house, house.deadlines
        self._phase, self._body_bytes, self._body_began = "", 0, 0.0
        self._half_closed = self._over = False
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @property
    def waits(self) -> bool:
        """Whether it has no request."""
        return self._phase in ("head", "idle")

    def drop(self) -> None:
        """Ends it without an answer, at once."""
        self._house.leave(self)
        self._raw.abort()

    def connection_made(self, transport: Any) -> None:
        self._raw = transport
        super().connection_made(_Transport(transport, self._close, lambda: self._phase == "end"))
        self._enter("head")
        if not self._house.enter(self):
            everything = self.app

            async def app(scope: Any, receive: Any, send: Any) -> None:
                open_to_all = origin_form(scope["path"]) in OPEN
                await (everything if open_to_all else self._house.refuse)(scope, receive, send)

            self.app = app

    def data_received(self, data: bytes) -> None:
        if self._phase == "end":
            return
        self._body_bytes += len(data)
        super().data_received(data)
        self._look(bool(data))

    def eof_received(self) -> bool | None:
        """True: what is asked for is still to be sent."""
        if self._phase != "answer" or not hasattr(socket, "TCP_INFO"):
            return None
        self._half_closed = True
        if self.cycle.scope["http_version"] == "1.0":  # It knows no answer that goes before another.
            self._set("peer", self._deadlines.half_closed, self._raw.abort)
            return True
        # A client that is gone answers to this with a reset, and one that still reads takes no notice.
        if not self.cycle.response_started:
            self._raw.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[], reason="Continue")))
        elif not self.flow.write_paused:  # What has begun and not ended is a stream of events: a comment.
            self._raw.write(self.conn.send(h11.Data(data=b":\n\n")))
        self._set("peer", 0.05, self._probe, 0.05)
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()
        if self._half_closed and self._phase != "answer":
            self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set("stall", self._deadlines.stall, self._raw.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unset("stall")

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = True
        for name in list(self._timers):
            self._unset(name)
        self._house.leave(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refused(400, "this is no request of HTTP/1.1", code="invalid_request"))

    def _look(self, came: bool = False) -> None:
        """What is waited for now. `came`: the client has sent something."""
        if self._phase == "end" or self._over:
            return
        if self.conn.their_state is h11.SEND_BODY:
            phase = "body"
        elif self.cycle is not None and not self.cycle.response_complete:
            phase = "answer"
        else:
            phase = "head" if came or self._phase == "head" else "idle"
        if phase != self._phase:
            self._enter(phase)

    def _enter(self, phase: str) -> None:
        self._phase = phase
        if phase == "head":
            self._set("read", self._deadlines.head, self._late)
        elif phase == "body":
            self._body_bytes, self._body_began = 0, now()
            self._set("read", self._deadlines.body, self._hurry)
        else:
            self._unset("read")

    def _hurry(self) -> None:
        """A body may take longer if much of it has come."""
        allowed = self._deadlines.body + self._body_bytes / self._deadlines.body_rate
        left = self._body_began + allowed - now()
        if left > 0:
            self._set("read", left, self._hurry)
        else:
            self._late()

    def _late(self) -> None:
        if self._phase == "head" and not self.conn.trailing_data[0]:
            self._close()  # Nothing was asked.
        else:
            self._refuse(Refused(408, "the request did not come in time", code="request_timeout"))

    def _refuse(self, refused: Refused) -> None:
        """An answer from outside the application, which is told that the client is gone. Then the connection ends."""
        begun = False
        if self.cycle is not None and not self.cycle.response_complete:
            begun, self.cycle.disconnected = self.cycle.response_started, True
            self.cycle.message_event.set()
        if begun or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._raw.abort()
            return
        body = encoded(refused.body)
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=refused.status, headers=headers), h11.Data(data=body),
                      h11.EndOfMessage()):
            self._raw.write(self.conn.send(event))
        self._close()

    def _close(self) -> None:
        """The client gets what was sent before. While it still sends it would get a reset instead: so no more is sent,
        and what comes is thrown away for a moment."""
        if self._over or self._phase == "end":
            return
        sends = self.conn.their_state in (h11.SEND_BODY, h11.ERROR) or self.conn.trailing_data[0]
        self._enter("end")
        self._unset_keepalive_if_required()
        if sends and not self._half_closed and self._raw.can_write_eof() and not self._raw.is_closing():
            try:
                self._raw.write_eof()
            except OSError:  # The client has reset it, as the next read would tell.
                self._raw.abort()
                return
            self.flow.resume_reading()
            self._set("read", self._deadlines.linger, self._raw.abort)
        else:
            self._raw.close()
            self._set("read", self._deadlines.stall, self._raw.abort)  # One that does not read keeps it from ending.

    def _probe(self, after: float) -> None:
        """Whether a client that has closed its side is there. Nothing else tells, as there is nothing more to read."""
        link = self._raw.get_extra_info("socket")
        with contextlib.suppress(OSError):
            if link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _PEER_CLOSED:
                self._set("peer", min(2 * after, 1), self._probe, min(2 * after, 1))
                return
        self._raw.abort()

    def _set(self, name: str, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Calls when as many seconds have run, unless that is unset or set anew."""
        ends = now() + seconds

        def look() -> None:
            left = ends - now()
            if left > 0:
                self._timers[name] = self.loop.call_later(min(left, NAP_S), look)
            else:
                call(*arguments)

        self._unset(name)
        self._timers[name] = self.loop.call_later(min(seconds, NAP_S), look)

    def _unset(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

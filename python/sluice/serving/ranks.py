"""The processes that torchrun started for one model, its ranks: rank 0 tells the others what to do, and all of them
agree on what came of it."""

from __future__ import annotations

import contextlib
import datetime
import hmac
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from sluice.errors import BY_STATUS, Error, Unsupported
from sluice.serving import clock

START_S = 1800.0  # To load the model, however much faster other ranks are.
_COLLECTIVE_S = 600.0  # A rank that died ends a collective of gloo at once, and none of NCCL.
_LAST_WORDS_S = 1.0  # For another rank to say why a collective has failed here.


class RanksLost(Error):
    """A rank has ended, is silent or broke off within a forward: no other one can go on."""


class Disagreed(Exception):
    """What all were to do has failed, and all know it. Of an error of one rank, rank 0 gets that itself."""


@dataclass(frozen=True)
class Launch:
    """What torchrun says of this process."""

    rank: int = 0
    ranks: int = 1

    @staticmethod
    def of_environment() -> Launch:
        """@throws Unsupported of several machines"""
        said = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
        if not all(each.isdecimal() for each in said):
            return Launch()
        rank, ranks, local_rank, local_ranks = map(int, said)
        if (rank, ranks) != (local_rank, local_ranks):
            raise Unsupported(f"torchrun has started {ranks} ranks, {local_ranks} of them on this machine; all must be "
                              "on one: start it with --nnodes 1")
        return Launch(rank, ranks)


@dataclass(frozen=True)
class _Broken:
    """A rank is of no use any more, and why."""

    why: str


class Ranks:
    """This process among the ranks. One thread uses it."""

    def __init__(self, launch: Launch, peers: dict[int, Connection], timeout_s: float) -> None:
        """`peers`: of rank 0 all others, of the others rank 0. `timeout_s`: a rank that says nothing for as long where
        it should is lost."""
        self.rank, self.ranks = launch.rank, launch.ranks
        self._peers, self._timeout_s = peers, timeout_s
        self._lost: str | None = None

    @property
    def lost(self) -> str | None:
        """Why the ranks cannot go on; None if they can. Between forwards no rank says anything, unless it ends."""
        if self._lost is None and self.rank == 0:
            for rank, peer in self._peers.items():
                with contextlib.suppress(RanksLost):
                    if peer.poll(0):
                        self._hear(rank, 0)
                        self._lose(f"rank {rank} said something that nobody had asked for")
        return self._lost

    def tell(self, message: object) -> None:
        """Rank 0 tells all others, which hear it in this order. None ends them."""
        if self._lost is not None:
            raise RanksLost(self._lost)
        for rank in self._peers:
            self._send(rank, message)

    def hear(self) -> Any:
        """What rank 0 tells next. Until there is something to do it says nothing, and its end is noticed."""
        return self._hear(0, None)

    def agree(self, value: int = 0, error: Exception | None = None, timeout_s: float | None = None) -> list[int]:
        """The values of all ranks, if none has an error. If one has, all raise: rank 0 that error or one of its kind,
        the others Disagreed. All ranks call it, after the same message.
        @throws RanksLost"""
        if self._lost is not None:
            raise RanksLost(self._lost)
        report = (value, None if error is None else _told(error))
        timeout_s = timeout_s or self._timeout_s
        if self.rank == 0:
            reports = [report, *(self._hear(rank, timeout_s) for rank in self._peers)]
            self.tell(reports)
        else:
            self._send(0, report)
            reports = self._hear(0, timeout_s)
        if not isinstance(reports, list):
            self._lose("rank 0 has given up what the ranks were at")
        for rank, (_, failed) in enumerate(reports):
            if failed is not None and self.rank:
                raise Disagreed(f"rank {rank}: {failed[1]}")
            if failed is not None:
                raise error if rank == 0 and error is not None else BY_STATUS.get(failed[0], Error)(
                    f"rank {rank}: {failed[1]}")
        return [value for value, _ in reports]

    def break_off(self, why: str) -> NoReturn:
        """This rank cannot keep in step with the others: all end. If another one has ended, that is why."""
        for rank, peer in self._peers.items():
            if clock.comes(peer, _LAST_WORDS_S):
                with contextlib.suppress(RanksLost):
                    self._hear(rank, 0)
        self._lose(f"rank {self.rank} {why}")

    def close(self) -> None:
        """Leaves the group of torch.distributed, which all ranks do together unless one is lost."""
        import torch.distributed

        for peer in self._peers.values():
            peer.close()
        if self._lost is None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _send(self, rank: int, message: object) -> None:
        try:
            self._peers[rank].send(message)
        except OSError:  # It has ended, or has not read for so long that there is no more room.
            self._lose(f"rank {rank} has ended or does not listen")

    def _hear(self, rank: int, timeout_s: float | None) -> Any:
        peer = self._peers[rank]
        try:
            if not clock.comes(peer, timeout_s):
                self._lose(f"rank {rank} has said nothing for {timeout_s:g} s")
            said = peer.recv()
        except (EOFError, OSError):
            self._lose(f"rank {rank} has ended")
        if isinstance(said, _Broken):
            self._lose(said.why)
        return said

    def _lose(self, why: str) -> NoReturn:
        """Tells whoever can still hear it."""
        self._lost = self._lost or why
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.send(_Broken(self._lost))
        raise RanksLost(self._lost) from None


def _told(error: Exception) -> tuple[int, str]:
    """Its status, -1 if it is none of ours, and its text."""
    status = getattr(error, "status", -1)
    return status, str(error) if status in BY_STATUS else f"{type(error).__name__}: {error}"


def join(launch: Launch, device: str, timeout_s: float) -> Ranks:
    """Joins the ranks: torch's group, whose collectives are the model's, and a connection with rank 0.
    @throws Unsupported if there is no GPU for each rank"""
    import torch
    import torch.distributed

    _check_device(launch, device, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    place = None
    if device != "cpu":
        torch.cuda.set_device(launch.rank)
        place = torch.device("cuda", launch.rank)
    torch.distributed.init_process_group("gloo" if place is None else "nccl", device_id=place,
                                         timeout=datetime.timedelta(seconds=_COLLECTIVE_S))
    return Ranks(launch, _connect(launch, place), timeout_s)


def _check_device(launch: Launch, device: str, gpus: int) -> None:
    """transformers gives each rank the GPU of its number, if there is any."""
    if device not in ("cpu", "cuda"):
        raise Unsupported(f"--device {device}: each of {launch.ranks} ranks has a GPU of its own; leave it out, or set "
                          "CUDA_VISIBLE_DEVICES")
    if device == "cpu" and gpus:
        raise Unsupported("--device cpu: ranks take a GPU where there is one; set CUDA_VISIBLE_DEVICES= to nothing")
    if device == "cuda" and gpus < launch.ranks:
        raise Unsupported(f"{launch.ranks} ranks need as many GPUs, and there are {gpus}; start torchrun with "
                          f"--nproc-per-node {max(gpus, 1)}")


def _connect(launch: Launch, place: Any) -> dict[int, Connection]:
    """Through a socket of this machine, whose name and key torch's group carries."""
    import torch.distributed

    told: list[Any] = [None, None]
    if launch.rank == 0:
        listener = socket.socket(socket.AF_UNIX)
        told = [f"\0sluice-{secrets.token_hex(16)}", secrets.token_bytes(32)]
        listener.bind(told[0])
        listener.listen(launch.ranks)
    torch.distributed.broadcast_object_list(told, src=0, device=place)
    name, key = told
    if launch.rank == 0:
        with listener:
            return _accept(listener, key, launch.ranks)
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(START_S)
    link.connect(name)
    peer = _connection(link)
    peer.send_bytes(key + bytes([launch.rank]))
    return {0: peer}


def _accept(listener: socket.socket, key: bytes, ranks: int) -> dict[int, Connection]:
    peers: dict[int, Connection] = {}
    ends = clock.now() + START_S
    listener.settimeout(clock.NAP_S)
    while len(peers) < ranks - 1:
        try:
            peer = _connection(listener.accept()[0])
        except TimeoutError:
            if clock.now() < ends:
                continue
            raise RanksLost(f"{ranks - 1 - len(peers)} ranks have not come within {START_S:g} s") from None
        # A peer without the key is no rank, and is read no further.
        with contextlib.suppress(EOFError, OSError):
            said = peer.recv_bytes(len(key) + 1)
            if hmac.compare_digest(said[:-1], key):
                peers[said[-1]] = peer
    return dict(sorted(peers.items()))


def _connection(link: socket.socket) -> Connection:
    link.setblocking(True)
    # Of each read and write, so that a message that stops half-way is noticed. Waits for one are `poll`'s.
    for side in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        link.setsockopt(socket.SOL_SOCKET, side, struct.pack("ll", 30, 0))
    return Connection(link.detach())

"""The commands serve, run and chat of python -m sluice: their arguments, and the server."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sluice._reporting import one_line, told
from sluice.errors import Error, InvalidArgument
from sluice.serving.arguments import GGUF, add_engine, add_sampling, file, number, settings_of, size
from sluice.serving.child import exit_at_once, exit_of_rank
from sluice.serving.process import EngineProcess
from sluice.serving.ranks import Disagreed, Launch
from sluice.serving.talk import chat, run

KEY_VARIABLE = "SLUICE_API_KEY"
_DRAIN_S = 5  # After a signal to end.
_KEPT_CONNECTIONS = 4  # For /health and /metrics.


class CannotListen(Error):
    """The server's address is taken, or none of this machine's."""


def add_commands(commands: Any) -> None:
    """Adds the commands to a parser's."""
    serve_command = commands.add_parser("serve", help="a server that speaks OpenAI's protocol")
    add_engine(serve_command, sequences=16)
    serve_command.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    serve_command.add_argument("--port", type=number(int, 0, 65535), default=8000,
                               help="0: any that is free (%(default)s)")
    serve_command.add_argument("--name", help="the model's for clients (the folder's)")
    serve_command.add_argument("--queue", type=number(int, 0), default=256,
                               help="answers that may wait; more are refused with 429 (%(default)s)")
    serve_command.add_argument("--api-key", action="append", metavar="KEY", help="of which clients must have "
                               f"one; may be repeated. Or the environment's {KEY_VARIABLE}, with spaces between keys")
    serve_command.add_argument("--shared-prefixes", action="store_true", help="prompts begin with what is known of any "
                               "client's, which tells clients of each other's")
    serve_command.add_argument("--max-body", type=size, help="bytes of a request (128 for a token of the context)")
    serve_command.add_argument("--disk", type=file, metavar="DIR", help="a folder for prefixes of prompts that host "
                               "memory has no room for; servers may share it")
    serve_command.add_argument("--disk-bytes", type=size, help="that they may take there")
    serve_command.add_argument("--connections", type=number(int, 1), help="at once; with more /health and /metrics "
                               "alone are served (1024, or twice what may be under way; and what ulimit -n leaves)")
    serve_command.add_argument("--silence", type=number(float, 0.1), default=600, metavar="SECONDS",
                               help="an engine that says nothing for as long, longer than a forward takes, is taken "
                                    "for lost (%(default)s)")
    serve_command.set_defaults(call=or_follow(serve))

    run_command = commands.add_parser("run", help="goes on with a text")
    add_engine(run_command, sequences=1)
    add_sampling(run_command)
    text = run_command.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt")
    text.add_argument("--file", type=file, help="with the prompt; -: standard input")
    add_session(run_command, "keeps the prompt: what FILE has of it need not be read again")
    run_command.set_defaults(call=or_follow(run))

    chat_command = commands.add_parser("chat", help="a conversation; every line of standard input is a turn")
    add_engine(chat_command, sequences=1)
    add_sampling(chat_command)
    chat_command.add_argument("--system", help="what the model is told first")
    add_session(chat_command, "keeps the conversation, which goes on from there; its messages are in FILE.json")
    chat_command.set_defaults(call=or_follow(chat))


def add_session(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--session", type=file, metavar="FILE", help=text)


def or_follow(call: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The same, but under torchrun only in its first process, which the others follow."""
    def command(arguments: argparse.Namespace) -> int:
        launch = Launch.of_environment()
        if launch.ranks == 1:
            return call(arguments)
        exit_of_rank(follow(arguments) if launch.rank else call(arguments))

    return command


def api_keys(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Of which clients must have one. An address that others reach and no key is worth a warning."""
    keys = tuple(key.strip() for key in arguments.api_key or os.environ.get(KEY_VARIABLE, "").split())
    if not all(key and key.isascii() and key.isprintable() for key in keys):
        raise InvalidArgument("--api-key is empty, or has what no header may have; leave it out if clients need none")
    try:
        own = ipaddress.ip_address(arguments.host).is_loopback
    except ValueError:
        own = arguments.host == "localhost"
    if not keys and not own:
        print(f"sluice: everyone who reaches {arguments.host or 'this machine'} may use this server; --api-key or "
              f"{KEY_VARIABLE} sets a key", file=sys.stderr, flush=True)
    return keys


def disk_secret(arguments: argparse.Namespace) -> bytes | None:
    """Of the servers that share --disk; None without one."""
    if (arguments.disk is None) != (arguments.disk_bytes is None):
        raise InvalidArgument("--disk and --disk-bytes belong together; give both, or neither")
    if arguments.disk is None:
        return None
    if arguments.no_prefix_cache:
        raise InvalidArgument("--disk is for prefixes, and --no-prefix-cache keeps none; leave one of them out")
    from sluice.serving.disk_files import secret_of

    return secret_of(arguments.disk)


def name_of(model: str) -> str:
    """The folder's, even if that is called "." or ends with a slash, or the file's."""
    return Path(model).resolve().name.removesuffix(GGUF)


def follow(arguments: argparse.Namespace) -> int:
    """A rank that is not the first: it does what that does, until that ends."""
    rank = Launch.of_environment().rank
    try:
        from sluice.serving.load import load_follower

        model = load_follower(settings_of(arguments))
        for number in (signal.SIGINT, signal.SIGTERM):  # They are meant for rank 0, which has them too.
            signal.signal(number, signal.SIG_IGN)
        model.follow()
        model.close()
    except Disagreed as error:
        exit_at_once(f"sluice: rank {rank} ends: {one_line(str(error))}\n")
    except Exception as error:  # Of others' code, too. Rank 0 notices, and torch's threads would keep the process.
        line, code = told(error)
        exit_at_once(f"sluice: rank {rank} ends: {line.removeprefix('sluice: ')}", code)
    return 0


def serve(arguments: argparse.Namespace) -> int:
    from sluice.serving.answering import Front
    from sluice.serving.api import create_app
    from sluice.serving.connections import House, WebServer, room_for
    from sluice.serving.load import load_tokenizer

    class Draining(WebServer):
        """Lets answers end when it is told to, for a while; then they are told why they do not."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            engine.close_in(_DRAIN_S)
            super().handle_exit(sig, frame)

    keys, secret = api_keys(arguments), disk_secret(arguments)
    settings = settings_of(arguments)
    listener = listen(arguments.host, arguments.port)  # An address that is taken is told before a model is loaded.
    most = arguments.connections or max(1024, 2 * (arguments.sequences + arguments.queue))
    house = House(room_for(most, _KEPT_CONNECTIONS), _KEPT_CONNECTIONS)
    engine = EngineProcess(settings)
    engine.start()
    try:
        # Both take seconds, at the same time.
        tokenizer = load_tokenizer(arguments.model, arguments.trust_remote_code)
        ready = engine.ready()
        name = arguments.name or name_of(arguments.model)
        front = Front(name, arguments.queue, keys, arguments.max_body, arguments.shared_prefixes, secret)
        app = create_app(engine, ready, tokenizer, front)
        host, port = listener.getsockname()[:2]
        near = "" if settings.device == "cpu" else f"{ready.near_bytes / 2**30:.2f} GiB of the GPU for near tokens, "
        print(f"{name}: {ready.limit} tokens of context, {arguments.sequences} answers at once, {near}"
              f"http://{f'[{host}]' if ':' in host else host}:{port}/v1", file=sys.stderr, flush=True)
        Draining(app, house, _DRAIN_S + 5).run(sockets=[listener])
    finally:
        engine.close()
    return 0


def listen(host: str, port: int) -> socket.socket:
    """A socket with that address. The protocol is named, as asyncio sends at once only on what it knows to be TCP;
    else a token may wait 40 ms for the client to acknowledge the one before."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        remedy = "--port names another, and 0 takes any that is free" if error.errno == errno.EADDRINUSE else \
            "--host and --port name another address"
        raise CannotListen(f"cannot listen at {host} port {port}: {error.strerror}; {remedy}") from None
    return listener

"""The commands serve, run and chat of python -m sluice."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sluice.errors import Error, InvalidArgument
from sluice.options import EngineOptions
from sluice.serving.process import EngineProcess, Settings
from sluice.serving.requests import Request, Sampling

KEY_VARIABLE = "SLUICE_API_KEY"
_DRAIN_S = 5  # After a signal to end.
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def size(text: str) -> int:
    """Bytes: 8GiB, 8G, 512M or a number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f'"{text}" is no size; write 8GiB, 512M or a number of bytes')
    return int(float(found[1]) * _UNITS[found[2].upper()])


def option(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as JSON has it, or a word."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f'"{text}" is not NAME=VALUE')
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def add_commands(commands: Any) -> None:
    """Adds the commands to a parser's."""
    serve_command = commands.add_parser("serve", help="a server that speaks OpenAI's protocol")
    _add_engine(serve_command, sequences=16)
    serve_command.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    serve_command.add_argument("--port", type=int, default=8000, help="0: any that is free (%(default)s)")
    serve_command.add_argument("--name", help="the model's for clients (the folder's)")
    serve_command.add_argument("--queue", type=int, default=256,
                               help="answers that may wait; more are refused with 429 (%(default)s)")
    serve_command.add_argument("--api-key", help=f"that clients must have; or the environment's {KEY_VARIABLE}")
    serve_command.add_argument("--silence", type=float, default=600, metavar="SECONDS", help="an engine that says "
                               "nothing for as long, longer than a forward takes, is taken for lost (%(default)s)")
    serve_command.set_defaults(call=serve)

    run_command = commands.add_parser("run", help="goes on with a text")
    _add_engine(run_command, sequences=1)
    _add_sampling(run_command)
    text = run_command.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt")
    text.add_argument("--file", type=Path, help="with the prompt; -: standard input")
    run_command.set_defaults(call=run)

    chat_command = commands.add_parser("chat", help="a conversation; every line of standard input is a turn")
    _add_engine(chat_command, sequences=1)
    _add_sampling(chat_command)
    chat_command.add_argument("--system", help="what the model is told first")
    chat_command.set_defaults(call=chat)


def _add_engine(parser: argparse.ArgumentParser, sequences: int) -> None:
    add = parser.add_argument
    add("--model", required=True, help="a folder as transformers saves it, or a name that it knows")
    add("--policy", default=Settings.policy, help="what is attended (%(default)s)")
    add("--host-bytes", type=size, default=Settings.host_bytes, help="host memory for keys and values (8GiB)")
    add("--context", type=int, help="tokens of prompt and answer, at most (the model's)")
    add("--sequences", type=int, default=sequences, help="answers that are generated at once (%(default)s)")
    add("--prefill-rows", type=int, default=Settings.prefill_rows,
        help="tokens of prompts that go through the model at once (%(default)s)")
    add("--slowdown", type=float, default=0, help="prompts that are read may let a forward take as many times as long "
        "for the answers beside them; 0: they have all rows (%(default)s)")
    add("--device", help="cpu, cuda or cuda:N (cuda where there is one)")
    add("--dtype", default=Settings.dtype, choices=("auto", "float32", "float16", "bfloat16"),
        help="of the model (as it was saved)")
    add("--no-prefix-cache", action="store_true", help="read every prompt anew")
    add("--option", type=option, action="append", default=[], metavar="NAME=VALUE",
        help="another of sluice.EngineOptions, such as near_bytes=1000000; may be repeated")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--max-tokens", type=int, help="of an answer (until the context is full)")
    add("--temperature", type=float, help="0: the most likely token (the model's own, or 1)")
    add("--top-p", type=float)
    add("--seed", type=int, help="to get the same again")


def settings_of(arguments: argparse.Namespace) -> Settings:
    device = arguments.device
    if device is None:
        from sluice._library import library

        device = "cuda" if library().cuda_devices() else "cpu"
    known = {each.name for each in dataclasses.fields(EngineOptions)}
    for name, _ in arguments.option:
        if name not in known:
            raise InvalidArgument(f"there is no option {name}; there are {', '.join(sorted(known))}")
    return Settings(model=arguments.model, policy=arguments.policy, host_bytes=arguments.host_bytes,
                    context=arguments.context, sequences=arguments.sequences, prefill_rows=arguments.prefill_rows,
                    slowdown=arguments.slowdown, device=device, dtype=arguments.dtype,
                    prefix=not arguments.no_prefix_cache, options=dict(arguments.option))


def serve(arguments: argparse.Namespace) -> int:
    import uvicorn

    from sluice.serving.answering import Front
    from sluice.serving.api import create_app
    from sluice.serving.load import load_tokenizer

    class WebServer(uvicorn.Server):
        """Lets answers end when it is told to, for a while; then they are told why they do not."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            engine.close_in(_DRAIN_S)
            super().handle_exit(sig, frame)

    listener = socket.socket(socket.AF_INET6 if ":" in arguments.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((arguments.host, arguments.port))  # An address that is taken is told before a model is loaded.
    engine = EngineProcess(settings_of(arguments), silence_s=arguments.silence)
    engine.start()
    try:
        # Both take seconds, at the same time.
        tokenizer, ready = load_tokenizer(arguments.model), engine.ready()
        name = arguments.name or Path(arguments.model).name
        front = Front(name, arguments.queue, arguments.api_key or os.environ.get(KEY_VARIABLE) or None)
        app = create_app(engine, ready, tokenizer, front)
        host, port = listener.getsockname()[:2]
        print(f"{name}: {ready.limit} tokens of context, {arguments.sequences} answers at once, "
              f"http://{f'[{host}]' if ':' in host else host}:{port}/v1", file=sys.stderr, flush=True)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_DRAIN_S + 5)
        WebServer(config).run(sockets=[listener])
    finally:
        engine.close()
    return 0


class Teller:
    """Answers of one loop to one user."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from sluice.serving.load import load_loop, load_tokenizer

        self._loop, ready = load_loop(settings_of(arguments))
        self.tokenizer = load_tokenizer(arguments.model)
        said = {name: getattr(arguments, name) for name in ("temperature", "top_p", "max_tokens", "seed")}
        said = {name: value for name, value in said.items() if value is not None}
        self._sampling = Sampling(**{**ready.defaults, "seed": secrets.randbits(63), **said})
        self._number = 0

    def answer(self, ids: list[int]) -> Iterator[str]:
        """The answer's text in pieces. It is given up with the iterator."""
        self._number += 1
        progress = Progress()
        self._loop.submit(Request(self._number, ids, self._sampling))
        try:
            while not self._loop.idle:
                with _uninterrupted():
                    events = self._loop.step()
                if not events:
                    progress.tell(*self._loop.progress(self._number))
                for event in events:
                    progress.clear()
                    if event.error:
                        raise Error(event.error)
                    yield event.text
        finally:
            progress.clear()
            self._loop.abort(self._number)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C comes after it: a forward that is cut leaves the engine with half of it. A second one comes at once."""
    came: list[int] = []

    def note(number: int, frame: Any) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


class Progress:
    """Of a prompt that is read: a line on standard error, if that is a terminal."""

    def __init__(self) -> None:
        self._shown, self._began, self._first = False, time.monotonic(), 0

    def tell(self, done: int, whole: int) -> None:
        if not sys.stderr.isatty():
            return
        self._first = self._first or done
        new = done - self._first
        left = ""
        if new > 0:
            seconds = int((time.monotonic() - self._began) / new * (whole - done))
            left = f", {seconds // 60}:{seconds % 60:02} left"
        else:
            self._began = time.monotonic()
        print(f"\rreading the prompt: {done:,} of {whole:,} tokens{left}\033[K", end="", file=sys.stderr, flush=True)
        self._shown = True

    def clear(self) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        self._shown = False


def run(arguments: argparse.Namespace) -> int:
    prompt = arguments.prompt
    if prompt is None:
        try:
            prompt = sys.stdin.read() if str(arguments.file) == "-" else arguments.file.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"{arguments.file} is no text of UTF-8: {error}") from None
    teller = Teller(arguments)
    for piece in teller.answer(teller.tokenizer.encode(prompt)):
        print(piece, end="", flush=True)
    print()
    return 0


def chat(arguments: argparse.Namespace) -> int:
    teller = Teller(arguments)
    if not getattr(teller.tokenizer, "chat_template", None):
        raise InvalidArgument("this model's tokenizer has no chat template; use run")
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    asks = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(asks)
        except EOFError:
            return 0
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        told = ""
        try:
            for piece in teller.answer(teller.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=True, return_dict=False)):
                told += piece
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            pass  # The answer is given up, and what there is of it stays.
        print()
        messages.append({"role": "assistant", "content": told})

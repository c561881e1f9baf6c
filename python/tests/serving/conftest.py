"""Loops over tiny models, and servers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from server import Server
from sluice.serving.loop import Loop
from sluice.serving.model import PackedModel
from small import KV, bare_model, tokenizer


@pytest.fixture
def make_loop() -> Iterator[Callable[..., Loop]]:
    """Loops over copies of tiny models; closed after the test."""
    models_made: list[PackedModel] = []

    def make(kind: str = "llama", policy: str = "full", prefix: bool = True, end_ids: Sequence[int] = (0,),
             slowdown: float = 0, **options: object) -> Loop:
        models_made.append(PackedModel(copy.deepcopy(bare_model(kind)), policy, **{
            "host_bytes": 8 << 20, "context": 256, "threads": 1, "pin_threads": False, "answer_timeout_ms": 30_000,
            "sequences": 8, "prefill_rows": 64, **KV, **options}))
        return Loop(models_made[-1], tokenizer(), end_ids=end_ids, prefix=prefix, slowdown=slowdown)

    yield make
    for model in models_made:
        model.close()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Digests of models are kept for these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    copy.deepcopy(bare_model("llama")).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def shared(folder: Path) -> Iterator[Server]:
    """A server that tests share."""
    with Server(folder) as server:
        yield server


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers with other arguments."""
    servers: list[Server] = []

    def start_one(*arguments: str, **environment: str) -> Server:
        servers.append(Server(folder, *arguments, **environment))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()

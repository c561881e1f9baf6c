"""Prefixes that host memory has no room for go to a folder and come back, also in an engine that comes later. With the
policy `full` tokens are the same, whatever becomes of the files."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sluice
from engines import Answer, Engine, configured, greedy, prompts
from sluice.vllm._config import adapt, settings_of
from sluice.vllm._disk import signature_of
from sluice.vllm._prefixes import Prefixes

PAGE = 16
GIVEN = prompts(*[150] * 8, seed=14)
FOUND = 150 - 150 % PAGE  # Tokens of each that are known afterwards.
ANSWER = greedy(8)
SMALL = 1 << 20  # Of host memory: four of these prompts.


@pytest.fixture(scope="module")
def own(model_of: Callable[[str], Path]) -> list[list[int]]:
    with Engine(model_of("Llama"), {}, enable_prefix_caching=False) as engine:
        return engine.tokens(GIVEN, ANSWER)


@pytest.fixture
def make(model_of: Callable[[str], Path], tmp_path: Path) -> Callable[..., Engine]:
    """Engines with a folder, and little host memory."""
    def made(family: str = "Llama", asynchronous: bool = False, folder: str = "disk", **changes: Any) -> Engine:
        options = {"host_bytes": SMALL, "disk": str(tmp_path / folder), "disk_bytes": "64MiB"}
        return Engine(model_of(family), options, asynchronous=asynchronous, **changes)

    return made


def ask(engine: Engine, given: list[list[int]] = GIVEN, **prompt: Any) -> list[Answer]:
    """One after the other."""
    return [engine.run([ids], ANSWER, **prompt)[0] for ids in given]


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [each.tokens for each in answers]


def known(answers: list[Answer]) -> list[int]:
    return [each.known for each in answers]


def figures(engine: Engine) -> dict[str, int]:
    return engine.forwards.disk.figures


@pytest.mark.parametrize("asynchronous", [False, True], ids=["one", "two"])
def test_prefixes_come_back_and_outlive_their_engine(make: Callable[..., Engine], own: list[list[int]],
                                                     asynchronous: bool) -> None:
    with make(asynchronous=asynchronous) as engine:
        first, again = ask(engine), ask(engine)
        assert tokens(first) == tokens(again) == own
        assert known(first) == [0] * 8 and known(again) == [FOUND] * 8
        assert figures(engine)["found"] >= 4 and figures(engine)["refused"] == 0
        assert engine.forwards.engine.stats().evicted_blocks > 0
    with make(asynchronous=asynchronous) as engine:
        # Together: what one begins with does not give way to what is read for another, which waits for a step.
        waited: list[bool] = []
        bring = engine.forwards.bring
        engine.forwards.bring = lambda prompt: waited.append(not bring(prompt)) or not waited[-1]
        answers = engine.run(GIVEN, ANSWER)
        assert tokens(answers) == own and [each.reason for each in answers] == ["length"] * 8
        assert sum(each == FOUND for each in known(answers)) >= 4 and any(waited)


def test_layers_with_windows(make: Callable[..., Engine]) -> None:
    with make("Gemma2") as engine:
        first = ask(engine)
        assert known(first) == [0] * 8
    with make("Gemma2") as engine:
        assert tokens(ask(engine)) == tokens(first) and figures(engine)["found"] > 0


def test_other_salts_and_models_find_nothing(make: Callable[..., Engine], own: list[list[int]]) -> None:
    """Another model is also one of the same files with other positions."""
    with make() as engine:
        ask(engine, cache_salt="one")
    with make(hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}) as engine:
        answers = ask(engine, GIVEN[:2], cache_salt="one")
        assert known(answers) == [0, 0] and tokens(answers) != own[:2]
        assert figures(engine)["found"] == figures(engine)["refused"] == 0
    with make() as engine:
        assert known(ask(engine, GIVEN[:2], cache_salt="other")) == [0, 0] == known(ask(engine, GIVEN[:2]))
        answers = ask(engine, GIVEN[:4], cache_salt="one")
        assert known(answers) == [FOUND] * 4 and tokens(answers) == own[:4]


def test_damage_costs_a_prefix(make: Callable[..., Engine], own: list[list[int]], tmp_path: Path,
                               monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as engine:
        ask(engine)
    files = sorted((tmp_path / "disk").glob("*.kv"))
    for at, each in enumerate(files):
        content = bytearray(each.read_bytes())
        content[len(content) // 2] ^= 1
        each.write_bytes(content if at % 2 else content[:100])
    said: list[str] = []
    monkeypatch.setattr("sluice.vllm._disk.logger.warning", said.append)
    with make() as engine:
        assert tokens(ask(engine)) == own
        assert figures(engine)["found"] == 0 and figures(engine)["refused"] == len(files) == len(said)
    assert all("--additional-config.sluice.disk " in each and "is damaged and is deleted" in each for each in said)


def test_a_disk_that_is_full_loses_nothing(make: Callable[..., Engine], own: list[list[int]], tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("sluice.vllm._disk.logger.warning", said.append)
    with make() as engine:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
        try:
            assert tokens(ask(engine)) == own
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert len(said) == figures(engine)["refused"] == 1 and "cannot be written to" in said[0]
        assert [each.name for each in (tmp_path / "disk").iterdir()] == ["lock"]


def test_requests_that_are_preempted_begin_with_what_was_written(make: Callable[..., Engine]) -> None:
    """Eight at once do not fit."""
    long = greedy(60)
    with make() as engine:
        assert engine.tokens(GIVEN, long) == engine.tokens(GIVEN, long)
        assert engine.forwards.preemptions > 0 and figures(engine)["found"] > 0
        engine.settle()
        assert len(engine.forwards) <= 1


def test_after_a_reset_the_disk_is_left(make: Callable[..., Engine], own: list[list[int]]) -> None:
    """Weights may be others then, and are the files' again in an engine that comes later."""
    with make() as engine:
        ask(engine, GIVEN[:6])
        engine.vllm.reset_prefix_cache()
        answers = ask(engine)
        assert known(answers) == [0] * 8 and tokens(answers) == own and engine.forwards.disk is None
    with make() as engine:
        answers = ask(engine)
        assert known(answers[6:]) == [0] * 2 and any(known(answers[:6])) and tokens(answers) == own


def request(number: int, lora: Any = None) -> SimpleNamespace:
    """As vLLM's scheduler has it."""
    return SimpleNamespace(request_id=str(number), mm_features=[], prompt_embeds=None, skip_reading_prefix_cache=False,
                           cache_salt=None, lora_request=lora, num_tokens=150, all_token_ids=GIVEN[0])


def test_adapters_have_nothing_on_disk() -> None:
    """No name of theirs says for good what they are."""
    asked: list[bool] = []
    prefixes = Prefixes(SimpleNamespace(known=lambda prompt: 0,
                                        bring=lambda prompt: asked.append(prompt.stored) or True))
    lora = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="one")
    for number, adapter in enumerate((None, lora)):
        prefixes.get_num_new_matched_tokens(request(number, adapter), 0)
    assert asked == [True, False]


def test_a_prompt_that_waits_is_not_looked_for_at_every_step() -> None:
    """Each look reads files: with hundreds of requests that wait for each other they would be most of a step."""
    asked: list[int] = []
    forwards = SimpleNamespace(known=lambda prompt: 48, promised=True,
                               bring=lambda prompt: asked.append(0) or not forwards.promised)
    prefixes = Prefixes(forwards)
    for step in range(3):
        answers = [prefixes.get_num_new_matched_tokens(request(number), 0) for number in range(4)]
        assert answers == [(None, False)] * 4 and len(asked) == 4
    forwards.promised = False
    assert prefixes.get_num_new_matched_tokens(request(0), 0) == (48, False) and len(asked) == 5
    prefixes.request_finished(request(1), ())
    forwards.promised = True
    assert prefixes.get_num_new_matched_tokens(request(1), 0) == (None, False) and len(asked) == 6


@pytest.mark.parametrize(("options", "changes", "said"), [
    ({"disk": "d"}, {}, "sluice.disk and .*sluice.disk_bytes belong together"),
    ({"disk_bytes": 1}, {}, "belong together"),
    ({"disk": 3, "disk_bytes": 1}, {}, "disk is 3; it must be the name of a folder"),
    ({"disk": "~no-such-user/d", "disk_bytes": 1}, {}, "there is no such user; write the folder out"),
    ({"disk": "d", "disk_bytes": "much"}, {}, "disk_bytes: \"much\" is no size"),
    ({"disk": "d", "disk_bytes": 1}, {"enable_prefix_caching": False}, "--no-enable-prefix-caching"),
    ({"disk": "d", "disk_bytes": 1}, {"distributed_executor_backend": "mp"}, "VLLM_ENABLE_V1_MULTIPROCESSING"),
    ({"disk": "d", "disk_bytes": 1}, {"pipeline_parallel_size": 2}, "it is not with several GPUs"),
    ({"disk": "d", "disk_bytes": 1}, {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "--scheduler-cls"),
])
def test_what_is_refused(model_of: Callable[[str], Path], options: dict[str, Any], changes: dict[str, Any],
                         said: str) -> None:
    with pytest.raises((sluice.InvalidArgument, ValueError), match=said):
        configured(model_of("Llama"), options, **changes)


def test_a_folder_of_the_user_s_own(model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch,
                                    tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = configured(model_of("Llama"), {"disk": "~/prefixes", "disk_bytes": 1})
    assert settings_of(config).disk == tmp_path / "prefixes"


@pytest.mark.parametrize(("changes", "said"), [
    ({"load_format": "runai_streamer"}, "--load-format runai_streamer has no files"),
    ({"model": "a/b"}, "which revision of a/b these are; give --revision with a commit"),
    ({"model": "a/b", "revision": "main"}, "which revision"),
    ({"model": "a/b", "commit": "0" * 40, "hf_config_path": "c/d"}, "which revision"),
])
def test_weights_that_may_change_under_their_name(model_of: Callable[[str], Path], changes: dict[str, Any],
                                                  said: str) -> None:
    """Such as those of an object store, of which vLLM has a folder with the configuration alone."""
    with pytest.raises(sluice.InvalidArgument, match=said):
        signature_of(*named(model_of, **changes))


def test_weights_with_a_name_for_good(model_of: Callable[[str], Path]) -> None:
    one, other = "0" * 40, "1" * 40
    names = [signature_of(*named(model_of, **changes)) for changes in (
        {}, {"model": "a/b", "commit": one}, {"model": "a/b", "commit": other}, {"model": "a/c", "commit": one},
        {"model": "a/b", "commit": one, "revision": other}, {"model": "a/b", "commit": one, "revision": "main"},
        {"load_format": "sharded_state"}, {"model_loader_extra_config": {"pattern": "part-*"}})]
    assert len(set(names)) == 6 and names[1] == names[5] and names[2] == names[4]


def named(model_of: Callable[[str], Path], commit: str | None = None, **changes: Any) -> tuple[Any, Any, Any]:
    """What `signature_of` takes, of a configuration with other names of weights."""
    config = configured(model_of("Llama"), {})
    for name, value in changes.items():
        setattr(config.load_config if hasattr(config.load_config, name) else config.model_config, name, value)
    config.model_config.hf_config._commit_hash = commit
    return config, settings_of(config), SimpleNamespace(options=SimpleNamespace(prefill_mode="full"))


def test_a_configuration_may_be_adapted_twice(model_of: Callable[[str], Path]) -> None:
    config = configured(model_of("Llama"), {"disk": "d", "disk_bytes": "1MiB"})
    adapt(config)
    settings = settings_of(config)
    assert (settings.disk, settings.disk_bytes) == (Path("d"), 1 << 20)


def test_a_folder_that_cannot_be_used(make: Callable[..., Engine], tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"")
    with pytest.raises(sluice.InvalidArgument, match=r"--additional-config.sluice.disk \S+taken: .*; give a folder"):
        make(folder="taken")

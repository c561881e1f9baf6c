"""From a folder to a serving loop."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from transformers.distributed import DistributedConfig

from sluice.errors import InvalidArgument
from sluice.serving.adapters import with_adapter
from sluice.serving.arguments import CannotLoad, NotInstalled, source
from sluice.serving.disk import Folder
from sluice.serving.loop import Loop
from sluice.serving.model import PackedModel
from sluice.serving.process import Ready, Settings
from sluice.serving.ranks import START_S, Launch, join
from sluice.serving.requests import Sampling
from sluice.serving.sessions import signature_of
from sluice.serving.sharded import ShardedModel
from sluice.serving.template import turn_ends
from sluice.serving.tier import DiskTier, kind_of
from sluice.serving.tokens import TokenBytes
from sluice.serving.weights import refuse_incomplete

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@contextlib.contextmanager
def _loading(what: str, remedy: str = "") -> Iterator[None]:
    """Whatever transformers raises becomes a line."""
    try:
        yield
    except CannotLoad:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if "trust_remote_code" in text:
            raise CannotLoad(f"{what} cannot be loaded: the model brings Python code of its own, which would run with "
                             "all your rights; read it, and if you trust it give --trust-remote-code") from error
        kind = NotInstalled if isinstance(error, ImportError) else CannotLoad
        raise kind(f"{what} cannot be loaded{remedy}: {text}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers writes tables of what it makes up, which is refused here in a line."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(before)


def _check_gguf(model: str) -> None:
    """@throws NotInstalled if the model is a file of GGUF and nothing here reads it"""
    if source(model)[1] and importlib.util.find_spec("gguf") is None:
        raise NotInstalled(f"{model} is read by the package gguf, which is not installed: pip install "
                           "'./python[gguf]', in Sluice's sources, has it")


def load_tokenizer(model: str, trust_remote_code: bool = False) -> Any:
    _check_gguf(model)
    place, file = source(model)
    # transformers advises to install packages, also where there is no tokenizer at all.
    remedy = "" if file else "; its files, such as tokenizer.json, must be beside the model"
    with _loading(f"the tokenizer of {model}", remedy):
        return transformers.AutoTokenizer.from_pretrained(place, **file, trust_remote_code=trust_remote_code)


def load_config(model: str, trust_remote_code: bool = False) -> transformers.PreTrainedConfig:
    _check_gguf(model)
    place, file = source(model)
    with _loading(f"the configuration of {model}"):
        return transformers.AutoConfig.from_pretrained(place, **file, trust_remote_code=trust_remote_code)


def _damaged(model: str) -> str | None:
    """A file of weights in a folder that cannot be read, is not as long as its header says, or has none. What
    transformers says of one does not name it."""
    for file in sorted(Path(model).glob("*.safetensors")):
        try:
            with safetensors.safe_open(file, "pt"):
                pass
        except safetensors.SafetensorError as error:
            return f"{file.name} is damaged, or was not copied whole ({error}): fetch the file again"
        except OSError as error:
            return f"{file.name} cannot be opened ({error})"
    return None


def load_model(model: str, dtype: str, trust_remote_code: bool = False, adapter: str | None = None,
               **options: Any) -> transformers.PreTrainedModel:
    """`dtype`: auto, or torch's name of one. `trust_remote_code`: Python files of the model's may run. In all loading
    here that is said, never left out: transformers would ask on standard input, and take any line for an answer."""
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    try:
        _check_gguf(model)
        place, file = source(model)
        with _loading(f"the model {model}"), _quiet():
            made, told = transformers.AutoModelForCausalLM.from_pretrained(
                place, **file, dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                trust_remote_code=trust_remote_code, output_loading_info=True, ignore_mismatched_sizes=True, **options)
            refuse_incomplete(model, made, told)
        _check_generation(model, made)
        return made if adapter is None else with_adapter(made, adapter)
    except CannotLoad as error:
        damaged = _damaged(model)  # Not before: a folder may have files that the model does without.
        if damaged is None:
            raise
        raise type(error)(f"{error}; {damaged}") from error


def end_ids(model: transformers.PreTrainedModel, tokenizer: Any = None) -> frozenset[int]:
    """Tokens with which a model ends an answer: as its generation_config has them, and of special tokens that of its
    configuration, the tokenizer's and the one that ends turns in the chat template."""
    def listed(ends: Any) -> set[int]:
        return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)

    ends = listed(model.generation_config.eos_token_id)
    if tokenizer is not None:
        # Where a configuration says nothing, its class may have a number of another vocabulary.
        special = TokenBytes(tokenizer).is_special
        config = model.config.get_text_config(decoder=True)
        ends |= set(filter(special, listed(config.eos_token_id) | listed(model.config.eos_token_id)))
        ends |= listed(tokenizer.eos_token_id) | turn_ends(tokenizer)
    return frozenset(ends)


def _check_generation(model: str, made: transformers.PreTrainedModel) -> None:
    """What a model's makers say of sampling and of ends is refused here, and not with each request.
    @throws CannotLoad"""
    file = Path(model) / "generation_config.json"
    if file.exists():  # transformers takes one that it cannot read for none.
        with _loading(str(file)):
            transformers.GenerationConfig.from_pretrained(model)
    with _loading(f"{model}: its generation_config.json"):
        Sampling(**_defaults(made))
        ends = made.generation_config.eos_token_id
        for each in ends if isinstance(ends, list) else [] if ends is None else [ends]:
            if type(each) is not int or each < 0:
                raise InvalidArgument(f"eos_token_id has {each!r}; it must have ids of tokens")


def _defaults(model: transformers.PreTrainedModel) -> dict[str, Any]:
    """Sampling, and only what the model's makers wrote: other defaults are the protocol's."""
    told = model.generation_config.to_diff_dict()
    defaults = {name: told[name] for name in _DEFAULTS if told.get(name) is not None}
    for name, value in defaults.items():
        if type(value) is not int and (type(value) is not float or name == "top_k"):
            raise InvalidArgument(f"{name} is {value!r}; it must be a number")
    if defaults.get("top_k") == -1:  # Others' word for any.
        del defaults["top_k"]
    return defaults


def _load_packed(settings: Settings) -> tuple[PackedModel, transformers.PreTrainedModel]:
    launch = Launch.of_environment()
    options = {"context": settings.context, "sequences": settings.sequences, "prefill_rows": settings.prefill_rows,
               "graphs": settings.graphs, **settings.options}
    if launch.ranks == 1:
        model = load_model(settings.model, settings.dtype, settings.trust_remote_code, settings.adapter)
        model = model.to(settings.device)
        packed = PackedModel(model, settings.policy, settings.host_bytes, compile=settings.compile, **options)
        return packed, model
    if settings.compile:
        raise InvalidArgument("--compile: a model that several processes share is not compiled; leave it out")
    if settings.adapter is not None:
        raise InvalidArgument("--adapter: a model that several processes share takes none; merge it into the weights")
    if settings.disk is not None:
        raise InvalidArgument("--disk: a model that several processes share keeps no prefixes there; leave it out")
    ranks = join(launch, settings.device, settings.silence_s)
    model, error = None, None
    try:
        model = load_model(settings.model, settings.dtype, settings.trust_remote_code,
                           distributed_config=DistributedConfig(tp_size=launch.ranks))
    except CannotLoad as failed:
        error = failed
    ranks.agree(error=error, timeout_s=START_S)
    packed = ShardedModel(model, settings.policy, settings.host_bytes, ranks=ranks, **options)
    return packed, model


def load_follower(settings: Settings) -> ShardedModel:
    """The model of a rank that is not the first."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # Rank 0 says the same.
    return _load_packed(settings)[0]


def load_loop(settings: Settings) -> tuple[Loop, Ready]:
    """Loads model and tokenizer, and builds the engine."""
    packed, model = _load_packed(settings)
    for what, why in (("CUDA graphs", packed.graphs_failed), ("torch.compile", packed.compile_failed)):
        if why is not None:
            print(f"sluice: forwards run without {what}: {why}", file=sys.stderr, flush=True)
    tokenizer = load_tokenizer(settings.model, settings.trust_remote_code)
    disk = None
    if settings.disk is not None:
        kind = kind_of(packed.engine.options, signature_of(packed, settings.model, settings.adapter))
        disk = DiskTier(packed.engine, packed.policy, Folder(settings.disk, settings.disk_bytes, kind))
    loop = Loop(packed, tokenizer, end_ids=end_ids(model, tokenizer), prefix=settings.prefix,
                slowdown=settings.slowdown, disk=disk)
    return loop, Ready(loop.limit, _defaults(model), packed.vocabulary, packed.engine.memory().near_pages)

"""The arguments of commands, and what is refused of them before anything is loaded."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sluice import _structs as structs
from sluice.errors import Error, InvalidArgument, Unsupported
from sluice.options import Bucket, EngineOptions, _refuse_scores, device_number
from sluice.serving.process import Settings


class CannotLoad(Error):
    """There is no model, or transformers does not take it."""

    exit_code = 2


class NotInstalled(CannotLoad):
    """A package that the model needs is missing."""

    exit_code = Unsupported.exit_code


GGUF = ".gguf"
# Of EngineOptions, what sets them.
_OTHERS = {"layers": "the model", "q_heads": "the model", "kv_heads": "the model", "head_dim": "the model",
           "scale": "the model", "softcap": "the model", "windows": "the model",
           "device": "--device", "host_bytes": "--host-bytes", "near_bytes": "--near-bytes",
           "policies": "--policy",
           "sequences": "--sequences", "largest": "--sequences and --prefill-rows"}
_OF_SHAPES = {"value_dim", "windows"}  # They go with other numbers of a model.
# One of these is in the name of a file of any tokenizer.
_TOKENIZERS = ("token", "vocab", "merges", "spiece", "sentencepiece", "tekken", ".model", ".gguf")
_SAID = {**_OTHERS, "kv_dtype": "--kv-dtype"}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def size(text: str) -> int:
    """Bytes: 8GiB, 8G, 512M or a number."""
    found = re.fullmatch(r"([0-9]{1,30})(?:(\.[0-9]{1,30})? *([KMGT])(?:i?B)?|B)?", text, re.IGNORECASE)
    if found is not None:
        unit = _UNITS[(found[3] or "").upper()]
        bytes = int(found[1]) * unit + int(float(found[2] or 0) * unit)
        if bytes < 1 << 63:
            return bytes
    raise argparse.ArgumentTypeError(f'"{shown(text)}" is no size; write 8GiB, 512M or a number of bytes')


def shown(text: str) -> str:
    """As much of what was given as an error may tell."""
    return text if len(text) <= 100 else text[:100] + "..."


def option(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as JSON has it, or a word."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f'"{shown(text)}" is not NAME=VALUE')
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
    except RecursionError:
        raise argparse.ArgumentTypeError(f'"{shown(text)}" is nested too deeply') from None


def number(kind: type, low: float, high: float | None = None) -> Callable[[str], Any]:
    """A finite number in [low, high], in ASCII digits; without `high`, one that an engine can take."""
    form = r"[+-]?[0-9]+" if kind is int else r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?"
    most = high if high is not None else (1 << 31) - 1 if kind is int else 1e9

    def parse(text: str) -> Any:
        try:
            value = kind(text) if re.fullmatch(form, text, re.IGNORECASE) else math.nan
        except ValueError:  # Of thousands of digits.
            value = math.nan
        if not low <= value <= most:
            bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
            raise argparse.ArgumentTypeError(
                f'"{shown(text)}" must be a{" whole" if kind is int else ""} number {bounds}')
        return value
    return parse


def file(text: str) -> Path:
    """A file's name."""
    if not text:
        raise argparse.ArgumentTypeError("the name of a file is empty; give one, or leave the option out")
    return Path(text)


def check_texts(arguments: argparse.Namespace) -> None:
    """Refuses values that are empty, which would count as left out, and bytes that are no text."""
    for name, value in vars(arguments).items():
        if value == "":
            raise InvalidArgument(f"--{name.replace('_', '-')} is empty; give it a value, or leave it out")
        try:
            _ = isinstance(value, str) and value.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(f"--{name.replace('_', '-')} is no text of UTF-8") from None


def add_model(parser: argparse.ArgumentParser, near: str) -> None:
    """A model, and what an engine for it may take. `near`: the memory that it takes by itself."""
    add = parser.add_argument
    add("--model", required=True, help="a folder as transformers saves it, a file of GGUF, or a name that transformers "
        "knows")
    add("--adapter", metavar="DIR", help="a LoRA adapter of the model, as peft saves it, which becomes part of its "
        "weights")
    add("--host-bytes", type=size, default=Settings.host_bytes, help="host memory for keys and values (8GiB)")
    add("--near-bytes", type=size, help="of a GPU's memory, for keys and values that are attended often; 0: none "
        f"({near})")
    add("--prefill-rows", type=number(int, 1), default=Settings.prefill_rows,
        help="tokens of prompts that go through the model at once (%(default)s)")
    add("--device", help="cpu, cuda or cuda:N (cuda where there is one)")
    add("--dtype", default=Settings.dtype, choices=("auto", "float32", "float16", "bfloat16"),
        help="of the model (as it was saved)")
    add("--trust-remote-code", action="store_true", help="Python files of the model's may run; without it a model that "
        "needs them is refused")
    add("--kv-dtype", choices=("f32", "f16", "bf16", "fp8_e4m3"), help="of keys and values in memory; fp8_e4m3: half "
        "the host memory, rounded to 8 bits (the model's)")
    add("--option", type=option, action="append", default=[], metavar="NAME=VALUE",
        help="another of sluice.EngineOptions, such as page_tokens=32; may be repeated")


def add_engine(parser: argparse.ArgumentParser, sequences: int) -> None:
    add_model(parser, "as --host-bytes, or half of what is free")
    add = parser.add_argument
    add("--policy", default=Settings.policy, help="what is attended (%(default)s)")
    add("--context", type=number(int, 1), help="tokens of prompt and answer, at most (the model's)")
    add("--sequences", type=number(int, 1), default=sequences, help="answers that are generated at once (%(default)s)")
    add("--slowdown", type=number(float, 0), default=0, help="beside prompts that are read answers may come as many "
        "times as slowly as alone, on the average; 0: prompts have all rows of every forward (%(default)s)")
    add("--graphs", default=Settings.graphs, choices=("auto", "on", "off"),
        help="forwards of decoded tokens are replayed from CUDA graphs; auto: on a GPU (%(default)s)")
    add("--compile", action="store_true", help="the model is compiled by torch, so that a forward has fewer kernels; "
        "the start takes a minute longer")
    add("--no-prefix-cache", action="store_true", help="read every prompt anew")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--max-tokens", type=number(int, 1), help="of an answer (until the context is full)")
    add("--temperature", type=number(float, 0, 100), help="0: the most likely token (the model's own, or 1)")
    add("--top-p", type=number(float, 0, 1))
    add("--seed", type=number(int, -(1 << 63), (1 << 64) - 1), help="to get the same again")


def device_of(arguments: argparse.Namespace) -> str:
    """What --device says, or a GPU where there is one."""
    from sluice._library import library

    device = arguments.device or ("cuda" if library().cuda_devices() else "cpu")
    kind, number = device_number(device)
    if kind != structs.DEVICE_CPU:
        check_gpu(device, number)
    return device


def check_gpu(device: str, number: int) -> None:
    """Refuses a GPU that is not there, which torch would say with a traceback. `number`: of this device.
    @throws Unsupported"""
    import torch

    from sluice._library import library

    if not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None else "torch finds no GPU, or no driver"
        raise Unsupported(f"--device {device}: {why}; look at nvidia-smi, or use --device cpu")
    ours = library().cuda_devices()
    if not ours:
        raise Unsupported(f"--device {device}: torch finds a GPU, and {library().path} none that it can use; it needs a "
                          "driver for CUDA 13, and to have been built with nvcc of CUDA 13 on PATH")
    if number >= min(ours, torch.cuda.device_count()):
        raise Unsupported(f"--device {device}: there are {min(ours, torch.cuda.device_count())} GPUs, the first is "
                          "cuda:0; look at nvidia-smi and CUDA_VISIBLE_DEVICES")


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What --option and --kv-dtype say."""
    options = dict(arguments.option)
    if arguments.kv_dtype is not None:
        options["kv_dtype"] = arguments.kv_dtype
    return options


def settings_of(arguments: argparse.Namespace) -> Settings:
    device, options = device_of(arguments), options_of(arguments)
    check_options(options, arguments.policy)
    if arguments.near_bytes is not None:
        options["near_bytes"] = arguments.near_bytes
    check_folder(arguments.model)
    check_tokenizer(arguments.model)
    check_adapter(arguments.adapter)
    return Settings(model=arguments.model, adapter=arguments.adapter, policy=arguments.policy,
                    host_bytes=arguments.host_bytes,
                    context=arguments.context, sequences=arguments.sequences, prefill_rows=arguments.prefill_rows,
                    slowdown=arguments.slowdown, device=device, dtype=arguments.dtype,
                    trust_remote_code=arguments.trust_remote_code,
                    graphs=arguments.graphs, compile=arguments.compile, prefix=not arguments.no_prefix_cache,
                    disk=getattr(arguments, "disk", None), disk_bytes=getattr(arguments, "disk_bytes", None) or 0,
                    silence_s=getattr(arguments, "silence", Settings.silence_s), options=options)


def in_arguments(text: str) -> str:
    """A message that names options of an engine, with the arguments that set them."""
    def argument(found: re.Match[str]) -> str:
        return _SAID.get(found[1], f"--option {found[1]}")

    fields = "|".join(each.name for each in dataclasses.fields(EngineOptions))
    text = re.sub(rf"\A({fields})(?= is )", argument, text)
    return re.sub(r"(?:EngineOptions|AdmissionOptions)\.(\w+)", argument, text)


def check_options(options: dict[str, Any], policy: str, said: str = "--option ",
                  others: Mapping[str, str] = _OTHERS) -> None:
    """Refuses names and values that no engine takes, and policies that there are not. `said`: what messages have before
    a name. `others`: which options are not given so, and what sets them."""
    known = {each.name for each in dataclasses.fields(EngineOptions)} - set(others)
    for name, value in options.items():
        if name in others:
            raise InvalidArgument(f"{said}{name}: {others[name]} sets it")
        if name not in known:
            raise InvalidArgument(f"there is no option {name}; there are {', '.join(sorted(known))}")
        try:
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError
            EngineOptions(layers=1, q_heads=1, kv_heads=1, head_dim=64, **{name: value})._to_struct()
        except InvalidArgument as reason:
            raise InvalidArgument(f"{said}{reason}") from None
        except (AttributeError, TypeError, KeyError, OverflowError, ValueError, ctypes.ArgumentError, RecursionError):
            # Of words where numbers should be, and the like.
            raise InvalidArgument(f"{said}{name}: it may not be {shown(str(value))}") from None
    _refuse_scores(policy)
    alike = {name: value for name, value in options.items() if name not in _OF_SHAPES}
    try:
        EngineOptions(layers=1, q_heads=1, kv_heads=1, head_dim=64, policies=[policy],
                      largest=Bucket(decode_rows=1, max_tokens=1), **alike).resolved()
    except InvalidArgument as reason:
        raise InvalidArgument(f"{said}{reason}") from None


def check_folder(model: str) -> None:
    """Refuses a folder that is none or has no model, and files but those of GGUF. Another word is a name, which
    transformers looks up."""
    folder = Path(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            files = sorted(each.name for each in folder.glob(f"*{GGUF}"))
            raise CannotLoad(f"{model} has no model: config.json is missing" + (
                f"; --model {folder / files[0]} is a file of GGUF in it" if files else ""))
    elif folder.is_file() and folder.suffix != GGUF:
        raise CannotLoad(f"{model} is a file; --model is the folder that has it, with config.json and the files of the "
                         f"tokenizer beside it, or a file of GGUF (*{GGUF})")
    elif folder.suffix == GGUF and not folder.exists():
        raise CannotLoad(f"there is no file {model}")
    elif not folder.is_file() and (folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1):
        raise CannotLoad(f"there is no folder {model}; --model is one with config.json, as save_pretrained makes it, a "
                         f"file of GGUF (*{GGUF}), or a name on the Hugging Face Hub")


def check_tokenizer(model: str) -> None:
    """Refuses a folder that has none, which transformers takes long to say."""
    names = [each.name.lower() for each in Path(model).iterdir()] if Path(model).is_dir() else ["tokenizer.json"]
    if not any(part in name for name in names for part in _TOKENIZERS):
        raise CannotLoad(f"the tokenizer of {model} cannot be loaded; its files, such as tokenizer.json, must be "
                         "beside the model")


def check_adapter(folder: str | None) -> None:
    """Refuses a folder that has no adapter."""
    if folder is not None and not (Path(folder) / "adapter_config.json").is_file():
        raise CannotLoad(f"--adapter {folder} has no adapter: adapter_config.json, which peft writes, is missing")


def source(model: str) -> tuple[str, dict[str, str]]:
    """What transformers' from_pretrained takes for --model: the place, and the file of GGUF in it, if it is one."""
    path = Path(model)
    return (str(path.parent), {"gguf_file": path.name}) if path.suffix == GGUF else (model, {})

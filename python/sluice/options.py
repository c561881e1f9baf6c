"""What an engine, a forward and its parts are made of, as plain values."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sluice import _structs as structs
from sluice import figures
from sluice._library import library
from sluice.errors import InvalidArgument, Unsupported
from sluice.figures import Memory


class Features(enum.IntFlag):
    """What rows of a bucket that choose what they attend may do."""

    NONE = 0
    TOP_K = 1  #: some choose a number of tokens
    UNBOUNDED = 2  #: some choose a share of the mass, or attend everything
    PAGES = 4  #: some rank pages by their digests
    AUDIT = 8  #: what they attend is held against exact attention, see `Engine.audit`
    REHEARSED = 16  #: some choose by rehearsed queries, which `Engine.attend` is given
    SCORES = 32  #: some choose by scores that the caller brings to `Engine.attend`


@dataclass(frozen=True)
class Bucket:
    """What a forward is made for, padding included. What `Engine.attend` enqueues follows from it alone."""

    decode_rows: int = 0  #: rows that choose what they attend: new tokens, and drafts to verify
    prefill_rows: int = 0  #: rows of chunks of prompts, which attend all that comes before them
    prefills: int = 0  #: how many chunks these are
    max_tokens: int = 0  #: of the longest sequence, a multiple of page_tokens; 0: all that there is room for
    features: Features = Features.NONE  #: of no use without decode_rows
    #: 1: each of the decode_rows by itself. Else as many new tokens of a sequence, or fewer, attend together what any
    #: of them chose, and keys and values are read once for all; decode_rows is a multiple of it. Policies that choose
    #: on the CPU choose by the first of them.
    drafts: int = 1

    def __post_init__(self) -> None:
        # Made once: `attend` hands its address on for every layer.
        struct = structs.Bucket(**{field.name: _unsigned(field.name, getattr(self, field.name))
                                   for field in dataclasses.fields(self)})
        object.__setattr__(self, "_struct", struct)
        object.__setattr__(self, "_address", ctypes.addressof(struct))

    @property
    def rows(self) -> int:
        return self.decode_rows + self.prefill_rows

    # The struct holds nothing that the fields do not, and has no copy of its own.
    def __reduce__(self) -> tuple:
        return Bucket, tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def whole_tokens(options: EngineOptions) -> int:
    """Of an engine's options, max_tokens of the largest bucket whose sequences attend everything; 0: of none."""
    dense = options.dense_tokens or 0
    return min(dense - dense % options.page_tokens, options.largest.max_tokens)


def bucket_tokens(tokens: int, options: EngineOptions) -> int:
    """max_tokens of a bucket for sequences of up to `tokens`, in steps of 4096, or of what attends everything: what
    `attend` enqueues, and what that takes, grows with it. `options` are the engine's."""
    steps = min(-(-tokens // 4096) * 4096, options.largest.max_tokens)
    whole = whole_tokens(options)
    return whole if tokens <= whole < steps else steps


@dataclass(frozen=True)
class PlanItem:
    """New tokens of one sequence, consecutive rows of a forward."""

    sequence: int
    tokens: int = 1
    prefill: bool = False  #: a chunk of a prompt; else each row chooses as the sequence's policy says


_CHOICES: dict[str, tuple[str, ...]] = {
    "kv_dtype": ("f32", "f16", "bf16", "fp8_e4m3"),
    "prefill_mode": ("full", "flex", "automatic"),
    "placement": ("hybrid", "stream"),
    "handover": ("auto", "device", "stream", "host"),
}
#: `EngineOptions.dense_tokens`: as many as near_bytes have room for, up to where choosing pays
DENSE_AUTO = 0xFFFF_FFFF
#: `EngineOptions.fetch_share`: by the rates of link and threads, in forwards with many lists
FETCH_AUTO = -1.0
#: `EngineOptions.cpu_sequences` and `.cluster_sequences`: as many as live at once
ALL_SEQUENCES = 0xFFFF_FFFF
_APART = ("device", "largest", "cores", "windows", "policies")  # not a number each
_SWITCHES = ("prefix_decoded", "prefill_lines", "pin_threads")


@dataclass(kw_only=True)
class EngineOptions:
    """Everything that is fixed when an engine is created. None is the library's default, which sluice.h names;
    `Engine.options` has what it came to."""

    layers: int
    q_heads: int  #: a multiple of kv_heads, at most 32 for each of them
    kv_heads: int
    head_dim: int  #: on a GPU 64, 96, 128, 192 or 256; on the CPU any multiple of 16 up to 256
    value_dim: int | None = None  #: 0: values have head_dim elements; else latent attention on the CPU: they are the
    #: first value_dim elements of keys, kv_heads is 1, and head_dim up to 576 (DeepSeek V2 and V3: 512 of 576)
    device: str = "cpu"  #: or "cuda", or "cuda:1"
    device_bytes: int | None = None  #: most that is taken of the GPU's memory
    kv_dtype: Literal["f32", "f16", "bf16", "fp8_e4m3"] | None = None  #: of keys and values in memory
    host_bytes: int | None = None  #: host memory for keys and values, reserved at once
    near_bytes: int | None = None  #: device memory for a cache of them
    page_tokens: int | None = None  #: a power of two in [8, 256]
    promotions: int | None = None  #: tokens of a layer and KV head that are brought near at a time
    placement: Literal["hybrid", "stream"] | None = None  #: who attends what is chosen and not near
    fetch_share: float | None = None  #: in "hybrid", of what a GPU chose, the share that it attends over the link; or
    #: FETCH_AUTO: as the engine finds best
    fetch_lists: int | None = None  #: forwards with fewer lists (decode rows times KV heads) fetch nothing of it
    dense_tokens: int | None = None  #: up to which a sequence attends everything; DENSE_AUTO: as the engine finds best
    prefix_decoded: bool | None = None  #: tokens that were decoded are found as parts of prompts, too
    prefix_bytes: int | None = None  #: of host_bytes, for pages of named tokens that no sequence has
    policies: Sequence[str] | None = None  #: that sequences will be begun with, for which the engine has room: "sluice"
    #: if None; others are served as far as they want no more
    largest: Bucket | None = None  #: of all buckets; `policies` add the features that they want
    in_flight: int | None = None  #: forwards that are planned and not finished
    sequences: int | None = None  #: that live at once
    cpu_sequences: int | None = None  #: of them, at most, those whose policies choose on the CPU; ALL_SEQUENCES if None
    policy_bytes: int | None = None  #: most that these policies may keep on the heap; 0: no bound
    import_rows: int | None = None  #: tokens of one import
    prefill_window: int | None = None  #: tokens of keys that a chunk of a prompt attends at a time
    prefill_mode: Literal["full", "flex", "automatic"] | None = None  #: how prompts attend
    prefill_min_budget: int | None = None  #: FlexPrefill: tokens, at least
    prefill_max_budget: int | None = None  #: and at most, 0: any
    prefill_lines: bool | None = None  #: blocks by lines
    prefill_gamma: float | None = None  #: share of the attention that is enough
    prefill_tau: float | None = None
    threads: int | None = None  #: that answer the far part
    pin_threads: bool | None = None
    handover: Literal["auto", "device", "stream", "host"] | None = None  #: who waits for the CPU's part of a layer
    answer_timeout_ms: int | None = None  #: a layer waits no longer for the far part
    timeout_ms: int | None = None  #: every wait of a call
    cores: Sequence[int] | None = None  #: that threads run on, by the OS index of a PU of each
    scale: float | None = None  #: what q.k is multiplied by; 0: 1 / sqrt(head_dim)
    softcap: float | None = None  #: a scaled logit x becomes softcap * tanh(x / softcap); 0: it stays
    windows: Sequence[int] | None = None  #: per layer, newest tokens that a row sees, its own included; 0: all
    cluster_sequences: int | None = None  #: likewise, those whose policies choose among clusters of keys on the device
    window_slack: int | None = None  #: tokens that layers keep beyond their windows: as many can be taken back

    def resolved(self) -> EngineOptions:
        """The same as an engine has them that is made with them, whatever its device is: defaults filled in, features
        that `policies` want, cpu_sequences and cluster_sequences, and as many max_tokens as host_bytes hold.
        @throws InvalidArgument naming the option; Unsupported naming the policy"""
        struct, lib = self._to_struct(), library()
        lib.check(lib.engine_options_resolve(ctypes.byref(struct)))
        return EngineOptions._from_struct(struct)

    def memory_needed(self) -> Memory:
        """What an engine with these options would reserve, without making it; the threads' `partials`, and what comes
        with use, are 0.
        @throws Unsupported if the device cannot serve the shape"""
        struct, lib = structs.Memory(), library()
        lib.check(lib.engine_options_memory_needed(ctypes.byref(self._to_struct()), ctypes.byref(struct)))
        return figures.read(Memory, struct)

    def near_bytes_within(self, device_bytes: int) -> int:
        """The most that `near_bytes` may be for an engine to take no more than this of the GPU's memory, all told: near
        rows and their tables, copies in codes and digests of all keys, clusters, buffers. `near_bytes` does not count.
        @throws OutOfCapacity if there is no room for what is not near; else as memory_needed"""
        near, lib = ctypes.c_uint64(), library()
        lib.check(lib.engine_options_near_within(ctypes.byref(self._to_struct()),
                                                 _unsigned("device_bytes", device_bytes, 64), ctypes.byref(near)))
        return near.value

    def _to_struct(self) -> structs.EngineOptions:
        struct = structs.EngineOptions()
        lib = library()
        lib.check(lib.engine_options_init(ctypes.byref(struct), ctypes.sizeof(struct)))
        struct.device_type, struct.device_id = device_number(self.device)
        if self.largest is not None:
            if not isinstance(self.largest, Bucket):
                raise InvalidArgument(f"largest is {self.largest!r}; it must be a sluice.Bucket")
            for field in dataclasses.fields(Bucket):
                setattr(struct, f"largest_{field.name}", getattr(self.largest, field.name))
        if self.cores is not None:
            struct.core_count, struct.cores = _numbers("cores", self.cores)
        if self.windows is not None:
            struct.window_count, struct.windows = _numbers("windows", self.windows)
        if self.policies is not None:
            texts = _texts("policies", self.policies)
            struct.policy_count, struct.policies = len(texts), (ctypes.c_char_p * len(texts))(*texts)
        kinds = dict(structs.EngineOptions._fields_)
        for name, value in self.__dict__.items():
            if name in _CHOICES and value is not None:
                setattr(struct, name, _choice(name, value))
            elif name not in _APART and value is not None:
                if kinds[name] is not ctypes.c_float:
                    value = _unsigned(name, value, 8 * ctypes.sizeof(kinds[name]))
                try:
                    setattr(struct, name, value)
                except TypeError:
                    raise InvalidArgument(f"{name} is {value!r}; it must be a number") from None
        return struct

    @staticmethod
    def _from_struct(struct: structs.EngineOptions) -> EngineOptions:
        values = {field.name: getattr(struct, field.name) for field in dataclasses.fields(EngineOptions)
                  if field.name not in _APART}
        for name, words in _CHOICES.items():
            values[name] = words[values[name]]
        for name in _SWITCHES:
            values[name] = bool(values[name])
        largest = {field.name: getattr(struct, f"largest_{field.name}") for field in dataclasses.fields(Bucket)}
        largest["features"] = Features(largest["features"])
        values["device"] = "cpu" if struct.device_type == structs.DEVICE_CPU else f"cuda:{struct.device_id}"
        return EngineOptions(largest=Bucket(**largest), cores=struct.cores[: struct.core_count] or None,
                             windows=struct.windows[: struct.window_count] or None,
                             policies=[text.decode() for text in struct.policies[: struct.policy_count]], **values)


def wanted_by(policy: str) -> EngineOptions:
    """What any engine for a policy has, as `resolved` says it: features of its largest bucket, and whether sequences
    have room of their own on the CPU or for clusters."""
    return EngineOptions(layers=1, q_heads=1, kv_heads=1, head_dim=64, policies=[policy],
                         largest=Bucket(decode_rows=1, max_tokens=1)).resolved()


def policy_text(policy: str) -> bytes:
    """As the library reads it."""
    if not isinstance(policy, str):
        raise InvalidArgument(f'policy is {policy!r}; it must be a text, such as "sluice"')
    if "\0" in policy or not policy.isascii():  # The library would read it up to a zero.
        raise InvalidArgument(f"policy is {policy!r}; a policy has letters, digits and signs of ASCII alone")
    return policy.encode()


def device_number(name: str) -> tuple[int, int]:
    """Kind and number of a device, as the library has them."""
    kind, colon, number = str(name).partition(":")
    if kind == "cpu" and not colon:
        return structs.DEVICE_CPU, 0
    if kind == "cuda" and (number.isascii() and number.isdecimal() if colon else True):
        return structs.DEVICE_CUDA, _unsigned("device", int(number[:20] or 0), 31)
    raise InvalidArgument(f'device is "{name}"; it must be "cpu", "cuda" or "cuda:N"')


def _choice(name: str, word: str) -> int:
    if word not in _CHOICES[name]:
        raise InvalidArgument(f'{name} is "{word}"; it must be one of ' + ", ".join(_CHOICES[name]))
    return _CHOICES[name].index(word)


def _texts(name: str, policies: Sequence[str]) -> list[bytes]:
    if isinstance(policies, str) or not isinstance(policies, Sequence):
        raise InvalidArgument(f'{name} is {policies!r}; it must be a list of texts, such as ["sluice", "full"]')
    return [policy_text(policy) for policy in policies]


def _numbers(name: str, values: Sequence[int]) -> tuple[int, ctypes.Array]:
    try:
        numbers = None if isinstance(values, str) else list(values)
    except TypeError:
        numbers = None
    if numbers is None:
        raise InvalidArgument(f"{name} is {values!r}; it must be a list of whole numbers")
    return len(numbers), (ctypes.c_uint32 * len(numbers))(*(_unsigned(name, number) for number in numbers))


def _refuse_scores(policy: str) -> None:
    """Raises Unsupported if a policy wants scores, where none are taken from a model's layers."""
    if Features.SCORES in wanted_by(policy).largest.features:
        raise Unsupported(f"policy {policy} chooses by scores of a model's own indexer, which only callers of "
                          "sluice.Engine.attend hand over; drive a sluice.Engine, or choose by copies of keys, as in "
                          "exact | int4 | sample=256")


def _unsigned(name: str, value: int, bits: int = 32) -> int:
    # ctypes cuts off what does not fit.
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name} is {value!r}; it must be a whole number, an int") from None
    if not 0 <= number < 1 << bits:
        raise InvalidArgument(f"{name} is {number}; it must be in [0, {(1 << bits) - 1}]")
    return number

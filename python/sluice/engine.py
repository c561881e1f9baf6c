"""The engine."""

from __future__ import annotations

import array
import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from ctypes import byref
from typing import Any

from sluice import _structs as structs
from sluice import figures
from sluice._areas import Buffer, Path, file_name, is_path, readable, writable
from sluice._closing import Closing
from sluice._library import OWNER, library
from sluice._tensors import Argument
from sluice.errors import DeviceError, InvalidArgument
from sluice.figures import Audit, HeadAudit, Memory, SequenceMemory, Sizes, Stats
from sluice.options import Bucket, EngineOptions, PlanItem, _unsigned, policy_text


class Engine(Closing):
    """Attention for a batch of sequences whose keys and values lie in host memory; sluice.h says more of each call.

    Tensors are numpy arrays, torch tensors, or what has `__dlpack__`: [tokens, heads, head_dim] of f32, f16 or bf16.
    They are read and written in place. With the host device everything has happened when a call returns; on a GPU the
    engine keeps tensors alive until the forward that uses them is finished or cancelled. (Those of a CUDA graph belong
    to the graph: keep them as long as it is replayed.)

    `stream` is a torch.cuda.Stream or a cudaStream_t as a number; with the host device None. Calls from several threads
    take turns. Other threads of Python run meanwhile, but during `attend` on a GPU, which only enqueues.
    """

    def __init__(self, options: EngineOptions, *, owner: str = OWNER) -> None:
        """`owner`: what messages have before names of options, for those who have set them in another way."""
        self._owner = owner
        self._handle: ctypes.c_void_p | None = None
        # A signal's handler may interrupt a call of the same thread, hence RLock.
        self._lock, self._figures_lock = threading.RLock(), threading.RLock()
        self._library = lib = library()
        handle = ctypes.c_void_p()
        lib.check(lib.engine_create(byref(options._to_struct()), byref(handle)), owner)
        self._handle = handle
        made = structs.EngineOptions()
        lib.check(lib.engine_get_options(handle, byref(made)))
        self.options: EngineOptions = EngineOptions._from_struct(made)
        """As the engine was created with, defaults filled in, max_tokens being what there is room for."""

        sizes = structs.EngineSizes()
        lib.check(lib.engine_get_sizes(handle, byref(sizes)))
        self.sizes: Sizes = figures.read(Sizes, sizes)
        """What it has room for, of what policies want."""

        cuda = made.device_type == structs.DEVICE_CUDA
        # On the host attend is the computation itself, long enough for others to run.
        self._attend = lib.attend_held if cuda else lib.engine_attend
        self._attend_layer = lib.attend_layer_held if cuda else lib.engine_attend_layer
        self._asynchronous = cuda
        self._exports: list[object] = []
        self._q, self._k, self._v = (Argument(name, self._exports, cuda) for name in "qkv")
        self._rehearsed, self._scores = (Argument(name, self._exports, cuda) for name in ("rehearsed", "scores"))
        self._out, self._lse = (Argument(name, self._exports, cuda, written=True) for name in ("out", "lse"))
        # Tensors that a stream may still use, by forward in the order of plans, and by sequence that is imported.
        self._forwards: dict[int, list[object]] = {}
        self._imports: dict[int, list[object]] = {}

    def close(self) -> None:
        """Gives all memory back. What was enqueued on streams must have run."""
        with self._lock, self._figures_lock:
            handle, self._handle = self._handle, None
            if handle is not None:
                self._library.engine_destroy(handle)
                self._forwards.clear()
                self._imports.clear()

    def begin(self, policy: str, prompt: Iterable[int] | None = None, salt: int = 0) -> int:
        """A new sequence's number. With the ids of a prompt it begins with what is known of that: `tokens` says how
        many it has, and the others are to come as they would without. `salt` is whatever keys and values depend on
        besides ids."""
        sequence = ctypes.c_uint64()
        if prompt is None:
            self._call(self._library.engine_begin, policy_text(policy), byref(sequence))
        else:
            self._call(self._library.engine_begin_prompt, policy_text(policy), *_ids(prompt),
                       _unsigned("salt", salt, 64), byref(sequence))
        return sequence.value

    def match_prefix(self, policy: str, prompt: Iterable[int], salt: int = 0) -> int:
        """How many tokens a sequence would have that began like that now."""
        tokens = ctypes.c_uint32()
        self._call(self._library.engine_match_prefix, policy_text(policy), *_ids(prompt), _unsigned("salt", salt, 64),
                   byref(tokens))
        return tokens.value

    def name_tokens(self, sequence: int, first: int, ids: Iterable[int]) -> None:
        """Says which tokens those from position `first` on are, so that prompts to come can begin with them."""
        self._call(self._library.engine_name_tokens, sequence, _unsigned("first", first), *_ids(ids))

    def pin_caller(self) -> None:
        """Binds the calling thread, which does nothing but drive the engine, to the core that the engine's threads leave
        to it. Threads that it starts from then on, torch's among them, are bound with it.
        @throws Unsupported if there is no such core, or the system does not let it be bound"""
        self._call(self._library.engine_pin_caller)

    def unpin_caller(self) -> None:
        """Undoes that, on the same thread, before the engine is closed."""
        self._call(self._library.engine_unpin_caller)

    def preempt(self, sequence: int) -> None:
        """Gives up the near memory of a sequence that is to rest. Changes no token."""
        self._call(self._library.engine_preempt, sequence)

    def fork(self, sequence: int, tokens: int, policy: str | None = None) -> int:
        """A new sequence of another's first tokens, which share memory; under the same policy if None, with what that
        had learnt by then: it goes on as the other one would have. With history that holds up to 32 tokens back; from
        further back the policy begins again."""
        child = ctypes.c_uint64()
        self._call(self._library.engine_fork, sequence, _unsigned("tokens", tokens),
                   None if policy is None else policy_text(policy), byref(child))
        return child.value

    def truncate(self, sequence: int, tokens: int) -> None:
        """Takes the newest tokens back, until there are `tokens`, and what was learnt from them, as far back as `fork`
        does. Names of tokens that are left stay, those behind them are forgotten; as many tokens as there are change
        nothing."""
        self._call(self._library.engine_truncate, sequence, _unsigned("tokens", tokens))

    def park_bytes(self, sequence: int, model: str = "") -> int:
        """Bytes that a sequence takes that is parked now."""
        count = ctypes.c_uint64()
        self._call(self._library.engine_park_bytes, sequence, model.encode(), byref(count))
        return count.value

    def park(self, sequence: int, to: Path | Buffer, model: str = "") -> int:
        """Writes all that a sequence is to a file, or to a writable buffer of `park_bytes` at least; how many bytes
        those are. It stays as it is, until it is ended. A file takes its name once all of it is on the disk. `model`
        is what keys and values are of, such as name and revision of a model."""
        count = ctypes.c_uint64()
        if is_path(to):
            self._call(self._library.engine_park_file, sequence, model.encode(), file_name(to))
            return self.park_bytes(sequence, model)
        self._call(self._library.engine_park_memory, sequence, model.encode(), *writable(to), byref(count))
        return count.value

    def resume(self, source: Path | Buffer, model: str = "") -> int:
        """A new sequence with all that was parked in a file or a buffer, by this engine or another one, which goes on
        as the other would have; a policy that has learnt from tokens that were decoded begins anew. A buffer has what
        was written, and nothing else. What is damaged is Corrupt, what is of another model InvalidArgument."""
        sequence = ctypes.c_uint64()
        if is_path(source):
            self._call(self._library.engine_resume_file, file_name(source), model.encode(), byref(sequence))
        else:
            self._call(self._library.engine_resume_memory, *readable(source), model.encode(), byref(sequence))
        return sequence.value

    def import_prefix(self, sequence: int, layer: int, k: Any, v: Any, q: Any = None, stream: Any = None) -> None:
        """Appends tokens whose attention was computed elsewhere, one layer after the other; the last layer's call
        returns when they are in. `v` is None with `value_dim`."""
        with self._lock:
            handle = self._open()
            try:
                status = self._library.engine_import_prefix(
                    handle, sequence, _unsigned("layer", layer), self._k(k), self._values(v),
                    None if q is None else self._q(q), _stream(stream))
            finally:
                self._exports.clear()
            self._library.check(status, self._owner)
            if layer + 1 == self.options.layers:
                self._imports.pop(sequence, None)
            elif self._asynchronous:
                self._imports.setdefault(sequence, []).append((k, v, q))

    def end(self, sequence: int) -> None:
        """Ends a sequence. No forward with it may be under way."""
        self._call(self._library.engine_end, sequence)
        self._imports.pop(sequence, None)

    def tokens(self, sequence: int) -> int:
        """Tokens that all layers have."""
        tokens = ctypes.c_uint32()
        self._call(self._library.engine_tokens, sequence, byref(tokens))
        return tokens.value

    def far_bytes(self, sequence: int) -> int:
        """Bytes of host memory in blocks that the sequence holds, shared ones included."""
        count = ctypes.c_uint64()
        self._call(self._library.engine_far_bytes, sequence, byref(count))
        return count.value

    def can_admit(self, tokens: int, policy: str | None = None) -> bool:
        """Whether there is room for a new sequence of as many tokens beside what lives; with a policy, whether that is
        served, too, and has room for what it needs on the CPU."""
        admitted = ctypes.c_int()
        if policy is None:
            self._call(self._library.engine_can_admit, _unsigned("tokens", tokens), byref(admitted))
        else:
            self._call(self._library.engine_can_admit_policy, policy_text(policy), _unsigned("tokens", tokens),
                       byref(admitted))
        return admitted.value != 0

    def plan(self, items: Sequence[PlanItem], bucket: Bucket, stream: Any = None) -> int:
        """Plans a forward and enqueues that; gives its number, which is to be finished or cancelled. Rows are packed
        in the order of items, rows behind them are padding."""
        try:
            structs_of = (structs.PlanItem * len(items))()
            for struct, item in zip(structs_of, items):
                struct.struct_size = ctypes.sizeof(structs.PlanItem)
                struct.sequence = item.sequence
                struct.tokens = _unsigned("tokens", item.tokens)
                struct.prefill = item.prefill
        except (AttributeError, TypeError) as reason:
            raise InvalidArgument(f"items are to be a list of sluice.PlanItem: {reason}") from None
        forward = ctypes.c_uint64()
        with self._lock:
            self._call(self._library.engine_plan, structs_of, len(items), bucket._address, _stream(stream),
                       byref(forward))
            self._forwards[forward.value] = []
        return forward.value

    def attend(self, bucket: Bucket, layer: int, q: Any, k: Any, v: Any, out: Any, lse: Any = None,
               stream: Any = None, rehearsed: Any = None, scores: Any = None) -> None:
        """One layer of a forward of this bucket; layers come in order. q, out [rows, q_heads, head_dim], k, v [rows,
        kv_heads, head_dim], lse [rows, q_heads] in f32, with as many rows as the bucket has; with `value_dim` v is None
        and out [rows, q_heads, value_dim]. `rehearsed`, as q, in every layer but the first of buckets with
        Features.REHEARSED: what the attention input of the layer before, as that layer has normalised it, gives with
        this layer's query weights, after RoPE. `scores` [decode_rows or more, kv_heads or 1, max_tokens of the bucket
        or more] in f32, in every layer without a window of buckets with Features.SCORES: element t of a row is what the
        model's indexer says of the sequence's token t, for a KV head or for all; row i is of the forward's i-th token
        that is decoded, in the order of its items, prompts left out. Larger ones are chosen first; -inf comes behind
        all numbers, NaN behind that; tokens that a row does not see, and rows of policies without the source `scores`,
        are not looked at."""
        if layer >> 32:
            raise InvalidArgument(f"layer is {layer}; it must be one of the engine's")
        with self._lock:
            handle = self._handle
            if handle is None:
                raise _closed()
            try:
                tensors = (self._q(q), self._k(k), self._values(v), self._out(out),
                           None if lse is None else self._lse(lse))
                on = None if stream is None else _stream(stream)
                if rehearsed is None and scores is None:
                    status = self._attend(handle, bucket._address, layer, *tensors, on)
                else:
                    args = structs.AttendArgs(
                        0, layer, *tensors, None if rehearsed is None else self._rehearsed(rehearsed),
                        None if scores is None else self._scores(scores), on)
                    status = self._attend_layer(handle, bucket._address, byref(args))
            finally:
                self._exports.clear()
            if status:
                raise self._library.error(status, self._owner)
            if self._asynchronous and self._forwards:
                # All layers of a forward are enqueued before the next is planned.
                self._forwards[next(reversed(self._forwards))].append((q, k, v, out, lse, rehearsed, scores))

    def finish(self, forward: int) -> None:
        """Waits until the forward has run; then its sequences have their new tokens. After DeviceError none has, and
        it can be planned again; after Timeout it can be waited for again, or cancelled."""
        with self._lock:
            status = self._library.engine_finish(self._open(), forward)
            if status in (0, DeviceError.status):
                self._forwards.pop(forward, None)
            self._library.check(status, self._owner)

    def cancel(self, forward: int) -> None:
        """Takes a plan back and all behind it; no sequence has its new tokens."""
        with self._lock:
            self._call(self._library.engine_cancel, forward)
            while forward in self._forwards:
                self._forwards.popitem()

    def watch(self, sequence: int, tokens: Iterable[int]) -> None:
        """Positions of tokens whose attendance audits report apart; replaces those of an earlier call."""
        numbers = [_unsigned("tokens", token) for token in tokens]
        self._call(self._library.engine_watch, sequence, (ctypes.c_uint32 * len(numbers))(*numbers), len(numbers))

    def audit(self, sequence: int) -> Audit:
        """What the sequence's rows attended in forwards of buckets with Features.AUDIT, against exact attention."""
        struct = structs.Audit()
        self._call(self._library.engine_audit, sequence, byref(struct))
        return figures.read(Audit, struct)

    def audit_heads(self, sequence: int) -> list[list[HeadAudit]]:
        """The same by layer and query head."""
        layers, heads = self.options.layers, self.options.q_heads
        all_of = (structs.HeadAudit * (layers * heads))()
        for struct in all_of:
            struct.struct_size = ctypes.sizeof(structs.HeadAudit)
        self._call(self._library.engine_audit_heads, sequence, all_of, len(all_of))
        return [[figures.read(HeadAudit, struct) for struct in all_of[layer * heads : (layer + 1) * heads]]
                for layer in range(layers)]

    def stats(self) -> Stats:
        """What the engine has done so far. May be called at any time, also while another thread waits in a call."""
        struct = structs.Stats()
        with self._figures_lock:
            self._library.check(self._library.engine_stats(self._open(), byref(struct)))
        return figures.read(Stats, struct)

    def memory(self) -> Memory:
        """Its memory in bytes."""
        struct = structs.Memory()
        self._call(self._library.engine_memory, byref(struct))
        return figures.read(Memory, struct)

    def sequence_memory(self, sequence: int) -> SequenceMemory:
        """Of one sequence, in bytes."""
        struct = structs.SequenceMemory()
        self._call(self._library.engine_sequence_memory, sequence, byref(struct))
        return figures.read(SequenceMemory, struct)

    def _values(self, v: Any) -> int | None:
        return None if v is None and self.options.value_dim else self._v(v)

    def _open(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise _closed()
        return self._handle

    def _call(self, function: Callable[..., int], *arguments: object) -> None:
        with self._lock:
            self._library.check(function(self._open(), *arguments), self._owner)


def _closed() -> InvalidArgument:
    return InvalidArgument("the engine is closed; create another one")


def _stream(stream: Any) -> int | None:
    return stream if stream is None or isinstance(stream, int) else stream.cuda_stream


def _ids(ids: Iterable[int]) -> tuple[Any, int]:
    """Ids as an array of int32, and how many they are."""
    try:
        numbers = array.array("i", ids.tolist() if hasattr(ids, "tolist") else ids)
    except (TypeError, OverflowError) as reason:
        raise InvalidArgument(f"ids are to be one row of numbers of 32 bits: {reason}") from reason
    return (ctypes.c_int32 * len(numbers)).from_buffer(numbers), len(numbers)

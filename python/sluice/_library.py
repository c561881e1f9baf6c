"""Finds libsluice.so, loads it when it is needed first, and tells its functions their arguments."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

from sluice import _structs as structs
from sluice.errors import BY_STATUS, Error

VARIABLE = "SLUICE_LIBRARY"
"""Environment variable that names the library; the first place that is looked at."""

_BUNDLED = Path(__file__).with_name("libsluice.so")
_SYSTEM = "libsluice.so.1"

# Arguments of what returns a status. Handles, tensors and buckets on the way to `attend` are plain addresses.
_OUT_U32, _OUT_U64 = POINTER(c_uint32), POINTER(c_uint64)
_IDS = (POINTER(c_int32), c_size_t)
_LIST = (_OUT_U64, POINTER(c_size_t))
_STATUS = {
    "engine_options_init": (POINTER(structs.EngineOptions), c_size_t),
    "engine_options_resolve": (POINTER(structs.EngineOptions),),
    "engine_options_memory_needed": (POINTER(structs.EngineOptions), POINTER(structs.Memory)),
    "engine_options_near_within": (POINTER(structs.EngineOptions), c_uint64, POINTER(c_uint64)),
    "engine_create": (POINTER(structs.EngineOptions), POINTER(c_void_p)),
    "engine_get_options": (c_void_p, POINTER(structs.EngineOptions)),
    "engine_get_sizes": (c_void_p, POINTER(structs.EngineSizes)),
    "engine_begin": (c_void_p, c_char_p, _OUT_U64),
    "engine_begin_prompt": (c_void_p, c_char_p, *_IDS, c_uint64, _OUT_U64),
    "engine_match_prefix": (c_void_p, c_char_p, *_IDS, c_uint64, _OUT_U32),
    "engine_name_tokens": (c_void_p, c_uint64, c_uint32, *_IDS),
    "engine_pin_caller": (c_void_p,),
    "engine_unpin_caller": (c_void_p,),
    "engine_preempt": (c_void_p, c_uint64),
    "engine_fork": (c_void_p, c_uint64, c_uint32, c_char_p, _OUT_U64),
    "engine_truncate": (c_void_p, c_uint64, c_uint32),
    "engine_park_bytes": (c_void_p, c_uint64, c_char_p, _OUT_U64),
    "engine_park_memory": (c_void_p, c_uint64, c_char_p, c_void_p, c_uint64, _OUT_U64),
    "engine_park_file": (c_void_p, c_uint64, c_char_p, c_char_p),
    "engine_resume_memory": (c_void_p, c_void_p, c_uint64, c_char_p, _OUT_U64),
    "engine_resume_file": (c_void_p, c_char_p, c_char_p, _OUT_U64),
    "engine_import_prefix": (c_void_p, c_uint64, c_uint32, c_void_p, c_void_p, c_void_p, c_void_p),
    "engine_end": (c_void_p, c_uint64),
    "engine_tokens": (c_void_p, c_uint64, _OUT_U32),
    "engine_far_bytes": (c_void_p, c_uint64, _OUT_U64),
    "engine_can_admit": (c_void_p, c_uint32, POINTER(c_int)),
    "engine_can_admit_policy": (c_void_p, c_char_p, c_uint32, POINTER(c_int)),
    "engine_plan": (c_void_p, POINTER(structs.PlanItem), c_size_t, c_void_p, c_void_p, _OUT_U64),
    "engine_attend": (c_void_p, c_void_p, c_uint32, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    "engine_attend_layer": (c_void_p, c_void_p, POINTER(structs.AttendArgs)),
    "engine_finish": (c_void_p, c_uint64),
    "engine_cancel": (c_void_p, c_uint64),
    "admission_options_init": (POINTER(structs.AdmissionOptions), c_size_t),
    "admission_options_of": (c_void_p, POINTER(structs.AdmissionOptions)),
    "admission_create": (POINTER(structs.AdmissionOptions), POINTER(c_void_p)),
    "admission_get_options": (c_void_p, POINTER(structs.AdmissionOptions)),
    "admission_submit": (c_void_p, POINTER(structs.Request)),
    "admission_admit": (c_void_p, _OUT_U64, *_LIST, *_LIST),
    "admission_begun": (c_void_p, c_uint64, c_uint32),
    "admission_preempt": (c_void_p, c_uint64, *_LIST),
    "admission_next": (c_void_p, c_uint32, POINTER(structs.TurnItem), POINTER(c_size_t)),
    "admission_complete": (c_void_p, c_double, *_LIST),
    "admission_fail": (c_void_p,),
    "admission_end": (c_void_p, c_uint64),
    "admission_running": (c_void_p, *_LIST),
    "admission_get_use": (c_void_p, POINTER(structs.AdmissionUse)),
    "engine_stats": (c_void_p, POINTER(structs.Stats)),
    "engine_memory": (c_void_p, POINTER(structs.Memory)),
    "engine_sequence_memory": (c_void_p, c_uint64, POINTER(structs.SequenceMemory)),
    "engine_watch": (c_void_p, c_uint64, POINTER(c_uint32), c_size_t),
    "engine_audit": (c_void_p, c_uint64, POINTER(structs.Audit)),
    "engine_audit_heads": (c_void_p, c_uint64, POINTER(structs.HeadAudit), c_size_t),
}


OWNER = "EngineOptions."
"""Of an option's name in messages."""

_OPTION = re.compile(r"EngineOptions::(\w+)")
_RENAMED = {"timeout": "timeout_ms"}  # Of C++'s options, what is not called so in Python.


class Library:
    """A loaded libsluice.so. Its functions are attributes, without `sluice_`; they let other threads run meanwhile.
    `attend_held` is `engine_attend` that does not, and `attend_layer_held` likewise: what only enqueues is done
    sooner than other threads give back."""

    def __init__(self, name: str) -> None:
        self.name = name
        calls, held = ctypes.CDLL(name), ctypes.PyDLL(name)
        try:
            held.sluice_abi_version.restype = c_uint32
            self.abi_version: int = held.sluice_abi_version()
        except AttributeError:
            raise ImportError(f"{name} is not libsluice.so: it has no sluice_abi_version") from None
        if self.abi_version < structs.ABI_VERSION:
            raise ImportError(f"{name} has sluice_abi_version() {self.abi_version}, and this package needs "
                              f"{structs.ABI_VERSION} or more; install a newer libsluice.so, or unset {VARIABLE}")
        for function in ("version", "last_error"):
            getattr(held, f"sluice_{function}").restype = c_char_p
        self._last_error = held.sluice_last_error
        self.version: str = held.sluice_version().decode()
        calls.sluice_cuda_devices.restype = c_uint32
        self.cuda_devices = calls.sluice_cuda_devices
        for function in ("engine_destroy", "admission_destroy"):
            destroy = calls[f"sluice_{function}"]
            destroy.argtypes, destroy.restype = (c_void_p,), None
            setattr(self, function, destroy)
        for function, arguments in _STATUS.items():
            setattr(self, function, self._typed(calls, function, arguments))
        self.attend_held, self.attend_layer_held = (
            self._typed(held, name, _STATUS[name]) for name in ("engine_attend", "engine_attend_layer"))

    @staticmethod
    def _typed(library: ctypes.CDLL, function: str, arguments: tuple) -> ctypes._CFuncPtr:
        call = library[f"sluice_{function}"]
        call.argtypes, call.restype = arguments, c_int
        return call

    def error(self, status: int, owner: str = OWNER) -> Error:
        """What the calling thread's newest call that failed is to raise. `owner`: what its text has before names of
        options."""
        text = self._last_error().decode(errors="replace").replace("AdmissionOptions::", "AdmissionOptions.")
        text = _OPTION.sub(lambda found: owner + _RENAMED.get(found[1], found[1]), text)
        return BY_STATUS.get(status, Error)(text or f"sluice_status {status}")

    def check(self, status: int, owner: str = OWNER) -> None:
        if status:
            raise self.error(status, owner)

    @property
    def path(self) -> str:
        """The file that was loaded; as it was named, where the system does not say."""
        try:
            lines = Path("/proc/self/maps").read_text().splitlines()
        except OSError:
            return self.name
        stem = Path(self.name).name.split(".so")[0]
        found = {line.split(maxsplit=5)[5] for line in lines if f"/{stem}.so" in line}
        return self.name if len(found) != 1 else found.pop()


@functools.cache
def library() -> Library:
    """The library, by what the environment names, what lies beside this file, or what the system has installed."""
    named = os.environ.get(VARIABLE)
    tried = [named] if named else [*([str(_BUNDLED)] if _BUNDLED.exists() else []), _SYSTEM]
    reasons = []
    for name in tried:
        try:
            return Library(name)
        except OSError as reason:
            reasons.append(f"{name}: {reason}")
    raise ImportError("libsluice.so was not found; install this package with pip, which builds it, or set "
                      f"{VARIABLE} to its path. Tried " + "; ".join(reasons))

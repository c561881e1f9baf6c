"""The structs of sluice.h, field by field. tests/test_structs.py holds them against the header."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_double, c_float, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p

ABI_VERSION = 9
"""Of the header that these structs mirror."""

DEVICE_CPU, DEVICE_CUDA, DEVICE_CUDA_HOST = 1, 2, 3
TYPE_INT, TYPE_UINT, TYPE_FLOAT, TYPE_BFLOAT = 0, 1, 2, 4


class Sized(ctypes.Structure):
    """A struct that begins with its size, so that libraries of other versions can tell what it has."""

    def __init__(self, *args: object, **fields: object) -> None:
        super().__init__(*args, **fields)
        self.struct_size = ctypes.sizeof(self)


class Device(ctypes.Structure):
    _fields_ = [("device_type", c_int32), ("device_id", c_int32)]


class DataType(ctypes.Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class Tensor(ctypes.Structure):
    """A DLTensor."""

    _fields_ = [
        ("data", c_void_p),
        ("device", Device),
        ("ndim", c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class EngineOptions(Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("kv_dtype", c_int32),
        ("device_bytes", c_uint64),
        ("layers", c_uint32),
        ("q_heads", c_uint32),
        ("kv_heads", c_uint32),
        ("head_dim", c_uint32),
        ("host_bytes", c_uint64),
        ("near_bytes", c_uint64),
        ("page_tokens", c_uint32),
        ("promotions", c_uint32),
        ("placement", c_uint32),
        ("prefix_decoded", c_uint32),
        ("prefix_bytes", c_uint64),
        ("largest_decode_rows", c_uint32),
        ("largest_prefill_rows", c_uint32),
        ("largest_prefills", c_uint32),
        ("largest_max_tokens", c_uint32),
        ("largest_features", c_uint32),
        ("in_flight", c_uint32),
        ("sequences", c_uint32),
        ("cpu_sequences", c_uint32),
        ("unused_sizes", c_uint32 * 5),
        ("import_rows", c_uint32),
        ("prefill_window", c_uint32),
        ("prefill_mode", c_uint32),
        ("prefill_min_budget", c_uint32),
        ("prefill_max_budget", c_uint32),
        ("prefill_lines", c_uint32),
        ("prefill_gamma", c_float),
        ("prefill_tau", c_float),
        ("threads", c_uint32),
        ("pin_threads", c_uint32),
        ("answer_timeout_ms", c_uint32),
        ("timeout_ms", c_uint32),
        ("core_count", c_uint32),
        ("cores", ctypes.POINTER(c_uint32)),
        ("policy_bytes", c_uint64),
        ("scale", c_float),
        ("softcap", c_float),
        ("window_count", c_uint32),
        ("largest_drafts", c_uint32),
        ("windows", ctypes.POINTER(c_uint32)),
        ("window_slack", c_uint64),
        ("fetch_share", c_float),
        ("cluster_sequences", c_uint32),
        ("unused_clusters", c_uint32),
        ("dense_tokens", c_uint32),
        ("handover", c_uint32),
        ("unused_forecasts", c_uint32),
        ("unused_code_bits", c_uint64),
        ("fetch_lists", c_uint64),
        ("value_dim", c_uint64),
        ("policy_count", c_uint64),
        ("policies", ctypes.POINTER(c_char_p)),
    ]


class EngineSizes(Sized):
    _fields_ = [
        (name, c_uint32)
        for name in ("struct_size", "prompt_queries", "max_picks", "digests", "max_ranked", "max_window",
                     "max_clusters", "code_bits", "forecasts", "cpu_sequences", "cluster_sequences")
    ]


class Bucket(Sized):
    _fields_ = [
        (name, c_uint32)
        for name in ("struct_size", "decode_rows", "prefill_rows", "prefills", "max_tokens", "features", "drafts")
    ]


class AttendArgs(Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("layer", c_uint32),
        *((name, c_void_p) for name in ("q", "k", "v", "out", "lse", "rehearsed", "scores", "stream")),
    ]


class PlanItem(Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("tokens", c_uint32),
        ("sequence", c_uint64),
        ("prefill", c_uint32),
        ("reserved", c_uint32),
    ]


class AdmissionOptions(Sized):
    _fields_ = [
        (name, c_uint32)
        for name in ("struct_size", "decode_rows", "prefill_rows", "prefills", "sequences", "cpu_sequences",
                     "page_tokens", "max_tokens")
    ] + [(name, c_uint64) for name in ("pages", "watermark_pages", "near_pages", "near_pages_per_sequence")] + [
        ("slowdown", c_double), ("page_blocks", c_uint32), ("window_blocks", c_uint32), ("window_pages", c_uint64),
        ("window_resting_pages", c_uint64)
    ]


class Request(Sized):
    _fields_ = [(name, c_uint32) for name in ("struct_size", "prompt_tokens", "max_new_tokens", "on_cpu")] + [
        ("id", c_uint64)
    ]


class TurnItem(Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("tokens", c_uint32),
        ("request", c_uint64),
        ("first", c_uint32),
        ("prefill", c_uint32),
        ("output", c_uint32),
        ("reserved", c_uint32),
    ]


class AdmissionUse(Sized):
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32)] + [
        (name, c_uint64) for name in ("waiting", "running", "pages", "near_pages")
    ]


class Stats(Sized):
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32)] + [
        (name, c_uint64)
        for name in ("asked", "unplanned", "near_tokens", "far_tokens", "fetched_tokens", "promoted", "scored",
                     "estimated", "ranked_pages", "waited_ns", "answer_ns", "sparse_chunks", "dense_chunks",
                     "kept_blocks", "causal_blocks", "matched_tokens", "evicted_blocks", "missed", "stalls",
                     "awaited", "drawn_heads", "error_bars", "wide_bars")
    ]


class Memory(Sized):
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32)] + [
        (name, c_uint64)
        for name in ("far_pages", "far_pages_used", "far_pages_cached", "prefixes", "pinned", "partials", "policies",
                     "near_pages", "near_pages_used", "codes", "digests", "buffers")
    ]


class SequenceMemory(Sized):
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32)] + [
        (name, c_uint64)
        for name in ("far_pages", "far_pages_shared", "policy", "names", "tail", "near_pages", "near_pages_shared")
    ]


class Audit(Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("top_k", c_uint32),
        ("layers", c_uint32),
        ("q_heads", c_uint32),
        ("tokens", c_uint64),
        ("attended_tokens", c_uint64),
        ("dense_tokens", c_uint64),
        ("bypassed_heads", c_uint64),
        ("coverage_count", c_uint64),
        ("coverage_mean", c_double),
        ("coverage_min", c_double),
        ("coverage_p5", c_double),
        ("coverage_p50", c_double),
        ("overlap_count", c_uint64),
        ("overlap_mean", c_double),
        ("overlap_min", c_double),
        ("watched_count", c_uint64),
        ("watched_mean", c_double),
        ("watched_min", c_double),
    ]


class HeadAudit(Sized):
    _fields_ = (
        [("struct_size", c_uint32), ("reserved", c_uint32)]
        + [(name, c_uint64) for name in ("steps", "bound_broken", "watched_steps")]
        + [
            (name, c_double)
            for name in ("coverage", "coverage_min", "overlap", "error", "relative_error", "error_bound",
                         "watched_mass", "watched_kept")
        ]
    )

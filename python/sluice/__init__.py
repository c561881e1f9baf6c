"""Attention for long contexts, with keys and values in host memory.

    options = sluice.EngineOptions(layers=2, q_heads=8, kv_heads=2, head_dim=64,
                                   largest=sluice.Bucket(decode_rows=1, prefill_rows=256, prefills=1))
    with sluice.Engine(options) as engine:
        sequence = engine.begin("sluice")
        bucket = engine.options.largest
        forward = engine.plan([sluice.PlanItem(sequence, tokens=256, prefill=True)], bucket)
        for layer in range(options.layers):
            engine.attend(bucket, layer, q, k, v, out)  # numpy arrays or torch tensors
        engine.finish(forward)

Errors are subclasses of `sluice.Error`; their text names cause and remedy. The library is loaded when it is needed
first: what the environment variable SLUICE_LIBRARY names, what the package has brought, or the system's.
"""

from sluice import _library
from sluice._tensors import BFloat16, bf16
from sluice.admission import Admission, AdmissionOptions, Changes, TurnItem
from sluice.engine import Engine
from sluice.errors import (Corrupt, DeviceError, Error, InternalError, InvalidArgument, NotFound, OutOfCapacity,
                           ReadWriteError, Timeout, Unsupported)
from sluice.figures import AdmissionUse, Audit, HeadAudit, Memory, SequenceMemory, Sizes, Stats
from sluice.options import ALL_SEQUENCES, DENSE_AUTO, FETCH_AUTO, Bucket, EngineOptions, Features, PlanItem

__all__ = [
    "ALL_SEQUENCES", "Admission", "AdmissionOptions", "AdmissionUse", "Audit", "BFloat16", "Bucket", "Changes",
    "Corrupt", "DENSE_AUTO", "DeviceError", "Engine", "EngineOptions", "Error", "FETCH_AUTO", "Features", "HeadAudit",
    "InternalError", "InvalidArgument", "Memory", "NotFound", "OutOfCapacity", "PlanItem", "ReadWriteError",
    "SequenceMemory", "Sizes", "Stats", "Timeout", "TurnItem", "Unsupported", "bf16", "cuda_devices", "version",
]


def version() -> str:
    """Of the library that is loaded."""
    return _library.library().version


def cuda_devices() -> int:
    """GPUs that the library can use; 0 without one, without a driver, or in a build without CUDA."""
    return _library.library().cuda_devices()

"""Nothing is written to the user's directories, and vLLM starts as fast as it can. Before it is imported."""

from __future__ import annotations

import os
import tempfile

_WRITTEN = tempfile.TemporaryDirectory(prefix="sluice-vllm.")  # Goes with the process.
os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_CACHE_ROOT": _WRITTEN.name, "VLLM_CONFIG_ROOT": _WRITTEN.name, "HF_HUB_OFFLINE": "1",
                   "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"})

"""How much of a GPU's memory is a cache of near keys and values, where no option says."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from sluice.errors import OutOfCapacity, Unsupported
from sluice.options import EngineOptions

SHARE = 0.05
"""Of the tokens that host_bytes hold, the share that is near unless options say otherwise."""

SERVED_SHARE = 1.0
"""In a process that does nothing else with the GPU: what is near need not be awaited from the CPU."""

_RESERVED, _LEAST_RESERVED = 0.1, 2 << 30  # Of the GPU, for the model's forwards and their graphs: a share, at least.
_TAKEN = 0.5  # Of what is free beyond that: other programs may come to the GPU later.
_ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "fp8_e4m3": 1}
_NEAR_BYTES = {**_ELEMENT_BYTES, "fp8_e4m3": 2}  # Near rows are of bf16.
_SCALE_BYTES = {"fp8_e4m3": 4}  # Of a row of keys or values in host memory.
# What finds near rows, in bytes: for each token, layer and KV head that host_bytes hold, and for each near one.
_FAR_TABLE, _NEAR_TABLE = 4, 8
# What is to come near, in bytes for each layer and KV head: beside all else, and for each token that may at a time.
_LISTS, _LISTED, _PROMOTIONS = 20, 12, 1024


@dataclass(frozen=True)
class DeviceMemory:
    """Of a GPU in bytes, as torch.cuda.mem_get_info() says it."""

    free: int
    total: int


def default_near_bytes(options: EngineOptions, tokens: int, own_bytes: int, memory: DeviceMemory,
                       share: float = SHARE) -> int:
    """Device memory for near keys and values of all sequences together: a share of the tokens that host_bytes hold, but
    no more than sequences of `tokens` tokens have, and half of what is free beside a reserve and the engine's
    `own_bytes`. Whole pages of all layers and KV heads, none if there is no room. `options` are complete, as
    `resolved` has them."""
    planes = options.layers * options.kv_heads
    page_rows = options.page_tokens * planes
    kind = options.kv_dtype
    page = 2 * page_rows * options.head_dim * _NEAR_BYTES[kind]
    far_row = options.head_dim * _ELEMENT_BYTES[kind] + _SCALE_BYTES.get(kind, 0)
    pages = options.host_bytes // (2 * page_rows * far_row)
    useful = min(pages, options.sequences * -(-tokens // options.page_tokens))
    reserved = max(_LEAST_RESERVED, int(_RESERVED * memory.total))
    most = int(_TAKEN * max(0, memory.free - reserved - own_bytes))
    promotions = _PROMOTIONS if options.promotions is None else options.promotions
    tables = _FAR_TABLE * pages * page_rows + planes * (_LISTS + _LISTED * promotions)
    fitting = max(0, most - tables) // (page + _NEAR_TABLE * page_rows)
    return min(int(share * pages), useful, fitting) * page


def settle_near(options: EngineOptions, given: int | None, tokens: int, memory: DeviceMemory,
                share: float = SHARE) -> None:
    """Sets near_bytes of an engine on a GPU: `given`, or the default if that is None.
    @throws OutOfCapacity if the GPU has less than the engine takes; Unsupported if it does not serve the shape"""
    options.near_bytes = given or 0
    needed = options.memory_needed()
    if given is None:
        wanted = default_near_bytes(options.resolved(), tokens, needed.device, memory, share)
        if options.device_bytes:
            wanted = min(wanted, options.near_bytes_within(options.device_bytes))
        # Of sequences that are very long, a GPU cannot attend as many tokens near.
        for options.near_bytes in (wanted, wanted // 4, wanted // 16, wanted // 64, 0):
            with contextlib.suppress(Unsupported):
                needed = options.memory_needed()
                break
    if needed.device > memory.free:
        raise OutOfCapacity(
            f"the engine takes {needed.device:,} bytes of the GPU's memory, of which {memory.free:,} are free: "
            f"{needed.near_pages:,} for near keys and values, {needed.codes:,} for copies of keys, "
            f"{needed.digests + needed.buffers:,} for others. Give it a smaller "
            f"{'near_bytes, or ' if needed.near_pages else ''}host_bytes, of which the copies are a share, or free "
            "memory of the GPU: other programs', or by torch.cuda.empty_cache() what torch keeps for later")

"""Prompts that begin like known ones: what the engine has of them is not computed again.

vLLM's scheduler asks a KV connector how much of a prompt is known elsewhere, and gives out blocks for all of it. Ours
has the scheduler's side alone: a sequence that the engine begins has the known tokens already, and nothing is loaded.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (KVConnectorBase_V1, KVConnectorMetadata,
                                                               KVConnectorRole, SupportsHMA)
from vllm.logger import init_logger

from sluice.vllm._forwards import Forwards, Prompt

logger = init_logger("vllm.sluice")


class Prefixes(KVConnectorBase_V1, SupportsHMA):
    """Of a scheduler in the process of its worker, and in its thread. From its question until the step's sequences have
    begun no forward is planned, and so nothing that is known is forgotten."""

    def __init__(self, forwards: Forwards) -> None:
        # Not the base's, which wants a KVTransferConfig; with one workers would hand their caches over.
        self._role = KVConnectorRole.SCHEDULER
        self._forwards = forwards
        self._ids: dict[str, array.array[int]] = {}  # Of requests that wait: they may be asked for at every step.
        # A prompt is looked for on disk once, and again each time that it can be read from there.
        self._brought: set[str] = set()
        self._put_off: set[str] = set()
        self._resets = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """None has vLLM ask again at its next step."""
        if not _is_text(request) or request.skip_reading_prefix_cache:
            return 0, False
        name, prompt = request.request_id, self._prompt_of(request)
        if name not in self._brought:
            if (name in self._put_off and self._forwards.promised) or not self._forwards.bring(prompt):
                self._put_off.add(name)
                return None, False
            self._brought.add(name)
        return max(0, self._forwards.known(prompt) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request is in the step that is being scheduled."""
        if _is_text(request):
            self._forwards.expect(request.request_id, self._prompt_of(request), num_external_tokens)
        self._forget(request)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, None]:
        self._forget(request)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[Sequence[int], ...]) -> tuple[bool, None]:
        return self.request_finished(request, ())

    def reset_cache(self) -> bool:
        """What is known now is not found any more; it gives way when memory is needed."""
        self._resets += 1
        if self._forwards.disk is not None:
            logger.info("Prefixes on disk are not used any more, as weights may not be those of the model's files.")
            self._forwards.disk = None
        return True

    # The worker's side, which nothing calls.
    def start_load_kv(self, forward_context: Any, **_: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None: ...
    def wait_for_save(self) -> None: ...

    def _prompt_of(self, request: Any) -> Prompt:
        # What an adapter is called says nothing of it in another process.
        return Prompt(self._ids_of(request), self._salt(request), request.lora_request is None)

    def _forget(self, request: Any) -> None:
        """It does not wait any more."""
        self._ids.pop(request.request_id, None)
        self._brought.discard(request.request_id)
        self._put_off.discard(request.request_id)

    def _ids_of(self, request: Any) -> array.array[int]:
        """Of a request that comes again, with what it has answered."""
        kept = self._ids.get(request.request_id)
        if kept is None or len(kept) != request.num_tokens:
            self._ids[request.request_id] = kept = array.array("i", request.all_token_ids[: request.num_tokens])
        return kept

    def _salt(self, request: Any) -> int:
        """What keys and values depend on besides ids, and who may know of whose prompts."""
        lora = request.lora_request
        # A name may be given again, to another adapter.
        adapter = (lora.lora_name, lora.lora_int_id, lora.lora_path) if lora else ()
        parts = (request.cache_salt or "", adapter, self._resets)
        return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def _is_text(request: Any) -> bool:
    """Whether ids say all of a prompt: those of images and of embeddings stand for others."""
    return not request.mm_features and request.prompt_embeds is None

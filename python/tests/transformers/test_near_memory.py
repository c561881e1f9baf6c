"""Which GPU is asked what it has free, for near keys and values of a model that is enabled or served."""

from __future__ import annotations

import pytest
import sluice
import torch
from sluice import _transformers_support as support
from sluice._near import SHARE, DeviceMemory
from tiny import ON_CPU, enabled, llama

Asked = list[tuple[object, ...]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What settle_near was called with, and mem_get_info, which says that 3 of 4 bytes are free."""
    calls: Asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: calls.append((device,)) or (3, 4))
    monkeypatch.setattr(support, "settle_near", lambda *call: calls.append(call))
    return calls


def test_the_gpu_of_the_engine(asked: Asked) -> None:
    made = sluice.EngineOptions(layers=1, q_heads=1, kv_heads=1, head_dim=64, device="cuda:1")
    for given in (None, 0, 7):
        support.choose_near(made, given, 99)
        assert asked == [("cuda:1",), (made, given, 99, DeviceMemory(free=3, total=4), SHARE)]
        asked.clear()


@pytest.mark.skipif(not ON_CPU, reason="there is a GPU")
def test_the_cpu_has_nothing_near_unless_that_is_said(asked: Asked) -> None:
    for given, near in ((None, 0), (0, 0), (1 << 20, 1 << 20)):
        with enabled(llama(), near_bytes=given) as here:
            assert here.engine.options.near_bytes == near
            assert 0.9 * near <= here.engine.memory().near_pages <= near  # Whole pages of all layers and KV heads.
    assert not asked


@pytest.mark.skipif(ON_CPU, reason="there is no GPU")
def test_a_gpu_has_a_share_near() -> None:
    free, _ = torch.cuda.mem_get_info()
    with enabled(llama()) as here:
        assert 0 < here.engine.memory().near_pages <= 0.05 * here.engine.options.host_bytes
        assert here.engine.memory().device < free
    with enabled(llama(), near_bytes=0) as here:
        assert here.engine.memory().near_pages == 0
    with pytest.raises(sluice.OutOfCapacity, match="smaller near_bytes, or host_bytes"):
        enabled(llama(), near_bytes=free + (1 << 30))

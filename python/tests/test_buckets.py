"""Buckets of forwards: lengths in steps, and one for sequences that attend everything."""

from __future__ import annotations

import pytest
import sluice
from sluice.options import bucket_tokens, whole_tokens


def options(dense_tokens: int) -> sluice.EngineOptions:
    return sluice.EngineOptions(layers=1, q_heads=1, kv_heads=1, head_dim=64, page_tokens=16,
                                dense_tokens=dense_tokens, largest=sluice.Bucket(max_tokens=100_000))


@pytest.mark.parametrize(("dense", "tokens", "bucket"), [
    (0, 1, 4096), (0, 4096, 4096), (0, 4097, 8192), (0, 99_999, 100_000),
    (1000, 992, 992), (1000, 993, 4096),  # Whole pages.
    (10_000, 1, 4096), (10_000, 9_000, 10_000), (10_000, 10_001, 12_288), (200_000, 99_999, 100_000)])
def test_short_sequences_have_a_bucket_of_their_own(dense: int, tokens: int, bucket: int) -> None:
    assert bucket_tokens(tokens, options(dense)) == bucket


def test_what_is_attended_whole_is_in_the_largest_bucket() -> None:
    assert [whole_tokens(options(dense)) for dense in (0, 15, 1000, 200_000)] == [0, 0, 992, 100_000]

r"""Requests at random, each of which is answered as documented: seeds are the cases, and a failure names its own.

schemathesis makes others of the same description, of a server that runs:
    schemathesis run http://127.0.0.1:8000/openapi.json --phases coverage,fuzzing --checks not_a_server_error,\
status_code_conformance,content_type_conformance,response_schema_conformance --max-time 180
"""

from __future__ import annotations

import asyncio
import os

import httpx
import pytest
from bodies import Bodies, check
from test_api import Site

CASES = int(os.environ.get("SLUICE_TEST_CASES", "400"))  # More of them: SLUICE_TEST_CASES=100000.
_JSON = {"content-type": "application/json"}
_ROUTES = {"completions": "CompletionRequest", "chat/completions": "ChatRequest", "responses": "ResponsesRequest"}


@pytest.mark.parametrize("path", _ROUTES)
def test_bodies_at_random(path: str) -> None:
    site, served = Site(), 0

    async def ask() -> None:
        nonlocal served
        description = site.app.openapi()
        transport = httpx.ASGITransport(site.app)  # What the application raises is raised here.
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=None) as client:
            for seed in range(CASES):
                body = Bodies(description, seed).of(_ROUTES[path])
                try:
                    answer = await client.post(f"/v1/{path}", content=body, headers=_JSON)
                    if answer.headers["content-type"].startswith("text/event-stream"):
                        ends = b'"}}\n\n' if path == "responses" else b"data: [DONE]\n\n"
                        assert answer.status_code == 200 and answer.content.endswith(ends), answer.content[-200:]
                    else:
                        check(description, f"/v1/{path}", answer.status_code, answer.content)
                except Exception as error:
                    raise AssertionError(f"seed {seed}: {body[:2000]!r}") from error
                served += answer.status_code == 200

    asyncio.run(ask())
    assert served > CASES / 20  # Some get as far as an answer.
    assert site.metric("failed") == 0

"""The web server: OpenAI's completions and chat completions over an engine in another process."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse

from sluice.serving.answering import Answering, Front, lost
from sluice.serving.process import EngineLost, EngineProcess, Ready
from sluice.serving.protocol import ChatRequest, CompletionRequest, Refused


def create_app(engine: EngineProcess, ready: Ready, tokenizer: Any, front: Front) -> FastAPI:
    """The web application. `engine` has been started, and ends with it."""
    answering = Answering(engine, ready, tokenizer, front)
    began = int(time.time())

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        engine.listen()
        yield
        await asyncio.get_running_loop().run_in_executor(None, engine.close)

    app = FastAPI(title="Sluice", lifespan=life)

    def refuse(error: Refused) -> JSONResponse:
        if error.status < 500:  # Others have been counted as failed.
            answering.metrics.requests.labels("refused").inc()
        return JSONResponse(error.body, error.status, error.headers)

    app.add_exception_handler(Refused, lambda _, error: refuse(error))
    app.add_exception_handler(EngineLost, lambda _, error: refuse(lost(error)))
    app.add_exception_handler(RequestValidationError, lambda _, error: refuse(invalid(error)))
    # Which is logged, too.
    app.add_exception_handler(Exception, lambda _, error: refuse(Refused(
        500, f"a defect of the server: {type(error).__name__}", "server_error")))

    def key(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if front.api_key and not hmac.compare_digest(given.encode(), front.api_key.encode()):
            raise Refused(401, "the API key is wrong or missing: send it as Authorization: Bearer KEY",
                          code="invalid_api_key")

    routes = APIRouter(prefix="/v1", dependencies=[Depends(key)])

    @routes.post("/completions")
    async def completions(wants: CompletionRequest, request: Request) -> Response:
        return await answering.complete(wants, request)

    @routes.post("/chat/completions")
    async def chat_completions(wants: ChatRequest, request: Request) -> Response:
        return await answering.chat(wants, request)

    @routes.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": front.name, "object": "model", "created": began,
                                            "owned_by": "sluice", "max_model_len": ready.limit}]}

    @app.get("/health")
    async def health() -> Response:
        if engine.lost is not None:
            raise EngineLost(engine.lost)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(answering.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.include_router(routes)
    return app


def invalid(error: RequestValidationError) -> Refused:
    """The first thing that is wrong with a request."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"][1:])
    if first["type"] == "extra_forbidden":
        return Refused(400, f"{place} is not served", param=place, code="unsupported_parameter")
    return Refused(400, f"{place}: {first['msg']}", param=place)

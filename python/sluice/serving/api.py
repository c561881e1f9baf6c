"""The web server: OpenAI's completions, chat completions and responses over an engine in another process."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from sluice.serving.answering import Answering, Front
from sluice.serving.described import describe
from sluice.serving.guard import Answer, BodyRefused, Guard, body_limit
from sluice.serving.process import EngineLost, EngineProcess, Ready
from sluice.serving.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, Refused, TokenizeRequest
from sluice.serving.responses import ResponsesRequest
from sluice.serving.sending import lost


def create_app(engine: EngineProcess, ready: Ready, tokenizer: Any, front: Front) -> FastAPI:
    """The web application. `engine` has been started, and ends with it."""
    answering = Answering(engine, ready, tokenizer, front)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        engine.listen()
        yield
        answering.close()
        await asyncio.get_running_loop().run_in_executor(None, engine.close)

    app = FastAPI(title="Sluice", lifespan=life, docs_url=None, redoc_url=None, openapi_url="/openapi.json")

    def refuse(error: Refused) -> JSONResponse:
        if error.status < 500:  # Others have been counted as failed.
            answering.metrics.requests.labels("refused").inc()
        return Answer(error.body, error.status, error.headers)

    def defect(error: Exception) -> JSONResponse:
        """Which is logged, too."""
        answering.metrics.requests.labels("failed").inc()
        return refuse(Refused(500, f"a defect of the server: {type(error).__name__}", "server_error"))

    app.add_exception_handler(Refused, lambda _, error: refuse(error))
    app.add_exception_handler(EngineLost, lambda _, error: refuse(lost(error)))
    app.add_exception_handler(RequestValidationError, lambda _, error: refuse(invalid(error)))
    app.add_exception_handler(HTTPException, lambda request, error: refuse(unserved(request, error)))
    app.add_exception_handler(Exception, lambda _, error: defect(error))
    app.add_middleware(Guard, keys=front.api_keys, most=front.max_body or body_limit(ready.limit), refuse=refuse)
    _add_routes(app, answering, ready, front)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    return app


def _add_routes(app: FastAPI, answering: Answering, ready: Ready, front: Front) -> None:
    routes, engine = APIRouter(prefix="/v1"), answering.engine
    told = {"id": front.name, "object": "model", "created": int(time.time()), "owned_by": "sluice",
            "max_model_len": ready.limit}

    @routes.post("/completions")
    async def completions(wants: CompletionRequest, request: Request) -> Response:
        return await answering.complete(wants, request)

    @routes.post("/chat/completions")
    async def chat_completions(wants: ChatRequest, request: Request) -> Response:
        return await answering.chat(wants, request)

    @routes.post("/responses")
    async def responses(wants: ResponsesRequest, request: Request) -> Response:
        return await answering.respond(wants, request)

    @app.post("/tokenize")
    async def tokenize(wants: TokenizeRequest) -> Response:
        return await answering.tokenize(wants)

    @app.post("/detokenize")
    async def detokenize(wants: DetokenizeRequest) -> Response:
        return await answering.detokenize(wants)

    @routes.get("/models")
    @routes.head("/models", include_in_schema=False)
    async def models() -> Response:
        return Answer({"object": "list", "data": [told]})

    @routes.get("/models/{model:path}")
    @routes.head("/models/{model:path}", include_in_schema=False)
    async def model_of(model: str) -> Response:
        answering.check_model(model)
        return Answer(told)

    @app.get("/health")
    @app.head("/health", include_in_schema=False)
    async def health() -> Response:
        if engine.lost is not None:
            raise EngineLost(engine.lost)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    @app.head("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return PlainTextResponse(answering.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.include_router(routes)


def invalid(error: RequestValidationError) -> Refused:
    """The first thing that is wrong with a request."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return Refused(400, f"the body is no JSON: {first.get('ctx', {}).get('error', '')} at {first['loc'][-1]}")
    # Where a field may be of several kinds, their names in brackets follow.
    place = ".".join(itertools.takewhile(lambda part: "[" not in part, map(str, first["loc"][1:])))
    if first["type"] in ("missing", "model_attributes_type", "dict_type") and not place:
        return Refused(400, "the body must be a JSON object, sent with Content-Type: application/json")
    if first["type"] == "unsupported":
        return Refused(400, f"{first['msg']} is not served", param=first["msg"], code="unsupported_parameter")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden" or first.get("ctx", {}).get("max_length") == 0:
        return Refused(400, f"{place} is not served", param=place, code="unsupported_parameter")
    return Refused(400, f"{place}: {message}" if place else message, param=place or None)


def unserved(request: Request, error: HTTPException) -> Refused:
    """What the web framework refuses."""
    if isinstance(error, BodyRefused):
        return error.refused
    told = {404: f"there is no route {request.url.path}",
            405: f"{request.method} is not served at {request.url.path}",
            400: "the body cannot be read; it must be JSON in UTF-8, and not deeply nested"}
    message = told.get(error.status_code, str(error.detail))
    return Refused(error.status_code, message, headers=dict(error.headers or {}))

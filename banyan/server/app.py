"""The HTTP application: its routes, and which error becomes which status.

Owns the route table and the operator's endpoints (health, metrics, cache). Knows the engine by its
client only; all coroutines run on one event loop.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import banyan
from banyan.engine.messages import Reply
from banyan.server.engine_client import EngineClient
from banyan.server.errors import ApiError, ClientGone, EngineBusy, EngineGone, unavailable
from banyan.server.generate import Generator
from banyan.server.metrics import ServerMetrics
from banyan.server.prompts import PromptEncoder
from banyan.server.respond import json_response

_CLIENT_CLOSED = 499
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(client: EngineClient, encoder: PromptEncoder, metrics: ServerMetrics) -> FastAPI:
    """The application over a started engine."""
    app = FastAPI(title="Banyan", version=banyan.__version__, openapi_url=None)
    generator = Generator(client, encoder, metrics)
    operator = Operator(client, metrics)
    posts: dict[str, Any] = {
        "/v1/completions": generator.completions,
        "/v1/chat/completions": generator.chat,
        "/v1/cache/flush": operator.flush,
        "/v1/cache/check": operator.check,
    }
    gets: dict[str, Any] = {
        "/v1/models": operator.models,
        "/v1/models/{name:path}": operator.model,
        "/v1/cache/stats": operator.stats,
        "/health": operator.health,
        "/metrics": operator.metrics_text,
    }
    for path, handler in posts.items():
        app.add_route(path, handler, methods=["POST"])
    for path, handler in gets.items():
        app.add_route(path, handler, methods=["GET"])
    _add_error_handlers(app, metrics)
    app.add_middleware(CountResponses, metrics=metrics, paths=frozenset(posts | gets))
    return app


class Operator:
    """What is asked about the server itself."""

    def __init__(self, client: EngineClient, metrics: ServerMetrics) -> None:
        self._client, self._metrics = client, metrics
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        """200 while the engine answers, else 503 with the reason."""
        failure = self._client.failure
        body = {
            "status": "ok" if failure is None else "engine_gone",
            "reason": failure,
            "model": self._client.info["model"],
            "engine_pid": self._client.pid,
            "rank_pids": self._client.info.get("rank_pids", []),
            "in_flight": self._client.in_flight,
        }
        return json_response(body, 200 if failure is None else 503)

    async def models(self, request: Request) -> Response:
        """The one model served, as a list."""
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The model of that name."""
        name = request.path_params["name"]
        if name != self._client.info["model"]:
            raise ApiError(
                404, f"the model {name!r} is not served here", param="model", code="model_not_found"
            )
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._client.info["model"],
            "object": "model",
            "created": self._created,
            "owned_by": "banyan",
            "max_model_len": self._client.info["max_model_len"],
        }

    async def metrics_text(self, request: Request) -> Response:
        """Prometheus text; without the engine's part when the engine is gone."""
        try:
            stats: dict[str, Any] | None = (await self._client.command("stats")).body
        except EngineGone:
            stats = None
        return Response(self._metrics.render(stats), headers={"content-type": _METRICS_TYPE})

    async def stats(self, request: Request) -> Response:
        """Counters and gauges: of the cache as `cache`, of requests as `engine`."""
        return _reply(await self._client.command("stats"))

    async def flush(self, request: Request) -> Response:
        """Drop all cached content that no request holds."""
        return _reply(await self._client.command("flush"))

    async def check(self, request: Request) -> Response:
        """Verify every invariant of the cache; 500 with the findings when one does not hold."""
        return _reply(await self._client.command("check"))


def _reply(reply: Reply) -> Response:
    return json_response(reply.body, 200 if reply.ok else 500)


def _add_error_handlers(app: FastAPI, metrics: ServerMetrics) -> None:
    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return json_response(error.body(), error.status)

    async def no_engine(request: Request, error: Exception) -> Response:
        assert isinstance(error, EngineGone | EngineBusy)
        return json_response(unavailable(error).body(), 503)

    async def gone(request: Request, error: Exception) -> Response:
        metrics.clients_gone.inc()
        return Response(status_code=_CLIENT_CLOSED)

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.url.path}: {error.detail}"
        return json_response(
            ApiError(error.status_code, what, code="no_such_endpoint").body(), error.status_code
        )

    async def unexpected(request: Request, error: Exception) -> Response:
        return json_response(
            ApiError(500, f"internal error: {type(error).__name__}", code="internal").body(), 500
        )

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(EngineGone, no_engine)
    app.add_exception_handler(EngineBusy, no_engine)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(HTTPException, no_route)
    app.add_exception_handler(Exception, unexpected)


class CountResponses:
    """ASGI middleware that counts answers by path and status.

    Args:
        paths: the known routes; all other paths are counted together.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, paths: frozenset[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on; note the status as it goes by."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responses.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted)

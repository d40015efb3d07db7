"""What goes wrong over HTTP, in the shape that OpenAI's clients read.

Owns the mapping from an error to a status and a JSON body. Knows no endpoint.
"""

from __future__ import annotations

from typing import Any

from banyan.errors import BanyanError

STATUS_OF_CODE = {"engine_gone": 503, "queue_full": 503, "out_of_slots": 503, "model_failed": 500}
"""Statuses of the engine's error codes; every other refusal is the client's to correct: 400."""


class EngineGone(BanyanError):
    """The engine process has ended or is ending; nothing can be computed."""

    code = "engine_gone"


class EngineBusy(BanyanError):
    """More requests are waiting than the server holds; the client may try again later."""

    code = "queue_full"


class ClientGone(Exception):
    """The client closed its connection before its answer was complete."""


class ApiError(Exception):
    """An error to answer a request with.

    Args:
        status: HTTP status.
        param: the request field at fault, or None.
        code: a short machine-readable reason.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str) -> None:
        self.status, self.message, self.param, self.code = status, message, param, code
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """`{"error": {message, type, param, code}}`."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 404:
            kind = "not_found_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_request(message: str, param: str | None = None, code: str = "invalid_request") -> ApiError:
    """A request that must be changed before it can be served."""
    return ApiError(400, message, param=param, code=code)


def from_engine(message: str, code: str | None) -> ApiError:
    """The engine's refusal of a request, or its failure while serving it."""
    code = code or "invalid_request"
    param = "prompt" if code == "context_length_exceeded" else None
    return ApiError(STATUS_OF_CODE.get(code, 400), message, param=param, code=code)


def unavailable(error: EngineGone | EngineBusy) -> ApiError:
    """503: the engine is gone, or has no room for more requests."""
    return ApiError(503, str(error), code=error.code)

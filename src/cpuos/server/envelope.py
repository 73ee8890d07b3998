"""What is around every answer: request id, version, the size limit of bodies, and one shape for every error."""

from __future__ import annotations

import secrets
from importlib.metadata import version
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import OperationalError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cpuos.errors import ERRORS, CpuosError, InvalidRequest, LimitReached, NotFound, PlatformError, Unavailable
from cpuos.types.problems import invalid_request

__all__ = ["MAX_BODY_BYTES", "Envelope", "body_of_error", "install_error_handlers"]

MAX_BODY_BYTES = 1 << 20
VERSION = version("cpuos")
_log = structlog.get_logger("cpuos.server")


class Envelope:
    """Outermost layer. Whatever happens inside, the client gets an answer in our shape, with the request's id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(8)}"
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_marked(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["x-cpuos-version"] = VERSION
                headers["cache-control"] = "no-store"
                headers["x-content-type-options"] = "nosniff"
            await send(message)

        try:
            announced = Headers(scope=scope).get("content-length", "0")
            if not announced.isdecimal() or int(announced) > MAX_BODY_BYTES:
                raise _too_large(announced)
            await self._app(scope, _limited(receive), send_marked)
        except Exception as error:
            if not isinstance(error, CpuosError):
                _log.exception("request failed", request=request_id, method=scope["method"], path=scope["path"])
            if started:
                raise
            status, body = body_of_error(error, request_id=request_id)
            await JSONResponse(body, status_code=status)(scope, receive, send_marked)


def install_error_handlers(app: FastAPI) -> None:
    """Every error that a route can raise becomes the error body of `cpuos.errors`."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        status, body = body_of_error(error, request_id=request.state.request_id)
        headers = {"www-authenticate": "Bearer"} if status == 401 else None
        return JSONResponse(body, status_code=status, headers=headers)

    for kind in (CpuosError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)


def body_of_error(error: BaseException, *, request_id: str) -> tuple[int, dict[str, Any]]:
    """Status and body of whatever was raised. What is not ours is told as `internal`, without its text."""
    known = _as_ours(error, request_id=request_id)
    return ERRORS[known.code][1], known.body()


def _as_ours(error: BaseException, *, request_id: str) -> CpuosError:
    if isinstance(error, CpuosError):
        return error
    if isinstance(error, RequestValidationError):
        return invalid_request([{**problem, "loc": problem["loc"][1:]} for problem in error.errors()])
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        return NotFound(
            "cannot find the route", "there is no such path, or not with this method", hint="GET /v1/openapi.json"
        )
    if isinstance(error, HTTPException) and 400 <= error.status_code < 500:
        return InvalidRequest("cannot read the request", str(error.detail))
    if isinstance(error, OperationalError):  # it is locked or read-only, or its disk is full: no fault of the program
        return Unavailable("cannot use the server's database", str(error.orig), hint="cpuos doctor")
    return PlatformError(
        "cannot answer: a fault of cpuOS",
        f"the server's log has the details under {request_id}",
        hint="cpuos status",
        details={"request": request_id},
    )


def _limited(receive: Receive) -> Receive:
    """Counts what really comes: a body may announce no length."""
    received = 0

    async def receive_counted() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            raise _too_large(f"over {MAX_BODY_BYTES}")
        return message

    return receive_counted


def _too_large(size: str) -> LimitReached:
    return LimitReached(
        f"cannot take the request: its body of {size[:32]} bytes is too large",
        f"a body may have {MAX_BODY_BYTES} bytes; files go to the gateway, not here",
        code="body_too_large",
    )

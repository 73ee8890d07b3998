"""What the records worker answers on its unix socket, to root, the server and the gateway.

GET /v1/connections?after=N&limit=M             entries behind number N, oldest first
GET /v1/sandboxes/{sandbox_id}/refusals?after=N  refusals behind N, with all that the kernel has logged by now
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from cpuos.errors import CpuosError, InvalidRequest
from cpuos.node.network.records.book import Book
from cpuos.node.peers import checked_protocol

__all__ = ["RecordsServer", "create_api"]

_PAGE = 1000


def create_api(book: Book, *, drain: Callable[[str | None], None]) -> Starlette:
    """`drain` reads what waits of one sandbox, or of none in particular."""

    async def connections(request: Request) -> JSONResponse:
        drain(None)
        entries, following = book.journal.page(_number(request, "after", 0), limit=_number(request, "limit", _PAGE))
        return JSONResponse({"instance": book.journal.instance, "entries": entries, "next": following})

    async def refusals(request: Request) -> JSONResponse:
        sandbox = request.path_params["sandbox_id"]
        drain(sandbox)
        found, following, is_complete = book.refusals(sandbox, _number(request, "after", 0))
        answer = {"instance": book.journal.instance, "refusals": found, "next": following, "complete": is_complete}
        return JSONResponse(answer)

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, CpuosError)
        return JSONResponse(error.body(), status_code=error.status)

    return Starlette(
        routes=[
            Route("/v1/connections", connections),
            Route("/v1/sandboxes/{sandbox_id:str}/refusals", refusals),
        ],
        exception_handlers={CpuosError: refuse},
    )


class RecordsServer(uvicorn.Server):
    """Signals are the worker's."""

    def __init__(self, app: Starlette, *, allowed_uids: Collection[int]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=checked_protocol(allowed_uids),
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=1,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _number(request: Request, name: str, default: int) -> int:
    text: Any = request.query_params.get(name, str(default))
    if not (text.isdecimal() and text.isascii() and len(text) < 19):
        raise InvalidRequest(f"cannot read {name}: {text[:40]!r}", "it must be a number")
    return int(text)

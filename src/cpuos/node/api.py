"""The node's HTTP API as one table. It parses calls and writes answers; all work is in the service.

The socket that carries it is root on this machine: its peers are checked before a byte is read (`peers.py`).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cpuos.errors import Conflict, CpuosError, InvalidRequest, LimitReached, NotFound, PlatformError
from cpuos.node.facts import NodeFactsReader
from cpuos.node.packs import PackStore
from cpuos.node.service import NodeService
from cpuos.node.stored import Stored
from cpuos.node.template_store import TemplateStore
from cpuos.types.node import (
    NodeGeneration,
    NodeNetworkUpdate,
    NodePause,
    NodeRepause,
    NodeResume,
    NodeSandboxCreate,
    NodeSnapshotCreate,
)
from cpuos.types.sandbox import SANDBOX_ID_PATTERN
from cpuos.types.storage import Prune

__all__ = ["ROUTES", "create_api"]

log = structlog.get_logger("cpuos.node")

MAX_BODY_BYTES = 1 << 20
"""A network policy with every list full is about 300 KiB."""
MAX_WAIT_S = 60.0
MAX_DRAIN_S = 3600.0

M = TypeVar("M", bound=BaseModel)
Handler = Callable[["_Call"], Awaitable[Any]]


@dataclass(frozen=True, kw_only=True)
class _Call:
    request: Request
    service: NodeService
    facts: NodeFactsReader
    store: TemplateStore
    packs: PackStore
    stored: Stored

    @property
    def sandbox_id(self) -> str:
        return self.request.path_params["sandbox_id"]

    def number(self, name: str, default: float | None = None) -> float:
        text = self.request.query_params.get(name)
        try:
            if text is None and default is not None:
                return default
            return float(text or "")
        except ValueError:
            raise InvalidRequest(f"cannot read {name}: {text!r}", "it must be a number") from None


async def _get_node(call: _Call) -> BaseModel:
    return (await call.facts.read()).model_copy(update={"pool": call.service.pool.facts()})


async def _list_sandboxes(call: _Call) -> dict[str, Any]:
    return {"sandboxes": call.service.list()}


async def _create_sandbox(call: _Call) -> BaseModel:
    return await call.service.create(_parse(NodeSandboxCreate, await _read_body(call.request)))


async def _get_sandbox(call: _Call) -> BaseModel:
    return await call.service.get(call.sandbox_id)


async def _delete_sandbox(call: _Call) -> None:
    await call.service.delete(call.sandbox_id, generation=int(call.number("generation")))


async def _put_network(call: _Call) -> None:
    update = _parse(NodeNetworkUpdate, await _read_body(call.request))
    await call.service.update_network(call.sandbox_id, generation=update.generation, policy=update.policy)


async def _pause_sandbox(call: _Call) -> BaseModel:
    asked = _parse(NodePause, await _read_body(call.request))
    return await call.service.pause(
        call.sandbox_id, generation=asked.generation, freeze=asked.freeze, labels=asked.labels
    )


async def _resume_sandbox(call: _Call) -> BaseModel:
    asked = _parse(NodeResume, await _read_body(call.request))
    return await call.service.resume(call.sandbox_id, asked)


async def _settle_sandbox(call: _Call) -> None:
    asked = _parse(NodeGeneration, await _read_body(call.request))
    await call.service.settle(call.sandbox_id, generation=asked.generation)


async def _repause_sandbox(call: _Call) -> BaseModel:
    asked = _parse(NodeRepause, await _read_body(call.request))
    return await call.service.repause(call.sandbox_id, generation=asked.generation, frozen=asked.frozen)


async def _snapshot_sandbox(call: _Call) -> BaseModel:
    asked = _parse(NodeSnapshotCreate, await _read_body(call.request))
    return await call.service.snapshot(call.sandbox_id, asked)


async def _keep_root(call: _Call) -> None:
    asked = _parse(NodeGeneration, await _read_body(call.request))
    await call.service.keep_root(call.sandbox_id, generation=asked.generation)


async def _list_snapshots(call: _Call) -> dict[str, Any]:
    return {"snapshots": await call.service.snapshots()}


async def _delete_snapshot(call: _Call) -> None:
    snapshot = call.request.path_params["snapshot"]
    if re.fullmatch(SANDBOX_ID_PATTERN, snapshot) is None:
        raise NotFound(f"cannot find snapshot: {snapshot}", "that is not an id of one", code="snapshot_not_found")
    await call.service.delete_snapshot(snapshot)


async def _list_usage(call: _Call) -> dict[str, Any]:
    return {"usage": await call.service.usage()}


async def _get_stats(call: _Call) -> BaseModel:
    return await call.service.stats(call.sandbox_id)


async def _put_template(call: _Call) -> None:
    """The body is the image; it may be large and is not held in memory."""
    digest = call.request.query_params.get("sha256", "")
    size, image = int(call.number("size")), call.request.path_params["image"]
    await call.store.put(image, call.request.stream(), size=size, sha256=digest)


async def _delete_template(call: _Call) -> None:
    image = call.request.path_params["image"]
    if any(facts.template == image for facts in call.service.list()):
        raise Conflict(f"cannot delete template image {image}", "sandboxes run from it", code="template_in_use")
    await call.store.delete(image)


async def _put_pack(call: _Call) -> None:
    digest = call.request.query_params.get("sha256", "")
    size, image = int(call.number("size")), call.request.path_params["image"]
    await call.packs.store.put(image, call.request.stream(), size=size, sha256=digest)


async def _delete_pack(call: _Call) -> None:
    await call.service.delete_pack(call.request.path_params["image"])


async def _get_storage(call: _Call) -> BaseModel:
    return await call.stored.report()


async def _prune(call: _Call) -> dict[str, Any]:
    asked = _parse(Prune, await _read_body(call.request))
    return {"items": await call.stored.prune(dry_run=asked.dry_run)}


async def _drain(call: _Call) -> BaseModel:
    return await call.service.drain(limit_s=min(call.number("limit_s", 120.0), MAX_DRAIN_S))


async def _get_changes(call: _Call) -> dict[str, Any]:
    wait_s = min(call.number("wait_s", 0.0), MAX_WAIT_S)
    seq, changes = await call.service.changes.after(int(call.number("after", 0)), wait_s=wait_s)
    return {"seq": seq, "changes": changes}


async def _get_pool(call: _Call) -> BaseModel:
    wait_s = min(call.number("wait_s", 0.0), MAX_WAIT_S)
    return await call.service.pool.after(int(call.number("after", 0)), wait_s=wait_s)


ROUTES: list[tuple[str, str, Handler]] = [
    ("GET", "/v1/node", _get_node),
    ("GET", "/v1/sandboxes", _list_sandboxes),
    ("POST", "/v1/sandboxes", _create_sandbox),
    ("GET", "/v1/sandboxes/{sandbox_id}", _get_sandbox),
    ("DELETE", "/v1/sandboxes/{sandbox_id}", _delete_sandbox),
    ("PUT", "/v1/sandboxes/{sandbox_id}/network", _put_network),
    ("GET", "/v1/sandboxes/{sandbox_id}/stats", _get_stats),
    ("GET", "/v1/usage", _list_usage),
    ("POST", "/v1/sandboxes/{sandbox_id}/pause", _pause_sandbox),
    ("POST", "/v1/sandboxes/{sandbox_id}/resume", _resume_sandbox),
    ("POST", "/v1/sandboxes/{sandbox_id}/settle", _settle_sandbox),
    ("POST", "/v1/sandboxes/{sandbox_id}/repause", _repause_sandbox),
    ("POST", "/v1/sandboxes/{sandbox_id}/snapshot", _snapshot_sandbox),
    ("POST", "/v1/sandboxes/{sandbox_id}/keep-root", _keep_root),
    ("GET", "/v1/snapshots", _list_snapshots),
    ("DELETE", "/v1/snapshots/{snapshot}", _delete_snapshot),
    ("PUT", "/v1/templates/{image}", _put_template),
    ("DELETE", "/v1/templates/{image}", _delete_template),
    ("PUT", "/v1/packs/{image}", _put_pack),
    ("DELETE", "/v1/packs/{image}", _delete_pack),
    ("GET", "/v1/storage", _get_storage),
    ("POST", "/v1/storage/prune", _prune),
    ("GET", "/v1/changes", _get_changes),
    ("POST", "/v1/drain", _drain),
    ("GET", "/v1/pool", _get_pool),
]


def create_api(
    service: NodeService, facts: NodeFactsReader, store: TemplateStore, *, packs: PackStore, stored: Stored
) -> Starlette:
    """The application; who may connect is checked by the protocol class in front of it."""

    def endpoint(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return await _answer(
                handler, _Call(request=request, service=service, facts=facts, store=store, packs=packs, stored=stored)
            )

        return answer

    routes = [Route(path, endpoint(handler), methods=[method]) for method, path, handler in ROUTES]
    return Starlette(routes=routes, exception_handlers={404: _no_route, 405: _no_route})


async def _answer(handler: Handler, call: _Call) -> Response:
    try:
        result = await handler(call)
    except CpuosError as error:
        return JSONResponse(error.body(), status_code=error.status)
    except Exception:
        request_id = secrets.token_hex(8)
        log.exception("call failed", path=call.request.url.path, request_id=request_id)
        error = PlatformError("cannot finish the call", f"the node's log has the details under {request_id}")
        return JSONResponse(error.body(), status_code=error.status)
    if result is None:
        return Response(status_code=204)
    return Response(json.dumps(result, default=_encode), media_type="application/json")


def _encode(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"cannot encode {type(value).__name__}")


async def _read_body(request: Request) -> bytes:
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise LimitReached(
                "cannot read the request", f"its body is over {MAX_BODY_BYTES} bytes", code="body_too_large"
            )
        pieces.append(piece)
    return b"".join(pieces)


def _parse(kind: type[M], body: bytes) -> M:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "body"
        raise InvalidRequest(f"cannot read {field}", first["msg"], details={"field": field}) from error


async def _no_route(request: Request, error: Exception) -> Response:
    answer = NotFound(f"cannot find route: {request.method} {request.url.path}", "the node has no such one")
    return JSONResponse(answer.body(), status_code=answer.status)

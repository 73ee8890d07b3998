"""The control API on the gateway's own socket, for the server: sandboxes, what they do and who calls them, the journal,
revoked tickets."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from cpuos.errors import InvalidRequest
from cpuos.gateway.access import Gateway
from cpuos.gateway.calls import Call, Message, Receive, Route, Routes, Send, answer_error, read_model
from cpuos.gateway.previews.hosts import AGENT_PORT, Place
from cpuos.gateway.previews.ports import PublishedPort
from cpuos.gateway.reached import session_over
from cpuos.types.base import Request
from cpuos.types.command import CommandStatus
from cpuos.types.sandbox import SANDBOX_ID_PATTERN

__all__ = ["CONTROL_ROUTES", "create_control_app"]

MAX_JSON = 256 << 10
MAX_JOURNAL_PAGE = 5000
MAX_WAIT_S = 60.0
_SANDBOX_ID = re.compile(SANDBOX_ID_PATTERN)
SANDBOX = "/v1/sandboxes/{sandbox}"

Text = Annotated[str, StringConstraints(max_length=1000)]


class _Attach(Request):
    generation: int = Field(ge=1)
    hostname: Annotated[str, StringConstraints(max_length=64)] = ""
    wait_s: float = Field(10.0, ge=0, le=300)
    starting_s: float = Field(0.0, ge=0, le=3600)
    """For so long the node may still be making the sandbox; `wait_s` counts from when it runs."""
    incomplete: bool = False
    """A suspended one goes on also where not all of it came back."""


class _Suspend(Request):
    freeze: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    if_idle_since: float | None = None
    """Unix seconds: refused unless nothing was open since before then."""
    auto_resume: bool = True
    """Calls wait for a resume; else they are refused."""


class _Detach(Request):
    reason: Literal["stopped", "lost"]
    text: Text = ""
    generation: int | None = None
    """The one that ended: a later one stays."""
    session_s: float | None = Field(None, gt=0)
    """It was stopped because its session of so many seconds was over."""


class _OpenPort(Request):
    epoch: int = Field(ge=1)
    generation: int = Field(ge=1)
    public: bool = False
    public_until: float | None = None
    host: Literal["localhost"] | None = None


class _Oom(Request):
    """Memory ran out in a sandbox and a process was killed: its number inside, and those of its ancestors; none where
    they are not known."""

    pids: Annotated[list[int], Field(max_length=512)]


class _Halted(Request):
    """Its node holds all its processes, or lets them go on."""

    halted: bool


class _Revoke(Request):
    """Exactly one."""

    jti: Text | None = None
    sandbox: Text | None = None
    actor: Text | None = None

    @model_validator(mode="after")
    def _one(self) -> _Revoke:
        if sum(value is not None for value in (self.jti, self.sandbox, self.actor)) != 1:
            raise ValueError("give exactly one of jti, sandbox and actor")
        return self


async def _attach(call: Call, gateway: Gateway) -> None:
    request: _Attach = read_model(_Attach, await call.body(limit=MAX_JSON))
    hello = await gateway.sandboxes.attach(
        _sandbox_id(call),
        request.generation,
        hostname=request.hostname,
        wait_s=request.wait_s,
        starting_s=request.starting_s,
        incomplete=request.incomplete,
    )
    missing = [] if hello.thawed is None else hello.thawed.missing
    told = {"agent": hello.agent, "contract": hello.contract, "boot_s": hello.boot_s, "missing": missing}
    await call.answer_json(200, told)


async def _suspend(call: Call, gateway: Gateway) -> None:
    request: _Suspend = read_model(_Suspend, await call.body(limit=MAX_JSON))
    told = await gateway.sandboxes.suspend(
        _sandbox_id(call), request.freeze, if_idle_since=request.if_idle_since, auto_resume=request.auto_resume
    )
    await call.answer_json(200, told)


async def _get_activity(call: Call, gateway: Gateway) -> None:
    await call.answer_json(200, {"sandboxes": gateway.sandboxes.activity()})


async def _get_wakes(call: Call, gateway: Gateway) -> None:
    after, wait_s = call.number("after", default=0), call.seconds("wait_s", default=25.0, most=MAX_WAIT_S)
    wakes = gateway.sandboxes.wakes
    found, following = await wakes.after(after or 0, wait_s=wait_s)
    told = [{"seq": seq, "sandbox": sandbox_id} for seq, sandbox_id in found]
    await call.answer_json(200, {"source": wakes.source, "wakes": told, "next": following})


async def _detach(call: Call, gateway: Gateway) -> None:
    request: _Detach = read_model(_Detach, await call.body(limit=MAX_JSON))
    status = CommandStatus.KILLED if request.reason == "stopped" else CommandStatus.SANDBOX_LOST
    limit = session_over(request.session_s) if request.session_s is not None else None
    await gateway.sandboxes.detach(_sandbox_id(call), status, request.text, generation=request.generation, limit=limit)
    await call.answer(204, headers=[])


async def _forget(call: Call, gateway: Gateway) -> None:
    await gateway.sandboxes.forget(_sandbox_id(call), generation=call.number("generation"))
    await call.answer(204, headers=[])


async def _oom(call: Call, gateway: Gateway) -> None:
    request: _Oom = read_model(_Oom, await call.body(limit=MAX_JSON))
    commands = gateway.sandboxes.get(_sandbox_id(call)).oom(set(request.pids))
    await call.answer_json(200, {"commands": commands})


async def _set_halted(call: Call, gateway: Gateway) -> None:
    request: _Halted = read_model(_Halted, await call.body(limit=MAX_JSON))
    sandbox = gateway.sandboxes.find(_sandbox_id(call))
    if sandbox is not None:  # one that is being created: it is refused when it is asked for
        sandbox.gate.halted = request.halted
    await call.answer_json(200, {"known": sandbox is not None})


async def _open_port(call: Call, gateway: Gateway) -> None:
    request: _OpenPort = read_model(_OpenPort, await call.body(limit=MAX_JSON))
    sandbox, port = gateway.sandboxes.get(_sandbox_id(call)), _port(call)
    sandbox.ports.open(PublishedPort(port=port, **request.model_dump()))
    cut = gateway.previews.cut_unadmitted(Place(sandbox=sandbox.id, port=port))
    await call.answer_json(200, {"ended_calls": cut})


async def _close_port(call: Call, gateway: Gateway) -> None:
    epoch = call.number("epoch", default=0) or 0
    sandbox, port = gateway.sandboxes.find(_sandbox_id(call)), _port(call)
    cut = 0
    if sandbox is not None:
        sandbox.ports.close(port, epoch=epoch)
        cut = gateway.previews.cut_unadmitted(Place(sandbox=sandbox.id, port=port))
    await call.answer_json(200, {"ended_calls": cut})


async def _read_journal(call: Call, gateway: Gateway) -> None:
    after, limit = call.number("after", default=0), call.number("limit", default=1000, most=MAX_JOURNAL_PAGE)
    page = gateway.journal.page(after, limit=limit)
    told = b'{"instance":"%b","entries":[%b],"next":%d}'
    await call.answer(200, told % (gateway.journal.instance.encode(), b",".join(page.lines), page.next))


async def _revoke(call: Call, gateway: Gateway) -> None:
    request: _Revoke = read_model(_Revoke, await call.body(limit=MAX_JSON))
    for kind, value in request.model_dump(exclude_none=True).items():
        gateway.revocations.revoke(kind, value)
    ended = gateway.streams.end_revoked(gateway.revocations)
    await call.answer_json(200, {"ended_calls": ended})


async def _get_health(call: Call, gateway: Gateway) -> None:
    await call.answer_json(200, {"status": "ok", "journal": gateway.journal.last})


CONTROL_ROUTES = (
    Route(method="POST", path=f"{SANDBOX}/attach", handler=_attach),
    Route(method="POST", path=f"{SANDBOX}/suspend", handler=_suspend),
    Route(method="POST", path=f"{SANDBOX}/detach", handler=_detach),
    Route(method="GET", path="/v1/activity", handler=_get_activity),
    Route(method="GET", path="/v1/wakes", handler=_get_wakes),
    Route(method="POST", path=f"{SANDBOX}/oom", handler=_oom),
    Route(method="POST", path=f"{SANDBOX}/halted", handler=_set_halted),
    Route(method="PUT", path=f"{SANDBOX}/ports/{{port}}", handler=_open_port),
    Route(method="DELETE", path=f"{SANDBOX}/ports/{{port}}", handler=_close_port),
    Route(method="DELETE", path=SANDBOX, handler=_forget),
    Route(method="GET", path="/v1/journal", handler=_read_journal),
    Route(method="POST", path="/v1/tickets/revoke", handler=_revoke),
    Route(method="GET", path="/v1/health", handler=_get_health),
)


def create_control_app(gateway: Gateway) -> Callable[[Message, Receive, Send], Awaitable[None]]:
    """The ASGI application; who may connect is checked by its listener."""
    routes = Routes(CONTROL_ROUTES)

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        call = Call(scope, receive, send, values={})
        try:
            row, call.values = routes.find(scope["method"], scope["path"])
            await row.handler(call, gateway)
        except Exception as error:
            await answer_error(call, error)
        finally:
            call.finish()

    return app


def _port(call: Call) -> int:
    value = call.values["port"]
    if not value.isascii() or not value.isdigit() or not AGENT_PORT < int(value[:6]) <= 65535:
        raise InvalidRequest(f"cannot publish port {value[:16]}", "a port is 2 to 65535")
    return int(value)


def _sandbox_id(call: Call) -> str:
    """The id of the path, which becomes a folder's name: checked."""
    value = call.values["sandbox"]
    if not _SANDBOX_ID.fullmatch(value):
        raise InvalidRequest(f"cannot read the sandbox id {value[:64]!r}", "it has 20 of a-z and 0-9")
    return value

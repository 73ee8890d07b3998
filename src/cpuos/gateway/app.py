"""The data API as one table, and the way of each call: ticket, scope, sandbox, handler, errors."""

from __future__ import annotations

import os
import shlex
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from cpuos.errors import CpuosError
from cpuos.gateway import exec as commands
from cpuos.gateway import files, links, pty
from cpuos.gateway.access import Gateway, authorize, bearer, in_use
from cpuos.gateway.calls import Call, Message, Receive, Route, Routes, Send, answer_error
from cpuos.gateway.sandbox import GatewaySandbox
from cpuos.gateway.tickets import Ticket

__all__ = ["ROUTES", "create_app"]

SANDBOX = "/v1/sandboxes/{sandbox}"
COMMAND = f"{SANDBOX}/commands/{{command}}"


async def _get_health(call: Call) -> None:
    """GET /v1/health: the process answers."""
    await call.answer(200, b'{"status":"ok"}')


def _row(method: str, path: str, scope: str | None, action: str | None, handler: Any) -> Route:
    return Route(method=method, path=path, scope=scope, action=action, handler=handler)


# Method, path, what the ticket must grant, the journal's name for it, handler.
ROUTES = (
    _row("POST", f"{SANDBOX}/commands", "exec", "command.start", commands.start_command),
    _row("GET", f"{SANDBOX}/commands", "records", None, commands.list_commands),
    _row("GET", COMMAND, "records", None, commands.get_command),
    _row("GET", f"{COMMAND}/stream", "records", None, commands.stream_command),
    _row("GET", f"{COMMAND}/output", "records", None, commands.get_output),
    _row("GET", f"{COMMAND}/wait", "records", None, commands.wait_command),
    _row("POST", f"{COMMAND}/stdin", "exec", None, commands.write_stdin),
    _row("POST", f"{COMMAND}/kill", "exec", "command.kill", commands.kill_command),
    _row("POST", f"{COMMAND}/resize", "exec", None, commands.resize_command),
    _row("GET", f"{SANDBOX}/files", "files", "file.read", files.read_file),
    _row("PUT", f"{SANDBOX}/files", "files", "file.write", files.write_file),
    _row("DELETE", f"{SANDBOX}/files", "files", "file.remove", files.remove_file),
    _row("GET", f"{SANDBOX}/files/stat", "files", None, files.stat_file),
    _row("GET", f"{SANDBOX}/files/list", "files", None, files.list_files),
    _row("POST", f"{SANDBOX}/files/mkdir", "files", "file.mkdir", files.make_directory),
    _row("POST", f"{SANDBOX}/files/move", "files", "file.move", files.move_file),
    _row("GET", f"{SANDBOX}/files/watch", "files", None, files.watch_files),
    _row("GET", f"{SANDBOX}/files/tree", "files", "file.read_tree", files.read_tree),
    _row("PUT", f"{SANDBOX}/files/tree", "files", "file.write_tree", files.write_tree),
    _row("GET", "/v1/links/{token}", "link", "file.read", links.download),
    _row("HEAD", "/v1/links/{token}", "link", None, links.download),
    _row("WEBSOCKET", f"{SANDBOX}/pty", "exec", "command.start", pty.open_pty),
    _row("GET", "/v1/health", None, None, _get_health),
)


# They last as long as somebody wants them to; a pause waits a moment for the end of all others.
LASTING = frozenset((commands.start_command, commands.write_stdin, files.watch_files))


def _say_what_to_try(call: Call, error: Exception) -> None:
    """A pasteable step for what the agent refused: it knows neither the sandbox's id nor our commands."""
    sandbox = call.values.get("sandbox")
    if not isinstance(error, CpuosError) or sandbox is None or not sandbox.isalnum():
        return
    error.hint = error.lines()[2].replace("SANDBOX", sandbox)
    if error.code == "user_not_found":
        error.hint = f"cpuos exec {sandbox} cut -d: -f1 /etc/passwd"
    elif error.details.get("agent_code") == "cwd_not_found":
        error.hint = f"cpuos exec --cwd / {sandbox} ls -la /workspace, or another cwd"
    elif error.code == "file_not_found" and (path := files.shown_path(call)):
        folder = shlex.quote(os.path.dirname(path) or "/workspace")
        error.hint = (
            f"cpuos exec {sandbox} ls -la {folder}, or sbx.files.list({os.path.dirname(path) or '/workspace'!r})"
        )


async def _serve_inside(call: Call, row: Route, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway) -> None:
    """A call that needs the sandbox to run: it waits for a resume, and the sandbox is busy as long as it lasts."""
    await sandbox.awake()
    with in_use(sandbox, brief=row.handler not in LASTING):
        await row.handler(call, sandbox, ticket, gateway)


def create_app(gateway: Gateway) -> Callable[[Message, Receive, Send], Awaitable[None]]:
    """The ASGI application."""
    routes = Routes(ROUTES)

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await _serve_websocket(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        call = Call(scope, receive, send, values={})
        try:
            row, call.values = routes.find(scope["method"], scope["path"])
            if row.scope is None:
                await row.handler(call)
            elif row.scope == "link":
                await row.handler(call, gateway)
            else:
                sandbox, ticket = authorize(gateway, call.values["sandbox"], bearer(call), scope=row.scope)
                with gateway.streams.open(ticket):
                    if row.scope == "records":  # answered from the gateway's own record, whatever the sandbox does
                        await row.handler(call, sandbox, ticket, gateway)
                    else:
                        await _serve_inside(call, row, sandbox, ticket, gateway)
        except Exception as error:
            _say_what_to_try(call, error)
            await answer_error(call, error)
        finally:
            call.finish()

    async def _serve_websocket(scope: Message, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send, values={})
        try:
            row, call.values = routes.find("WEBSOCKET", scope["path"])
        except CpuosError:
            await send({"type": "websocket.close", "code": 4404, "reason": "no such route"})
            return
        with suppress(Exception):
            await row.handler(call, gateway)

    return app

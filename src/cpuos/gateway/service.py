"""The gateway as a whole: its parts put together, its two listeners, its beginning and end."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import structlog

from cpuos.gateway.access import Gateway
from cpuos.gateway.agent.connection import AgentTimes
from cpuos.gateway.agent.sockets import Dialler
from cpuos.gateway.app import create_app
from cpuos.gateway.control import create_control_app
from cpuos.gateway.journal import Journal
from cpuos.gateway.limits import GatewayLimits
from cpuos.gateway.previews.access import Doorkeeper
from cpuos.gateway.previews.visits import Previews, PreviewTimes
from cpuos.gateway.reached import LimitReader
from cpuos.gateway.refusals import LocalRefusals
from cpuos.gateway.sandboxes import Sandboxes
from cpuos.gateway.serve import HttpListener
from cpuos.gateway.spool import SpoolLimits
from cpuos.gateway.streams import OpenStreams
from cpuos.gateway.tickets import Revocations, TicketVerifier

__all__ = ["open_gateway", "serve_gateway"]

log = structlog.get_logger("gateway")


@asynccontextmanager
async def open_gateway(
    state_dir: Path,
    *,
    public_key: Path,
    dialler: Dialler,
    limit_reader: LimitReader | None = None,
    records_socket: Path | None = None,
    limits: GatewayLimits | None = None,
    spool_limits: SpoolLimits | None = None,
    times: AgentTimes | None = None,
    preview_domain: str = "preview.localhost",
    preview_times: PreviewTimes | None = None,
) -> AsyncIterator[Gateway]:
    """The parts without listeners; what an earlier process left is taken up, what lives on is left to the next."""
    limits = limits or GatewayLimits()
    journal = Journal(state_dir / "journal")
    revocations = Revocations(state_dir / "revoked.jsonl")
    refusals = LocalRefusals(records_socket) if records_socket is not None else None
    sandboxes = Sandboxes(
        state_dir / "sandboxes",
        journal=journal,
        dialler=dialler,
        refusals=refusals,
        limit_reader=limit_reader,
        limits=limits,
        spool_limits=spool_limits or SpoolLimits(),
        times=times or AgentTimes(),
    )
    streams = OpenStreams()
    verifier = TicketVerifier(public_key, revocations=revocations)
    gateway = Gateway(
        sandboxes=sandboxes,
        journal=journal,
        verifier=verifier,
        revocations=revocations,
        previews=Previews(
            domain=preview_domain,
            doorkeeper=Doorkeeper(sandboxes, verifier),
            streams=streams,
            times=preview_times or PreviewTimes(),
        ),
        limits=limits,
        streams=streams,
    )
    try:
        await sandboxes.open()
        yield gateway
    finally:
        await gateway.streams.end_all()
        await sandboxes.aclose()
        if refusals is not None:
            await refusals.aclose()
        journal.close()


@asynccontextmanager
async def serve_gateway(
    gateway: Gateway, *, host: str, port: int, control_socket: Path, control_peers: frozenset[int]
) -> AsyncIterator[str]:
    """Listen for clients and for the server; the data API's URL."""
    data = socket.create_server((host, port), reuse_port=False, backlog=1024, family=_family(host))
    control = _unix_listener(control_socket)
    listeners = [
        HttpListener(create_app(gateway), data),
        HttpListener(create_control_app(gateway), control, peers=control_peers),
    ]
    try:
        for listener in listeners:
            await listener.open()
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{data.getsockname()[1]}"
    finally:
        for listener in listeners:
            await listener.aclose()
        _remove(control_socket)


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.unlink()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _unix_listener(path: Path) -> socket.socket:
    """A listening socket at `path`, 0660; a socket that a dead process left is replaced."""
    _remove(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listening.bind(str(path))
    os.chmod(path, 0o660)
    listening.listen(128)
    return listening

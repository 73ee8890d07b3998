"""Who may come in: the ticket of a call, the sandbox that it opens, and the journal's entries of what it does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from cpuos.errors import AgentFailure, AuthenticationError, CpuosError, Forbidden, SandboxGone
from cpuos.gateway.calls import Call, ClientGone
from cpuos.gateway.journal import Journal
from cpuos.gateway.limits import GatewayLimits
from cpuos.gateway.previews.visits import Previews
from cpuos.gateway.sandbox import GatewaySandbox
from cpuos.gateway.sandboxes import Sandboxes
from cpuos.gateway.streams import OpenStreams
from cpuos.gateway.tickets import Revocations, Ticket, TicketVerifier

__all__ = ["Gateway", "authorize", "bearer", "in_use", "journaled"]


@dataclass(frozen=True, kw_only=True)
class Gateway:
    """What the handlers work with."""

    sandboxes: Sandboxes
    journal: Journal
    verifier: TicketVerifier
    revocations: Revocations
    previews: Previews
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    streams: OpenStreams = field(default_factory=OpenStreams)


def bearer(call: Call) -> str:
    """The ticket's text."""
    value = call.header(b"authorization")
    if value is None:
        raise AuthenticationError(
            "cannot serve the call without a ticket", "send Authorization: Bearer TICKET", code="key_missing"
        )
    kind, _, text = value.partition(" ")
    if kind.lower() != "bearer":
        raise AuthenticationError("cannot read Authorization", "it is not `Bearer TICKET`", code="ticket_invalid")
    return text.strip()


def authorize(gateway: Gateway, sandbox_id: str, text: str, *, scope: str) -> tuple[GatewaySandbox, Ticket]:
    """The sandbox that the ticket opens, at its generation; everything else raises."""
    ticket = gateway.verifier.verify(text)
    if ticket.sandbox != sandbox_id:
        raise AuthenticationError("cannot use the ticket: it is for another sandbox", code="ticket_invalid")
    sandbox = gateway.sandboxes.get(sandbox_id)
    sandbox.check_generation(ticket)
    if scope not in ticket.scope and not (scope == "records" and "exec" in ticket.scope):
        if "records" in ticket.scope and sandbox.ended is not None:
            raise sandbox.gone()
        raise Forbidden(
            f"cannot do this with the ticket: it does not grant {scope}",
            f"it grants {', '.join(sorted(ticket.scope))}",
            hint=f"POST /v1/sandboxes/{sandbox_id}/access of the server gives a ticket",
        )
    return sandbox, ticket


@contextmanager
def in_use(sandbox: GatewaySandbox, *, brief: bool) -> Iterator[None]:
    """For a call that needs its agent: it is busy as long as that lasts, and what cut it is told. `brief`: it mostly
    ends by itself, and a pause waits a moment for that."""
    with sandbox.activity.hold(brief=brief):
        try:
            yield
        except AgentFailure as error:
            raise sandbox.explain(error) from error


@asynccontextmanager
async def journaled(
    gateway: Gateway, ticket: Ticket, action: str, *, target: str, detail: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """Intent before, outcome after, also on failure; the body may add to the outcome's detail."""
    intent = gateway.journal.intent(ticket, action, target=target, detail=detail)
    result = "unknown"
    try:
        yield detail
        result = "ok"
    except ClientGone:
        detail["error"] = "the client left"
        raise
    except (AgentFailure, SandboxGone) as error:
        detail["code"] = error.code
        raise
    except CpuosError as error:
        result, detail["code"] = "error", error.code
        raise
    finally:
        gateway.journal.outcome(intent, ticket, action, target=target, result=result, detail=detail)

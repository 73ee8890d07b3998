"""Who may see a preview: everyone, whoever has a token of it, or nobody."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cpuos.errors import AuthenticationError, CpuosError, Forbidden
from cpuos.gateway.previews.headers import TOKEN_HEADER, Headers, cookie_values, query_token, values_of
from cpuos.gateway.previews.hosts import Place, is_same_origin
from cpuos.gateway.sandbox import GatewaySandbox
from cpuos.gateway.sandboxes import Sandboxes
from cpuos.gateway.tickets import Ticket, TicketVerifier

__all__ = ["Admission", "Asked", "Doorkeeper", "is_program"]

_READING = (b"GET", b"HEAD")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A visitor's request, as far as it matters at the door."""

    method: bytes
    target: bytes
    host: bytes
    headers: Headers
    websocket: bool
    prefix: bytes = b""
    """Path mode: what stood before the target."""

    @property
    def wants_page(self) -> bool:
        """A browser that shows what it gets."""
        accepted = b",".join(values_of(self.headers, b"accept"))
        return self.method in _READING and b"text/html" in accepted and not self.websocket


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Let in, and by what."""

    sandbox: GatewaySandbox
    place: Place
    ticket: Ticket | None
    """None: the port is public."""
    rewritten_host: bytes | None
    cookie: bytes | None = None
    """The token came in the query: the browser is to keep it as a cookie."""


class Doorkeeper:
    """Decides by the token, the port's record and, where a browser adds the token by itself, who made it ask."""

    def __init__(
        self, sandboxes: Sandboxes, verifier: TicketVerifier, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._sandboxes = sandboxes
        self._verifier = verifier
        self._clock = clock

    def admit(self, asked: Asked, place: Place) -> Admission:
        """Let in, or raise: the sandbox is not known, the token is missing, wrong or stale, the page is another's."""
        sandbox = self._sandboxes.get(place.sandbox)
        published = sandbox.ports.get(place.port, generation=sandbox.generation)
        if published is not None and published.is_public(self._clock()):
            if sandbox.ended is not None:
                raise sandbox.gone()
            return _admission(sandbox, place, None, host=published.host)
        told, explicit = self._find_ticket(asked, place, sandbox)
        if sandbox.ended is not None:
            raise sandbox.gone()
        if not explicit:
            _check_page(asked)
        shown = query_token(asked.target) if explicit and told.in_query and asked.wants_page else None
        return _admission(sandbox, place, told.ticket, host=told.ticket.host, cookie=shown)

    def holder(self, text: bytes) -> Place:
        """The place that a token is for."""
        ticket = self._verifier.verify(text.decode("latin-1"))
        if "preview" not in ticket.scope or ticket.port is None:
            raise AuthenticationError("cannot use the ticket: it is not for a preview", code="ticket_invalid")
        return Place(sandbox=ticket.sandbox, port=ticket.port)

    def still_admits(self, admission: Admission) -> bool:
        """Whether what was let in would be let in now."""
        published = admission.sandbox.ports.get(admission.place.port, generation=admission.sandbox.generation)
        if published is None:
            return False
        if admission.ticket is None:
            return published.is_public(self._clock())
        return admission.ticket.epoch == published.epoch

    def time_left(self, admission: Admission) -> float | None:
        """Seconds until what was let in is let in no longer; None: only a change ends it."""
        if admission.ticket is not None:
            return admission.ticket.expires_at - self._clock()
        published = admission.sandbox.ports.get(admission.place.port, generation=admission.sandbox.generation)
        if published is None or published.public_until is None:
            return None
        return published.public_until - self._clock()

    def _find_ticket(self, asked: Asked, place: Place, sandbox: GatewaySandbox) -> tuple[_Told, bool]:
        """The first good ticket of those that the visitor shows, and whether it was shown on purpose."""
        refused: CpuosError | None = None
        in_query = query_token(asked.target)
        shown = [(text, True, False) for text in values_of(asked.headers, TOKEN_HEADER)]
        shown += [(in_query, True, True)] if in_query is not None else []
        shown += [(text, False, False) for text in cookie_values(asked.headers)]
        for text, explicit, from_query in shown[:8]:
            try:
                return _Told(ticket=self._check(text, place, sandbox), in_query=from_query), explicit
            except (AuthenticationError, Forbidden) as error:
                refused = refused or error
        raise refused or AuthenticationError(
            f"cannot show port {place.port} of sandbox {place.sandbox}: it is private",
            "it opens with a link that carries a token",
            code="key_missing",
            hint=f"sbx.ports.url({place.port}), or cpuos ports {place.sandbox} {place.port}",
        )

    def _check(self, text: bytes, place: Place, sandbox: GatewaySandbox) -> Ticket:
        try:
            ticket = self._verifier.verify(text.decode("latin-1"))
        except AuthenticationError as error:
            error.what = error.what.replace("the ticket", "the preview's token")
            error.hint = f"sbx.ports.url({place.port}), or cpuos ports {place.sandbox} {place.port}"
            if error.code == "ticket_expired":
                error.why = "its time is over"
            raise
        if "preview" not in ticket.scope or ticket.port != place.port or ticket.sandbox != place.sandbox:
            raise _unfit(place, "it is for another sandbox or port, or for something else")
        if ticket.generation != sandbox.generation:
            raise _unfit(place, "the sandbox was made anew since")
        published = sandbox.ports.get(place.port, generation=sandbox.generation)
        if published is None or published.epoch != ticket.epoch:
            raise _unfit(place, "the port was closed since")
        return ticket


@dataclass(frozen=True, kw_only=True)
class _Told:
    ticket: Ticket
    in_query: bool


def is_program(asked: Asked) -> bool:
    """A request that no browser makes for a page, with a token that was put there on purpose.

    So that programs can come by the listener's address where the preview's name does not resolve: what is shown there
    would share its origin with other sandboxes, if a browser could be made to show it. A header of ours cannot be
    sent by a link or a form, nor by a script of another origin; every browser sends Origin with a WebSocket.
    """
    by_browser = any(name.lower().startswith(b"sec-fetch-") or name.lower() == b"origin" for name, _ in asked.headers)
    shown = values_of(asked.headers, TOKEN_HEADER) or (asked.websocket and query_token(asked.target) is not None)
    return bool(shown) and not by_browser


def _check_page(asked: Asked) -> None:
    """The browser added the cookie by itself, so the page that made it ask must be the preview's own.

    `SameSite` is not enough: previews of other sandboxes are of the same site.
    """
    origins = values_of(asked.headers, b"origin")
    sites = values_of(asked.headers, b"sec-fetch-site")
    opened = asked.method in _READING and values_of(asked.headers, b"sec-fetch-mode") == [b"navigate"]
    opened = opened and values_of(asked.headers, b"sec-fetch-dest") == [b"document"]
    if asked.websocket or (origins and not opened):
        fits = len(origins) == 1 and is_same_origin(origins[0], asked.host)
    else:
        fits = not sites or sites in ([b"same-origin"], [b"none"]) or opened
    if not fits:
        raise Forbidden(
            "cannot serve the request: a page of another origin made it",
            "a private preview's cookie opens it only to its own pages",
            hint="open the preview by its link, or send the token as X-Cpuos-Preview-Token",
        )


def _admission(
    sandbox: GatewaySandbox, place: Place, ticket: Ticket | None, *, host: str | None, cookie: bytes | None = None
) -> Admission:
    rewritten = f"{host}:{place.port}".encode("ascii") if host == "localhost" else None
    return Admission(sandbox=sandbox, place=place, ticket=ticket, rewritten_host=rewritten, cookie=cookie)


def _unfit(place: Place, why: str) -> AuthenticationError:
    return AuthenticationError(
        f"cannot use the preview's token for port {place.port} of sandbox {place.sandbox}",
        why,
        code="ticket_invalid",
        hint=f"sbx.ports.url({place.port}), or cpuos ports {place.sandbox} {place.port}",
    )

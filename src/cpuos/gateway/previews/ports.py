"""The published ports of one sandbox: who may see them, kept on the disk so that a restart lets nobody in or out."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cpuos.errors import Conflict, LimitReached
from cpuos.gateway.records import write_whole

__all__ = ["MAX_PORTS", "PublishedPort", "PublishedPorts"]

MAX_PORTS = 512
"""Of one sandbox, closed ones too: each change writes them all."""


@dataclass(frozen=True, kw_only=True)
class PublishedPort:
    """A closed one stays as the memory of the epoch that is over."""

    port: int
    epoch: int
    generation: int
    open: bool = True
    public: bool = False
    public_until: float | None = None
    host: str | None = None
    """What the server inside gets as Host from visitors without a token."""

    def is_public(self, now: float) -> bool:
        return self.open and self.public and (self.public_until is None or now < self.public_until)


class PublishedPorts:
    """In memory and in one file; it goes with the sandbox's record."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ports: dict[int, PublishedPort] = {}
        with suppress(FileNotFoundError, ValueError, TypeError):
            rows = [PublishedPort(**row) for row in json.loads(path.read_bytes())]
            self._ports = {row.port: row for row in rows}

    def get(self, port: int, *, generation: int) -> PublishedPort | None:
        """The port as it is published for this generation of the sandbox."""
        found = self._ports.get(port)
        return found if found is not None and found.open and found.generation == generation else None

    def open(self, published: PublishedPort) -> None:
        """Publish it, or change how; an epoch that is over does not come back."""
        known = self._ports.get(published.port)
        if known is not None and (published.epoch < known.epoch or (published.epoch == known.epoch and not known.open)):
            raise Conflict(
                f"cannot publish port {published.port}: it was closed meanwhile", "publish it again", code="wrong_state"
            )
        if known is None and len(self._ports) >= MAX_PORTS:
            raise LimitReached(
                f"cannot publish port {published.port}",
                f"{MAX_PORTS} ports of the sandbox were published, and there are no more for one sandbox",
                details={"limit": "ports", "value": MAX_PORTS},
            )
        if known != published:
            self._save(published)

    def close(self, port: int, *, epoch: int) -> None:
        """Also one that was never published: what comes late must not open it."""
        known = self._ports.get(port)
        if known is None and len(self._ports) < MAX_PORTS:
            self._save(PublishedPort(port=port, epoch=epoch, generation=0, open=False))
        elif known is not None and known.open and known.epoch <= epoch:
            self._save(replace(known, epoch=epoch, open=False, public=False))

    def _save(self, published: PublishedPort) -> None:
        ports = {**self._ports, published.port: published}
        write_whole(self._path, json.dumps([asdict(row) for row in ports.values()]).encode())
        self._ports = ports

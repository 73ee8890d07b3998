"""What a worker has open, one part a sandbox."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from cpuos.node.network.workers.channel import Descriptors
from cpuos.node.network.workers.messages import Close

__all__ = ["Served"]


class _Part(Protocol):
    async def close(self) -> None: ...


P = TypeVar("P", bound=_Part)


class Served(Generic[P]):
    """By sandbox. What is taken out is closed."""

    def __init__(self) -> None:
        self._parts: dict[str, P] = {}

    def get(self, sandbox: str) -> P | None:
        return self._parts.get(sandbox)

    def all(self) -> list[P]:
        return list(self._parts.values())

    def put(self, sandbox: str, part: P) -> None:
        """An earlier one has to be forgotten before: both would have the same socket."""
        self._parts[sandbox] = part

    async def forget(self, sandbox: str) -> None:
        """One that is not known is fine."""
        part = self._parts.pop(sandbox, None)
        if part is not None:
            await part.close()

    async def shut(self, message: Close, descriptors: Descriptors) -> None:
        """The operation `Close`."""
        await self.forget(message.sandbox)

    async def close(self) -> None:
        for sandbox in list(self._parts):
            await self.forget(sandbox)

"""The policy hook of guard. Without rules everything that a permission grants is allowed."""

from __future__ import annotations

from typing import Protocol

from cpuos.server.auth import Actor

__all__ = ["AllowAll", "Policy"]


class Policy(Protocol):
    async def check(self, actor: Actor, *, action: str, target: str) -> None:
        """Return when the action may go on; raise `Forbidden` with the rule that refuses it."""
        ...


class AllowAll:
    async def check(self, actor: Actor, *, action: str, target: str) -> None:
        return None

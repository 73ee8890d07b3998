"""Which sandboxes may have been refused more than was logged, so that their router's counters are looked at now."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Floods"]

EVERY_S = 2.0
SUSPECT = 20
"""Logged refusals of one spell. The log bears 50 at once and 20 a second: with fewer than this in `EVERY_S` it has as
many left, so that nothing can go unlogged before there are so many again."""


@dataclass
class _Spell:
    logged: int = 0
    is_suspect: bool = False
    looked_at: float = float("-inf")


class Floods:
    """Of all sandboxes; one that is quiet costs nothing."""

    def __init__(self) -> None:
        self._spells: dict[str, _Spell] = {}

    def logged(self, sandbox: str) -> None:
        """A refusal of it came by the log."""
        spell = self._spells.setdefault(sandbox, _Spell())
        spell.logged += 1
        spell.is_suspect = spell.is_suspect or spell.logged >= SUSPECT

    def suspect(self, sandbox: str) -> None:
        """Something is known to be missing: where that was, there may be more."""
        self._spells.setdefault(sandbox, _Spell()).is_suspect = True

    def forget(self, sandbox: str) -> None:
        self._spells.pop(sandbox, None)

    def due(self, now: float) -> list[str]:
        """Those whose counters are wanted. Each is named again after a while, until a spell of it was quiet."""
        found = []
        for sandbox, spell in list(self._spells.items()):
            if now - spell.looked_at < EVERY_S and now >= spell.looked_at:
                continue
            if spell.is_suspect:
                found.append(sandbox)
                # After many there is little left in the log's allowance: the next spell is looked at too.
                self._spells[sandbox] = _Spell(is_suspect=spell.logged >= SUSPECT, looked_at=now)
            elif spell.looked_at != float("-inf"):
                del self._spells[sandbox]
        return found

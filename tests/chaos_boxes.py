"""Sandboxes and snapshots of `lifecycle_chaos` as its clients know them: which files must be there, and which may."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

__all__ = ["LOOK", "Box", "Seen", "Snap"]

LOOK = """pgrep -fc '^chaos-counte[r]'; echo "came to $(cat /tmp/n)"
cd /workspace/c && sha256sum f-* || true; echo; cd ~/c && sha256sum f-* || true"""


@dataclass(kw_only=True)
class Box:
    """A sandbox as its clients know it."""

    id: str
    acknowledged: set[str] = field(default_factory=set)
    """Files that must be there."""
    tried: set[str] = field(default_factory=set)
    """Files that may be there."""
    home: set[str] = field(default_factory=set)
    """Those of `acknowledged` that must be outside of /workspace too: of one that was made anew what was saved."""
    home_when_shot: set[str] = field(default_factory=set)
    written_at: dict[str, datetime] = field(default_factory=dict)
    """Not of what it was born with."""
    count: int | None = None
    """What its counting process had come to; None: it has none."""
    shot: bool = False
    """Its process was killed by SIGKILL, and it was not made anew since."""
    lives: int = 1
    """One more each time it was made anew."""
    generation: int = 1
    """Of the last of these."""
    ended: bool = False
    """Its kill was asked for."""
    pauses: int = 0

    def moment(self) -> Box:
        """What it has now at least."""
        return Box(
            id=self.id,
            acknowledged=set(self.acknowledged),
            home=set(self.home),
            count=self.count,
            shot=self.shot,
            lives=self.lives,
        )


@dataclass(frozen=True, kw_only=True)
class Snap:
    id: str
    acknowledged: frozenset[str]
    tried: frozenset[str]
    home: frozenset[str]
    count: int | None
    """None: it was saved without processes."""

    def born(self, sandbox_id: str) -> Box:
        """One that begins with it."""
        return Box(
            id=sandbox_id,
            acknowledged=set(self.acknowledged),
            tried=set(self.tried),
            home=set(self.home),
            count=self.count,
        )


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What `LOOK` prints."""

    counters: str
    """How many processes count."""
    count: int | None
    """None: it is being written."""
    workspace: dict[str, str]
    """Digests of files by their names."""
    home: dict[str, str]

    @classmethod
    def read(cls, stdout: str) -> Seen:
        first, _, home = stdout.partition("\n\n")
        counters, count, *workspace = first.split("\n")
        count = count.removeprefix("came to ")
        digests = [
            {name: digest for digest, name in (line.split() for line in lines if line)}
            for lines in (workspace, home.split("\n"))
        ]
        return cls(counters=counters, count=int(count) if count else None, workspace=digests[0], home=digests[1])

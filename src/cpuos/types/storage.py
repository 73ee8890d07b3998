"""What takes room on a node, and what of it nobody needs."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from cpuos.types.base import Answer, Request
from cpuos.types.node import VolumeFacts

__all__ = ["LAYERS_UNUSED_S", "NodeStorage", "Prune", "Pruned", "Storage", "StorageItem", "StorageKind"]

LAYERS_UNUSED_S = 86_400.0
"""What steps of builds have left is not needed when no build has begun with it for so long."""


class StorageKind(StrEnum):
    TEMPLATE = "template"
    BUILT = "built"
    """Image of a template that a workspace built."""
    PACK = "pack"
    KEPT = "kept"
    """Image of a template that something was begun with."""
    BUILD_LAYER = "build_layer"
    """What the steps of a build have left, for later builds."""
    SNAPSHOT = "snapshot"
    PAUSED = "paused"
    """Memory and root of a paused sandbox."""
    ROOT = "root"
    """What was saved of the root of one that runs."""
    DISK = "disk"
    LAYER = "layer"
    """What a running sandbox has written outside of /workspace."""
    STOCK = "stock"
    """Empty disks, made in advance."""
    LEFTOVER = "leftover"
    """What was begun and not finished."""
    OUTPUT = "output"
    """Recorded output of commands."""
    RECORDS = "records"
    """Database and journals."""
    LOGS = "logs"
    RUNTIME = "runtime"
    CACHE = "cache"
    """Downloads of set-up."""
    BALLAST = "ballast"


class StorageItem(Answer):
    kind: StorageKind
    name: str
    """Of a sandbox, snapshot, template or pack its id or name; else of a folder."""
    state: str = ""
    """Of what belongs to a sandbox: what that is. Of what steps of builds have left: when it was last used."""
    apparent_bytes: int = 0
    """Length of its files; most are sparse."""
    real_bytes: int = 0
    """What it takes on the volume. A file with two names counts for the first."""
    shared_bytes: int = 0
    """What of that others have too: the same blocks, or the same file."""
    needed: bool = True
    why: str = ""
    """Why it is not needed."""


class NodeStorage(Answer):
    node: str
    volume: VolumeFacts
    reflink: bool
    """Copies share blocks until they are written to."""
    items: list[StorageItem]


class Storage(Answer):
    nodes: list[NodeStorage]


class Prune(Request):
    dry_run: bool = Field(default=True)
    """Only say what would go."""
    layers_unused_s: float = Field(default=LAYERS_UNUSED_S, ge=0, le=1e9)
    """What steps of builds have left goes when no build has begun with it for so long; 0: all that no build at work
    may begin with."""


class Pruned(Answer):
    dry_run: bool
    items: list[StorageItem]
    """What went, or would."""
    freed_bytes: int

"""What takes room on the nodes, by what it is for, and what of it goes when the operator asks. The nodes count bytes by
name; that a snapshot is what steps of a build have left is known here alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from cpuos.scheduler.base import Scheduler
from cpuos.server.clock import Clock
from cpuos.server.snapshots import Snapshots
from cpuos.server.templates.builder import Builder
from cpuos.server.templates.layers import Layers, StoredLayer
from cpuos.types.storage import LAYERS_UNUSED_S, NodeStorage, Prune, StorageItem, StorageKind

__all__ = ["Stores"]


class Stores:
    def __init__(
        self, *, scheduler: Scheduler, snapshots: Snapshots, builder: Builder, layers: Layers, clock: Clock
    ) -> None:
        self._scheduler = scheduler
        self._snapshots = snapshots
        self._builder = builder
        self._layers = layers
        self._clock = clock

    async def report(self, nodes: Sequence[str], *, layers_unused_s: float = LAYERS_UNUSED_S) -> list[NodeStorage]:
        told = [await self._scheduler.client(node).storage() for node in nodes]
        layers = {layer.snapshot: layer for layer in await self._layers.stored()}
        return [
            node.model_copy(update={"items": [self._shown(item, layers, layers_unused_s) for item in node.items]})
            for node in told
        ]

    async def prune(self, nodes: Sequence[str], request: Prune) -> list[StorageItem]:
        """What went, or would."""
        report = await self.report(nodes, layers_unused_s=request.layers_unused_s)
        planned = [item for node in report for item in node.items if item.kind is StorageKind.BUILD_LAYER]
        went = [item for item in planned if not item.needed]
        if not request.dry_run:
            doomed = await self._layers.prune_unused(request.layers_unused_s)
            await self._snapshots.tidy()
            await self._builder.tidy()
            left = {facts.id for node in nodes for facts in await self._scheduler.client(node).snapshots()}
            went = [item for item in planned if item.name in doomed - left]
        for node in nodes:
            went += await self._scheduler.client(node).prune(dry_run=request.dry_run)
        return went

    def _shown(self, item: StorageItem, layers: dict[str, StoredLayer], unused_s: float) -> StorageItem:
        layer = layers.get(item.name)
        if item.kind is not StorageKind.SNAPSHOT or layer is None:
            return item
        changes = {"kind": StorageKind.BUILD_LAYER, "state": f"used {layer.used_at:%Y-%m-%d %H:%M}"}
        if layer.in_use:
            changes["state"] = "in use"
        elif layer.used_at <= self._clock() - timedelta(seconds=unused_s):
            why = f"no build has begun with it since {layer.used_at:%Y-%m-%d %H:%M}; one that needs it makes it again"
            changes |= {"needed": False, "why": why}
        return item.model_copy(update=changes)

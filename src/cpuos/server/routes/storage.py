"""What takes room on the nodes, and what of it goes: the operator's, over all workspaces."""

from __future__ import annotations

from cpuos.server.routes.called import Called, Plane
from cpuos.server.routes.installation import views
from cpuos.types.storage import Prune, Pruned, Storage

__all__ = ["get_storage", "prune_storage"]


async def get_storage(plane: Plane) -> Storage:
    """Each thing with the length of its files, what they take on the volume, and what of that others have too."""
    return Storage(nodes=await plane.stores.report([view.facts.node for view in await views(plane)]))


async def prune_storage(body: Prune, plane: Plane, call: Called) -> Pruned:
    """Remove what nobody needs: what steps of builds have left and no build has begun with of late, images of templates
    that nothing was begun with, old versions of the runtime, downloads of set-up. With `dry_run` (the default) only say
    what that is."""
    items = await plane.stores.prune([view.facts.node for view in await views(plane)], body)
    freed = sum(item.real_bytes for item in items)
    call.detail |= {"dry_run": body.dry_run, "items": len(items), "freed_bytes": 0 if body.dry_run else freed}
    call.detail |= {"layers_unused_s": body.layers_unused_s}
    return Pruned(dry_run=body.dry_run, items=items, freed_bytes=freed)

"""What the installation has: templates, nodes, room, health."""

from __future__ import annotations

from cpuos.errors import Unavailable
from cpuos.scheduler.base import NodeView
from cpuos.server.routes.called import Plane
from cpuos.types.installation import Amount, Capacity, Health, Node, NodeList, Pool
from cpuos.types.node import PoolFacts

__all__ = ["get_capacity", "get_health", "list_nodes", "views"]


async def get_health(plane: Plane) -> Health:
    """Needs no key. `degraded`: the server answers, a part that it needs does not."""
    return await plane.health()


async def list_nodes(plane: Plane) -> NodeList:
    reachable = await plane.refresh_nodes()
    return NodeList(
        nodes=[
            Node(
                name=view.facts.node,
                reachable=reachable,
                templates=[template for template in view.facts.templates if not template.built],
                pool=_count(view.facts.pool),
                **view.facts.model_dump(exclude={"node", "boot_id", "templates", "pool"}),
            )
            for view in plane.scheduler.nodes()
        ]
    )


def _count(pool: PoolFacts) -> Pool:
    """Which they are is nobody's business: they belong to nobody yet."""
    return Pool(ready=len(pool.ready), **pool.model_dump(include={"memory_mib", "budget_mib", "taken", "missed"}))


async def get_capacity(plane: Plane) -> Capacity:
    """What may be promised to sandboxes in all, and what is."""
    known = await views(plane)

    def amount(name: str) -> Amount:
        return Amount(
            total=sum(getattr(view.total, name) for view in known),
            reserved=sum(getattr(view.reserved, name) for view in known),
            machine=sum(getattr(view.machine, name) for view in known),
        )

    return Capacity(**{name: amount(name) for name in ("sandboxes", "cpu", "memory_mib", "disk_mib")})


async def views(plane: Plane) -> list[NodeView]:
    """The nodes with fresh facts where these can be had; an error when there is none."""
    await plane.refresh_nodes()
    known = list(plane.scheduler.nodes())
    if not known:
        raise Unavailable(
            "cannot tell: no node is known",
            "the node daemon has not answered since the server started",
            code="node_unavailable",
            hint="cpuos up",
        )
    return known

"""What the installation has: templates, nodes, room, health."""

from __future__ import annotations

from cpuos.errors import Unavailable
from cpuos.scheduler.base import NodeView
from cpuos.server.routes.called import Plane
from cpuos.types.installation import Amount, Capacity, Health, Node, NodeList, TemplateList

__all__ = ["get_capacity", "get_health", "list_nodes", "list_templates"]


async def get_health(plane: Plane) -> Health:
    """Needs no key. `degraded`: the server answers, a part that it needs does not."""
    return await plane.health()


async def list_templates(plane: Plane) -> TemplateList:
    templates = {template.name: template for view in await _views(plane) for template in view.facts.templates}
    return TemplateList(templates=[templates[name] for name in sorted(templates)])


async def list_nodes(plane: Plane) -> NodeList:
    reachable = await plane.refresh_nodes()
    return NodeList(
        nodes=[
            Node(name=view.facts.node, reachable=reachable, **view.facts.model_dump(exclude={"node", "boot_id"}))
            for view in plane.scheduler.nodes()
        ]
    )


async def get_capacity(plane: Plane) -> Capacity:
    """What may be promised to sandboxes in all, and what is."""
    views = await _views(plane)

    def amount(name: str) -> Amount:
        return Amount(
            total=sum(getattr(view.total, name) for view in views),
            reserved=sum(getattr(view.reserved, name) for view in views),
        )

    return Capacity(**{name: amount(name) for name in ("sandboxes", "cpu", "memory_mib", "disk_mib")})


async def _views(plane: Plane) -> list[NodeView]:
    await plane.refresh_nodes()
    views = list(plane.scheduler.nodes())
    if not views:
        raise Unavailable(
            "cannot tell: no node is known",
            "the node daemon has not answered since the server started",
            code="node_unavailable",
            hint="cpuos up",
        )
    return views

"""The API as one table: who may call what, and as what it is audited."""

from __future__ import annotations

from cpuos.server.auth import Permission as P
from cpuos.server.guard import Route
from cpuos.server.routes.access import create_access, create_link
from cpuos.server.routes.alarms import get_workspace_alarms, update_workspace_alarms
from cpuos.server.routes.audit import list_audit
from cpuos.server.routes.installation import get_capacity, get_health, list_nodes
from cpuos.server.routes.network import (
    get_sandbox_network,
    get_workspace_network,
    list_sandbox_connections,
    update_sandbox_network,
    update_workspace_network,
)
from cpuos.server.routes.packs import create_pack, delete_pack, get_pack, list_packs
from cpuos.server.routes.ports import create_port, delete_port, list_ports
from cpuos.server.routes.sandboxes import (
    ReplayCreate,
    create_sandbox,
    delete_sandbox,
    get_sandbox,
    list_sandboxes,
    recreate_sandbox,
    update_sandbox,
)
from cpuos.server.routes.snapshots import (
    ReplayFork,
    ReplaySnapshot,
    create_snapshot,
    delete_snapshot,
    fork_sandbox,
    fork_snapshot,
    get_snapshot,
    list_snapshots,
    pause_sandbox,
    resume_sandbox,
)
from cpuos.server.routes.storage import get_storage, prune_storage
from cpuos.server.routes.templates import (
    create_build,
    delete_build,
    delete_template,
    get_build,
    get_template,
    list_templates,
    update_build,
)

__all__ = ["ROUTES"]

# fmt: off
ROUTES: tuple[Route, ...] = (
    Route(method="POST",   path="/v1/sandboxes",              handler=create_sandbox, permission=P.SANDBOXES_WRITE,  audit="sandbox.create", status=201, replay=ReplayCreate()),
    Route(method="GET",    path="/v1/sandboxes",              handler=list_sandboxes, permission=P.SANDBOXES_READ),
    Route(method="GET",    path="/v1/sandboxes/{ref}",        handler=get_sandbox,    permission=P.SANDBOXES_READ),
    Route(method="PATCH",  path="/v1/sandboxes/{ref}",        handler=update_sandbox, permission=P.SANDBOXES_WRITE,  audit="sandbox.update"),
    Route(method="DELETE", path="/v1/sandboxes/{ref}",        handler=delete_sandbox, permission=P.SANDBOXES_WRITE,  audit="sandbox.kill"),
    Route(method="POST",   path="/v1/sandboxes/{ref}/pause",  handler=pause_sandbox,  permission=P.SANDBOXES_WRITE,  audit="sandbox.pause"),
    Route(method="POST",   path="/v1/sandboxes/{ref}/resume", handler=resume_sandbox, permission=P.SANDBOXES_WRITE,  audit="sandbox.resume"),
    Route(method="POST",   path="/v1/sandboxes/{ref}/recreate", handler=recreate_sandbox, permission=P.SANDBOXES_WRITE, audit="sandbox.recreate", status=201, replay=ReplayCreate()),
    Route(method="POST",   path="/v1/sandboxes/{ref}/snapshots", handler=create_snapshot, permission=P.SANDBOXES_WRITE, audit="sandbox.snapshot", status=201, replay=ReplaySnapshot()),
    Route(method="POST",   path="/v1/sandboxes/{ref}/fork",   handler=fork_sandbox,   permission=P.SANDBOXES_WRITE,  audit="sandbox.fork", status=201, replay=ReplayFork()),
    Route(method="POST",   path="/v1/sandboxes/{ref}/access", handler=create_access,  permission=P.SANDBOXES_ACCESS, audit="access.create"),
    Route(method="POST",   path="/v1/sandboxes/{ref}/links",  handler=create_link,    permission=P.SANDBOXES_ACCESS, audit="link.create", status=201),
    Route(method="POST",   path="/v1/sandboxes/{ref}/ports",  handler=create_port,    permission=P.SANDBOXES_ACCESS, audit="port.open"),
    Route(method="GET",    path="/v1/sandboxes/{ref}/ports",  handler=list_ports,     permission=P.SANDBOXES_READ),
    Route(method="DELETE", path="/v1/sandboxes/{ref}/ports/{port}", handler=delete_port, permission=P.SANDBOXES_ACCESS, audit="port.close"),
    Route(method="GET",    path="/v1/sandboxes/{ref}/network", handler=get_sandbox_network, permission=P.SANDBOXES_READ),
    Route(method="PUT",    path="/v1/sandboxes/{ref}/network", handler=update_sandbox_network, permission=P.SANDBOXES_WRITE, audit="sandbox.network"),
    Route(method="GET",    path="/v1/sandboxes/{ref}/connections", handler=list_sandbox_connections, permission=P.AUDIT_READ),
    Route(method="GET",    path="/v1/snapshots",              handler=list_snapshots, permission=P.SANDBOXES_READ),
    Route(method="GET",    path="/v1/snapshots/{ref}",        handler=get_snapshot,   permission=P.SANDBOXES_READ),
    Route(method="DELETE", path="/v1/snapshots/{ref}",        handler=delete_snapshot, permission=P.SANDBOXES_WRITE, audit="snapshot.delete"),
    Route(method="POST",   path="/v1/snapshots/{ref}/fork",   handler=fork_snapshot,  permission=P.SANDBOXES_WRITE,  audit="snapshot.fork", status=201, replay=ReplayFork()),
    Route(method="GET",    path="/v1/workspace/network",      handler=get_workspace_network, permission=P.SANDBOXES_READ),
    Route(method="PUT",    path="/v1/workspace/network",      handler=update_workspace_network, permission=P.WORKSPACE_WRITE, audit="workspace.network"),
    Route(method="GET",    path="/v1/workspace/alarms",       handler=get_workspace_alarms, permission=P.SANDBOXES_READ),
    Route(method="PUT",    path="/v1/workspace/alarms",       handler=update_workspace_alarms, permission=P.WORKSPACE_WRITE, audit="workspace.alarms"),
    Route(method="GET",    path="/v1/audit",                  handler=list_audit,     permission=P.AUDIT_READ),
    Route(method="GET",    path="/v1/templates",              handler=list_templates, permission=P.NODES_READ),
    Route(method="GET",    path="/v1/templates/{name}",       handler=get_template,   permission=P.NODES_READ),
    Route(method="DELETE", path="/v1/templates/{name}",       handler=delete_template, permission=P.SANDBOXES_WRITE, audit="template.delete"),
    Route(method="POST",   path="/v1/builds",                 handler=create_build,   permission=P.SANDBOXES_WRITE,  audit="template.build", status=201),
    Route(method="GET",    path="/v1/builds/{build}",         handler=get_build,      permission=P.SANDBOXES_READ),
    Route(method="PATCH",  path="/v1/builds/{build}",         handler=update_build,   permission=P.SANDBOXES_WRITE,  audit="build.update"),
    Route(method="DELETE", path="/v1/builds/{build}",         handler=delete_build,   permission=P.SANDBOXES_WRITE,  audit="build.cancel"),
    Route(method="GET",    path="/v1/nodes",                  handler=list_nodes,     permission=P.NODES_READ),
    Route(method="POST",   path="/v1/sandboxes/{ref}/packs",  handler=create_pack,    permission=P.SANDBOXES_WRITE,  audit="pack.create", status=201),
    Route(method="GET",    path="/v1/packs",                  handler=list_packs,     permission=P.SANDBOXES_READ),
    Route(method="GET",    path="/v1/packs/{name}",           handler=get_pack,       permission=P.SANDBOXES_READ),
    Route(method="DELETE", path="/v1/packs/{name}",           handler=delete_pack,    permission=P.SANDBOXES_WRITE,  audit="pack.delete"),
    Route(method="GET",    path="/v1/storage",                handler=get_storage,    permission=P.NODES_WRITE),
    Route(method="POST",   path="/v1/storage/prune",          handler=prune_storage,  permission=P.NODES_WRITE,      audit="storage.prune"),
    Route(method="GET",    path="/v1/capacity",               handler=get_capacity,   permission=P.NODES_READ),
    Route(method="GET",    path="/v1/health",                 handler=get_health,     permission=None),
)
# fmt: on

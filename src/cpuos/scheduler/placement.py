"""Choosing a node and a runtime: pure functions of facts and reservations."""

from __future__ import annotations

from collections.abc import Sequence

from cpuos.errors import CapacityExceeded, CpuosError, InvalidRequest, NotFound, SetupRequired, Unavailable
from cpuos.scheduler.base import Capacity, CapacityRules, Demand, NodeView, Placement
from cpuos.types.near import near_details, nearest
from cpuos.types.node import NodeFacts, RuntimeFacts
from cpuos.types.room import describe_shortage
from cpuos.types.sandbox import Isolation

__all__ = ["check_room", "place", "shortage", "total_capacity"]

_STRENGTH = {level: rank for rank, level in enumerate(reversed(Isolation))}


def place(views: Sequence[NodeView], demand: Demand) -> Placement:
    """The node with the most free memory that takes the demand; else the error that says why none does."""
    if not views:
        raise Unavailable(
            "cannot create sandbox: no node is known",
            "the node daemon has not answered since the server started",
            code="node_unavailable",
            hint="cpuos up",
        )
    problems: list[CpuosError] = []
    for view in sorted(views, key=lambda view: view.reserved.memory_mib - view.total.memory_mib):
        try:
            return _place_on(view, demand)
        except CpuosError as problem:
            problems.append(problem)
    # The problem that is nearest to a yes says most: room, then runtime, then template.
    order = [CapacityExceeded, SetupRequired, InvalidRequest, NotFound]
    raise min(problems, key=lambda problem: order.index(type(problem)))


def total_capacity(facts: NodeFacts, rules: CapacityRules) -> Capacity:
    """What the node may promise in all."""
    return Capacity(
        sandboxes=facts.max_sandboxes,
        cpu=facts.cpu * rules.cpu_overcommit,
        memory_mib=int(max(0, facts.memory_mib - rules.memory_reserve_mib) * rules.memory_overcommit),
        disk_mib=int(max(0, facts.disk_mib - rules.disk_reserve_mib) * rules.disk_overcommit),
    )


def check_room(view: NodeView, more: Capacity, *, action: str) -> None:
    """Raise when the node has not that much more."""
    short = shortage(view, more)
    if short:
        raise _no_room(view.facts.node, short, action=action)


def shortage(view: NodeView, wanted: Capacity) -> dict[str, dict[str, float]]:
    """What is short of so much more: name to asked, free, total, promised and what the
    machine has. Empty when it fits."""
    short = {}
    for name in ("sandboxes", "cpu", "memory_mib", "disk_mib"):
        asked, total, reserved = (getattr(part, name) for part in (wanted, view.total, view.reserved))
        if asked > 0 and reserved + asked > total:
            row = {"asked": asked, "free": max(0, total - reserved), "total": total, "promised": reserved}
            short[name] = row | {"machine": float(getattr(view.machine, name))}
    return short


def _place_on(view: NodeView, demand: Demand) -> Placement:
    facts = view.facts
    template = next((known for known in facts.templates if known.name == demand.template), None)
    if template is None:
        # Images of builds go by their names in the server; whose they are is not for everyone.
        names = sorted(known.name for known in facts.templates if not known.built)
        raise NotFound(
            f"cannot create sandbox: no template {demand.template!r}",
            f"installed are: {', '.join(names) or 'none'}",
            code="template_not_found",
            hint="cpuos create --template " + (nearest(demand.template, names) or (names or ["python"])[-1]),
            details={"template": demand.template, "templates": names},
        )
    runtime = _choose_runtime(facts, demand)
    if demand.node not in (None, facts.node):
        raise CapacityExceeded(
            f"cannot create sandbox: what it begins with is not on node {facts.node}",
            f"it lies on node {demand.node}",
            hint="cpuos snapshots ls",
        )
    check_room(view, Capacity.of(demand), action="create sandbox")
    return Placement(
        node=facts.node,
        runtime=runtime.name,
        isolation=runtime.isolation,
        isolation_detail=runtime.detail,
        template_digest=template.digest,
    )


def _choose_runtime(facts: NodeFacts, demand: Demand) -> RuntimeFacts:
    if demand.runtime != "auto" and all(runtime.name != demand.runtime for runtime in facts.runtimes):
        names = [runtime.name for runtime in facts.runtimes]
        known = ", ".join(sorted(names)) or "none"
        raise InvalidRequest(
            f"cannot create sandbox: unknown runtime {demand.runtime!r}",
            f"known on {facts.node} are: auto, {known}",
            details={"field": "runtime", "value": demand.runtime, **near_details(demand.runtime, ["auto", *names])},
        )
    asked = [runtime for runtime in facts.runtimes if demand.runtime in ("auto", runtime.name)]
    available = [runtime for runtime in asked if runtime.available]
    allowed = [one for one in available if demand.allow_emulated or one.isolation is not Isolation.EMULATED]
    strongest = max(allowed, key=lambda runtime: _STRENGTH[runtime.isolation], default=None)
    wanted = demand.min_isolation
    if strongest is None and available:
        raise SetupRequired(
            f"cannot create sandbox: runtime {available[0].name!r} on {facts.node} is only emulated",
            f"{available[0].detail}: slow, and nobody has built it to keep guests in; it must be asked for",
            code="runtime_unavailable",
            hint="cpuos create --runtime microvm --allow-emulated",
        )
    if strongest is None:
        reasons = "; ".join(f"{runtime.name}: {runtime.reason or 'not available'}" for runtime in asked)
        raise _no_runtime(f"runtime {demand.runtime!r} is not available on {facts.node}", reasons or "it has none")
    if wanted is not None and _STRENGTH[strongest.isolation] < _STRENGTH[wanted]:
        raise _no_runtime(
            f"isolation {wanted.value!r} is not available on {facts.node}",
            f"the strongest there is {strongest.isolation.value!r} ({strongest.name})",
        )
    return strongest


def _no_runtime(what: str, why: str) -> SetupRequired:
    return SetupRequired(f"cannot create sandbox: {what}", why, code="runtime_unavailable", hint="cpuos doctor")


def _no_room(node: str, short: dict[str, dict[str, float]], *, action: str) -> CapacityExceeded:
    never = [name for name, row in short.items() if row["asked"] > row["total"] and row["free"] > 0]
    if never:
        limits = ", ".join(_amount(name, short[name]["free"]) for name in never)
        hint = f"ask for at most {limits} (free now; GET /v1/capacity tells what there is)"
    else:
        hint = "cpuos ls, then cpuos kill SANDBOX; or ask for at most what is free (GET /v1/capacity)"
    return CapacityExceeded(
        f"cannot {action}: node {node} has no room ({', '.join(sorted(short))})",
        describe_shortage(short),
        hint=hint,
        details={"node": node, "short": short},
    )


def _amount(name: str, value: float) -> str:
    if name in ("memory_mib", "disk_mib"):
        return f"{value:.0f} MiB {name.removesuffix('_mib')}"
    return f"{value:g} {name}"

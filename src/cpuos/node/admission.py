"""What this node may still promise. The server counts too, but with facts that may be seconds old, and the node is the
one that has to keep the promise: it refuses what it cannot hold, by name.

A sandbox that is paused holds its disk alone. Ready ones that nobody has asked for hold nothing: they go when their
place is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cpuos.errors import CapacityExceeded
from cpuos.node import host
from cpuos.node.journal import Record, Stage
from cpuos.node.runtime_table import RuntimeTable
from cpuos.node.volume import Volume
from cpuos.types.node import NodeSandboxCreate, RoomFacts
from cpuos.types.room import describe_shortage

__all__ = ["Admission", "AdmissionRules", "Held"]

# The host's own: daemons, the supervisor, whoever logs in.
_OWN_PROCESSES = 2048
# Both /workspace and the root's writable layer hold the number (docs/adr/0006).
_DISKS = 2
_UNCOUNTED = (Stage.READY, Stage.GONE)
_WITH_LAYER = (Stage.CREATING, Stage.RUNNING, Stage.SAVING, Stage.PAUSING, Stage.RESUMING)


@dataclass(frozen=True, kw_only=True)
class AdmissionRules:
    """How many times over each resource may be promised, of what is left after the host's reserve."""

    max_sandboxes: int = 64
    cpu_overcommit: float = 8.0
    memory_overcommit: float = 1.0
    memory_reserve_mib: int = 0
    disk_overcommit: float = 1.0
    disk_reserve_mib: int = 0
    processes_overcommit: float = 8.0


@dataclass(frozen=True, kw_only=True)
class Held:
    """An amount of each resource: what is promised, or what may be."""

    sandboxes: float = 0
    cpu: float = 0
    memory_mib: float = 0
    processes: float = 0
    """Of the host: a sandbox's own take several each, at most."""
    disk_mib: float = 0
    """Of the volume: a sandbox's number counts twice."""


class Admission:
    """Reads what there is at each question. It never awaits: between its word and the record nothing comes."""

    def __init__(
        self,
        records: Callable[[], Iterable[Record]],
        *,
        runtimes: RuntimeTable,
        volume: Volume,
        rules: AdmissionRules,
        proc: Path = Path("/proc"),
    ) -> None:
        self._records = records
        self._runtimes = runtimes
        self._volume = volume
        self.rules = rules
        self._proc = proc
        self._layers: dict[str, int] = {}
        """Bytes of root layers, as they were measured last."""
        self.refusing = ""
        """Why nothing new is taken for now: the host is under pressure."""

    def require(self, what: str, request: NodeSandboxCreate, *, restarts: bool = False) -> None:
        """Raise unless there is room for what is asked. `restarts`: its disk is there already."""
        self._volume.require(what)
        if self.refusing:
            raise CapacityExceeded(what, self.refusing, hint="cpuos status", details={"pressure": True})
        wanted = self._of(request, whole=True)
        held, total = self.held(without=request.id if restarts else None), self.total()
        short = {}
        for name in vars(wanted):
            asked, taken, most = (getattr(part, name) for part in (wanted, held, total))
            if taken + asked > most:
                row = {"asked": asked, "free": max(0.0, most - taken), "total": most, "promised": taken}
                short[name] = row | {"machine": getattr(self._machine(), name)}
        if short:
            raise _no_room(what, short)

    def held(self, *, without: str | None = None) -> Held:
        """What is promised to sandboxes that are here."""
        amounts = []
        for record in self._records():
            if record.stage in _UNCOUNTED or record.ended or record.id == without:
                continue
            amounts.append(self._of(record.request, whole=record.stage is not Stage.PAUSED))
        return Held(**{name: sum(getattr(one, name) for one in amounts) for name in vars(Held())})

    def total(self) -> Held:
        """What may be promised in all."""
        rules = self.rules
        disk_mib = self._volume_mib() - rules.disk_reserve_mib
        processes = host.most_processes(self._proc) - _OWN_PROCESSES
        return Held(
            sandboxes=rules.max_sandboxes,
            cpu=host.cpu_count() * rules.cpu_overcommit,
            memory_mib=max(0, host.memory_mib() - rules.memory_reserve_mib) * rules.memory_overcommit,
            processes=max(0, processes) * rules.processes_overcommit,
            disk_mib=max(0, disk_mib) * rules.disk_overcommit,
        )

    def _machine(self) -> Held:
        """What there is."""
        return Held(
            sandboxes=self.rules.max_sandboxes,
            cpu=host.cpu_count(),
            memory_mib=host.memory_mib(),
            processes=host.most_processes(self._proc),
            disk_mib=self._volume_mib(),
        )

    def facts(self) -> dict[str, RoomFacts]:
        held, total = self.held(), self.total()
        return {name: RoomFacts(total=getattr(total, name), held=getattr(held, name)) for name in vars(held)}

    def _of(self, request: NodeSandboxCreate, *, whole: bool) -> Held:
        disk_mib = request.disk_mib * _DISKS
        if not whole:
            return Held(disk_mib=disk_mib)
        runtime = self._runtimes.find(request.runtime)
        processes = runtime.host_processes(request.max_processes) if runtime is not None else request.max_processes
        return Held(sandboxes=1, cpu=request.cpu, memory_mib=request.memory_mib, processes=processes, disk_mib=disk_mib)

    @property
    def disk_mib(self) -> int:
        """The sum of sandboxes' numbers that the volume could hold if all were filled."""
        return self._volume_mib() // _DISKS

    def writing(self) -> list[str]:
        """The sandboxes whose disks may grow now. One that is paused finds out at its resume whether there is room."""
        return [one.id for one in self._records() if not (one.ended or (one.stage is Stage.PAUSED and one.parked))]

    def layers_left(self, *, without: str) -> int:
        """Bytes that root layers of running sandboxes, but for this one's, may still take of the volume. They are not
        promised several times over where the rules do not say so."""
        alive = [one for one in self._records() if one.stage in _WITH_LAYER and one.id != without]
        left = (max(0, (one.request.disk_mib << 20) - self._layers.get(one.id, 0)) for one in alive)
        return int(sum(left) / self.rules.disk_overcommit)

    def _volume_mib(self) -> int:
        """What sandboxes have of the volume, and could have."""
        facts = self._volume.facts()
        free = (facts.free_bytes + facts.ballast_bytes) >> 20
        return free + host.held_disk_mib(self._volume.folder / "disks") + (sum(self._layers.values()) >> 20)

    def measure(self) -> None:
        """Look anew what root layers have taken: files without a name, found through the processes that hold them. It
        takes some milliseconds; run it in a thread."""
        found = {}
        for record in list(self._records()):
            runtime = self._runtimes.find(record.request.runtime)
            if record.stage is Stage.RUNNING and runtime is not None:
                found[record.id] = runtime.layer_bytes(record.id)
        self._layers = found


def _no_room(what: str, short: dict[str, dict[str, float]]) -> CapacityExceeded:
    parts = [describe_shortage(short)]
    details: dict[str, object] = {"short": short}
    if "sandboxes" in short:
        most = int(short["sandboxes"]["total"])
        parts.append(f"max_sandboxes is {most}")
        details |= {"limit": "max_sandboxes", "value": most}
    if "disk_mib" in short:
        parts.append("of a disk's number the node promises twice as much")
    return CapacityExceeded(
        what,
        f"this node has no room ({', '.join(sorted(short))}): {'; '.join(parts)}",
        hint="cpuos ls, then cpuos kill SANDBOX; or ask for at most what is free",
        details=details,
    )

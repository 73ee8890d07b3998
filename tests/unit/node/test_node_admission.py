"""What a node may promise: by its own count, of what its host has."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cpuos.errors import CapacityExceeded
from cpuos.node import host
from cpuos.node.admission import Admission, AdmissionRules
from cpuos.node.journal import Record, Stage
from cpuos.node.pressure import PressureWatch
from cpuos.settings import Settings
from cpuos.testing.node import fake_node
from cpuos.types.node import NodeSandboxCreate, PressureLevel, VolumeFacts

MIB = 1 << 20
Asking = Callable[..., NodeSandboxCreate]
NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Host:
    """8 CPUs, 8 GiB of memory, 100 GiB free on the volume, 30,000 processes."""

    def __init__(self, folder: Path) -> None:
        self.records: list[Record] = []
        self.layers: dict[str, int] = {}
        self.folder = folder
        self.free_bytes = 100 << 30

    def add(self, request: NodeSandboxCreate, stage: Stage = Stage.RUNNING, **changes: Any) -> None:
        self.records.append(
            Record(request=request, stage=stage, boot_id="b", changed_at=NOW, session_key="", **changes)
        )

    def facts(self) -> VolumeFacts:
        return VolumeFacts(full=False, total_bytes=1 << 40, free_bytes=self.free_bytes, ballast_bytes=0)

    def require(self, what: str) -> None:
        """Never full."""

    def find(self, name: str) -> Any:
        return SimpleNamespace(host_processes=lambda most: 4 * most, layer_bytes=lambda one: self.layers.get(one, 0))

    def admission(self, **rules: Any) -> Admission:
        return Admission(
            lambda: self.records,
            runtimes=self,  # type: ignore[arg-type]
            volume=self,  # type: ignore[arg-type]
            rules=AdmissionRules(**rules),
        )


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(host, "cpu_count", lambda: 8)
    monkeypatch.setattr(host, "memory_mib", lambda: 8192)
    monkeypatch.setattr(host, "most_processes", lambda proc: 32048)
    return Host(tmp_path)


def short_of(admission: Admission, request: NodeSandboxCreate, **how: Any) -> dict[str, Any]:
    with pytest.raises(CapacityExceeded) as refused:
        admission.require("cannot create sandbox", request, **how)
    assert refused.value.code == "capacity_exceeded"
    for name in refused.value.details["short"]:
        assert name in refused.value.why
    return refused.value.details["short"]


@pytest.mark.parametrize(
    ("rules", "value", "resource", "most"),
    [
        ({"cpu_overcommit": 1}, {"cpu": 3}, "cpu", 2),
        ({"memory_reserve_mib": 2048}, {"memory_mib": 1024}, "memory_mib", 6),
        ({"memory_reserve_mib": 2048, "memory_overcommit": 2}, {"memory_mib": 1024}, "memory_mib", 12),
        ({"processes_overcommit": 1}, {"max_processes": 1500}, "processes", 5),
        ({"processes_overcommit": 2}, {"max_processes": 1500}, "processes", 10),
        ({"disk_reserve_mib": 20 << 10}, {"disk_mib": 8192}, "disk_mib", 5),
        ({"disk_reserve_mib": 20 << 10, "disk_overcommit": 3}, {"disk_mib": 8192}, "disk_mib", 15),
        ({"max_sandboxes": 3}, {}, "sandboxes", 3),
    ],
)
def test_each_resource_is_refused_by_its_name(
    own: Host, asking: Asking, rules: dict[str, float], value: dict[str, int], resource: str, most: int
) -> None:
    """The number of sandboxes that fit is exact, and what an overcommit multiplies."""
    admission = own.admission(**({"cpu_overcommit": 100, "max_sandboxes": 99} | rules))
    for letter in "abcdefghijklmnopqrstuvwxyz"[:most]:
        request = asking(letter, **value)
        admission.require("cannot create sandbox", request)
        own.add(request)
    assert list(short_of(admission, asking("z", **value))) == [resource]


def test_what_holds_nothing_is_not_counted(own: Host, asking: Asking) -> None:
    admission = own.admission(max_sandboxes=1)
    own.add(asking("a"), Stage.GONE)
    own.add(asking("b"), Stage.READY)
    own.add(asking("c"), Stage.PAUSED)
    own.add(asking("d"), Stage.DEAD, ended=True)
    admission.require("cannot create sandbox", asking("e"))
    own.add(asking("e"), Stage.CREATING)
    room = {"asked": 1, "free": 0, "total": 1, "promised": 1, "machine": 1}
    assert short_of(admission, asking("f")) == {"sandboxes": room}


def test_a_refusal_tells_what_is_promised_how_much_may_be_and_what_there_is(own: Host, asking: Asking) -> None:
    admission = own.admission(memory_reserve_mib=2048, memory_overcommit=2)
    own.add(asking("a", memory_mib=8192))
    with pytest.raises(CapacityExceeded) as refused:
        admission.require("cannot create sandbox", asking("b", memory_mib=8192))
    told = "memory: 8192 MiB asked, 4096 MiB free (8192 MiB promised, limit 12288 MiB, the machine has 8192 MiB)"
    assert refused.value.why == f"this node has no room (memory_mib): {told}"


def test_a_paused_one_keeps_its_disk_and_takes_the_rest_to_resume(own: Host, asking: Asking) -> None:
    admission = own.admission(disk_reserve_mib=0)
    paused = asking("a", disk_mib=40 << 10)
    own.add(paused, Stage.PAUSED)
    assert list(short_of(admission, asking("b", disk_mib=12 << 10))) == ["disk_mib"]
    admission.require("cannot resume sandbox", paused, restarts=True)
    own.add(asking("c", memory_mib=8000))
    assert list(short_of(admission, paused, restarts=True)) == ["memory_mib"]


def test_root_layers_are_part_of_what_the_volume_holds(own: Host, asking: Asking) -> None:
    """10 GiB of the volume became the layer's: the sandbox may still take the rest of what it was promised."""
    admission = own.admission()
    request = asking("a", disk_mib=50 << 10)
    own.add(request)
    before = admission.total().disk_mib
    own.layers[request.id] = 10 << 30
    own.free_bytes -= 10 << 30
    admission.measure()
    assert admission.total().disk_mib == before
    assert admission.layers_left(without="") == (50 << 30) - (10 << 30)
    assert admission.layers_left(without=request.id) == 0


def test_under_pressure_nothing_new_is_taken(own: Host, asking: Asking) -> None:
    admission = own.admission()
    admission.refusing = "the node takes nothing new for now: 10 MiB are free"
    with pytest.raises(CapacityExceeded, match="nothing new") as refused:
        admission.require("cannot create sandbox", asking("a"))
    assert refused.value.details == {"pressure": True}


class Pressed:
    """A host whose memory runs short, and a clock."""

    def __init__(self, admission: Admission) -> None:
        self.now, self.why, self.ready, self.shrunk = 0.0, "", 0, 0
        self.admission = admission
        self.watch = PressureWatch(admission, shrink=self.shrink, read=lambda: self.why, clock=lambda: self.now)

    async def shrink(self) -> int:
        gone, self.ready = self.ready, 0
        self.shrunk += gone
        return gone

    async def at(self, now: float) -> PressureLevel:
        self.now = now
        await self.watch.look()
        return self.watch.facts.level


async def test_the_steps_come_in_order_and_each_has_time_to_help(own: Host) -> None:
    pressed = Pressed(own.admission())
    pressed.ready = 3
    assert await pressed.at(0) is PressureLevel.NONE
    assert pressed.shrunk == 0
    pressed.why = "10 MiB are free"
    assert await pressed.at(1) is PressureLevel.SHRINK_POOL
    assert pressed.shrunk == 3
    assert await pressed.at(3.9) is PressureLevel.SHRINK_POOL
    assert await pressed.at(4) is PressureLevel.PAUSE_IDLE
    assert pressed.admission.refusing == ""
    assert await pressed.at(10.9) is PressureLevel.PAUSE_IDLE
    assert await pressed.at(11) is PressureLevel.REFUSE_NEW
    assert "10 MiB are free" in pressed.admission.refusing
    assert (pressed.watch.facts.times, pressed.watch.facts.why) == (3, "10 MiB are free")


async def test_it_is_over_once_it_was_calm_for_a_while(own: Host) -> None:
    pressed = Pressed(own.admission())
    pressed.why = "short"
    for now in (0, 10):
        await pressed.at(now)
    pressed.why = ""
    assert await pressed.at(11) is PressureLevel.REFUSE_NEW
    assert await pressed.at(15.9) is PressureLevel.REFUSE_NEW
    assert await pressed.at(16) is PressureLevel.NONE
    assert pressed.admission.refusing == ""
    pressed.why = "short again"
    assert await pressed.at(17) is PressureLevel.SHRINK_POOL  # from the beginning


async def test_a_moment_of_calm_does_not_end_it(own: Host) -> None:
    pressed = Pressed(own.admission())
    pressed.why = "short"
    await pressed.at(0)
    await pressed.at(4)
    pressed.why = ""
    await pressed.at(5)
    pressed.why = "short"
    assert await pressed.at(6) is PressureLevel.PAUSE_IDLE
    assert await pressed.at(9.5) is PressureLevel.PAUSE_IDLE  # its time counts anew


async def test_a_node_refuses_what_its_server_did_not_know(settings: Settings, asking: Asking) -> None:
    small = settings.model_copy(update={"memory_reserve_mib": host.memory_mib() - 512})
    async with fake_node(small) as node:
        await node.client.create(asking("a", memory_mib=300))
        with pytest.raises(CapacityExceeded) as refused:
            await node.client.create(asking("b", memory_mib=300))
        assert refused.value.details["short"]["memory_mib"]["free"] == 212
        facts = await node.client.facts()
        assert (facts.room["memory_mib"].held, facts.room["memory_mib"].total) == (300, 512)
        assert facts.pressure.level is PressureLevel.NONE
        await node.client.delete("a" * 20, generation=1)
        await node.client.create(asking("b", memory_mib=300))


def test_what_is_paused_for_good_does_not_grow(own: Host, asking: Asking) -> None:
    """Else the promises of many that are paused would keep all others from being paused."""
    admission = own.admission()
    for name, stage, parked in (
        ("a", Stage.RUNNING, False),
        ("b", Stage.PAUSED, False),
        ("c", Stage.PAUSED, True),
        ("d", Stage.READY, False),
        ("e", Stage.RESUMING, True),
    ):
        own.add(asking(name), stage, parked=parked)
    own.add(asking("f"), Stage.DEAD, ended=True)
    assert admission.writing() == [asking(name).id for name in "abde"]

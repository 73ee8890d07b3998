"""Where a sandbox goes, and what is said when it goes nowhere."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane import FakeNode
from cpuos.errors import CapacityExceeded, CpuosError
from cpuos.scheduler.base import Capacity, CapacityRules, Demand, NodeView
from cpuos.scheduler.local import LocalScheduler
from cpuos.scheduler.placement import place
from cpuos.types.node import NodeFacts, RuntimeFacts, TemplateFacts
from cpuos.types.sandbox import Isolation


def runtime(name: str, isolation: Isolation, *, available: bool = True) -> RuntimeFacts:
    return RuntimeFacts(name=name, available=available, isolation=isolation, detail="", reason="no /dev/kvm")


ALL = [
    runtime("qemu", Isolation.EMULATED),
    runtime("gvisor", Isolation.GVISOR),
    runtime("firecracker", Isolation.MICROVM, available=False),
]


def view(runtimes: list[RuntimeFacts] | None = None, reserved: Capacity | None = None, **total: Any) -> NodeView:
    facts = NodeFacts(
        node="node-1",
        version="1",
        boot_id="b",
        runtimes=ALL if runtimes is None else runtimes,
        templates=[TemplateFacts(name="python", digest="sha256:1", size_bytes=1)],
        cpu=4,
        memory_mib=8192,
        disk_mib=65536,
        max_sandboxes=8,
    )
    room = {"sandboxes": 8, "cpu": 32, "memory_mib": 8192, "disk_mib": 65536, **total}
    return NodeView(facts=facts, total=Capacity(**room), reserved=reserved or Capacity())


def demand(**changes: Any) -> Demand:
    values = {"template": "python", "runtime": "auto", "min_isolation": None, "cpu": 2, "memory_mib": 2048}
    return Demand(**{**values, "disk_mib": 8192, **changes})


def test_auto_takes_the_strongest_that_is_available() -> None:
    assert place([view()], demand()).runtime == "gvisor"
    assert place([view([*ALL[:2], runtime("firecracker", Isolation.MICROVM)])], demand()).runtime == "firecracker"


def test_a_named_runtime_is_taken() -> None:
    placement = place([view()], demand(runtime="qemu", allow_emulated=True))
    assert (placement.runtime, placement.isolation) == ("qemu", Isolation.EMULATED)


def test_emulation_is_for_those_who_ask_for_it() -> None:
    emulated = view([runtime("microvm", Isolation.EMULATED), runtime("gvisor", Isolation.GVISOR, available=False)])
    for asked in (demand(), demand(runtime="microvm"), demand(min_isolation=Isolation.EMULATED)):
        with pytest.raises(CpuosError) as caught:
            place([emulated], asked)
        assert caught.value.code == "runtime_unavailable"
        assert "only emulated" in caught.value.what
    assert place([emulated], demand(allow_emulated=True)).isolation is Isolation.EMULATED
    # To be allowed is not to be preferred.
    assert place([view()], demand(allow_emulated=True)).isolation is Isolation.GVISOR


async def test_an_instance_may_allow_it_for_all() -> None:
    facts = view([runtime("microvm", Isolation.EMULATED)]).facts
    for allowed in (False, True):
        scheduler = LocalScheduler(_Node(facts), CapacityRules(allow_emulated=allowed))  # type: ignore[arg-type]
        await scheduler.refresh()
        if allowed:
            assert scheduler.reserve("a" * 20, demand()).isolation is Isolation.EMULATED
        else:
            with pytest.raises(CpuosError, match="only emulated"):
                scheduler.reserve("a" * 20, demand())


class _Node:
    def __init__(self, facts: NodeFacts) -> None:
        self._facts = facts

    async def facts(self) -> NodeFacts:
        return self._facts


@pytest.mark.parametrize(
    ("asked", "code", "text"),
    [
        (demand(template="ruby"), "template_not_found", "installed are: python"),
        (demand(runtime="podman"), "invalid_request", "auto, firecracker, gvisor, qemu"),
        (demand(runtime="firecracker"), "runtime_unavailable", "no /dev/kvm"),
        (demand(min_isolation=Isolation.MICROVM), "runtime_unavailable", "the strongest there is 'gvisor'"),
        (
            demand(runtime="qemu", min_isolation=Isolation.GVISOR, allow_emulated=True),
            "runtime_unavailable",
            "'emulated'",
        ),
        (demand(memory_mib=9000), "capacity_exceeded", "memory: 9000 MiB asked, 8192 MiB free (0 MiB promised,"),
        (demand(disk_mib=1 << 17), "capacity_exceeded", "disk: 131072 MiB asked, 65536 MiB free"),
    ],
)
def test_what_cannot_be_placed_is_named(asked: Demand, code: str, text: str) -> None:
    with pytest.raises(CpuosError) as caught:
        place([view()], asked)
    assert caught.value.code == code
    assert text in caught.value.why
    assert caught.value.what.startswith("cannot create sandbox: ")


def test_a_full_node_names_all_that_is_short() -> None:
    full = Capacity(sandboxes=8, cpu=31, memory_mib=8000, disk_mib=0)
    with pytest.raises(CapacityExceeded) as caught:
        place([view(reserved=full)], demand())
    assert set(caught.value.details["short"]) == {"sandboxes", "cpu", "memory_mib"}
    assert caught.value.status == 429


def test_no_node() -> None:
    with pytest.raises(CpuosError) as caught:
        place([], demand())
    assert caught.value.code == "node_unavailable"


@given(
    asked=st.lists(
        st.tuples(st.integers(1, 8), st.integers(128, 4096), st.integers(64, 16384), st.booleans()), max_size=40
    )
)
async def test_promises_never_pass_the_total(asked: list[tuple[int, int, int, bool]]) -> None:
    node = FakeNode()
    node.capacity = {"cpu": 4, "memory_mib": 9216, "disk_mib": 67584, "max_sandboxes": 12}
    scheduler = LocalScheduler(node, CapacityRules(cpu_overcommit=8, memory_reserve_mib=1024, disk_reserve_mib=2048))
    await scheduler.refresh()
    held = []
    for number, (cpu, memory, disk, give_back) in enumerate(asked):
        with suppress(CapacityExceeded):
            scheduler.reserve(str(number), demand(cpu=cpu, memory_mib=memory, disk_mib=disk))
            held.append(str(number))
        if give_back and held:
            scheduler.release(held[0])
            scheduler.release(held.pop(0))
        (only,) = scheduler.nodes()
        assert only.reserved.sandboxes == len(held) <= 12
        assert only.reserved.memory_mib <= 8192
        assert only.reserved.disk_mib <= 65536
        assert only.reserved.cpu <= 32

"""Random lifecycle operations of several clients on real sandboxes while server, gateway, node and sandboxes are killed
with SIGKILL: nothing synced is lost, no state or change of state is illegal, nothing is left.

`CPUOS_CHAOS_SEED` sets the seed, `CPUOS_CHAOS_OPERATIONS` how many operations.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest

from chaos_boxes import Box
from cpuos import Client, Sandbox, Snapshot
from cpuos.errors import SandboxGone
from cpuos.services.health import ask
from cpuos.testing.instance import Instance
from cpuos.testing.waiting import wait_until
from cpuos.types.sandbox import LIVE_STATES
from lifecycle_chaos import SHAPE, Chaos
from state_history import StateHistory

pytestmark = [pytest.mark.gvisor]
IN_BETWEEN = {"creating", "pausing", "resuming", "stopping"}
SETTLES_S = 120


@pytest.fixture
def own() -> Iterator[Instance]:
    with Instance(runtime="gvisor", max_sandboxes=12) as own:
        yield own


@pytest.mark.parametrize(
    "operations",
    [
        pytest.param(150, marks=pytest.mark.timeout(900)),
        pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)]),
    ],
)
def test_random_operations(own: Instance, operations: int) -> None:
    seed = int(os.environ.get("CPUOS_CHAOS_SEED") or random.randrange(1 << 32))
    operations = int(os.environ.get("CPUOS_CHAOS_OPERATIONS") or operations)
    print(f"CPUOS_CHAOS_SEED={seed}")
    history = StateHistory(own)
    chaos = Chaos(own, seed=seed, operations=operations)
    chaos.run()
    print(dict(sorted(chaos.tally.items())))
    own.wait_ready()
    client = own.client()
    wait_until(lambda: not in_between(client), within_s=SETTLES_S)
    chaos.end_untold(client)
    assert not chaos.faults, "\n".join(chaos.faults)
    all_known_are_whole(chaos, client)
    all_end(own, client)
    assert not chaos.faults, "\n".join(chaos.faults)
    assert history.illegal() == []
    lost = [move for move in history.moves() if move[2] == "lost"]
    assert all(reason and was != "paused" for _, was, _, reason in lost), lost
    nothing_is_left(own, client, history)


def in_between(client: Client) -> list[str]:
    boxes = [f"{box.id} {box.state.value}" for box in Sandbox.list(client=client) if box.state.value in IN_BETWEEN]
    snaps = [
        f"{snap.id} {snap.state}" for snap in Snapshot.list(client=client) if snap.state in ("creating", "deleting")
    ]
    return boxes + snaps


def all_known_are_whole(chaos: Chaos, client: Client) -> None:
    infos = {info.id: info for info in Sandbox.list(state="all", client=client)}
    for box in chaos.boxes.values():
        info = infos[box.id]
        if info.state.value in ("paused", "running"):
            try:
                chaos.look(box, client)
            except SandboxGone:
                assert box.shot, f"{box.id} is gone and nobody killed it"
        else:
            assert info.state.value == "lost", f"{box.id}: {info}"
    unknown = [info.id for info in infos.values() if info.state in LIVE_STATES and info.id not in chaos.boxes]
    assert unknown == [], "made or not ended by calls that said otherwise"
    for box in [box for box in (chaos.gone | chaos.boxes).values() if infos[box.id].state.value == "lost"]:
        assert box.shot, f"{box.id}: {infos[box.id]}"
        kept = wait_until(lambda box=box: kept_of(box, client), within_s=SETTLES_S)
        with Sandbox.create(snapshot=kept, client=client) as sandbox:
            copy = Box(id=sandbox.id, acknowledged=box.acknowledged, tried=box.tried)
            chaos.look(copy, client, root=False)
    for snap in chaos.snaps.values():
        with Sandbox.create(snapshot=snap.id, client=client) as sandbox:
            chaos.look(snap.born(sandbox.id), client)


def kept_of(box: Box, client: Client) -> str | None:
    """The snapshot of what was left of a lost one."""
    snaps = Snapshot.list(sandbox=box.id, client=client)
    return next((snap.id for snap in snaps if snap.created_by == "system"), None)


def all_end(own: Instance, client: Client) -> None:
    for info in Sandbox.list(client=client):
        Sandbox.connect(info.id, client=client).kill()
    for snap in Snapshot.list(client=client):
        Snapshot.get(snap.id, client=client).delete()
    assert Sandbox.list(client=client) == []
    with Sandbox.create(client=client, **SHAPE) as sandbox:
        assert sandbox.exec("echo works").stdout == "works\n"


def nothing_is_left(own: Instance, client: Client, history: StateHistory) -> None:
    def left() -> list[str]:
        _, body = ask(own.settings.node_socket, "/v1/sandboxes", timeout_s=30)
        store = os.listdir(own.settings.node_state_dir / "snapshots")
        found = [f"on the node: {facts}" for facts in body["sandboxes"] if facts["alive"]]
        found += [f"image {name}" for name in store]
        found += [f"open intent: {number}" for number in range(history.open_intents())]
        capacity = client.get_json("/v1/capacity")
        found += [f"{name} reserved: {told}" for name, told in capacity.items() if told["reserved"]]
        return found + own.leftovers()

    deadline = time.monotonic() + SETTLES_S
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert found == []

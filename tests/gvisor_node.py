"""A node daemon with real disks, slots and gVisor, in a folder of its own: started again after each kill."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from cpuos.errors import CpuosError
from cpuos.node.client import LocalNodeClient
from cpuos.runtimes.limits import ControlGroups
from cpuos.settings import Settings, load_settings
from cpuos.testing.daemons import DaemonForker, NodeDaemon
from cpuos.testing.leftovers import find_traces, remove_groups, remove_mounts
from cpuos.types.network import EffectivePolicy, NetworkMode, NetworkPolicy, PolicyLayer
from cpuos.types.node import NodeSandboxCreate
from small_volume import copies_bytes

A = "a" * 20
S = "s" * 20
FREEZE = "0123456789abcdef" * 2


class Node:
    """One instance's daemon, started again after each kill."""

    def __init__(self, settings: Settings, forker: DaemonForker) -> None:
        self.settings = settings
        self._forker = forker
        self.process: NodeDaemon | None = None
        self._generation = int(time.time())

    async def ready(self, client: LocalNodeClient) -> None:
        if self.process is None or self.process.poll() is not None:
            self.settings.node_socket.unlink(missing_ok=True)
            self.process = self._forker.start(self.settings)
        deadline = time.monotonic() + 30
        while True:
            try:
                await client.facts()
                return
            except CpuosError:
                assert self.process.poll() is None, self.process.log()
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)

    def next(self, letter: str = "a", **changes: object) -> NodeSandboxCreate:
        self._generation += 1
        values = {
            "id": letter * 20,
            "generation": self._generation,
            "template": "base",
            "runtime": self.settings.runtime,
            "hostname": "box",
            "cpu": 1,
            "memory_mib": 256,
            "disk_mib": 64,
            "max_processes": 64,
        }
        return NodeSandboxCreate(**(values | changes))

    def router_rules(self, sandbox_id: str = A) -> str:
        """What holds in the router of a sandbox."""
        router = self.settings.run_dir / "netns" / f"{sandbox_id}.slot" / "router"
        into = ["nsenter", f"--mount=/proc/{self.process.pid}/ns/mnt", "nsenter", f"--net={router}"]
        shown = subprocess.run([*into, "nft", "list", "ruleset"], capture_output=True, text=True, check=True)
        return shown.stdout

    def traces(self) -> list[str]:
        assert self.process is not None
        return find_traces(self.settings, node_pid=self.process.pid)


@contextmanager
def gvisor_node(
    *,
    volume_mib: int | None = None,
    pool_mib: int = 0,
    pool_keep: Sequence[str] = (),
    runtime: str = "gvisor",
    max_sandboxes: int = 64,
) -> Iterator[Node]:
    """`volume_mib`: its data lies on a volume of this size. `pool_keep`: what is kept ready, in so much memory."""
    # Not pytest's own folder: the network workers' user must be able to pass it.
    folder = Path(tempfile.mkdtemp(prefix="cpuos-test-"))
    folder.chmod(0o755)
    folders = {"state_dir": folder / "state", "run_dir": folder / "run"}
    # What a test needs does not hang on what else lies on the machine's disk, but where the volume is its own.
    disk = {"disk_overcommit": 1, "disk_reserve_mib": 0} if volume_mib else {"disk_overcommit": 16}
    pool = {"pool_memory_mib": pool_mib, "pool_keep": list(pool_keep)}
    settings = load_settings(**folders, **disk, **pool, runtime=runtime, max_sandboxes=max_sandboxes)
    with _volume(folder, volume_mib), DaemonForker() as forker:
        node = Node(settings, forker)
        try:
            yield node
        finally:
            if node.process is not None:
                node.process.terminate()
                node.process.wait()
            groups = ControlGroups(settings.instance_id)
            for sandbox_id in groups.list():  # a test failed
                groups.kill(sandbox_id)
            remove_mounts(settings)
            remove_groups(settings)
    shutil.rmtree(folder)


def closed_network(version: int = 1) -> EffectivePolicy:
    """Nothing may be reached."""
    off = PolicyLayer(origin="sandbox", policy=NetworkPolicy(mode=NetworkMode.OFF))
    return EffectivePolicy(version=version, layers=[off])


@asynccontextmanager
async def emptied_client(node: Node) -> AsyncIterator[LocalNodeClient]:
    """To a node that is ready; at the end all sandboxes and snapshots go, and nothing is left of them."""
    async with LocalNodeClient(node.settings.node_socket) as client:
        await node.ready(client)
        yield client
        await node.ready(client)
        for facts in await client.list():
            await client.delete(facts.id, generation=facts.generation)
        for snapshot in await client.snapshots():
            await client.delete_snapshot(snapshot.id)
        assert node.traces() == []
        assert os.listdir(node.settings.node_state_dir / "snapshots") == []


@contextmanager
def _volume(folder: Path, size_mib: int | None) -> Iterator[None]:
    if size_mib is None:
        yield
        return
    image, mounted = folder / "volume.img", folder / "state"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate((size_mib << 20) + copies_bytes(["base"]))
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mounted)], check=True)
    try:
        yield
    finally:
        deadline = time.monotonic() + 60
        while subprocess.run(["umount", str(mounted)]).returncode != 0:
            assert time.monotonic() < deadline
            time.sleep(0.1)

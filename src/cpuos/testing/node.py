"""A node with the fake runtime: in this process, or as a daemon (`python -m cpuos.testing.node`)."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cpuos.node.client import DialClient, LocalNodeClient
from cpuos.node.daemon import NodeParts, held_state, host_parts, running_node, serve
from cpuos.node.logs import configure_logs
from cpuos.node.service import NodeService
from cpuos.node.steps import Checkpoint
from cpuos.node.storage import enter_mount_namespace
from cpuos.plugins import RuntimeHost
from cpuos.settings import Settings, load_settings
from cpuos.testing.fake_resources import FakeDisks, FakeSlots
from cpuos.testing.fake_runtime import FakeRuntime

__all__ = [
    "FakeNode",
    "InjectedFault",
    "fake_node",
    "fake_parts",
    "fake_settings",
    "fault_is_pending",
    "main",
    "plan_fault",
    "write_fake_template",
]


@dataclass(frozen=True, kw_only=True)
class FakeNode:
    settings: Settings
    parts: NodeParts
    service: NodeService
    client: LocalNodeClient
    dial: DialClient


@asynccontextmanager
async def fake_node(settings: Settings, *, checkpoint: Checkpoint = lambda point: None) -> AsyncIterator[FakeNode]:
    """A node of this process with its two sockets. Its sandboxes live on when it ends, as a real node's do."""
    parts = fake_parts(settings, checkpoint=checkpoint)
    async with running_node(settings, parts=parts) as service, LocalNodeClient(settings.node_socket) as client:
        dial = DialClient(settings.dial_socket)
        yield FakeNode(settings=settings, parts=parts, service=service, client=client, dial=dial)


@asynccontextmanager
async def fake_settings(**values: object) -> AsyncIterator[Settings]:
    """Settings of a private instance in a short temporary path; what is left of its sandboxes is ended with it."""
    folder = Path(tempfile.mkdtemp(prefix="cpuos-"))
    folders = {"data_dir": folder / "data", "state_dir": folder / "state", "run_dir": folder / "run"}
    settings = load_settings(**{**folders, "runtime": "fake", "pool_memory_mib": 0, **values})
    write_fake_template(settings)
    try:
        yield settings
    finally:
        shutil.rmtree(settings.node_state_dir / "snapshots", ignore_errors=True)
        parts = fake_parts(settings)
        for sandbox_id in await parts.runtimes["fake"].leftovers():
            await parts.runtimes["fake"].destroy(sandbox_id)
        shutil.rmtree(folder)


def fake_parts(settings: Settings, *, checkpoint: Checkpoint = lambda point: None) -> NodeParts:
    """Parts that need no rights on the host."""
    folders = {name: settings.run_dir / "fake" / name for name in ("runtime", "disks", "slots")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    host = RuntimeHost(
        instance_id=settings.instance_id,
        data_dir=settings.data_dir,
        state_dir=folders["runtime"],
        run_dir=folders["runtime"],
    )
    return NodeParts(
        runtimes={"fake": FakeRuntime(host)},
        disks=FakeDisks(folders["disks"]),
        slots=FakeSlots(folders["slots"]),
        checkpoint=checkpoint,
    )


def write_fake_template(settings: Settings, name: str = "python") -> None:
    """An empty image with a right manifest: all that the fake runtime needs."""
    folder: Path = settings.template_dir / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "root.erofs").write_bytes(b"")
    (folder / "manifest.json").write_text(json.dumps({"name": name, "digest": "sha256:fake", "size": 0}))


def plan_fault(settings: Settings, point: str, *, kill: bool = False) -> None:
    """Make the daemon of this instance raise, or die by SIGKILL, when it next passes this checkpoint."""
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    _fault_file(settings).write_text(f"{'kill' if kill else 'raise'} {point}")


def fault_is_pending(settings: Settings) -> bool:
    return _fault_file(settings).exists()


def main() -> None:
    """`python -m cpuos.testing.node`: a daemon that takes planned faults, with the runtime that its settings name."""
    settings = load_settings()
    configure_logs(settings.log_level)
    os.umask(0o077)
    if settings.runtime == "fake":
        make_parts = functools.partial(fake_parts, settings, checkpoint=_checkpoint(settings))
    else:
        enter_mount_namespace(settings.run_dir / "ns" / "mnt")
        make_parts = lambda: replace(host_parts(settings), checkpoint=_checkpoint(settings))  # noqa: E731
    with held_state(settings):
        asyncio.run(serve(settings, parts=make_parts))


def _checkpoint(settings: Settings) -> Checkpoint:
    path = _fault_file(settings)

    def check(point: str) -> None:
        try:
            action, planned = path.read_text().split()
        except (FileNotFoundError, ValueError):
            return
        if planned == point:
            path.unlink()
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise InjectedFault(point)

    return check


def _fault_file(settings: Settings) -> Path:
    return settings.run_dir / "fault"


class InjectedFault(Exception):
    """Not an error of the table: verbs must cope with what nobody foresaw."""


if __name__ == "__main__":
    main()

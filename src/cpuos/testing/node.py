"""A node with the fake runtime: in this process, or as a daemon (`python -m cpuos.testing.node`)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cpuos.node.client import DialClient, LocalNodeClient
from cpuos.node.daemon import NodeParts, held_state, running_node, serve
from cpuos.node.logs import configure_logs
from cpuos.node.service import NodeService
from cpuos.node.steps import Checkpoint
from cpuos.plugins import RuntimeHost
from cpuos.settings import Settings, load_settings
from cpuos.testing.fake_resources import FakeDisks, FakeSlots
from cpuos.testing.fake_runtime import FakeRuntime

__all__ = ["KILL_AT", "FakeNode", "fake_node", "fake_parts", "fake_settings", "main", "write_fake_template"]


KILL_AT = "CPUOS_TESTING_KILL_AT"
"""Environment variable: the daemon kills itself with SIGKILL at this checkpoint."""


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
    settings = load_settings(
        data_dir=folder / "data", state_dir=folder / "state", run_dir=folder / "run", runtime="fake", **values
    )
    write_fake_template(settings)
    try:
        yield settings
    finally:
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


def main() -> None:
    settings = load_settings()
    configure_logs(settings.log_level)
    os.umask(0o077)
    with held_state(settings):
        asyncio.run(serve(settings, parts=lambda: fake_parts(settings, checkpoint=_kill_at)))


def _kill_at(point: str) -> None:
    if os.environ.get(KILL_AT) == point:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()

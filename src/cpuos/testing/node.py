"""A node with the fake runtime: in this process, or as a daemon (`python -m cpuos.testing.node`)."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from cpuos.node.daemon import NodeParts, held_state, serve
from cpuos.node.logs import configure_logs
from cpuos.node.steps import Checkpoint
from cpuos.plugins import RuntimeHost
from cpuos.settings import Settings, load_settings
from cpuos.testing.fake_resources import FakeDisks, FakeSlots
from cpuos.testing.fake_runtime import FakeRuntime

__all__ = ["fake_parts", "main", "write_fake_template"]


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
        asyncio.run(serve(settings, parts=lambda: fake_parts(settings)))


if __name__ == "__main__":
    main()

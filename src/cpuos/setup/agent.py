"""The guest agent: one static Go binary from `guest/`."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

from cpuos.errors import SetupRequired
from cpuos.setup.golang import find_go, go_environment
from cpuos.setup.host import Host
from cpuos.setup.source import source_tree

__all__ = ["agent_is_current", "build_agent"]


def agent_is_current(host: Host) -> bool:
    """Whether the agent is there and was built from the sources of this clone."""
    if not host.settings.agent_path.is_file():
        return False
    tree = source_tree()
    if tree is None:
        return True
    try:
        return _record(host).read_text() == _sources_hash(tree / "guest")
    except OSError:
        return False


def build_agent(host: Host) -> None:
    """Build the agent and move it into place; sandboxes that run keep the one they started with."""
    tree, go = source_tree(), find_go(host)
    if tree is None or go is None:
        raise SetupRequired(
            "cannot build the guest agent", "it needs a clone with guest/ and Go 1.26.3 or newer", hint="make setup"
        )
    out = host.settings.cache_dir / "cpuos-agent"
    out.parent.mkdir(parents=True, exist_ok=True)
    flags = ["-trimpath", "-ldflags", "-s -w"]
    host.run([go, "mod", "download"], cwd=tree / "guest", env=go_environment(host), network=True)
    host.run([go, "build", *flags, "-o", out, "."], cwd=tree / "guest", env=go_environment(host))
    host.settings.agent_dir.mkdir(parents=True, exist_ok=True)
    out.chmod(0o755)
    out.replace(host.settings.agent_path)
    _record(host).write_text(_sources_hash(tree / "guest"))


def _record(host: Host) -> Path:
    # Beside the folder, not in it: the folder is mounted in every sandbox.
    return host.settings.agent_dir.with_name("agent.sources")


def _sources_hash(folder: Path) -> str:
    digest = hashlib.sha256(platform.machine().encode())
    for path in sorted(folder.rglob("*")):
        if path.suffix in {".go", ".mod", ".sum"} and not path.name.endswith("_test.go"):
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()

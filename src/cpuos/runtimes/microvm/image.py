"""What microVMs of this node start from, as `cpuos setup microvm` made it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from cpuos.errors import SetupRequired

__all__ = ["GuestImage", "find_image"]

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class GuestImage:
    kernel: Path
    initrd: Path
    kernel_name: str
    identity: str
    """Digests of both: another one boots otherwise."""


def find_image(folder: Path) -> GuestImage:
    """The image that the manifest tells of; the manifest is written last, so the rest is whole."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["format"] != _FORMAT:
            raise KeyError("format")
        return GuestImage(
            kernel=folder / "vmlinux",
            initrd=folder / "initrd",
            kernel_name=str(manifest["kernel"]),
            identity=f"{manifest['vmlinux']} {manifest['initrd']}",
        )
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise SetupRequired(
            "cannot start a microVM: its kernel is not prepared",
            f"no manifest of this version in {folder}",
            hint="sudo cpuos setup microvm",
        ) from problem

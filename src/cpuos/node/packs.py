"""The data packs of this node: images that guests made and that only guests' kernels read. To the host they are bytes.

packs/<image>/root.erofs        shared by all sandboxes that have it
packs/<image>/manifest.json     its size and digest
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from cpuos.errors import Conflict, NotFound
from cpuos.node.template_store import TemplateStore
from cpuos.types.pack import PACK_IMAGE_PATTERN, PackFacts

__all__ = ["PackStore"]


class PackStore:
    """Each appears whole or not at all, is never changed, and goes when nothing has it any more."""

    def __init__(self, folder: Path, *, max_bytes: int, reserve_bytes: int) -> None:
        self._folder = folder
        self.store = TemplateStore(
            folder, max_bytes=max_bytes, reserve_bytes=reserve_bytes, pattern=PACK_IMAGE_PATTERN, noun="pack"
        )

    def mounts(self, packs: Mapping[str, str]) -> tuple[tuple[str, Path], ...]:
        """Where in a sandbox, and the image, in the order of paths."""
        return tuple((path, self._image(packs[path])) for path in sorted(packs))

    def require(self, images: Collection[str]) -> None:
        """Raise unless all are here."""
        for image in images:
            if not self._image(image).exists():
                raise NotFound(f"cannot find pack {image}", "this node has no such one", code="pack_not_found")

    async def delete(self, image: str, *, used: Collection[str]) -> None:
        """Nothing there is fine. Returns to the loop only after it is out of its place."""
        if image in used:
            raise Conflict(
                f"cannot delete pack {image}", "sandboxes or snapshots have it", code="pack_in_use", hint="cpuos ls"
            )
        await self.store.delete(image)

    def facts(self) -> list[PackFacts]:
        found = []
        for folder in sorted(self._folder.iterdir()) if self._folder.is_dir() else []:
            try:
                told = json.loads((folder / "manifest.json").read_bytes())
                found.append(PackFacts(image=folder.name, digest=told["digest"], size_bytes=told["size"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # it is being made, or goes
        return found

    def _image(self, image: str) -> Path:
        return self._folder / image / "root.erofs"

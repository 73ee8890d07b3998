"""Images of templates by their digest, for as long as anything on this node was begun with them: a template that is
built anew or removed changes nothing for sandboxes that are paused, and for snapshots.

    template-images/<digest>.erofs    a second name of the template's image
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import structlog

from cpuos.errors import CpuosError
from cpuos.node.templates import Template, Templates

__all__ = ["KeptTemplates"]

log = structlog.get_logger("cpuos.node")


class KeptTemplates:
    """A folder on the volume of the templates; where it is on another they are copied, each before it is first used."""

    def __init__(self, folder: Path, *, templates: Templates) -> None:
        self._folder = folder
        self._templates = templates
        self._stays: set[str] = set()
        """Digests of images on another volume that are not copied."""
        self._fetching = asyncio.Lock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def keep(self, name: str) -> Template:
        """The template as it is installed now, with an image that stays; errors as of `Templates.get`."""
        while True:
            template = self._templates.get(name)
            kept = self._path(template.digest)
            if kept.exists():
                return template
            draft = self._folder / f".{secrets.token_hex(8)}"
            try:
                os.link(template.image, draft)
            except OSError as problem:
                log.warning("template not kept", template=name, why=str(problem))
                return template
            # It may have been replaced between the look at its manifest and the link.
            if self._templates.get(name).digest == template.digest:
                draft.rename(kept)
                return template
            draft.unlink()

    def begin(self, used: Collection[str]) -> None:
        """Before anything is begun: what has one of the digests in `used` has it where it is now, and goes on there."""
        for path in self._folder.glob(".*"):
            path.unlink(missing_ok=True)
        self._stays |= {digest for digest in used if not self._path(digest).exists()}

    async def fetch(self, name: str, *, used: Callable[[], Collection[str]]) -> None:
        """Copy the template here, where it lies on another volume and nothing was begun with it yet. Without room it is
        used where it is, as long as this daemon runs."""
        if not self._lies_elsewhere(name):
            return
        async with self._fetching:
            template = self._templates.get(name)
            if template.digest in self._stays or self._path(template.digest).exists():
                return
            if template.digest in used() or not await asyncio.to_thread(self._fetch, template):
                self._stays.add(template.digest)

    def _fetch(self, template: Template) -> bool:
        draft = self._folder / f".{secrets.token_hex(8)}"
        try:
            _copy(template.image, draft)
            if self._templates.get(template.name).digest != template.digest:
                return False  # it was replaced meanwhile
            draft.chmod(0o644)
            draft.rename(self._path(template.digest))
            return True
        except (OSError, CpuosError) as problem:
            log.warning("template not copied", template=template.name, why=str(problem))
            return False
        finally:
            draft.unlink(missing_ok=True)

    def _lies_elsewhere(self, name: str) -> bool:
        try:
            return self._templates.image_path(name).stat().st_dev != self._folder.stat().st_dev
        except FileNotFoundError:
            return False

    def installed(self) -> list[Template]:
        """As they are now."""
        return self._templates.list()

    def image(self, name: str, *, digest: str) -> Path:
        """Where the image of this digest lies: the same path for all that begin with it."""
        kept = self._path(digest)
        return kept if kept.exists() else self._templates.image_path(name)

    def has(self, name: str, *, digest: str) -> bool:
        """Whether `image` gives one of this digest."""
        if self._path(digest).exists():
            return True
        return any(template.name == name and template.digest == digest for template in self._templates.list())

    def unneeded(self, digests: Collection[str]) -> list[Path]:
        """All but those of these digests."""
        needed = {self._path(digest).name for digest in digests}
        return [path for path in self._folder.iterdir() if path.name not in needed]

    def _path(self, digest: str) -> Path:
        return self._folder / f"{re.sub('[^A-Za-z0-9]', '-', digest)}.erofs"


def _copy(source: Path, target: Path) -> None:
    """Between volumes: nothing of it can be shared."""
    with source.open("rb") as read, target.open("xb") as write:
        shutil.copyfileobj(read, write, 1 << 20)
        write.flush()
        os.fsync(write.fileno())

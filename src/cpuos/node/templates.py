"""The templates of this node, read from their manifests: installed ones, and the images of builds."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import structlog

from cpuos.errors import NotFound
from cpuos.types.node import TemplateFacts
from cpuos.types.template import BUILT_IMAGE_PATTERN

__all__ = ["Template", "Templates"]

log = structlog.get_logger("cpuos.node")
_Signs = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Template:
    name: str
    digest: str
    size_bytes: int
    image: Path


class Templates:
    """Folders with one folder a template: `root.erofs` and `manifest.json`. Looked at anew at each call, and read where
    one of the two is another file than before."""

    def __init__(self, folder: Path, *, built: Path | None = None) -> None:
        """`built` holds the images of builds, apart from what set-up made."""
        self._folder = folder
        self._built = built
        self._read_before: dict[Path, tuple[_Signs, Template]] = {}

    def get(self, name: str) -> Template:
        template = self._read(self._home(name) / name)
        if template is None:
            names = ", ".join(template.name for template in self._list(self._folder))
            raise NotFound(
                f"cannot find template: {name!r}",
                f"installed are: {names or 'none'}",
                code="template_not_found",
                hint="cpuos doctor",
            )
        return template

    def image_path(self, name: str) -> Path:
        """Where the template's image lies, also when it is not installed any more."""
        return self._home(name) / name / "root.erofs"

    def list(self) -> list[Template]:
        built = [] if self._built is None else self._list(self._built)
        return self._list(self._folder) + [template for template in built if _is_built(template.name)]

    def facts(self) -> list[TemplateFacts]:
        return [
            TemplateFacts(name=t.name, digest=t.digest, size_bytes=t.size_bytes, built=_is_built(t.name))
            for t in self.list()
        ]

    def _home(self, name: str) -> Path:
        return self._built if self._built is not None and _is_built(name) else self._folder

    def _list(self, home: Path) -> list[Template]:
        if not home.is_dir():
            return []
        found = (self._read(folder) for folder in sorted(home.iterdir()) if not folder.name.startswith("."))
        return [template for template in found if template is not None]

    def _read(self, folder: Path) -> Template | None:
        try:
            signs = _signs_of(folder)
            known = self._read_before.get(folder)
            if known is not None and known[0] == signs:
                return known[1]
            manifest = json.loads((folder / "manifest.json").read_bytes())
            image = folder / "root.erofs"
            size_bytes = image.stat().st_size
            if manifest["name"] != folder.name or size_bytes != manifest["size"]:
                raise ValueError("the manifest is of another template or image")
            template = Template(name=folder.name, digest=str(manifest["digest"]), size_bytes=size_bytes, image=image)
            self._read_before[folder] = (signs, template)
            return template
        except FileNotFoundError:
            self._read_before.pop(folder, None)
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("template unreadable", template=folder.name, error=str(error))
            return None


def _signs_of(folder: Path) -> _Signs:
    """Others once either file was written or replaced."""
    facts = [os.stat(folder / name) for name in ("manifest.json", "root.erofs")]
    return tuple((one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in facts)


def _is_built(name: str) -> bool:
    return re.match(BUILT_IMAGE_PATTERN, name) is not None

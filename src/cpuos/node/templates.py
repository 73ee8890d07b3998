"""The templates installed on this node, read from their manifests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import structlog

from cpuos.errors import NotFound
from cpuos.types.node import TemplateFacts

__all__ = ["Template", "Templates"]

log = structlog.get_logger("cpuos.node")


@dataclass(frozen=True, kw_only=True)
class Template:
    name: str
    digest: str
    size_bytes: int
    image: Path


class Templates:
    """A folder with one folder a template: `root.erofs` and `manifest.json`. Read anew at each call: they are few."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, name: str) -> Template:
        template = self._read(self._folder / name)
        if template is None:
            names = ", ".join(template.name for template in self.list())
            raise NotFound(
                f"cannot find template: {name!r}",
                f"installed are: {names or 'none'}",
                code="template_not_found",
                hint="cpuos doctor",
            )
        return template

    def image_path(self, name: str) -> Path:
        """Where the template's image lies, also when it is not installed any more."""
        return self._folder / name / "root.erofs"

    def list(self) -> list[Template]:
        if not self._folder.is_dir():
            return []
        found = (self._read(folder) for folder in sorted(self._folder.iterdir()) if not folder.name.startswith("."))
        return [template for template in found if template is not None]

    def facts(self) -> list[TemplateFacts]:
        return [TemplateFacts(name=t.name, digest=t.digest, size_bytes=t.size_bytes) for t in self.list()]

    def _read(self, folder: Path) -> Template | None:
        try:
            manifest = json.loads((folder / "manifest.json").read_bytes())
            image = self.image_path(folder.name)
            size_bytes = image.stat().st_size
            if manifest["name"] != folder.name or size_bytes != manifest["size"]:
                raise ValueError("the manifest is of another template or image")
            return Template(name=folder.name, digest=str(manifest["digest"]), size_bytes=size_bytes, image=image)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("template unreadable", template=folder.name, error=str(error))
            return None

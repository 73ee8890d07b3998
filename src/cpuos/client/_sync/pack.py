# Generated from src/cpuos/client/_async/pack.py by scripts/gen_sync.py; edit that.
"""DataPack: a folder as a read-only image, for any number of sandboxes."""

from __future__ import annotations

import builtins
import os
from pathlib import Path
from urllib.parse import quote

from cpuos.client._backend_sync import shielded
from cpuos.client._pack_size import disk_for, place_for
from cpuos.client._parse import make_request, parse_answer
from cpuos.client._sync.client import Client
from cpuos.client._sync.sandbox import Sandbox
from cpuos.types.pack import Pack, PackCreate, PackList

__all__ = ["DataPack"]

_FOLDER = "/workspace/pack"
_PACK_S = 3600.0


class DataPack:
    """Made once of a folder, and given to sandboxes: `Sandbox.create(packs={"/data/weather": "weather"})`."""

    @classmethod
    def build(
        cls,
        name: str,
        path: str | os.PathLike[str],
        *,
        disk: str | int | None = None,
        timeout: str | float = "1h",
        client: Client | None = None,
    ) -> Pack:
        """Make it of a local folder or file, which a sandbox of its own gets and packs.

        A name that is there means the new one from now on; sandboxes that have the old one keep it.
        """
        local = Path(path)
        shape = {"template": "base", "memory": "512MiB", "disk": disk or disk_for(local), "network": "off"}
        with Sandbox.create(**shape, timeout=timeout, client=client) as sandbox:
            sandbox.files.upload(local, place_for(local, below=_FOLDER))
            return cls.of(sandbox, name, _FOLDER)

    @classmethod
    def of(cls, sandbox: Sandbox, name: str, path: str = "/workspace") -> Pack:
        """Make it of a folder of a running sandbox."""
        body = make_request(PackCreate, {"name": name, "path": path}, doing="make data pack")
        where = f"/v1/sandboxes/{sandbox.id}/packs"
        call = sandbox._client.server.call
        answer = call("POST", where, content=body, repeatable=False, read_timeout_s=_PACK_S)
        return parse_answer(Pack, answer.body)

    @classmethod
    def list(cls, *, client: Client | None = None) -> builtins.list[Pack]:
        """Those of the workspace, by name."""
        return parse_answer(PackList, _call("GET", "/v1/packs", client)).packs

    @classmethod
    def get(cls, name: str, *, client: Client | None = None) -> Pack:
        """Its digest, size and number of files."""
        return parse_answer(Pack, _call("GET", _path(name), client))

    @classmethod
    def delete(cls, name: str, *, client: Client | None = None) -> None:
        """Remove it; refused (`pack_in_use`) while a sandbox or a snapshot has it."""
        _call("DELETE", _path(name), client)


def _call(method: str, path: str, client: Client | None) -> bytes:
    used = client or Client()
    try:
        return (used.server.call(method, path)).body
    finally:
        if client is None:
            shielded(used.close, timeout_s=1.0)


def _path(name: str) -> str:
    return f"/v1/packs/{quote(name, safe='')}"

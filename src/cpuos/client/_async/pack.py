"""AsyncDataPack: a folder as a read-only image, for any number of sandboxes."""

from __future__ import annotations

import builtins
import os
from pathlib import Path
from urllib.parse import quote

from cpuos.client._async.client import AsyncClient
from cpuos.client._async.sandbox import AsyncSandbox
from cpuos.client._backend_async import shielded
from cpuos.client._pack_size import disk_for, place_for
from cpuos.client._parse import make_request, parse_answer
from cpuos.types.pack import Pack, PackCreate, PackList

__all__ = ["AsyncDataPack"]

_FOLDER = "/workspace/pack"
_PACK_S = 3600.0


class AsyncDataPack:
    """Made once of a folder, and given to sandboxes: `AsyncSandbox.create(packs={"/data/weather": "weather"})`."""

    @classmethod
    async def build(
        cls,
        name: str,
        path: str | os.PathLike[str],
        *,
        disk: str | int | None = None,
        timeout: str | float = "1h",
        client: AsyncClient | None = None,
    ) -> Pack:
        """Make it of a local folder or file, which a sandbox of its own gets and packs.

        A name that is there means the new one from now on; sandboxes that have the old one keep it.
        """
        local = Path(path)
        shape = {"template": "base", "memory": "512MiB", "disk": disk or disk_for(local), "network": "off"}
        async with await AsyncSandbox.create(**shape, timeout=timeout, client=client) as sandbox:
            await sandbox.files.upload(local, place_for(local, below=_FOLDER))
            return await cls.of(sandbox, name, _FOLDER)

    @classmethod
    async def of(cls, sandbox: AsyncSandbox, name: str, path: str = "/workspace") -> Pack:
        """Make it of a folder of a running sandbox."""
        body = make_request(PackCreate, {"name": name, "path": path}, doing="make data pack")
        where = f"/v1/sandboxes/{sandbox.id}/packs"
        call = sandbox._client.server.call
        answer = await call("POST", where, content=body, repeatable=False, read_timeout_s=_PACK_S)
        return parse_answer(Pack, answer.body)

    @classmethod
    async def list(cls, *, client: AsyncClient | None = None) -> builtins.list[Pack]:
        """Those of the workspace, by name."""
        return parse_answer(PackList, await _call("GET", "/v1/packs", client)).packs

    @classmethod
    async def get(cls, name: str, *, client: AsyncClient | None = None) -> Pack:
        """Its digest, size and number of files."""
        return parse_answer(Pack, await _call("GET", _path(name), client))

    @classmethod
    async def delete(cls, name: str, *, client: AsyncClient | None = None) -> None:
        """Remove it; refused (`pack_in_use`) while a sandbox or a snapshot has it."""
        await _call("DELETE", _path(name), client)


async def _call(method: str, path: str, client: AsyncClient | None) -> bytes:
    used = client or AsyncClient()
    try:
        return (await used.server.call(method, path)).body
    finally:
        if client is None:
            await shielded(used.close, timeout_s=1.0)


def _path(name: str) -> str:
    return f"/v1/packs/{quote(name, safe='')}"

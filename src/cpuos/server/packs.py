"""Data packs: made of a folder by the sandbox that has it, kept by its node as bytes, read by the kernels of others."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog
from sqlalchemy import Row

from cpuos.errors import Conflict, CpuosError, InvalidRequest, LimitReached, NotFound
from cpuos.scheduler.base import Scheduler
from cpuos.server.asks import new_id
from cpuos.server.clock import Clock
from cpuos.server.db import packs as records
from cpuos.server.db.database import Database
from cpuos.server.templates.guest import Gate, Guest
from cpuos.server.templates.packer import Packer, read_packer
from cpuos.types.command import Command
from cpuos.types.pack import AttachedPack, Pack, PackCreate
from cpuos.types.sandbox import SandboxState

__all__ = ["PackRules", "Packs"]

_log = structlog.get_logger("cpuos.server")

MAX_PACKS = 1000
_OUTPUT = 4096
_TOO_LARGE_EXIT = 87


@dataclass(frozen=True, kw_only=True)
class PackRules:
    """What a workspace may have of them."""

    max_mib: int = 65536
    workspace_mib: int = 262144


@dataclass(frozen=True, kw_only=True)
class _Made:
    size: int
    sha256: str
    files: int


class Packs:
    def __init__(
        self,
        *,
        database: Database,
        scheduler: Scheduler,
        gate: Gate,
        rules: PackRules,
        clock: Clock,
    ) -> None:
        self._database = database
        self._scheduler = scheduler
        self._gate = gate
        self._rules = rules
        self._clock = clock
        self._packer: Packer | None = None
        self._storing: dict[str, tuple[str, int]] = {}
        """Images on their way, with the workspace and what of its room they take."""

    async def resolve(
        self, workspace: str, packs: Mapping[str, str], *, origin: Row[Any] | None = None
    ) -> dict[str, dict[str, str]]:
        """What these names mean now, as a record keeps it: by where they lie. Without any, those of the snapshot to
        begin with."""
        if not packs:
            return {} if origin is None else origin.packs
        found = {}
        async with self._database.read() as connection:
            for path, name in sorted(packs.items()):
                row = await records.pack_row(connection, workspace, name)
                if row is None:
                    raise _not_found(name)
                found[path] = AttachedPack(name=name, digest=row.digest, image=row.image).model_dump()
        for path, other in ((a, b) for a in found for b in found if b.startswith(f"{a}/")):
            raise InvalidRequest(
                f"cannot have a data pack at {other}", f"it lies in another one, at {path}", details={"field": "packs"}
            )
        return found

    async def demand_attached(self, row: Row[Any], packs: Mapping[str, str]) -> None:
        """It was made with these. None can be attached to one that runs (ADR 19)."""
        wanted = await self.resolve(row.workspace, packs)
        for path, pack in wanted.items():
            if row.packs.get(path, {}).get("image") == pack["image"]:
                continue
            option = f"--pack {path}={pack['name']}"
            raise Conflict(
                f"cannot attach data pack {pack['name']!r} to sandbox {row.id} at {path}",
                f"its runtime {row.runtime!r} takes none into a sandbox that runs: it has those that it was made with",
                code="packs_fixed",
                hint=f"cpuos create {option}; with its files: cpuos snapshot {row.id} --no-memory, then"
                f" cpuos create --snapshot SNAPSHOT {option}",
                details={"field": "packs", "path": path, "pack": pack["name"], "runtime": row.runtime},
            )

    async def make(self, row: Row[Any], request: PackCreate, *, actor: str) -> Pack:
        """Of a folder of a running sandbox. Whatever fails, nothing of it is left."""
        if SandboxState(row.state) is not SandboxState.RUNNING:
            raise Conflict(f"cannot make data pack {request.name!r}: the sandbox is {row.state}")
        guest = self._gate.guest(row, actor=actor)
        image, work = f"pack-{new_id()}", f"/var/tmp/cpuos-{secrets.token_hex(8)}"
        node = self._scheduler.client(row.node)
        self._storing[image] = (row.workspace, 0)
        try:
            await self._check_room(row.workspace, request.name)
            made = await self._pack(guest, request, work=work)
            self._storing[image] = (row.workspace, made.size)
            await self._check_room(row.workspace, request.name)
            async with guest.open(f"{work}/pack.erofs") as content:
                await node.put_pack(image, size=made.size, sha256=made.sha256, content=content)
            values = {
                "workspace": row.workspace,
                "name": request.name,
                "image": image,
                "node": row.node,
                "digest": f"sha256:{made.sha256}",
                "size_bytes": made.size,
                "files": made.files,
                "created_at": self._clock(),
                "created_by": actor,
            }
            async with self._database.write() as connection:
                await records.put_pack(connection, values)
        finally:
            del self._storing[image]
            await self._clean(guest, work)
        return await self.get(row.workspace, request.name)

    async def list(self, workspace: str) -> list[Pack]:
        async with self._database.read() as connection:
            return [records.pack_of(row) for row in await records.list_packs(connection, workspace)]

    async def get(self, workspace: str, name: str) -> Pack:
        async with self._database.read() as connection:
            row = await records.pack_row(connection, workspace, name)
        if row is None:
            raise _not_found(name)
        return records.pack_of(row)

    async def delete(self, workspace: str, name: str) -> Pack:
        """Refused while a sandbox or a snapshot has it."""
        async with self._database.read() as connection:
            row = await records.pack_row(connection, workspace, name)
        if row is None:
            raise _not_found(name)
        await self._scheduler.client(row.node).delete_pack(row.image)
        async with self._database.write() as connection:
            await records.delete_pack(connection, workspace, name)
        return records.pack_of(row)

    async def tidy(self) -> None:
        """Remove from the nodes what no name means and nothing has. A step of the reconciler."""
        for view in self._scheduler.nodes():
            there = {pack.image for pack in view.facts.packs}
            if not there:
                continue
            async with self._database.read() as connection:
                named = await records.all_pack_images(connection)
            for image in sorted(there - named - self._storing.keys()):
                try:
                    await self._scheduler.client(view.facts.node).delete_pack(image)
                except CpuosError as error:
                    if error.code != "pack_in_use":
                        raise

    async def _pack(self, guest: Guest, request: PackCreate, *, work: str) -> _Made:
        self._packer = self._packer or await read_packer()
        for name, content in self._packer.files.items():
            await guest.put(f"{work}/{name}", content)
        script = _script(self._packer, path=request.path, work=work, max_mib=self._rules.max_mib)
        command = await guest.wait(await guest.start(script, name=f"{work}/pack"))
        if command.exit_code != 0:
            said = (await guest.output_end(command.id, stream="stderr", limit=_OUTPUT)).decode(errors="replace")
            raise _failed(request, command, said)
        made = _read(await guest.output_end(command.id, stream="stdout", limit=_OUTPUT))
        if made is None:
            raise _failed(request, command, "the sandbox did not say what it made")
        if made.size > self._rules.max_mib << 20:
            raise _too_large(request, f"it has {made.size >> 20} MiB", max_mib=self._rules.max_mib)
        return made

    async def _check_room(self, workspace: str, name: str) -> None:
        """Those that are on their way take room too, this one included: else calls at once would all fit."""
        async with self._database.read() as connection:
            rows = [row for row in await records.list_packs(connection, workspace) if row.name != name]
        coming = [size for owner, size in self._storing.values() if owner == workspace]
        held, more, limit = sum(row.size_bytes for row in rows), sum(coming), self._rules.workspace_mib << 20
        if len(rows) + len(coming) > MAX_PACKS or held + more > limit:
            raise LimitReached(
                f"cannot make data pack {name!r}: the workspace's packs would be too many or too large",
                f"{len(rows)} with {held >> 20} MiB are there, {len(coming)} with {more >> 20} MiB come; "
                f"{MAX_PACKS} with {limit >> 20} MiB are allowed",
                hint="cpuos pack rm NAME",
                details={"limit": "packs", "max_mib": limit >> 20, "max": MAX_PACKS},
            )

    async def _clean(self, guest: Guest, work: str) -> None:
        try:
            await guest.wait(await guest.start(f"rm -rf {work}", name=f"{work}/clean"))
        except CpuosError as error:
            _log.warning("what a data pack was made with is still in its sandbox", why=str(error))


def _script(packer: Packer, *, path: str, work: str, max_mib: int) -> str:
    folder = shlex.quote(path)
    return f"""
cd {work}
trap '[ $? -eq 0 ] || rm -f pack.erofs' EXIT
if [ ! -d {folder} ]; then echo "there is no folder of that name in the sandbox" >&2; exit 1; fi
used=$(du -s --apparent-size --block-size=1M -- {folder} | cut -f1)
if [ "$used" -gt {max_mib} ]; then echo "the folder holds $used MiB" >&2; exit {_TOO_LARGE_EXIT}; fi
rm -f pack.erofs
# Without attributes, and the same bytes for the same files.
./{packer.loader} --library-path . ./{packer.program} -x-1 -E noinline_data --preserve-mtime --quiet \\
  -T0 -U 00000000-0000-0000-0000-000000000000 pack.erofs {folder} >&2
stat -c %s pack.erofs
sha256sum pack.erofs | cut -d' ' -f1
find {folder} -xdev -type f | wc -l
"""


def _read(output: bytes) -> _Made | None:
    """The lines that the script ends with; None when they are not what it writes."""
    lines = output.decode(errors="replace").split("\n")
    try:
        size, digest, files = int(lines[0]), lines[1], int(lines[2])
    except (IndexError, ValueError):
        return None
    if size <= 0 or not 0 <= files < 1 << 31 or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        return None
    return _Made(size=size, sha256=digest, files=files)


def _failed(request: PackCreate, command: Command, said: str) -> CpuosError:
    if command.exit_code == _TOO_LARGE_EXIT:
        return _too_large(request, said.strip())
    why = said.strip()[-1000:] or f"the packer ended as {command.status.value}"
    return InvalidRequest(f"cannot make data pack {request.name!r} of {request.path}", why, code="pack_failed")


def _too_large(request: PackCreate, why: str, *, max_mib: int | None = None) -> LimitReached:
    more = f", and {max_mib} MiB are allowed" if max_mib else ""
    return LimitReached(
        f"cannot make data pack {request.name!r} of {request.path}: it is too large",
        f"{why}{more}",
        details={"limit": "pack_size"},
    )


def _not_found(name: str) -> NotFound:
    return NotFound(f"cannot find data pack {name!r}", "this workspace has none of that name", code="pack_not_found")

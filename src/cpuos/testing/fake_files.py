"""Files of the fake agent, as in api/guest.md. With real users the thread takes the user's file-system ids, so that
the kernel decides what is allowed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import errno
import functools
import grp
import json
import os
import pwd
import shutil
import stat
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from cpuos.testing.fake_http import GuestError, HttpRequest, HttpResponse
from cpuos.types.frames import FrameKind, encode_frame

__all__ = ["FakeFiles"]

T = TypeVar("T")
MAX_ENTRIES = 20_000
PIECE = 256 << 10

_CODES = {
    errno.ENOENT: "file_not_found",
    errno.EEXIST: "file_exists",
    errno.EISDIR: "is_a_directory",
    errno.ENOTDIR: "not_a_directory",
    errno.ENOTEMPTY: "directory_not_empty",
    errno.EACCES: "file_permission_denied",
    errno.EPERM: "file_permission_denied",
    errno.EROFS: "file_permission_denied",
    errno.ENAMETOOLONG: "file_name_invalid",
    errno.EINVAL: "file_name_invalid",
    errno.ELOOP: "file_name_invalid",
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.ENXIO: "file_kind_unsupported",
}


class FakeFiles:
    """File calls below `root` ("/" where the agent has a root of its own)."""

    def __init__(self, root: Path, *, switch_users: bool) -> None:
        self._root = os.fsencode(root).rstrip(b"/")
        self._switch_users = switch_users

    async def read(self, request: HttpRequest) -> HttpResponse:
        path = self._path(request)
        descriptor = await self._as_user(request, lambda: _open_regular(path))
        size = os.fstat(descriptor).st_size
        offset = request.number("offset")
        length = min(request.number("length", size), max(0, size - offset))
        return HttpResponse(
            body=_read_pieces(descriptor, offset, length),
            headers={"Content-Length": str(length), "X-File-Size": str(size)},
        )

    async def write(self, request: HttpRequest) -> HttpResponse:
        asked = self._path(request)
        mode = int(request.text("mode", "0"), 8) or None
        parents, exclusive = request.flag("create_parents", default=True), request.flag("exclusive", default=False)
        draft = await self._as_user(request, lambda: _Draft.open(asked, parents=parents, exclusive=exclusive))
        try:
            async for piece in request.body():
                await self._guarded(lambda piece=piece: draft.write(piece))
            await self._as_user(request, lambda: draft.commit(mode=mode, exclusive=exclusive))
        except BaseException:
            await self._as_user(request, draft.discard)
            raise
        return HttpResponse(json=await self._as_user(request, lambda: self._info(draft.path, follow=False)))

    async def stat(self, request: HttpRequest) -> HttpResponse:
        path, follow = self._path(request), request.flag("follow", default=False)
        return HttpResponse(json=await self._as_user(request, lambda: self._info(path, follow=follow)))

    async def list(self, request: HttpRequest) -> HttpResponse:
        path, depth = self._path(request), request.number("depth", 1)
        return HttpResponse(json=await self._as_user(request, lambda: self._list(path, depth)))

    async def mkdir(self, request: HttpRequest) -> HttpResponse:
        path, mode = self._path(request), int(request.text("mode", "755"), 8)
        parents = request.flag("parents", default=True)
        make = functools.partial(os.makedirs, exist_ok=True) if parents else os.mkdir
        await self._as_user(request, lambda: make(path, mode))
        return HttpResponse(json=await self._as_user(request, lambda: self._info(path, follow=False)))

    async def move(self, request: HttpRequest) -> HttpResponse:
        source, target = self._path(request), self._path(request, "to")
        overwrite = request.flag("overwrite", default=False)

        def move() -> None:
            if not overwrite and os.path.lexists(target):
                raise OSError(errno.EEXIST, "exists")
            os.rename(source, target)

        await self._as_user(request, move)
        return HttpResponse(json=await self._as_user(request, lambda: self._info(target, follow=False)))

    async def remove(self, request: HttpRequest) -> HttpResponse:
        path, recursive = self._path(request), request.flag("recursive", default=False)

        def remove() -> None:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                os.unlink(path)
            elif recursive:
                shutil.rmtree(path)
            else:
                os.rmdir(path)

        await self._as_user(request, remove)
        return HttpResponse(json={})

    async def watch(self, request: HttpRequest) -> None:
        """By comparing listings: enough for a fake."""
        path, depth = self._path(request), 64 if request.flag("recursive", default=True) else 1
        before = await self._as_user(request, lambda: self._snapshot(path, depth))
        await request.upgrade()
        gone = asyncio.create_task(request.reader.read(1))
        try:
            while not gone.done():
                await asyncio.wait([gone], timeout=0.05)
                with contextlib.suppress(GuestError):
                    after = await self._as_user(request, lambda: self._snapshot(path, depth))
                    for event in _differences(before, after):
                        request.writer.write(encode_frame(FrameKind.EVENT, json.dumps(event).encode()))
                    before = after
                await request.writer.drain()
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    async def read_tree(self, request: HttpRequest) -> HttpResponse:
        path = self._path(request)

        def pack() -> int:
            if not os.path.isdir(path):
                raise OSError(errno.ENOTDIR if os.path.lexists(path) else errno.ENOENT, "no folder")
            file = tempfile.TemporaryFile()  # noqa: SIM115
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for name in sorted(os.listdir(os.fsdecode(path))):
                    tar.add(os.path.join(os.fsdecode(path), name), arcname=name, filter=_plain_member)
            file.flush()
            descriptor = os.dup(file.fileno())
            file.close()
            return descriptor

        descriptor = await self._as_user(request, pack)
        body = _read_pieces(descriptor, 0, os.fstat(descriptor).st_size)
        return HttpResponse(body=body, headers={"Content-Type": "application/x-tar"})

    async def write_tree(self, request: HttpRequest) -> HttpResponse:
        path = self._path(request)
        with tempfile.TemporaryFile() as file:
            async for piece in request.body():
                file.write(piece)
            file.seek(0)
            counted = await self._as_user(request, lambda: _unpack(file, path))
        return HttpResponse(json=counted)

    # paths, users, errors

    def _path(self, request: HttpRequest, name: str = "path") -> bytes:
        path = request.query.get(name)
        if not path:
            raise GuestError("invalid", f"{name} is missing")
        if b"\0" in path:
            raise GuestError("file_name_invalid", f"{name} has a zero byte", errno=errno.EINVAL)
        full = path if path.startswith(b"/") else b"/workspace/" + path
        return (self._root + os.path.normpath(full).replace(b"//", b"/")) or b"/"

    async def _as_user(self, request: HttpRequest, call: Callable[[], T]) -> T:
        user = request.text("user", "user")
        ids = None
        if self._switch_users:
            try:
                entry = pwd.getpwnam(user)
            except KeyError:
                raise GuestError("user_not_found", f"no user {user}") from None
            ids = (entry.pw_uid, entry.pw_gid)
        return await self._guarded(lambda: _with_ids(ids, call))

    async def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(call)
        except OSError as error:
            code = _CODES.get(error.errno or 0, "internal")
            raise GuestError(code, os.strerror(error.errno or 0), errno=error.errno) from error

    def _shown(self, path: bytes) -> bytes:
        return path[len(self._root) :] or b"/"

    def _info(self, path: bytes, *, follow: bool) -> dict[str, Any]:
        status = os.stat(path) if follow else os.lstat(path)
        return self._info_of(path, status)

    def _info_of(self, path: bytes, status: os.stat_result) -> dict[str, Any]:
        shown = self._shown(path)
        text = shown.decode(errors="replace")
        link = os.readlink(path).decode(errors="replace") if stat.S_ISLNK(status.st_mode) else None
        return {
            "path": text,
            "raw": None if text.encode(errors="replace") == shown else base64.b64encode(shown).decode(),
            "kind": _kind(status.st_mode),
            "size": status.st_size,
            "mode": stat.S_IMODE(status.st_mode),
            "user": _name(lambda: pwd.getpwuid(status.st_uid).pw_name, status.st_uid),
            "group": _name(lambda: grp.getgrgid(status.st_gid).gr_name, status.st_gid),
            "uid": status.st_uid,
            "gid": status.st_gid,
            "modified_at": datetime.fromtimestamp(status.st_mtime, UTC).isoformat(),
            "link_target": link,
        }

    def _list(self, path: bytes, depth: int) -> dict[str, Any]:
        entries: list[dict[str, Any]] = []
        paths = self._walk(path, depth)
        for entry in paths[:MAX_ENTRIES]:
            with contextlib.suppress(FileNotFoundError):
                entries.append(self._info(entry, follow=False))
        return {"entries": entries, "truncated": len(paths) > MAX_ENTRIES}

    def _walk(self, path: bytes, depth: int) -> list[bytes]:
        found, level = [], [path]
        for number in range(depth):
            deeper = []
            for folder in level:
                try:
                    names = os.listdir(folder)
                except OSError:
                    if number == 0:
                        raise
                    continue
                paths = [os.path.join(folder, name) for name in names]
                found += paths
                deeper += [entry for entry in paths if os.path.isdir(entry) and not os.path.islink(entry)]
            level = deeper
        return sorted(found)

    def _snapshot(self, path: bytes, depth: int) -> dict[bytes, tuple[int, int, int]]:
        seen = {}
        for entry in self._walk(path, depth):
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(entry)
                seen[self._shown(entry)] = (status.st_mtime_ns, status.st_size, status.st_ino)
        return seen


class _Draft:
    """A file being written beside its target; readers see the old or the new one, never a part."""

    def __init__(self, path: bytes, draft: bytes, descriptor: int) -> None:
        self.path = path
        self._draft = draft
        self._descriptor = descriptor

    @classmethod
    def open(cls, asked: bytes, *, parents: bool, exclusive: bool) -> _Draft:
        path = os.path.realpath(asked) if os.path.islink(asked) else asked
        if os.path.isdir(path):
            raise OSError(errno.EISDIR, "is a directory")
        if os.path.lexists(path) and not os.path.isfile(path):
            raise GuestError("file_kind_unsupported", "not a regular file")
        if exclusive and os.path.lexists(asked):
            raise OSError(errno.EEXIST, "exists")
        if os.path.exists(path) and not os.access(path, os.W_OK, effective_ids=True):
            _check_write(path)
        if parents:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        if len(os.path.basename(path)) > 255:
            raise OSError(errno.ENAMETOOLONG, "name too long")
        draft = os.path.join(os.path.dirname(path), b".cpuos-" + os.urandom(8).hex().encode())
        return cls(path, draft, os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def write(self, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def commit(self, *, mode: int | None, exclusive: bool) -> None:
        try:
            before = os.stat(self.path)
        except FileNotFoundError:
            os.fchmod(self._descriptor, mode if mode is not None else 0o644)
        else:
            with contextlib.suppress(PermissionError):
                os.fchown(self._descriptor, before.st_uid, before.st_gid)
            os.fchmod(self._descriptor, (stat.S_IMODE(before.st_mode) & 0o1777) if mode is None else mode)
        os.fsync(self._descriptor)
        if exclusive:
            os.link(self._draft, self.path)
            os.unlink(self._draft)
        else:
            os.rename(self._draft, self.path)
        os.close(self._descriptor)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._draft)


def _check_write(path: bytes) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))


def _open_regular(path: bytes) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, "is a directory")
    raise GuestError("file_kind_unsupported", "not a regular file")


async def _read_pieces(descriptor: int, offset: int, length: int) -> AsyncIterator[bytes]:
    try:
        while length:
            piece = await asyncio.to_thread(os.pread, descriptor, min(length, PIECE), offset)
            if not piece:
                raise ConnectionResetError("the file became shorter")
            offset += len(piece)
            length -= len(piece)
            yield piece
    finally:
        os.close(descriptor)


def _with_ids(ids: tuple[int, int] | None, call: Callable[[], T]) -> T:
    if ids is None or ids[0] == os.geteuid():
        return call()
    libc = ctypes.CDLL(None)
    # File-system ids belong to the thread alone; away from 0 the kernel also drops its file capabilities.
    libc.setfsgid(ids[1])
    libc.setfsuid(ids[0])
    try:
        return call()
    finally:
        libc.setfsuid(os.geteuid())
        libc.setfsgid(os.getegid())


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symlink" if stat.S_ISLNK(mode) else "other"


def _name(look_up: Callable[[], str], number: int) -> str:
    try:
        return look_up()
    except KeyError:
        return str(number)


def _differences(before: dict[bytes, Any], after: dict[bytes, Any]) -> list[dict[str, Any]]:
    events = []
    inodes = {value[2]: path for path, value in before.items() if path not in after}
    moved = {inodes[value[2]]: path for path, value in after.items() if path not in before and value[2] in inodes}
    for source, target in moved.items():
        events.append({"kind": "moved", "path": _text(source), "moved_to": _text(target)})
    for path in sorted(after.keys() - before.keys() - set(moved.values())):
        events.append({"kind": "created", "path": _text(path)})
    for path in sorted(before.keys() - after.keys() - moved.keys()):
        events.append({"kind": "removed", "path": _text(path)})
    for path in sorted(before.keys() & after.keys()):
        if before[path] != after[path]:
            events.append({"kind": "modified", "path": _text(path)})
    return events


def _text(path: bytes) -> str:
    return path.decode(errors="replace")


def _plain_member(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return member if member.isfile() or member.isdir() or member.issym() else None


def _unpack(file: Any, target: bytes) -> dict[str, int]:
    os.makedirs(target, exist_ok=True)
    files = size = 0
    with tarfile.open(fileobj=file, mode="r|*") as tar:
        for member in tar:
            path = _member_path(os.fsdecode(target), member.name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if member.isdir():
                os.makedirs(path, exist_ok=True)
            elif member.issym():
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                os.symlink(member.linkname, path)
            elif member.isfile():
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                source = tar.extractfile(member)
                assert source is not None
                with open(path, "xb") as output:
                    shutil.copyfileobj(source, output)
                os.chmod(path, member.mode & 0o777)
                size += member.size
            else:
                raise GuestError("invalid", f"{member.name!r} is a device or hard link")
            files += 1
    return {"files": files, "bytes": size}


def _member_path(target: str, name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or name.startswith("/"):
        if name.strip("./") == "" and not name.startswith("/") and ".." not in parts:
            return target
        raise GuestError("invalid", f"{name!r} would leave the folder")
    path = target
    for part in parts[:-1]:
        path = os.path.join(path, part)
        if os.path.islink(path):
            raise GuestError("invalid", f"{name!r} goes through a link")
    return os.path.join(path, parts[-1])

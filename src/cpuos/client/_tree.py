"""Trees of files on the user's own machine, written and read by handles.

What comes from a sandbox is hostile: names lead nowhere but below the target, nothing is followed, no mode has more
than permission bits. A download goes to a staging folder inside the target and moves into place when it is whole.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cpuos.client._tar import TarEntry, TarKind, read_tar
from cpuos.errors import CpuosError, FileConflict, FileProblem, LimitReached, PermissionDenied, PlatformError

__all__ = ["Skipped", "TransferReport", "UnpackRules", "local_error", "save_file", "unpack_tree"]

MAX_ENTRIES = 1_000_000
MAX_DEPTH = 256
"""Folders in folders. Removing what was staged holds a handle for each."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, kw_only=True)
class Skipped:
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class TransferReport:
    """What an upload or download moved, and what it left out."""

    files: int = 0
    folders: int = 0
    bytes: int = 0
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, kw_only=True)
class UnpackRules:
    links: Literal["skip", "keep"] = "skip"
    """keep: make those links that stay below the target; the others are skipped all the same."""
    portable_names: bool = True
    """Refuse names that are one on systems which ignore case or compose characters."""
    max_bytes: int = 64 << 30
    max_entries: int = MAX_ENTRIES


@dataclass
class _Count:
    files: int = 0
    folders: int = 0
    bytes: int = 0
    skipped: list[Skipped] = field(default_factory=list)

    def report(self) -> TransferReport:
        return TransferReport(files=self.files, folders=self.folders, bytes=self.bytes, skipped=tuple(self.skipped))


def save_file(chunks: Iterator[bytes], target: Path, *, mode: int, max_bytes: int) -> TransferReport:
    """One file, whole or not at all; an existing file is replaced, a link or folder at that name is refused."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _check_replaceable(folder, os.fsencode(target.name), os.fspath(target))
            staged = f".cpuos-{secrets.token_hex(8)}.part"
            try:
                size = _write_file(folder, staged, _up_to(chunks, max_bytes), mode=mode)
                os.rename(staged, target.name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                _remove_quietly(folder, staged)
                raise
        finally:
            os.close(folder)
    except OSError as error:
        raise local_error(error, os.fspath(target), doing="write") from error
    return TransferReport(files=1, bytes=size)


def unpack_tree(chunks: Iterator[bytes], target: Path, rules: UnpackRules) -> TransferReport:
    """A tar stream as the folder `target`; all of it, or nothing. Existing plain files are replaced."""
    made = False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.mkdir()
            made = True
        except FileExistsError:
            pass
        root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        staged = f".cpuos-{secrets.token_hex(8)}.part"
        try:
            os.mkdir(staged, 0o700, dir_fd=root)
            staging = os.open(staged, _DIRECTORY, dir_fd=root)
            try:
                count = _Unpacker(staging, rules).unpack(chunks)
                _check_merge(staging, root, b"")
                _merge(staging, root)
            finally:
                os.close(staging)
                _remove_tree(root, os.fsencode(staged))
        finally:
            os.close(root)
    except BaseException as error:
        if made:
            _rmdir_quietly(target)
        if isinstance(error, OSError):
            raise local_error(error, os.fspath(target), doing="write") from error
        raise
    return count.report()


_Names = dict[str, tuple[bytes, "_Names"]]
"""By the name as others read it: the name as it came, and those in it."""


class _Unpacker:
    """Writes entries below a folder that nobody else knows of.

    What is kept of names is bounded by their number, whatever kinds of entries they are of.
    """

    def __init__(self, root: int, rules: UnpackRules) -> None:
        self._root = root
        self._rules = rules
        self._count = _Count()
        self._names: _Names = {}
        self._known = self._made = 0
        """Names in the above, and folders that no entry is of."""
        self._links: list[tuple[tuple[bytes, ...], bytes]] = []
        # The folder of the last entry stays open: entries come folder by folder.
        self._parent: tuple[tuple[bytes, ...], int] | None = None

    def unpack(self, chunks: Iterator[bytes]) -> _Count:
        try:
            for number, (entry, content) in enumerate(read_tar(chunks), 1):
                self._check_number(number)
                parts = _safe_parts(entry.name)
                if parts:
                    self._check_spelling(parts)
                    self._take(entry, parts, content)
            # Last, so that no entry can be written through them.
            for parts, link in self._links:
                os.symlink(link, parts[-1], dir_fd=self._folder(parts[:-1]))
        finally:
            if self._parent:
                os.close(self._parent[1])
        return self._count

    def _take(self, entry: TarEntry, parts: tuple[bytes, ...], content: Iterator[memoryview]) -> None:
        shown = _shown(parts)
        if entry.kind is TarKind.DIRECTORY:
            self._folder(parts[:-1])
            self._make_folder(parts, entry.mode)
            self._count.folders += 1
        elif entry.kind is TarKind.FILE:
            self._count.bytes += entry.size
            if self._count.bytes > self._rules.max_bytes:
                raise LimitReached(
                    f"cannot download the folder: it is over {self._rules.max_bytes} bytes",
                    f"reached at {shown!r}",
                    hint="download(…, max_size='100GiB')",
                )
            try:
                _write_file(self._folder(parts[:-1]), parts[-1], content, mode=entry.mode, mtime=entry.modified_at)
            except FileExistsError:
                raise _unsafe(shown, "the sandbox sent two entries of this name") from None
            self._count.files += 1
        elif entry.kind is TarKind.SYMLINK:
            self._take_link(entry, parts)
        else:
            raise _unsafe(shown, "it is neither file, folder nor symbolic link")

    def _take_link(self, entry: TarEntry, parts: tuple[bytes, ...]) -> None:
        if self._rules.links == "skip":
            self._skip(parts, f"symbolic link to {os.fsdecode(entry.link)!r}")
        elif not _stays_inside(entry.link, depth=len(parts) - 1):
            self._skip(parts, f"symbolic link that leaves the folder, to {os.fsdecode(entry.link)!r}")
        else:
            self._links.append((parts, entry.link))

    def _skip(self, parts: tuple[bytes, ...], reason: str) -> None:
        self._count.skipped.append(Skipped(path=_shown(parts), reason=reason))

    def _check_spelling(self, parts: tuple[bytes, ...]) -> None:
        if not self._rules.portable_names:
            return
        level = self._names
        for end, part in enumerate(parts, 1):
            folded = _fold(part)
            if folded not in level:
                level[folded] = (part, {})
                self._known += 1
                self._check_number(self._known)
            known, level = level[folded]
            if known != part:
                raise _unsafe(
                    _shown(parts[:end]),
                    f"where case or accents do not count it is the same name as {_shown((*parts[: end - 1], known))!r}",
                    hint="download(…, portable_names=False)",
                )

    def _check_number(self, number: int) -> None:
        if number > self._rules.max_entries:
            raise LimitReached(
                f"cannot download the folder: it holds over {self._rules.max_entries} files and folders",
                hint="tar -cf /workspace/folder.tar PATH in the sandbox, and download that",
            )

    def _folder(self, parts: tuple[bytes, ...]) -> int:
        if self._parent and self._parent[0] == parts:
            return self._parent[1]
        opened = os.dup(self._root)
        try:
            for end, part in enumerate(parts, 1):
                try:
                    inner = os.open(part, _DIRECTORY, dir_fd=opened)
                except FileNotFoundError:
                    self._made += 1
                    self._check_number(self._made)
                    os.mkdir(part, 0o755, dir_fd=opened)
                    inner = os.open(part, _DIRECTORY, dir_fd=opened)
                except (NotADirectoryError, OSError) as error:
                    if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                        raise
                    raise _unsafe(_shown(parts[:end]), "it is used as a folder and is none") from error
                os.close(opened)
                opened = inner
        except BaseException:
            os.close(opened)
            raise
        if self._parent:
            os.close(self._parent[1])
        self._parent = (parts, opened)
        return opened

    def _make_folder(self, parts: tuple[bytes, ...], mode: int) -> None:
        parent = self._folder(parts[:-1])
        try:
            # The owner keeps all rights: what follows must be written, and the user must be able to remove it.
            os.mkdir(parts[-1], mode & 0o777 | 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(parts[-1], dir_fd=parent, follow_symlinks=False).st_mode):
                raise _unsafe(_shown(parts), "the sandbox sent two entries of this name") from None


def _write_file(
    folder: int,
    name: str | bytes,
    chunks: Iterator[bytes] | Iterator[memoryview],
    *,
    mode: int,
    mtime: float | None = None,
) -> int:
    descriptor = os.open(name, _NEW_FILE, mode & 0o777, dir_fd=folder)
    size = 0
    try:
        for chunk in chunks:
            view = memoryview(chunk)
            size += len(view)
            while view:
                view = view[os.write(descriptor, view) :]
        if mtime is not None and 0 <= mtime < 1 << 33:
            os.utime(descriptor, (mtime, mtime))
    finally:
        os.close(descriptor)
    return size


def _up_to(chunks: Iterator[bytes], max_bytes: int) -> Iterator[bytes]:
    """What the sandbox says of a file's size is its word."""
    left = max_bytes
    for chunk in chunks:
        left -= len(chunk)
        if left < 0:
            raise LimitReached(
                f"cannot download the file: it is over {max_bytes} bytes", hint="download(…, max_size='100GiB')"
            )
        yield chunk


def _check_merge(source: int, target: int, prefix: bytes) -> None:
    """Refuse before the first entry is moved."""
    for name in map(os.fsencode, os.listdir(source)):
        path = prefix + name
        mode = os.stat(name, dir_fd=source, follow_symlinks=False).st_mode
        if not stat.S_ISDIR(mode):
            _check_replaceable(target, name, os.fsdecode(path), may_replace=stat.S_ISREG(mode))
            continue
        existing = _lstat(target, name)
        if existing is None:
            continue
        if not stat.S_ISDIR(existing.st_mode):
            kind = "a link" if stat.S_ISLNK(existing.st_mode) else "a file"
            raise _unsafe(os.fsdecode(path), f"the target has {kind} where a folder is to be")
        with _Opened(name, source) as inner_source, _Opened(name, target) as inner_target:
            _check_merge(inner_source, inner_target, path + b"/")


def _merge(source: int, target: int) -> None:
    for name in map(os.fsencode, os.listdir(source)):
        is_folder = stat.S_ISDIR(os.stat(name, dir_fd=source, follow_symlinks=False).st_mode)
        if is_folder and _lstat(target, name) is not None:
            with _Opened(name, source) as inner_source, _Opened(name, target) as inner_target:
                _merge(inner_source, inner_target)
        else:
            os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)


class _Opened:
    """A folder by its handle, for the length of a block."""

    def __init__(self, name: bytes, folder: int) -> None:
        self._descriptor = os.open(name, _DIRECTORY, dir_fd=folder)

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)


def _check_replaceable(folder: int, name: bytes, shown: str, *, may_replace: bool = True) -> None:
    existing = _lstat(folder, name)
    if existing is None:
        return
    if stat.S_ISLNK(existing.st_mode):
        raise _unsafe(shown, "the target has a link of this name, which is not followed")
    if stat.S_ISDIR(existing.st_mode):
        raise FileConflict(f"cannot write file: {shown}", "a folder of this name exists", code="is_a_directory")
    if not stat.S_ISREG(existing.st_mode) or not may_replace:
        raise _unsafe(shown, "the target has something else of this name")


def _lstat(folder: int, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _safe_parts(name: bytes) -> tuple[bytes, ...]:
    """Components of an entry's name; () for the folder itself."""
    if name.startswith(b"/"):
        raise _unsafe(os.fsdecode(name), "it is an absolute path")
    parts = tuple(part for part in name.split(b"/") if part not in (b"", b"."))
    if len(parts) > MAX_DEPTH:
        raise _unsafe(f"{_shown(parts[:3])}/…", f"it lies over {MAX_DEPTH} folders deep")
    if b".." in parts or b"\0" in name:
        raise _unsafe(os.fsdecode(name), "it would leave the target folder")
    return parts


def _stays_inside(link: bytes, *, depth: int) -> bool:
    """A relative link whose ".." come first and do not climb over the folder: so no chain of links leaves it either."""
    if link.startswith(b"/") or not link or b"\0" in link:
        return False
    parts = [part for part in link.split(b"/") if part not in (b"", b".")]
    ups = next((index for index, part in enumerate(parts) if part != b".."), len(parts))
    return ups <= depth and b".." not in parts[ups:]


def _fold(part: bytes) -> str:
    text = unicodedata.normalize("NFC", os.fsdecode(part)).casefold()
    return unicodedata.normalize("NFC", text)


def _shown(parts: tuple[bytes, ...]) -> str:
    return os.fsdecode(b"/".join(parts))


def _remove_tree(folder: int, name: bytes) -> None:
    """Remove by handles: nothing below is followed."""
    try:
        descriptor = os.open(name, _DIRECTORY, dir_fd=folder)
    except OSError:
        return
    try:
        for entry in map(os.fsencode, os.listdir(descriptor)):
            if stat.S_ISDIR(os.stat(entry, dir_fd=descriptor, follow_symlinks=False).st_mode):
                _remove_tree(descriptor, entry)
            else:
                os.unlink(entry, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    os.rmdir(name, dir_fd=folder)


def _remove_quietly(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        return


def _rmdir_quietly(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        return


def _unsafe(path: str, why: str, *, hint: str = "") -> FileProblem:
    return FileProblem(
        f"cannot write entry: {path!r}", why, code="unsafe_path", hint=hint, details={"path": ascii(path)}
    )


def local_error(error: OSError, path: str, *, doing: str) -> CpuosError:
    """A failure of this machine's own file system."""
    what = f"cannot {doing} local file: {path!r}"
    why = f"{error.strerror or error}" + (f": {os.fsdecode(error.filename)!r}" if error.filename else "")
    match error.errno:
        case errno.ENOENT:
            return FileProblem(what, why, code="file_not_found")
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return PermissionDenied(what, why)
        case errno.ENOSPC | errno.EDQUOT:
            return LimitReached(what, why, code="disk_full")
        case errno.ENAMETOOLONG | errno.EILSEQ | errno.EINVAL:
            return FileProblem(what, why, code="file_name_invalid")
        case errno.ENOTDIR:
            return FileConflict(what, why, code="not_a_directory")
        case errno.EISDIR:
            return FileConflict(what, why, code="is_a_directory")
        case errno.EEXIST:
            return FileConflict(what, why, code="file_exists")
    return PlatformError(what, why)

"""A local folder as a tar stream, read by handles; links are sent as links and never followed unless asked."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

from cpuos.client._body import PIECE_BYTES
from cpuos.client._tree import Skipped, TransferReport, local_error
from cpuos.errors import FileProblem

__all__ = ["Packer"]


class Packer:
    """Makes the stream of one folder, any number of times; `report` tells of the last time."""

    def __init__(self, source: Path, *, follow_links: bool) -> None:
        self._source = source
        self._follow = follow_links
        self._skipped: list[Skipped] = []
        self._files = self._folders = self._bytes = 0

    @property
    def report(self) -> TransferReport:
        return TransferReport(files=self._files, folders=self._folders, bytes=self._bytes, skipped=tuple(self._skipped))

    def pieces(self) -> Iterator[bytes]:
        """The tar in pieces of about one MiB."""
        self._skipped = []
        self._files = self._folders = self._bytes = 0
        buffer = bytearray()
        try:
            root = os.open(self._source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for piece in self._folder(root, "", ()):
                    buffer += piece
                    if len(buffer) >= PIECE_BYTES:
                        yield bytes(buffer)
                        buffer.clear()
            finally:
                os.close(root)
        except OSError as error:
            raise local_error(error, os.fspath(self._source), doing="read") from error
        yield bytes(buffer) + bytes(2 * tarfile.BLOCKSIZE)

    def _folder(self, folder: int, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[bytes]:
        facts = os.fstat(folder)
        here = (facts.st_dev, facts.st_ino)
        if here in above:
            self._skipped.append(Skipped(path=prefix, reason="a link back to a folder that holds it"))
            return
        for name in sorted(os.listdir(folder)):
            path = f"{prefix}{name}"
            try:
                entry = os.stat(name, dir_fd=folder, follow_symlinks=self._follow)
            except OSError as error:
                self._skipped.append(Skipped(path=path, reason=f"cannot be read: {error.strerror}"))
                continue
            if stat.S_ISLNK(entry.st_mode):
                yield _header(path, entry, tarfile.SYMTYPE, link=os.readlink(name, dir_fd=folder))
            elif stat.S_ISDIR(entry.st_mode):
                yield _header(path, entry, tarfile.DIRTYPE)
                self._folders += 1
                inner = os.open(name, self._flags(os.O_DIRECTORY), dir_fd=folder)
                try:
                    yield from self._folder(inner, f"{path}/", (*above, here))
                finally:
                    os.close(inner)
            elif stat.S_ISREG(entry.st_mode):
                yield from self._file(folder, name, path)
            else:
                self._skipped.append(Skipped(path=path, reason="neither file, folder nor symbolic link"))

    def _file(self, folder: int, name: str, path: str) -> Iterator[bytes]:
        # NONBLOCK: were it replaced by a pipe just now, the open would wait for ever.
        descriptor = os.open(name, self._flags(os.O_NONBLOCK), dir_fd=folder)
        try:
            facts = os.fstat(descriptor)
            yield _header(path, facts, tarfile.REGTYPE)
            left = facts.st_size
            while left:
                piece = os.read(descriptor, min(left, PIECE_BYTES))
                if not piece:
                    raise FileProblem(
                        f"cannot upload local file: {path!r}",
                        "it became shorter while it was read",
                        code="upload_incomplete",
                    )
                left -= len(piece)
                yield piece
            yield bytes(-facts.st_size % tarfile.BLOCKSIZE)
            self._files += 1
            self._bytes += facts.st_size
        finally:
            os.close(descriptor)

    def _flags(self, more: int) -> int:
        return os.O_RDONLY | os.O_CLOEXEC | more | (0 if self._follow else os.O_NOFOLLOW)


def _header(path: str, facts: os.stat_result, kind: bytes, *, link: str = "") -> bytes:
    info = tarfile.TarInfo(path)
    info.type = kind
    info.mode = stat.S_IMODE(facts.st_mode) & 0o777
    info.mtime = int(facts.st_mtime)
    info.size = facts.st_size if kind == tarfile.REGTYPE else 0
    info.linkname = link
    return info.tobuf(tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape")

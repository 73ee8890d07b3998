"""Files of a sandbox. Paths count from /workspace; text or os.PathLike, any name that Linux takes."""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Literal

from cpuos.client._async.connection import AsyncGateway, AsyncServer, Content
from cpuos.client._async.transfer import download, upload
from cpuos.client._backend_async import is_stream, iterate_blocking, iterate_ready, sleep
from cpuos.client._body import PIECE_BYTES, make_body
from cpuos.client._http import PATIENT, Once, Retry, TransportFailure
from cpuos.client._parse import parse_answer
from cpuos.client._tree import TransferReport, UnpackRules
from cpuos.client._watch import EventReader
from cpuos.errors import CpuosError, FileProblem, OutputLost
from cpuos.types.files import FileEvent, FileInfo, FileList
from cpuos.types.units import parse_duration_s, parse_size_bytes

__all__ = ["AsyncFiles"]

Path = str | os.PathLike[str]


class AsyncFiles:
    """`sbx.files`. Every call acts as `user` unless another user of the sandbox is named."""

    def __init__(self, gateway: AsyncGateway, server: AsyncServer) -> None:
        self._gateway = gateway
        self._server = server
        self._root = f"{gateway.root}/files"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._gateway.sandbox_id}>"

    async def read(self, path: Path, *, user: str | None = None) -> bytes:
        """All bytes of a file."""
        retry = Retry(PATIENT, repeatable=True)
        while True:
            answer = await self._gateway.open("GET", self._root, query={"path": os.fspath(path), "user": user})
            try:
                return await answer.read()
            except TransportFailure as failure:
                # From the start: the file may have changed meanwhile, and two halves are no whole.
                delay = retry.after_failure(failure)
                if delay is None:
                    raise _cut(path, failure) from failure
            finally:
                await answer.close()
            await sleep(delay)

    async def read_text(self, path: Path, *, encoding: str = "utf-8", user: str | None = None) -> str:
        """A file as text; bytes that are not in the encoding raise UnicodeDecodeError."""
        return (await self.read(path, user=user)).decode(encoding)

    async def open_read(
        self, path: Path, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> AsyncIterator[bytes]:
        """The bytes of a file as they come, for files that do not fit into memory. A cut raises `stream_cut`."""
        query = {"path": os.fspath(path), "offset": offset or None, "length": length, "user": user}
        answer = await self._gateway.open("GET", self._root, query=query)
        try:
            async with aclosing(answer.chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
        except TransportFailure as failure:
            raise _cut(path, failure) from failure
        finally:
            await answer.close()

    async def write(
        self,
        path: Path,
        data: Any,
        *,
        mode: int | None = None,
        exclusive: bool = False,
        user: str | None = None,
    ) -> FileInfo:
        """Write bytes, text, a file opened for reading, or an iterable of bytes. Readers see the old or the new file.

        Parents are made. An existing file keeps its mode and owner; with `exclusive` it is an error instead.
        """
        content, headers = _content_of(data)
        query = {
            "path": os.fspath(path),
            "mode": None if mode is None else f"{mode:04o}",
            "exclusive": exclusive or None,
            "user": user,
        }
        # An exclusive write that arrived would fail its own repeat.
        answer = await self._gateway.call(
            "PUT", self._root, query=query, headers=headers, content=content, repeatable=not exclusive
        )
        return parse_answer(FileInfo, answer.body)

    async def list(
        self, path: Path = "/workspace", *, depth: int = 1, user: str | None = None
    ) -> builtins.list[FileInfo]:
        """Entries of a folder, sorted; with `depth` also those of its folders.

        A folder with more entries than one answer takes raises `limit_reached`.
        """
        query = {"path": os.fspath(path), "depth": depth, "user": user}
        found = parse_answer(FileList, (await self._gateway.call("GET", f"{self._root}/list", query=query)).body)
        if found.truncated:
            raise FileProblem(
                f"cannot list folder: {os.fspath(path)!r}",
                f"it has more entries than one answer takes; {len(found.entries)} came",
                code="limit_reached",
                hint="list its folders one by one, or sbx.exec('find …')",
            )
        return found.entries

    async def stat(self, path: Path, *, follow: bool = False, user: str | None = None) -> FileInfo:
        """What a path is. `follow`: of the target, where it is a link."""
        query = {"path": os.fspath(path), "follow": follow or None, "user": user}
        return parse_answer(FileInfo, (await self._gateway.call("GET", f"{self._root}/stat", query=query)).body)

    async def exists(self, path: Path, *, user: str | None = None) -> bool:
        """True for anything at that path, also a link to nowhere."""
        try:
            await self.stat(path, user=user)
        except FileProblem as error:
            if error.code in ("file_not_found", "not_a_directory"):
                return False
            raise
        return True

    async def mkdir(
        self, path: Path, *, parents: bool = True, mode: int | None = None, user: str | None = None
    ) -> None:
        """Make a folder, with its parents. One that exists is no error unless `parents` is False."""
        query = {
            "path": os.fspath(path),
            "parents": parents,
            "mode": None if mode is None else f"{mode:04o}",
            "user": user,
        }
        await self._gateway.call("POST", f"{self._root}/mkdir", query=query, repeatable=parents)

    async def move(self, path: Path, to: Path, *, overwrite: bool = False, user: str | None = None) -> None:
        """Rename within the sandbox."""
        query = {"path": os.fspath(path), "to": os.fspath(to), "overwrite": overwrite or None, "user": user}
        await self._gateway.call("POST", f"{self._root}/move", query=query, repeatable=False)

    async def remove(self, path: Path, *, recursive: bool = False, user: str | None = None) -> None:
        """Remove a file, link or empty folder; with `recursive` a folder and all in it."""
        query = {"path": os.fspath(path), "recursive": recursive or None, "user": user}
        await self._gateway.call("DELETE", self._root, query=query, repeatable=False)

    async def watch(
        self, path: Path = "/workspace", *, recursive: bool = True, user: str | None = None
    ) -> AsyncIterator[FileEvent]:
        """Changes below a folder as they happen. Kind `overflow`: some were lost, list again."""
        query = {"path": os.fspath(path), "recursive": recursive, "user": user}
        retry = Retry(PATIENT, repeatable=True)
        while True:
            answer = await self._gateway.open("GET", f"{self._root}/watch", query=query)
            reader = EventReader()
            try:
                async with aclosing(answer.chunks()) as chunks:
                    async for chunk in chunks:
                        for event in reader.feed(chunk):
                            yield event
                        retry.progress()
                if reader.ended:
                    return
                failure = TransportFailure("the connection ended", sent=True)
            except TransportFailure as cut:
                failure = cut
            finally:
                await answer.close()
            delay = retry.after_failure(failure)
            if delay is None:
                raise _cut(path, failure)
            await sleep(delay)
            yield FileEvent(kind="overflow", path=os.fspath(path))

    async def url(self, path: Path, *, expires: str | float = "10m") -> str:
        """A link that downloads this one file without a key, until it expires."""
        body = {"path": os.fspath(path), "expires_s": parse_duration_s(expires, name="expires")}
        answer = await self._server.call("POST", f"{self._gateway.root}/links", content=json.dumps(body).encode())
        return json.loads(answer.body)["url"]

    async def upload(
        self, local: Path, remote: Path, *, follow_links: bool = False, user: str | None = None
    ) -> TransferReport:
        """A local file to the path `remote`, or what is in a local folder into the folder `remote`.

        Where `remote` ends with "/" a file goes into that folder under its own name.

        Links in a folder arrive as links; `follow_links` sends what they lead to. Pipes and devices are left out
        and named in the report.
        """
        return await upload(self._gateway, local, os.fspath(remote), user=user, follow_links=follow_links)

    async def download(
        self,
        remote: Path,
        local: Path,
        *,
        links: Literal["skip", "keep"] = "skip",
        portable_names: bool = True,
        max_size: str | int = "64GiB",
        user: str | None = None,
    ) -> TransferReport:
        """A file to the path `local` (into it where that is a folder), or a folder's content into the folder `local`.

        Nothing is written outside `local` and no link is followed. Links are left out and named in the report;
        `links="keep"` makes those that stay inside. Modes keep permission bits only. Names that are one where case
        or accents do not count are refused (`unsafe_path`) unless `portable_names=False`. All or nothing.
        """
        rules = UnpackRules(
            links=links, portable_names=portable_names, max_bytes=parse_size_bytes(max_size, name="max_size")
        )
        return await download(self._gateway, os.fspath(remote), local, user=user, rules=rules)


def _content_of(data: Any) -> tuple[Content, dict[str, str]]:
    headers = {"content-type": "application/octet-stream"}
    if is_stream(data):
        return Once(data), headers
    body = make_body(data)
    if body.length is not None:
        headers["content-length"] = str(body.length)
        if body.length <= PIECE_BYTES and body.in_memory:
            return b"".join(body.pieces()), headers
    walk = iterate_ready if body.in_memory else iterate_blocking
    if body.rewinds:
        return lambda: walk(body.pieces()), headers
    return Once(walk(body.pieces())), headers


def _cut(path: Path, failure: TransportFailure) -> CpuosError:
    return OutputLost(
        f"cannot read to the end: {os.fspath(path)!r}", f"the stream was cut: {failure.reason}", code="stream_cut"
    )

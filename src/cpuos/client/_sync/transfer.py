# Generated from src/cpuos/client/_async/transfer.py by scripts/gen_sync.py; edit that.
"""Files and folders between the user's machine and a sandbox; the file work itself is in `_tree` and `_pack`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cpuos.client._backend_sync import call_blocking, consume_blocking, iterate_blocking, sleep
from cpuos.client._body import make_body
from cpuos.client._http import PATIENT, Retry, TransportFailure
from cpuos.client._parse import parse_answer
from cpuos.client._sync.connection import Gateway
from cpuos.client._tree import TransferReport, UnpackRules, local_error, save_file, unpack_tree
from cpuos.errors import OutputLost
from cpuos.types.files import FileInfo, FileKind

__all__ = ["download", "upload"]

_BINARY = {"content-type": "application/octet-stream"}


def upload(
    gateway: Gateway, local: str | os.PathLike[str], remote: str, *, user: str | None, follow_links: bool
) -> TransferReport:
    """A file to the path `remote` (into it where that ends with "/"), or what is in a folder."""
    source = Path(local)
    try:
        is_folder = call_blocking(source.is_dir)
        if is_folder:
            return _upload_folder(gateway, source, remote, user=user, follow_links=follow_links)
        file = call_blocking(source.open, "rb")
    except OSError as error:
        raise local_error(error, os.fspath(local), doing="read") from error
    try:
        if remote.endswith("/"):
            remote += source.name
        mode = os.fstat(file.fileno()).st_mode & 0o777
        body = make_body(file)
        query = {"path": remote, "mode": f"{mode:04o}", "user": user}
        gateway.call(
            "PUT",
            f"{gateway.root}/files",
            query=query,
            headers={**_BINARY, "content-length": str(body.length)},
            content=lambda: iterate_blocking(body.pieces()),
        )
    except OSError as error:
        raise local_error(error, os.fspath(local), doing="read") from error
    finally:
        file.close()
    return TransferReport(files=1, bytes=body.length or 0)


def download(
    gateway: Gateway, remote: str, local: str | os.PathLike[str], *, user: str | None, rules: UnpackRules
) -> TransferReport:
    """A file to the path `local`, or into it where it is a folder; a folder's content into the folder `local`."""
    target = Path(local)
    answer = gateway.call("GET", f"{gateway.root}/files/stat", query={"path": remote, "follow": True, "user": user})
    info = parse_answer(FileInfo, answer.body)
    query = {"path": remote, "user": user}
    if info.kind is FileKind.DIRECTORY:
        return _receive(gateway, f"{gateway.root}/files/tree", query, lambda chunks: unpack_tree(chunks, target, rules))
    if os.fspath(local).endswith("/") or call_blocking(target.is_dir):
        # The name is the caller's own word, never the sandbox's.
        target = target / (os.path.basename(remote.rstrip("/")) or "file")
    return _receive(
        gateway,
        f"{gateway.root}/files",
        query,
        lambda chunks: save_file(chunks, target, mode=info.mode, max_bytes=rules.max_bytes),
    )


def _upload_folder(
    gateway: Gateway, source: Path, remote: str, *, user: str | None, follow_links: bool
) -> TransferReport:
    # Imported here: the standard library's tarfile takes longer than most calls.
    from cpuos.client._pack import Packer

    packer = Packer(source, follow_links=follow_links)
    gateway.call(
        "PUT",
        f"{gateway.root}/files/tree",
        query={"path": remote, "user": user},
        headers={"content-type": "application/x-tar"},
        content=lambda: iterate_blocking(packer.pieces()),
        read_timeout_s=300.0,
    )
    return packer.report


def _receive(
    gateway: Gateway, path: str, query: dict[str, Any], save: Callable[[Iterator[bytes]], TransferReport]
) -> TransferReport:
    """A body to disk. After a cut it begins anew: the file may have changed, and two halves are no whole."""
    retry = Retry(PATIENT, repeatable=True)
    while True:
        answer = gateway.open("GET", path, query=query)
        try:
            return consume_blocking(answer.chunks(), save)
        except TransportFailure as failure:
            delay = retry.after_failure(failure)
            if delay is None:
                raise OutputLost(
                    f"cannot download: {query['path']}", f"the stream was cut: {failure.reason}", code="stream_cut"
                ) from failure
        finally:
            answer.close()
        sleep(delay)

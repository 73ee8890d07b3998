"""Images of builds, as the server sends them: bytes of a stated size and digest. Nothing here looks into them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from cpuos.durable import sync_folder
from cpuos.errors import Conflict, InvalidRequest, LimitReached
from cpuos.types.template import BUILT_IMAGE_PATTERN

__all__ = ["TemplateStore"]


class TemplateStore:
    """A folder of folders; each appears whole or not at all."""

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        reserve_bytes: int,
        pattern: str = BUILT_IMAGE_PATTERN,
        noun: str = "template image",
    ) -> None:
        """`reserve_bytes` of the volume stay free whatever comes; `pattern` is that of names."""
        self._pattern = pattern
        self._noun = noun
        self._folder = folder
        self._max_bytes = max_bytes
        self._reserve_bytes = reserve_bytes

    async def put(self, image: str, content: AsyncIterator[bytes], *, size: int, sha256: str) -> None:
        """Keep an image. An image that is there already is another build's: names are given once."""
        target = self._target(image)
        if not 0 < size <= self._max_bytes:
            raise LimitReached(
                f"cannot keep {self._noun} {image}: it has {size} bytes",
                f"this node takes up to {self._max_bytes}",
                details={"limit": "template_size", "max": self._max_bytes},
            )
        if target.exists():
            raise Conflict(f"cannot keep {self._noun} {image}", "there is one of that name")
        await asyncio.to_thread(self._check_room, image, size)
        partial = self._folder / f".{image}.{secrets.token_hex(4)}"
        partial.mkdir(mode=0o700)
        try:
            await self._receive(partial / "root.erofs", content, image=image, size=size, sha256=sha256)
            manifest = {"name": image, "digest": f"sha256:{sha256}", "size": size}
            await asyncio.to_thread(_finish, partial, target, manifest)
        finally:
            await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)

    async def delete(self, image: str) -> None:
        """Nothing there is fine. A sandbox that runs from it keeps it open."""
        target = self._target(image)
        doomed = self._folder / f".{image}.{secrets.token_hex(4)}"
        try:
            target.rename(doomed)
        except FileNotFoundError:
            return
        await asyncio.to_thread(shutil.rmtree, doomed, ignore_errors=True)

    def clear_partial(self) -> None:
        """Remove what a daemon that was killed left; at the start, when nothing is being received."""
        if self._folder.is_dir():
            for folder in self._folder.glob(".*-*"):
                shutil.rmtree(folder, ignore_errors=True)

    async def _receive(self, path: Path, content: AsyncIterator[bytes], *, image: str, size: int, sha256: str) -> None:
        digest, received = hashlib.sha256(), 0
        with path.open("xb") as file:
            async for piece in content:
                received += len(piece)
                if received > size:
                    break
                await asyncio.to_thread(_write, file.fileno(), piece, digest)
            await asyncio.to_thread(os.fsync, file.fileno())
        if received != size or digest.hexdigest() != sha256:
            why = f"{received} bytes of {size} came" if received != size else "the digest is another"
            raise InvalidRequest(f"cannot keep {self._noun} {image}: it is not what was announced", why)

    def _check_room(self, image: str, size: int) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(self._folder).free
        if free - size < self._reserve_bytes:
            raise LimitReached(
                f"cannot keep {self._noun} {image}: the node's disk has no room",
                f"{size >> 20} MiB asked, {max(0, free - self._reserve_bytes) >> 20} MiB free",
                code="disk_full",
                hint="cpuos template rm NAME",
            )

    def _target(self, image: str) -> Path:
        if re.match(self._pattern, image) is None:
            raise InvalidRequest(f"cannot use {self._noun} {image!r}", "that is not how one is called here")
        return self._folder / image


def _write(descriptor: int, piece: bytes, digest: hashlib._Hash) -> None:
    digest.update(piece)
    view = memoryview(piece)
    while view:
        view = view[os.write(descriptor, view) :]


def _finish(partial: Path, target: Path, manifest: dict[str, object]) -> None:
    (partial / "root.erofs").chmod(0o444)
    with (partial / "manifest.json").open("x") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(target)
    sync_folder(target.parent)

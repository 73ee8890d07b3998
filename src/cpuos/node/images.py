"""What is kept of sandboxes that do not run: images of paused ones, and snapshots.

    snapshots/<name>/manifest.json    what it is, and of what it was made
    snapshots/<name>/manifest.mac     proof that this node wrote the manifest
    snapshots/<name>/digests.json     digest of each file of memory/ and root/, with its own proof; later than the rest
    snapshots/<name>/memory/          processes, by the runtime
    snapshots/<name>/root/            files outside of /workspace, by the runtime
    snapshots/<name>/disk.img         /workspace; disk.json says who wrote its blocks
    snapshots/<name>/workspace.note   of a paused one: the digest of its disk, with its own proof; later than the rest
    snapshots/<name>/agent/           the agent that the processes began with

A name is the id of a snapshot, or `pause-` and the id of a sandbox: that one keeps its disk, so there is no disk.img.
`root-` and the id of a sandbox is what its last pause saved of its root, kept while it runs on: with its disk that is
what is left of it should it die.
An image is made below `.part-<name>` and is there once that is renamed. None is ever changed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from cpuos.errors import Conflict, NotFound, PlatformError
from cpuos.node import syscalls
from cpuos.types.network import EffectivePolicy
from cpuos.types.sandbox import SANDBOX_ID_PATTERN

__all__ = ["AGENT", "DISK", "MEMORY", "ROOT", "ImageStore", "Manifest", "pause_name", "root_name"]

log = structlog.get_logger("cpuos.node")

_NAME = re.compile(rf"(pause-|root-)?({SANDBOX_ID_PATTERN[1:-1]})")
_PART, _TRASH = ".part-", ".trash-"
_KEY_BYTES = 32
_SPARSE = "sparse"
_BLOCK = 64 << 10
_MOST_CHECKED = 1000
# Far above what a volume counts its times in.
_SETTLED_NS = 1_000_000_000
_Mark = tuple[int, int, int, int, int]
# What is in the folder of an image.
AGENT, DISK, MEMORY, ROOT = "agent", "disk.img", "memory", "root"
_HASHED = (MEMORY, ROOT)


class Manifest(BaseModel):
    """What was saved, of what, and what it fits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    sandbox: str
    generation: int
    incarnation: int
    freeze: str = ""
    """What its processes were frozen with; empty without processes."""
    template: str
    template_digest: str
    runtime: str
    runtime_version: str
    cpu: int
    memory_mib: int
    disk_mib: int
    max_processes: int
    policy: EffectivePolicy
    created_at: datetime
    root_at: datetime | None = None
    """When its root was saved, where that was before the rest."""
    packs: dict[str, str] = {}
    """Data packs that it had, by where."""
    files: dict[str, int] = {}
    """Size of each file by its path."""

    @property
    def memory(self) -> bool:
        return any(name.startswith(f"{MEMORY}/") for name in self.files)

    @property
    def root(self) -> bool:
        return any(name.startswith(f"{ROOT}/") for name in self.files)


def pause_name(sandbox_id: str) -> str:
    return f"pause-{sandbox_id}"


def root_name(sandbox_id: str) -> str:
    return f"root-{sandbox_id}"


class ImageStore:
    """Images below one folder (root, 0700). All of it blocks; only the counts of readers are the loop's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._key = _read_key(folder.with_name(f"{folder.name}.key"))
        self._readers: Counter[str] = Counter()
        self._checked: dict[_Mark, str] = {}
        """Digests of files that were read as a whole, and did not change since."""

    def path(self, name: str) -> Path:
        return self._folder / _checked(name)

    def begin(self, name: str) -> Path:
        """An empty folder to make the image in; what an earlier try left is gone."""
        part = self.part(name)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(mode=0o700)
        return part

    def link(self, source: str, name: str, folders: list[str]) -> None:
        """Begin an image with these folders of another one, where it has them: their files get a second name."""
        part = self.begin(name)
        for folder in folders:
            for path in _files(self.path(source) / folder):
                target = part / path.relative_to(self.path(source))
                target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                os.link(path, target)

    def part(self, name: str) -> Path:
        """Where the image is made."""
        return self._folder / f"{_PART}{_checked(name)}"

    def commit(self, manifest: Manifest) -> Manifest:
        """Put all that is in the folder of `begin` on disk, and make it the image. An earlier one of that name goes."""
        part = self.part(manifest.name)
        for path in _files(part):
            if path.parent.name != AGENT:  # whose file other folders have too, and guests may read
                path.chmod(0o600)
        files = {str(path.relative_to(part)): path.stat().st_size for path in _files(part)}
        manifest = manifest.model_copy(update={"files": files})
        text = manifest.model_dump_json().encode()
        (part / "manifest.json").write_bytes(text)
        (part / "manifest.mac").write_text(self._sign(b"manifest", text))
        for path in [*_files(part), *(folder for folder in part.rglob("*") if folder.is_dir()), part]:
            _sync(path)
        self._put(part, self.path(manifest.name))
        return manifest

    def _put(self, part: Path, target: Path) -> None:
        """At each moment the one of before or this one is there."""
        if target.exists():
            syscalls.exchange(part, target)
            _sync(self._folder)
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.rename(target)
            _sync(self._folder)

    def discard(self, name: str) -> None:
        """Neither the image nor a part of it is there any more."""
        self.discard_part(name)
        self.remove(name)

    def discard_part(self, name: str) -> None:
        """What was begun is not there any more; an image of before stays."""
        shutil.rmtree(self.part(name), ignore_errors=True)

    def has(self, name: str) -> bool:
        return (self.path(name) / "manifest.json").exists()

    def read(self, name: str) -> Manifest:
        """The manifest, proved to be this node's and of this name, and all its files there with their sizes."""
        folder = self.path(name)
        try:
            text = (folder / "manifest.json").read_bytes()
            mac = (folder / "manifest.mac").read_text()
        except FileNotFoundError as problem:
            raise _not_found(name) from problem
        if not hmac.compare_digest(mac.encode(), self._sign(b"manifest", text).encode()):
            raise _damaged(name, "its manifest was not written by this node")
        try:
            manifest = Manifest.model_validate_json(text)
        except ValidationError as problem:
            raise _damaged(name, "its manifest is of another version of cpuOS") from problem
        if manifest.name != name:
            raise _damaged(name, f"its manifest is that of {manifest.name}")
        for file, size in manifest.files.items():
            path = folder / file
            if not path.is_file() or path.stat().st_size != size:
                raise _damaged(name, f"{file} is not there with its {size} bytes")
        return manifest

    def hash(self, name: str) -> None:
        """Add the digests, unless they are there. An image that goes meanwhile is fine."""
        folder = self.path(name)
        try:
            if not (folder / "digests.json").exists():
                files = self._digests(name, _HASHED, digest=_sparse_digest)
                text = json.dumps({"name": name, "way": _SPARSE, "files": files}).encode()
                whole = json.dumps({"text": text.decode(), "mac": self._sign(b"digests", text)})
                draft = folder / "digests.part"
                draft.write_text(whole)
                draft.rename(folder / "digests.json")
        except (FileNotFoundError, NotFound):
            return

    def check(self, name: str, *, folders: list[str]) -> None:
        """All files in these, of memory and root, are as they were saved, where the digests are there already."""
        folder = self.path(name)
        try:
            whole = json.loads((folder / "digests.json").read_bytes())
            text, mac = whole["text"].encode(), whole["mac"].encode()
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            raise _damaged(name, "its digests cannot be read") from problem
        if not hmac.compare_digest(mac, self._sign(b"digests", text).encode()):
            raise _damaged(name, "its digests were not written by this node")
        known = json.loads(text)
        if known["name"] != name:
            raise _damaged(name, f"its digests are those of {known['name']}")
        way = _sparse_digest if known.get("way") == _SPARSE else _sha256
        there = {str(path.relative_to(folder)): path for part in folders for path in _files(folder / part)}
        saved = {file: digest for file, digest in known["files"].items() if file.split("/")[0] in folders}
        for file in sorted(saved.keys() | there.keys()):
            if file not in saved or file not in there or self._digest(there[file], way) != saved[file]:
                raise _damaged(name, f"{file} is not as it was saved")

    def add_note(self, name: str, about: str, note: dict[str, str]) -> None:
        """Put down something that is known of it only later, in place of what was. An image that is gone is fine."""
        text = json.dumps({"name": name, "about": about, "note": note})
        draft = self.path(name) / f".{about}.note"
        try:
            draft.write_text(json.dumps({"text": text, "mac": self._sign(b"note", text.encode())}))
            draft.rename(self.path(name) / f"{about}.note")
        except FileNotFoundError:
            return

    def note(self, name: str, about: str) -> dict[str, str] | None:
        try:
            whole = json.loads((self.path(name) / f"{about}.note").read_bytes())
            text, mac = whole["text"], whole["mac"].encode()
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            raise _damaged(name, f"what is noted of its {about} cannot be read") from problem
        if not hmac.compare_digest(mac, self._sign(b"note", text.encode()).encode()):
            raise _damaged(name, f"what is noted of its {about} was not written by this node")
        told = json.loads(text)
        return told["note"] if (told["name"], told["about"]) == (name, about) else None

    def remove(self, name: str) -> None:
        """Not there is fine."""
        trash = self._folder / f"{_TRASH}{secrets.token_hex(8)}"
        with contextlib.suppress(FileNotFoundError):
            self.path(name).rename(trash)
        shutil.rmtree(trash, ignore_errors=True)

    def size_bytes(self, saved: Manifest) -> int:
        """What its files take on the volume; blocks that are shared count in full."""
        folder = self.path(saved.name)
        return sum((folder / file).stat().st_blocks * 512 for file in saved.files)

    def list(self) -> list[str]:
        """Names of all that are there, whole."""
        return sorted(name for name in os.listdir(self._folder) if _NAME.fullmatch(name) and self.has(name))

    def packs(self) -> set[str]:
        """All data packs that any image needs. A damaged one counts for what it still says."""
        found: set[str] = set()
        for name in self.list():
            with contextlib.suppress(OSError, ValueError, AttributeError):
                found |= set(json.loads((self.path(name) / "manifest.json").read_bytes()).get("packs", {}).values())
        return found

    def owners(self) -> list[str]:
        """Ids of all sandboxes with an image of their own, or a part of one."""
        found = set()
        for name in os.listdir(self._folder):
            match = _NAME.fullmatch(name.removeprefix(_PART))
            if match is not None and match[1]:
                found.add(match[2])
        return sorted(found)

    def sweep(self) -> None:
        """Remove what a forerunner left half-made or half-removed."""
        for name in os.listdir(self._folder):
            if name.startswith((_PART, _TRASH)):
                shutil.rmtree(self._folder / name, ignore_errors=True)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """It is not removed by a caller's wish meanwhile."""
        self._readers[name] += 1
        try:
            yield
        finally:
            self._readers[name] -= 1

    def check_unread(self, name: str) -> None:
        if self._readers[name] > 0:
            raise Conflict(
                f"cannot delete snapshot: {name}", "a sandbox is being created from it", code="snapshot_in_use"
            )

    def _digest(self, path: Path, way: Callable[[Path], str]) -> str:
        """Of a file that is read again only if it, or what the volume says of it, has changed: many copies of one image
        would each read all of its memory."""
        mark = _mark_of(path)
        found = self._checked.get(mark)
        if found is not None:
            return found
        found = way(path)
        if time.time_ns() - mark[-1] > _SETTLED_NS:  # a change after this one has another time
            while len(self._checked) >= _MOST_CHECKED:
                self._checked.pop(next(iter(self._checked)), None)
            self._checked[mark] = found
        return found

    def _digests(self, name: str, folders: Sequence[str], *, digest: Callable[[Path], str]) -> dict[str, str]:
        image = self.path(name)
        files = [path for folder in folders for path in _files(image / folder)]
        return {str(path.relative_to(image)): digest(path) for path in files}

    def _sign(self, domain: bytes, text: bytes) -> str:
        return hmac.new(self._key, b"cpuos-image-" + domain + b"-v1\n" + text, hashlib.sha256).hexdigest()


def _read_key(path: Path) -> bytes:
    """The key, made when there is none. With another key no image of before is taken."""
    if not path.exists():
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(_KEY_BYTES))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        draft.rename(path)
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise PlatformError(f"cannot read the key of images: {path}", f"it has {len(key)} bytes, not {_KEY_BYTES}")
    return key


def _checked(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"not the name of an image: {name!r}")
    return name


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mark_of(path: Path) -> _Mark:
    """Another one after any change: nobody sets ctime back."""
    facts = path.stat()
    return (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


def _sparse_digest(path: Path) -> str:
    """sha256 of its size and of each block that is not zero, with its place: memory and disks of a machine are large,
    and hold little. Where the volume keeps holes makes no difference."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest, nothing, end = hashlib.sha256(size.to_bytes(8, "big")), bytes(_BLOCK), 0
        while end < size:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError as problem:
                if problem.errno == errno.ENXIO:  # a hole until the end
                    break
                raise
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            end = min(size, -(-end // _BLOCK) * _BLOCK)
            for offset in range(start // _BLOCK * _BLOCK, end, _BLOCK):
                block = os.pread(file.fileno(), _BLOCK, offset)
                if block != nothing[: len(block)]:
                    digest.update(offset.to_bytes(8, "big"))
                    digest.update(block)
        return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _said(name: str) -> str:
    match = _NAME.fullmatch(name)
    assert match is not None
    return f"what is kept of sandbox {match[2]}" if match[1] else f"snapshot: {name}"


def _not_found(name: str) -> NotFound:
    return NotFound(f"cannot find {_said(name)}", "this node has no such one", code="snapshot_not_found")


def _damaged(name: str, why: str) -> PlatformError:
    log.error("image damaged", image=name, why=why)
    return PlatformError(f"cannot use {_said(name)}", why, code="snapshot_damaged")

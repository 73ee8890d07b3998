"""OCI images as tests make them, and what an image's layers come to, told by a reader of our own."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cpuos.server.templates.packer import read_packer

__all__ = ["base_layer", "entry", "expected_tree", "layer", "write_docker_archive", "write_layout"]

TIME = 1_700_000_000


def entry(name: str, content: bytes | None = None, **values: Any) -> tuple[tarfile.TarInfo, bytes]:
    """A folder when it has no content and no type."""
    made = tarfile.TarInfo(name)
    made.mtime = TIME
    made.mode = 0o644 if content is not None else 0o755
    if content is None and "type" not in values:
        made.type = tarfile.DIRTYPE
    for key, value in values.items():
        setattr(made, key, value)
    made.size = values.get("size", len(content or b""))
    return made, content or b""


def layer(entries: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, content in entries:
            archive.addfile(member, io.BytesIO(content))
    return written.getvalue()


def base_layer() -> bytes:
    """As little as a sandbox can run: some programs of this machine, with their libraries. No bash."""
    entries = [entry("bin"), entry("etc"), entry("lib64"), entry("lib"), entry("srv", uid=500, gid=500)]
    libraries: dict[str, bytes] = {}
    for name, source in (("sh", "dash"), *((one, one) for one in ("cat", "find", "id", "sha256sum", "sleep", "xargs"))):
        program = asyncio.run(read_packer(source))
        libraries |= {key: value for key, value in program.files.items() if key != program.program}
        entries.append(entry(f"bin/{name}", program.files[program.program], mode=0o755))
        loader = program.loader
    for name, content in sorted(libraries.items()):
        entries.append(entry(f"lib/{name}", content, mode=0o755))
    entries.append(entry(f"lib64/{loader}", libraries[loader], mode=0o755))
    entries.append(entry("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nworker:x:500:500::/srv:/bin/sh\n"))
    return layer(entries)


def write_layout(
    folder: Path, layers: Iterable[bytes], *, config: Mapping[str, Any] | None = None, packed: Iterable[bytes] = ()
) -> Path:
    """An OCI layout of one image; layers are compressed as registries have them. Those of `packed` are already."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    kind = "application/vnd.oci.image"
    plain = list(layers)
    blobs_of = [*(gzip.compress(one, 1, mtime=0) for one in plain), *packed]
    described_layers = [{"mediaType": f"{kind}.layer.v1.tar+gzip", **blob(one)} for one in blobs_of]
    diffs = [f"sha256:{hashlib.sha256(one).hexdigest()}" for one in [*plain, *packed]]
    described = {
        "architecture": "amd64",
        "os": "linux",
        "config": dict(config or {}),
        "rootfs": {"type": "layers", "diff_ids": diffs},
    }
    settings = {"mediaType": f"{kind}.config.v1+json", **blob(json.dumps(described).encode())}
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.manifest.v1+json",
        "config": settings,
        "layers": described_layers,
    }
    top = {"mediaType": f"{kind}.manifest.v1+json", **blob(json.dumps(manifest).encode())}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [top]}))
    (folder / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
    return folder


def write_docker_archive(target: Path, layers: Iterable[bytes], *, config: Mapping[str, Any] | None = None) -> Path:
    """As `docker save` writes it."""
    plain = list(layers)
    described = {
        "architecture": "amd64",
        "os": "linux",
        "config": dict(config or {}),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(one).hexdigest()}" for one in plain]},
    }
    names = [f"{number}/layer.tar" for number in range(len(plain))]
    listed = [{"Config": "config.json", "RepoTags": ["saved:latest"], "Layers": names}]
    with tarfile.open(target, "w") as archive:
        parts = {"config.json": json.dumps(described).encode(), "manifest.json": json.dumps(listed).encode()}
        for name, content in {**parts, **dict(zip(names, plain, strict=True))}.items():
            archive.addfile(entry(name, content)[0], io.BytesIO(content))
    return target


def expected_tree(layers: Iterable[bytes]) -> dict[str, tuple[Any, ...]]:
    """Path to kind, mode, owner and content, of what the layers come to by the OCI specification."""
    tree: dict[str, tuple[Any, ...]] = {}

    def remove(path: str, *, keep_itself: bool = False) -> None:
        for other in [one for one in tree if one.startswith(f"{path}/") or (one == path and not keep_itself)]:
            del tree[other]

    for content in layers:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            members = archive.getmembers()
            for member in members:  # what is hidden is of lower layers alone
                folder, _, name = f"/{member.name}".rpartition("/")
                if name == ".wh..wh..opq":
                    remove(folder, keep_itself=True)
                elif name.startswith(".wh."):
                    remove(f"{folder}/{name.removeprefix('.wh.')}")
            for member in members:
                path = f"/{member.name}"
                if member.name.rpartition("/")[2].startswith(".wh."):
                    continue
                owned = (member.mode, member.uid, member.gid)
                if member.isdir():
                    if path in tree and tree[path][0] != "d":
                        remove(path)
                    tree[path] = ("d", *owned, "")
                    continue
                remove(path)
                if member.issym():
                    tree[path] = ("l", 0o777, member.uid, member.gid, member.linkname)
                elif member.islnk():
                    tree[path] = tree[f"/{member.linkname}"]
                else:
                    file = archive.extractfile(member)
                    assert file is not None
                    tree[path] = ("f", *owned, hashlib.sha256(file.read()).hexdigest())
    return tree

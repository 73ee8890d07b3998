"""Trees that a hostile sandbox sends never leave the target folder on the user's machine."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpuos.client._http import TransportFailure
from cpuos.client._pack import Packer
from cpuos.client._tar import read_tar
from cpuos.client._tree import UnpackRules, save_file, unpack_tree
from cpuos.errors import AgentFailure, CpuosError, FileProblem, LimitReached


def tar_of(*entries: tuple[str, bytes, bytes | str, int]) -> bytes:
    """Entries of (name, type, content or link, mode)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        for name, kind, content, mode in entries:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, mode
            if isinstance(content, str):
                info.linkname = content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def file(name: str, content: bytes = b"x", mode: int = 0o644) -> tuple[str, bytes, bytes, int]:
    return (name, tarfile.REGTYPE, content, mode)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[str, bytes, str, int]:
    return (name, kind, target, 0o777)


def folder(name: str, mode: int = 0o755) -> tuple[str, bytes, bytes, int]:
    return (name, tarfile.DIRTYPE, b"", mode)


def unpack(target: Path, data: bytes, size: int = 1000, **rules: object):
    chunks = (data[start : start + size] for start in range(0, len(data), size))
    return unpack_tree(chunks, target, UnpackRules(**rules))


def everything(path: Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))


@pytest.mark.parametrize("size", [1, 511, 512, 513, 1 << 20])
def test_a_plain_tree(tmp_path: Path, size: int) -> None:
    names = ["a", "dir/b", "dir/deep/" + "n" * 200, "ü/é🤣", "raw\udcff", "x" * 255]
    data = tar_of(*[file(name, os.urandom(700)) for name in names], folder("empty"), file("./dot/./c"))
    report = unpack(tmp_path / "t", data, size)
    assert report.files == len(names) + 1
    found = everything(tmp_path / "t")
    assert set(names) <= set(found)
    assert {"empty", "dot/c"} <= set(found)
    assert not [name for name in found if ".part" in name]


@pytest.mark.parametrize(
    "entries",
    [
        [file("../evil")],
        [file("/etc/evil")],
        [file("a/../../evil")],
        [file(".."), file("x")],
        [link("out", ".."), file("out/evil")],
        [link("out", "/tmp"), file("out/evil")],
        [file("a"), file("a")],
        [file("a"), file("a/b")],
        [file("a"), folder("a")],
        [folder("a"), file("a")],
        [file("Read"), file("READ")],
        [file("straße"), file("STRASSE")],
        [file("\u00e9"), file("e\u0301")],
        [file("D/a"), file("d/b")],
        [link("a", "/etc/passwd", tarfile.LNKTYPE)],
        [("dev", tarfile.CHRTYPE, b"", 0o666)],
        [("pipe", tarfile.FIFOTYPE, b"", 0o666)],
        [file("n" * 256)],
        [file("../" * 40 + "tmp/evil")],
    ],
    ids=lambda entries: "-".join(entry[0][:12].replace("/", "_") for entry in entries),
)
@pytest.mark.parametrize("links", ["skip", "keep"])
def test_hostile_trees_leave_nothing(tmp_path: Path, entries: list, links: str) -> None:
    root = tmp_path / "t"
    if entries[0][1] == tarfile.SYMTYPE:
        # The link itself is left out, or made last, when its name is a folder's.
        with contextlib.suppress(FileProblem):
            unpack(root, tar_of(*entries), links=links)
        assert not (tmp_path / "evil").exists()
        assert not Path("/tmp/evil").exists()
        return
    with pytest.raises(CpuosError) as caught:
        unpack(root, tar_of(file("first"), *entries), links=links)
    assert caught.value.code in ("unsafe_path", "file_name_invalid")
    assert list(tmp_path.iterdir()) == []


def test_names_that_differ_by_case_are_taken_when_asked(tmp_path: Path) -> None:
    unpack(tmp_path / "t", tar_of(file("Read"), file("READ")), portable_names=False)
    assert everything(tmp_path / "t") == ["READ", "Read"]


def test_modes_are_masked(tmp_path: Path) -> None:
    os.umask(old := os.umask(0o022))
    unpack(tmp_path / "t", tar_of(file("s", mode=0o6777), folder("d", mode=0o7000), file("d/f", mode=0o4111)))
    assert (tmp_path / "t/s").stat().st_mode & 0o7777 == 0o777 & ~old
    assert (tmp_path / "t/d").stat().st_mode & 0o7000 == 0
    assert (tmp_path / "t/d/f").stat().st_mode & 0o7777 == 0o111


def test_links_are_left_out_and_named(tmp_path: Path) -> None:
    report = unpack(tmp_path / "t", tar_of(link("l", "/etc/passwd"), file("a")))
    assert everything(tmp_path / "t") == ["a"]
    assert [(skipped.path, skipped.reason) for skipped in report.skipped] == [("l", "symbolic link to '/etc/passwd'")]


def test_kept_links_stay_inside(tmp_path: Path) -> None:
    data = tar_of(
        file("d/a"),
        link("ok", "d/a"),
        link("d/up", "../ok"),
        link("self", "."),
        link("abs", "/etc/passwd"),
        link("out", "../x"),
        link("d/out", "../../x"),
        link("chain", "self/../.."),
        link("hop", "self/.."),
    )
    report = unpack(tmp_path / "t", data, links="keep")
    assert sorted(skipped.path for skipped in report.skipped) == ["abs", "chain", "d/out", "hop", "out"]
    root = tmp_path / "t"
    assert (root / "d/up").read_bytes() == b"x"
    for path in root.rglob("*"):
        assert path.resolve().is_relative_to(root.resolve())


def test_existing_files_are_replaced_and_links_are_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "t", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "a").write_text("old")
    (root / "keep").write_text("mine")
    (root / "d").mkdir()
    unpack(root, tar_of(file("a", b"new"), file("d/b")))
    assert (root / "a").read_text() == "new"
    assert everything(root) == ["a", "d", "d/b", "keep"]
    for name, target in (("f", outside / "f"), ("e", outside)):
        (root / name).symlink_to(target)
    before = everything(root)
    for entries in ([file("n"), file("f")], [file("n"), file("e/x")], [file("n"), folder("a")], [file("n"), file("d")]):
        with pytest.raises(FileProblem):
            unpack(root, tar_of(*entries))
        assert everything(root) == before
    assert everything(outside) == []


def test_a_target_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("x")
    with pytest.raises(FileProblem) as caught:
        unpack(tmp_path / "t", tar_of(file("a")))
    assert caught.value.code == "not_a_directory"


def test_size_is_limited(tmp_path: Path) -> None:
    with pytest.raises(LimitReached):
        unpack(tmp_path / "t", tar_of(file("a", bytes(1000)), file("b", bytes(1000))), max_bytes=1500)
    assert list(tmp_path.iterdir()) == []


def test_the_size_of_one_file_is_limited(tmp_path: Path) -> None:
    """The sandbox tells how long it is, and may never end."""

    def endless() -> Iterator[bytes]:
        while True:
            yield bytes(1000)

    with pytest.raises(LimitReached):
        save_file(endless(), tmp_path / "t", mode=0o644, max_bytes=100_000)
    assert list(tmp_path.iterdir()) == []
    assert save_file(iter([bytes(1000)]), tmp_path / "t", mode=0o644, max_bytes=1000).bytes == 1000


def _endless(piece: Callable[[int], bytes]) -> Iterator[bytes]:
    for number in itertools.count():
        yield piece(number)


def _extended(number: int) -> bytes:
    value = b"x%d=" % number + b"v" * 8000
    record = b"%d " % (len(value) + 6) + value + b"\n"
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, len(record)
    return info.tobuf() + record + bytes(-len(record) % 512)


def _empty(kind: bytes, name: str) -> Callable[[int], bytes]:
    def piece(number: int) -> bytes:
        info = tarfile.TarInfo(name.format(number))
        info.type, info.linkname = kind, "a"
        return info.tobuf()

    return piece


def _deep(number: int) -> bytes:
    path = b"a/" * 3000 + b"f"
    record = b"%d path=" % (len(path) + 11) + path + b"\n"
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, len(record)
    return info.tobuf() + record + bytes(-len(record) % 512) + tarfile.TarInfo("f").tobuf()


@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize(
    ("piece", "code"),
    [
        (_extended, "agent_invalid"),
        (_deep, "unsafe_path"),
        (_empty(tarfile.XHDTYPE, "x{}"), "agent_invalid"),
        (_empty(tarfile.REGTYPE, "f{}"), "limit_reached"),
        (_empty(tarfile.DIRTYPE, "d{}"), "limit_reached"),
        (_empty(tarfile.DIRTYPE, "same"), "limit_reached"),
        (_empty(tarfile.SYMTYPE, "l{}"), "limit_reached"),
        (_empty(tarfile.SYMTYPE, "l{}" + "/a" * 40), "limit_reached"),
        (_empty(tarfile.REGTYPE, "f{}" + "/a" * 40), "limit_reached"),
    ],
    ids=["extended", "deep", "empty-extended", "files", "folders", "same", "links", "deep-links", "deep-files"],
)
def test_a_stream_without_end_takes_little_of_this_machine(
    tmp_path: Path, piece: Callable[[int], bytes], code: str, portable: bool
) -> None:
    given = 0

    def counted() -> Iterator[bytes]:
        nonlocal given
        for chunk in _endless(piece):
            given += len(chunk)
            assert given < 4 << 20
            yield chunk

    tracemalloc.start()
    try:
        with pytest.raises(CpuosError) as caught:
            unpack_tree(counted(), tmp_path / "t", UnpackRules(portable_names=portable, max_entries=1000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.code == code
    assert peak < 4 << 20
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", range(0, 3000, 97))
def test_a_cut_stream_is_a_cut_and_leaves_nothing(tmp_path: Path, cut: int) -> None:
    data = tar_of(file("a", bytes(700)), file("b" * 150, bytes(10)))
    with pytest.raises(TransportFailure):
        unpack(tmp_path / "t", data[:cut])
    assert list(tmp_path.iterdir()) == []


def _bad_headers() -> Iterator[bytes]:
    good = tar_of(file("a"))
    yield b"\xff" * 512
    yield good[:100] + b"7" + good[101:]
    yield good[:124] + b"\x80" + b"\xff" * 11 + good[136:]
    for record in (
        b"0 a=b\n",
        b"99999 a=b\n",
        b"x a=b\n",
        b"8 path\n\n",
        b"22 GNU.sparse.major=1\n",
        b"10 size=-1\n",
    ):
        info = tarfile.TarInfo("pax")
        info.type, info.size = tarfile.XHDTYPE, len(record)
        yield info.tobuf() + record + bytes(-len(record) % 512) + good
    info = tarfile.TarInfo("huge")
    info.type, info.size = tarfile.XHDTYPE, 1 << 40
    yield info.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20)


@pytest.mark.parametrize("data", list(_bad_headers()), ids=lambda data: str(len(data)))
def test_bytes_that_are_no_tar(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(AgentFailure):
        unpack(tmp_path / "t", data + bytes(1024))
    assert list(tmp_path.iterdir()) == []


def test_other_writers_are_understood() -> None:
    for form in (tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT):
        buffer = io.BytesIO()
        name = "d" * 90 + "/" + "n" * (90 if form == tarfile.USTAR_FORMAT else 200)
        with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
        entries = [(entry.name.decode(), b"".join(content)) for entry, content in read_tar(iter([buffer.getvalue()]))]
        assert entries == [(name, b"abc")]


def test_packing_follows_no_link_unless_asked(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("hidden")
    source = tmp_path / "s"
    (source / "d").mkdir(parents=True)
    (source / "link").symlink_to(secret)
    (source / "file-link").symlink_to(secret / "key")
    (source / "d" / "loop").symlink_to("..")
    (source / "raw\udcff").write_text("r")
    (source / "dangling").symlink_to("nowhere")
    packer = Packer(source, follow_links=False)
    kinds = {entry.name: entry.kind for entry, _ in read_tar(packer.pieces())}
    assert kinds[b"link"] == kinds[b"file-link"] == kinds[b"d/loop"] == "symlink"
    assert b"raw\xff" in kinds
    assert b"hidden" not in b"".join(packer.pieces())
    follower = Packer(source, follow_links=True)
    kinds = {entry.name: entry.kind for entry, _ in read_tar(follower.pieces())}
    assert kinds[b"link/key"] == "file"
    assert kinds[b"file-link"] == "file"
    assert [skipped.path for skipped in follower.report.skipped] == ["d/loop/", "dangling"]


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    source = tmp_path / "s"
    for number in range(30):
        path = source / f"d{number % 4}" / f"{'long' * 30}-{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(number * 997))
        path.chmod(0o600 if number % 2 else 0o755)
    report = unpack_tree(Packer(source, follow_links=False).pieces(), tmp_path / "t", UnpackRules())
    assert report.files == 30
    for path in source.rglob("*"):
        copy = tmp_path / "t" / path.relative_to(source)
        assert copy.stat().st_mode == path.stat().st_mode
        if path.is_file():
            assert copy.read_bytes() == path.read_bytes()
            assert int(copy.stat().st_mtime) == int(path.stat().st_mtime)

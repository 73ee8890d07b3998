"""The mark and the digest of a disk: any change moves the one, any byte the other, and holes are as zeros."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from cpuos.node.storage.digest import digest_of, mark_of, only_moved

SIZE = 8 << 20


def go_on() -> bool:
    return True


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image"
    with path.open("wb") as file:
        file.truncate(SIZE)
        file.seek(3 << 20)
        file.write(random.Random(1).randbytes((1 << 20) + 5))
    return path


def test_a_changed_byte_moves_both_though_the_times_are_put_back(image: Path) -> None:
    mark, digest = mark_of([image]), digest_of([image], go_on=go_on)
    assert mark_of([image]) == mark
    status = image.stat()
    with image.open("r+b") as file:
        file.seek((4 << 20) + 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(image, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert mark_of([image]) != mark
    assert digest_of([image], go_on=go_on) != digest


def test_a_moved_one_is_told_from_a_changed_one(image: Path, tmp_path: Path) -> None:
    mark, folder = mark_of([image]), tmp_path / "other"
    folder.mkdir()
    shutil.copy2(image, folder / "image")
    assert only_moved(mark, mark_of([folder / "image"]))
    assert not only_moved(mark, mark)
    assert not only_moved(mark, "")
    with (folder / "image").open("r+b") as file:
        file.write(b"x")
    assert not only_moved(mark, mark_of([folder / "image"]))
    os.utime(image, ns=(1, image.stat().st_mtime_ns))  # in its place with its times: whatever that was, it was no move
    assert not only_moved(mark, mark_of([image]))


def test_a_copy_with_other_holes_has_the_same_digest(image: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    copy = folder / "image"
    copy.write_bytes(image.read_bytes())
    assert copy.stat().st_blocks > image.stat().st_blocks
    assert mark_of([copy]) != mark_of([image])
    assert digest_of([copy], go_on=go_on) == digest_of([image], go_on=go_on)


@pytest.mark.parametrize("where", [0, (1 << 20) - 1, SIZE - 1])
def test_a_byte_in_a_hole_counts(image: Path, where: int) -> None:
    digest = digest_of([image], go_on=go_on)
    with image.open("r+b") as file:
        file.seek(where)
        file.write(b"x")
    assert digest_of([image], go_on=go_on) != digest


def test_length_and_which_file_it_is_count(image: Path, tmp_path: Path) -> None:
    digest = digest_of([image], go_on=go_on)
    os.truncate(image, SIZE + (1 << 20))
    assert digest_of([image], go_on=go_on) != digest
    os.truncate(image, SIZE)
    assert digest_of([image], go_on=go_on) == digest
    other = image.rename(tmp_path / "root.image")
    assert digest_of([other], go_on=go_on) != digest


def test_it_is_given_up_when_asked(image: Path) -> None:
    asked = iter([True, False])
    assert digest_of([image], go_on=lambda: next(asked)) is None


def test_none_there_has_no_mark(tmp_path: Path) -> None:
    assert mark_of([tmp_path / "image", tmp_path / "root.image"]) == ""

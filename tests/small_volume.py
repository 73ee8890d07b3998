"""A small volume of its own for an instance, and a look at whether any disk on it has seen an error."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cpuos.settings import load_settings
from cpuos.testing.instance import Instance
from cpuos.testing.waiting import wait_until

__all__ = ["copies_bytes", "disks_see_no_error", "volume"]

VOLUME_MIB = 2048


@contextmanager
def volume(
    image: Path,
    place: Path,
    *,
    mib: int = VOLUME_MIB,
    templates: Sequence[str] = (),
    mkfs: Sequence[str] = ("mkfs.ext4", "-q", "-F", "-m", "0"),
) -> Iterator[None]:
    """At `place`, which is made for it, in the file `image`; so large beside the copies of these templates that a node
    makes there."""
    place.mkdir()
    with image.open("wb") as file:
        file.truncate((mib << 20) + copies_bytes(templates))
    subprocess.run([*mkfs, image], check=True)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    place.chmod(0o755)
    try:
        yield
    finally:
        wait_until(lambda: subprocess.run(["umount", place], stderr=subprocess.DEVNULL).returncode == 0)
        place.rmdir()
        image.parent.rmdir()


def copies_bytes(templates: Sequence[str]) -> int:
    """What the copies of these templates take on a volume where they do not lie."""
    images = [load_settings().template_dir / name / "root.erofs" for name in templates]
    return sum(path.stat().st_size + (8 << 20) for path in images)


@contextmanager
def disks_see_no_error(small: Instance) -> Iterator[None]:
    """Fails at its end where the kernel has said so meanwhile."""
    began = time.monotonic()
    yield
    said = subprocess.run(["dmesg", "--raw"], capture_output=True, text=True, check=True).stdout.splitlines()
    of_here = {f"loop{path.parts[3].removeprefix('loop')}" for path in _loops(small)}
    for line in said:
        at, _, text = line.partition("] ")
        if float(at.partition("[")[2] or 0) >= began - 1:
            assert not (
                "error" in text.lower() and any(f"{loop}," in text or f"({loop})" in text for loop in of_here)
            ), text
    for path in _loops(small):
        errors = Path(f"/sys/fs/ext4/{path.parts[3]}/errors_count")
        assert not errors.exists() or errors.read_text().strip() == "0"


def _loops(small: Instance) -> list[Path]:
    backing = Path("/sys/block").glob("loop*/loop/backing_file")
    return [path for path in backing if str(small.folder) in path.read_text()]

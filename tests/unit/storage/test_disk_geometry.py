"""The usable size of an image is the number asked for, or up to 5 % more."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from cpuos.node.storage.geometry import geometry_for

MKFS, DUMP = "/usr/sbin/mkfs.ext4", "/usr/sbin/dumpe2fs"
BLOCK = 4096


@pytest.mark.skipif(shutil.which(MKFS) is None, reason="needs e2fsprogs")
@pytest.mark.parametrize(
    "usable_mib", [64, 65, 100, 256, 511, 512, 1000, 1023, 1024, 2047, 2048, 8191, 8192, 16384, 65536]
)
def test_usable_size_is_the_number(tmp_path, usable_mib):
    geometry = geometry_for(usable_mib)
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(geometry.image_mib << 20)
    subprocess.run([MKFS, *geometry.mkfs_arguments(), str(image)], check=True, capture_output=True)
    text = subprocess.run([DUMP, "-h", str(image)], check=True, capture_output=True, text=True).stdout
    free, blocks = (int(re.search(rf"^{name}: +(\d+)$", text, re.M)[1]) for name in ("Free blocks", "Block count"))
    assert re.search(r"^Reserved block count: +0$", text, re.M)
    kept = min(blocks // 50, 4096)  # ext4 keeps these for itself while mounted
    available_mib = (free - kept) * BLOCK / (1 << 20)
    assert usable_mib * 1.001 <= available_mib <= usable_mib * 1.05
    assert image.stat().st_blocks * 512 < 4 << 20, "an empty image takes almost nothing"

"""The one thing mkfs.erofs cannot do: a fixed build time in the superblock while files keep their own times."""

from __future__ import annotations

import struct
from pathlib import Path

from cpuos.errors import SetupRequired

__all__ = ["stamp_image"]

# Linux fs/erofs/erofs_fs.h, struct erofs_super_block
_START = 1024
_MAGIC = 0xE0F5E1E2
_CHECKSUM_FEATURE = 0x1


def stamp_image(image: Path, epoch: int) -> None:
    """Set the build time of an EROFS image and renew its checksum."""
    with image.open("r+b") as file:
        file.seek(_START)
        head = file.read(16)
        magic, _, features = struct.unpack_from("<III", head)
        block_bits = head[12]
        if magic != _MAGIC:
            raise SetupRequired(f"cannot stamp {image}", "it is not an EROFS image", hint="cpuos doctor")
        file.seek(_START)
        block = bytearray(file.read((1 << block_bits) - _START))
        struct.pack_into("<QI", block, 24, epoch, 0)
        struct.pack_into("<I", block, 4, 0)
        if features & _CHECKSUM_FEATURE:
            struct.pack_into("<I", block, 4, _crc32c(bytes(block)))
        file.seek(_START)
        file.write(block)


def _crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), seeded with ones and not inverted at the end, as EROFS has it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc

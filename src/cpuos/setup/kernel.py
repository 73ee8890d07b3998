"""The guest's kernel: `vmlinux` out of the compressed file that a distribution ships, one file for both VMMs.

Linux Documentation/arch/x86/boot.rst: the setup header says where in the file the compressed kernel lies; its first
bytes say by what it was compressed, and its last four how long it is unpacked.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import struct
import subprocess
from pathlib import Path

from cpuos.errors import SetupRequired

__all__ = ["extract_kernel", "unpack_lz4", "unpack_zstd"]

_MAGIC_AT, _MAGIC = 0x202, b"HdrS"
_SETUP_SECTORS_AT, _PAYLOAD_AT = 0x1F1, 0x248
_SECTOR = 512
_ELF = b"\x7fELF"
_LZ4_LEGACY = b"\x02\x21\x4c\x18"
_MAX_BYTES = 256 << 20


def extract_kernel(boot_image: Path, target: Path) -> None:
    """Write the ELF file that is in a bzImage; one that is an ELF file already is copied."""
    data = boot_image.read_bytes()
    unpacked = data if data.startswith(_ELF) else _unpack(_payload(boot_image, data), boot_image)
    if not unpacked.startswith(_ELF):
        raise _unusable(boot_image, "what is compressed in it is no ELF file")
    partial = target.with_name(f".{target.name}.partial")
    partial.write_bytes(unpacked)
    partial.replace(target)


def unpack_lz4(data: bytes) -> bytes:
    """The legacy frame of lz4: a magic number, then blocks of at most 8 MiB, each behind its length."""
    out = bytearray()
    at = len(_LZ4_LEGACY)
    while at + 4 <= len(data):
        (length,) = struct.unpack_from("<I", data, at)
        at += 4
        if length == 0 or at + length > len(data):  # the kernel's own length field behind the last block
            break
        _unpack_block(memoryview(data)[at : at + length], out)
        at += length
    return bytes(out)


def _unpack_block(block: memoryview, out: bytearray) -> None:
    """One block: literals, then a copy of what came before, and again; the last has literals alone."""
    at, end = 0, len(block)
    while at < end:
        token = block[at]
        count, at = _length(block, at + 1, token >> 4)
        out += block[at : at + count]
        at += count
        if at >= end:
            return
        distance = block[at] | block[at + 1] << 8
        count, at = _length(block, at + 2, token & 15)
        _copy_back(out, distance, count + 4)


def _length(block: memoryview, at: int, value: int) -> tuple[int, int]:
    if value == 15:
        while True:
            more = block[at]
            at += 1
            value += more
            if more != 255:
                break
    return value, at


def _copy_back(out: bytearray, distance: int, count: int) -> None:
    start = len(out) - distance
    if distance == 0 or start < 0 or len(out) + count > _MAX_BYTES:
        raise ValueError("a copy reaches out of the data")
    if distance >= count:
        out += out[start : start + count]
    else:  # it overlaps itself: a pattern that repeats
        pattern = bytes(out[start:])
        out += (pattern * (count // distance + 1))[:count]


def _payload(boot_image: Path, data: bytes) -> bytes:
    if data[_MAGIC_AT : _MAGIC_AT + 4] != _MAGIC:
        raise _unusable(boot_image, "it is neither a bzImage nor an ELF file")
    offset, length = struct.unpack_from("<II", data, _PAYLOAD_AT)
    start = (data[_SETUP_SECTORS_AT] + 1) * _SECTOR + offset
    if length < 8 or start + length > len(data):
        raise _unusable(boot_image, "its header names a place outside of the file")
    return data[start : start + length]


def _unpack(payload: bytes, boot_image: Path) -> bytes:
    """The payload ends with the length of the kernel, which no decompressor but gzip's own takes for its data."""
    try:
        if payload.startswith(_LZ4_LEGACY):
            return unpack_lz4(payload[:-4])
        if payload.startswith(b"\x1f\x8b"):
            return gzip.decompress(payload)
        if payload.startswith(b"\xfd7zXZ\0"):
            return lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(payload, max_length=_MAX_BYTES)
        if payload.startswith(b"\x5d\0\0"):
            return lzma.LZMADecompressor(lzma.FORMAT_ALONE).decompress(payload, max_length=_MAX_BYTES)
        if payload.startswith(b"BZh"):
            return bz2.BZ2Decompressor().decompress(payload, max_length=_MAX_BYTES)
        if payload.startswith(b"\x28\xb5\x2f\xfd"):
            return unpack_zstd(payload[:-4])
    except (ValueError, IndexError, EOFError, OSError, lzma.LZMAError, subprocess.CalledProcessError) as error:
        raise _unusable(boot_image, f"its kernel cannot be unpacked: {error}") from error
    raise _unusable(boot_image, f"its kernel is compressed by something unknown ({payload[:4].hex()})")


def unpack_zstd(data: bytes) -> bytes:
    """By the program of that name."""
    if shutil.which("zstd") is None:
        raise SetupRequired(
            "cannot unpack the guest's kernel",
            "it or a module of it is compressed by zstd",
            hint="apt-get install --yes zstd",
        )
    return subprocess.run(["zstd", "--decompress", "--stdout"], input=data, capture_output=True, check=True).stdout


def _unusable(boot_image: Path, why: str) -> SetupRequired:
    return SetupRequired(f"cannot use kernel: {boot_image}", why, hint="cpuos setup microvm --help")

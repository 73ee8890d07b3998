"""Loop devices by ioctl: one call attaches an image, and the kernel lets go of it with the last mount."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from pathlib import Path

__all__ = ["attach_loop", "loops_below"]

# linux/loop.h
_LOOP_CONFIGURE = 0x4C0A
_LOOP_CTL_GET_FREE = 0x4C82
_LO_FLAGS_AUTOCLEAR = 4
_LOOP_MAJOR = 7
# struct loop_config: fd, block size, loop_info64 (five u64, four u32, names and key, two u64), eight reserved u64.
_CONFIG = struct.Struct("=II 5Q 4I 64s 64s 32s 2Q 8Q")
_TRIES = 64


def attach_loop(image: int) -> tuple[str, int]:
    """Attach the open image to a free loop device. Mount the device, then close the descriptor that comes with it."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            device = f"/dev/loop{number}"
            fd = _open_device(device, number)
            zeros = [0] * 5
            config = _CONFIG.pack(image, 4096, *zeros, 0, 0, 0, _LO_FLAGS_AUTOCLEAR, b"", b"", b"", 0, 0, *([0] * 8))
            try:
                fcntl.ioctl(fd, _LOOP_CONFIGURE, config)
                return device, fd
            except OSError as problem:
                os.close(fd)
                if problem.errno != errno.EBUSY:  # another took the same number: ask again
                    raise
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "no free loop device")


def loops_below(folder: Path) -> dict[str, Path]:
    """Loop devices whose image lies below `folder`: device name to image."""
    found = {}
    for entry in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            image = Path(entry.read_text().rstrip("\n"))
        except OSError:
            continue  # let go of in this moment
        if folder in image.parents:
            found[entry.parts[3]] = image
    return found


def _open_device(device: str, number: int) -> int:
    try:
        return os.open(device, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # No devtmpfs here: the kernel made the device, nobody made its node.
        try:
            os.mknod(device, 0o600 | stat.S_IFBLK, os.makedev(_LOOP_MAJOR, number))
        except FileExistsError:
            pass
        return os.open(device, os.O_RDWR | os.O_CLOEXEC)

"""How big an ext4 image must be for a number of usable mebibytes. Checked by tests from 64 MiB to 256 GiB."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Geometry", "geometry_for"]

_INODE_BYTES = 256
# ext4 keeps min(2 %, 4096 blocks) for its own emergencies, and f_bavail leaves them out (fs/ext4/super.c).
_KEPT_SHARE, _KEPT_MAX_MIB = 0.02, 16
# Block maps, descriptors, extents of fragmented files and folders: what a file's blocks are not.
_INDEX_SHARE = 0.004
_GROUP_SHARE = 0.0002


@dataclass(frozen=True, kw_only=True)
class Geometry:
    image_mib: int
    bytes_per_inode: int
    journal_mib: int

    def mkfs_arguments(self, *, owner: int = 1000) -> list[str]:
        """Arguments of mkfs.ext4 for an image of this geometry; lazy tables make it a matter of milliseconds."""
        return [
            *("-q", "-F", "-m", "0", "-b", "4096", "-I", str(_INODE_BYTES), "-i", str(self.bytes_per_inode)),
            *("-J", f"size={self.journal_mib}", "-O", "^resize_inode"),
            *("-E", f"lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner={owner}:{owner}"),
        ]


def geometry_for(usable_mib: int) -> Geometry:
    """The image that holds `usable_mib` of files, and at most 5 % more."""
    # Small disks get more inodes a byte: source trees are made of small files.
    bytes_per_inode = 8192 if usable_mib < 1024 else 16384
    journal_mib = next(size for size, below in ((4, 512), (8, 2048), (16, 8192), (32, 1 << 62)) if usable_mib < below)
    needed = usable_mib + max(1.0, usable_mib * _INDEX_SHARE) + journal_mib
    total = needed / (1 - _INODE_BYTES / bytes_per_inode - _GROUP_SHARE)
    total += min(_KEPT_SHARE * total, _KEPT_MAX_MIB + 0.2)
    return Geometry(image_mib=int(total) + 1, bytes_per_inode=bytes_per_inode, journal_mib=journal_mib)

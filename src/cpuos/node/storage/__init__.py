"""Disks of sandboxes: what lies on the data volume, and how it is mounted."""

from cpuos.node.storage.disks import DiskStore
from cpuos.node.storage.namespace import enter_mount_namespace, mount_alone, release_mount_namespace

__all__ = ["DiskStore", "enter_mount_namespace", "mount_alone", "release_mount_namespace"]

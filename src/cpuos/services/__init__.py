"""cpuOS on this machine: start, stop, look, remove. `up` starts a supervisor, which keeps node, server and gateway."""

from cpuos.services.control import Instance, Stopped, down, up
from cpuos.services.removal import Left, Removal, uninstall
from cpuos.services.report import InstanceStatus, PartStatus, status

__all__ = [
    "Instance",
    "InstanceStatus",
    "Left",
    "PartStatus",
    "Removal",
    "Stopped",
    "down",
    "status",
    "uninstall",
    "up",
]

"""Network of sandboxes: one slot each, a router namespace and a bare one."""

from cpuos.node.network.slots import NetworkSlots

__all__ = ["NetworkSlots"]

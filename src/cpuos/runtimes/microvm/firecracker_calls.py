"""What Firecracker is told, call by call: `docs/explanation/firecracker.md` has each beside the public description.

In the jail of every machine the same names mean the same things, so that a snapshot is taken up anywhere without an
override: `/boot`, `/drives/NAME`, the tap `lan`, `/snapshot` to write one, `/image` to read one from.
"""

from __future__ import annotations

from typing import Any

from cpuos.runtimes.base import DeviceRates
from cpuos.runtimes.microvm.firecracker_api import Call
from cpuos.runtimes.microvm.vmm import Drive, Machine

__all__ = [
    "MEMORY_FILE",
    "STATE_FILE",
    "TAP",
    "boot_calls",
    "describe_call",
    "drive_path",
    "load_call",
    "report_calls",
    "save_call",
    "state_call",
    "version_call",
]

TAP, INTERFACE = "lan", "eth0"
STATE_FILE, MEMORY_FILE = "state", "memory"
_SECOND_MS = 1000


def drive_path(name: str) -> str:
    return f"/drives/{name}"


def report_calls() -> list[Call]:
    """Where it writes of itself; before anything else, and after a load again: a snapshot does not hold it."""
    logger = {"log_path": "/log", "level": "Warning", "show_level": True, "show_log_origin": False}
    return [
        Call(method="PUT", path="/logger", body=logger),
        Call(method="PUT", path="/metrics", body={"metrics_path": "/metrics"}),
    ]


def boot_calls(machine: Machine, *, rates: DeviceRates) -> list[Call]:
    """The whole machine, then its start. What is not named here it does not get."""
    arguments = f"{_kernel_arguments(machine)} {machine.arguments}"
    if machine.drives:
        # As serial numbers the guest sees numbers of the files; it has to know the order.
        arguments += f" --drives {','.join(drive.name for drive in machine.drives)}"
    boot = {"kernel_image_path": machine.kernel, "initrd_path": machine.initrd, "boot_args": arguments}
    sizes = {"vcpu_count": machine.cpu, "mem_size_mib": machine.memory_mib, "smt": False, "track_dirty_pages": False}
    calls = [
        Call(method="PUT", path="/machine-config", body=sizes),
        Call(method="PUT", path="/boot-source", body=boot),
        *(_drive_call(drive, rates=rates) for drive in machine.drives),
    ]
    if machine.tap is not None:
        calls.append(_network_call(machine, rates=rates))
    calls += [
        Call(method="PUT", path="/entropy", body={}),
        Call(method="PUT", path="/actions", body={"action_type": "InstanceStart"}),
    ]
    return calls


def state_call(*, paused: bool) -> Call:
    return Call(method="PATCH", path="/vm", body={"state": "Paused" if paused else "Resumed"})


def save_call() -> Call:
    """Of a machine that is paused: all of its memory, and the state of its devices."""
    body = {
        "snapshot_type": "Full",
        "snapshot_path": f"/snapshot/{STATE_FILE}",
        "mem_file_path": f"/snapshot/{MEMORY_FILE}",
    }
    return Call(method="PUT", path="/snapshot/create", body=body)


def load_call() -> Call:
    """Memory from the file, by a private mapping: what the guest writes is its own. It stands still until told."""
    body = {
        "snapshot_path": f"/image/{STATE_FILE}",
        "mem_backend": {"backend_type": "File", "backend_path": f"/image/{MEMORY_FILE}"},
        "track_dirty_pages": False,
        "resume_vm": False,
    }
    return Call(method="PUT", path="/snapshot/load", body=body)


def describe_call() -> Call:
    return Call(method="GET", path="/")


def version_call() -> Call:
    return Call(method="GET", path="/version")


def _drive_call(drive: Drive, *, rates: DeviceRates) -> Call:
    body: dict[str, Any] = {
        "drive_id": drive.name,
        # The guest's root is what its first process mounts; a root device would be named on the kernel's command line.
        "is_root_device": False,
        "is_read_only": not drive.writable,
        "path_on_host": drive_path(drive.name),
        "io_engine": "Sync",
        # The default ignores the guest's flushes, and with them what it was promised to keep.
        "cache_type": "Writeback" if drive.writable else "Unsafe",
    }
    limiter = _limiter(megabytes=rates.disk_mib_per_s, operations=rates.disk_operations_per_s)
    return Call(method="PUT", path=f"/drives/{drive.name}", body=body | _named("rate_limiter", limiter))


def _network_call(machine: Machine, *, rates: DeviceRates) -> Call:
    body = {"iface_id": INTERFACE, "host_dev_name": TAP, "guest_mac": machine.guest_mac}
    limiter = _limiter(megabytes=rates.network_mib_per_s, operations=rates.network_packets_per_s)
    for way in ("rx_rate_limiter", "tx_rate_limiter"):
        body |= _named(way, limiter)
    return Call(method="PUT", path=f"/network-interfaces/{INTERFACE}", body=body)


def _limiter(*, megabytes: int, operations: int) -> dict[str, Any]:
    """Buckets that hold what a second gives; none where there is no limit."""
    buckets = {"bandwidth": megabytes << 20, "ops": operations}
    return {name: {"size": size, "refill_time": _SECOND_MS} for name, size in buckets.items() if size}


def _named(name: str, value: dict[str, Any]) -> dict[str, Any]:
    return {name: value} if value else {}


def _kernel_arguments(machine: Machine) -> str:
    """`reboot=k` resets by the keyboard controller, the one way that this machine has. Firecracker adds its own."""
    words = ["panic=-1", "reboot=k", "random.trust_cpu=on", "cryptomgr.notests", "ipv6.autoconf=0"]
    words += ["i8042.noaux", "i8042.nomux", "i8042.dumbkbd"]
    words.append("console=ttyS0" if machine.tells_console else "quiet 8250.nr_uarts=0")
    return " ".join(words)

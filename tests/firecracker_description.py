"""What Firecracker's public API description says of the calls that cpuOS makes: fields, types, which are required.

Restated from src/firecracker/swagger/firecracker.yaml of github.com/firecracker-microvm/firecracker (Apache-2.0), as of
version 1.17.0-dev, commit 004d935399ba6062240af269638635d54229f5bf; without its texts, and without what is not called.
A field that only a version newer than 1.14 knows is left out, so that using it fails here. Firecracker refuses a field
that it does not know; so does `problems_with`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["DEFINITIONS", "OPERATIONS", "problems_with"]

Field = Any
"""A type's name, the name of a definition, a tuple of allowed words, or a list of one of these."""

OPERATIONS: dict[str, str | None] = {
    "GET /": None,
    "GET /version": None,
    "PUT /actions": "InstanceActionInfo",
    "PUT /boot-source": "BootSource",
    "PUT /drives/{drive_id}": "Drive",
    "PUT /entropy": "EntropyDevice",
    "PUT /logger": "Logger",
    "PUT /machine-config": "MachineConfiguration",
    "PUT /metrics": "Metrics",
    "PUT /network-interfaces/{iface_id}": "NetworkInterface",
    "PUT /snapshot/create": "SnapshotCreateParams",
    "PUT /snapshot/load": "SnapshotLoadParams",
    "PATCH /vm": "Vm",
}

DEFINITIONS: dict[str, tuple[set[str], dict[str, Field]]] = {
    "InstanceActionInfo": (
        {"action_type"},
        {"action_type": ("FlushMetrics", "InstanceStart", "SendCtrlAltDel")},
    ),
    "BootSource": (
        {"kernel_image_path"},
        {"boot_args": "string", "initrd_path": "string", "kernel_image_path": "string"},
    ),
    "Drive": (
        # is_read_only and path_on_host: required of a drive that is a file, by their descriptions.
        {"drive_id", "is_root_device", "is_read_only", "path_on_host"},
        {
            "drive_id": "string",
            "partuuid": "string",
            "is_root_device": "boolean",
            "cache_type": ("Unsafe", "Writeback"),
            "is_read_only": "boolean",
            "path_on_host": "string",
            "rate_limiter": "RateLimiter",
            "io_engine": ("Sync", "Async"),
            "socket": "string",
        },
    ),
    "EntropyDevice": (set(), {"rate_limiter": "RateLimiter"}),
    "Logger": (
        set(),
        {
            "level": ("Error", "Warning", "Info", "Debug", "Trace", "Off"),
            "log_path": "string",
            "show_level": "boolean",
            "show_log_origin": "boolean",
            "module": "string",
        },
    ),
    "MachineConfiguration": (
        {"mem_size_mib", "vcpu_count"},
        {
            "cpu_template": ("C3", "T2", "T2S", "T2CL", "T2A", "V1N1", "None"),
            "smt": "boolean",
            "mem_size_mib": "integer",
            "track_dirty_pages": "boolean",
            "vcpu_count": "integer",
            "huge_pages": ("None", "2M"),
        },
    ),
    "MemoryBackend": (
        {"backend_type", "backend_path"},
        {"backend_type": ("File", "Uffd"), "backend_path": "string"},
    ),
    "Metrics": ({"metrics_path"}, {"metrics_path": "string"}),
    "NetworkInterface": (
        {"host_dev_name", "iface_id"},
        {
            "guest_mac": "string",
            "host_dev_name": "string",
            "iface_id": "string",
            "rx_rate_limiter": "RateLimiter",
            "tx_rate_limiter": "RateLimiter",
        },
    ),
    "RateLimiter": (set(), {"bandwidth": "TokenBucket", "ops": "TokenBucket"}),
    "SnapshotCreateParams": (
        {"mem_file_path", "snapshot_path"},
        {"mem_file_path": "string", "snapshot_path": "string", "snapshot_type": ("Full", "Diff")},
    ),
    "SnapshotLoadParams": (
        # mem_backend: exactly one of it and the deprecated mem_file_path.
        {"snapshot_path", "mem_backend"},
        {
            "snapshot_path": "string",
            "mem_backend": "MemoryBackend",
            "track_dirty_pages": "boolean",
            "resume_vm": "boolean",
            "network_overrides": ["NetworkOverride"],
        },
    ),
    "TokenBucket": (
        {"refill_time", "size"},
        {"one_time_burst": "integer", "refill_time": "integer", "size": "integer"},
    ),
    "Vm": ({"state"}, {"state": ("Paused", "Resumed")}),
}

_TYPES: dict[str, type] = {"string": str, "integer": int, "boolean": bool}


def problems_with(operation: str, body: object) -> list[str]:
    """What of this request the description does not allow."""
    method, path = operation.split(" ")
    parts = path.split("/")
    name = {"drives": "drive_id", "network-interfaces": "iface_id"}.get(parts[1])
    if name and len(parts) == 3:
        operation = f"{method} /{parts[1]}/{{{name}}}"
        if not isinstance(body, dict) or body.get(name) != parts[2]:
            return [f"{operation}: {name} is not that of the path"]
    if operation not in OPERATIONS:
        return [f"{operation}: no such operation"]
    wanted = OPERATIONS[operation]
    if wanted is None:
        return [] if body is None else [f"{operation}: takes no body"]
    return [f"{operation}: {problem}" for problem in _problems(wanted, body, at="body")]


def _problems(kind: Field, value: object, *, at: str) -> list[str]:
    if isinstance(kind, tuple):
        return [] if value in kind else [f"{at} is {value!r}, none of {kind}"]
    if isinstance(kind, list):
        if not isinstance(value, list):
            return [f"{at} is no list"]
        return [problem for each in value for problem in _problems(kind[0], each, at=at)]
    if kind in _TYPES:
        fits = type(value) is _TYPES[kind] and (kind != "integer" or value >= 0)  # type: ignore[operator]
        return [] if fits else [f"{at} is {value!r}, no {kind}"]
    required, fields = DEFINITIONS[kind]
    if not isinstance(value, dict):
        return [f"{at} is no object"]
    found = [f"{at} lacks {name}" for name in sorted(required - value.keys())]
    found += [f"{at} has {name}, which is not known" for name in sorted(value.keys() - fields.keys())]
    for name in fields.keys() & value.keys():
        found += _problems(fields[name], value[name], at=f"{at}.{name}")
    return found

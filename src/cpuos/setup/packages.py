"""System packages, by apt-get; only what is missing."""

from __future__ import annotations

from cpuos.setup.host import Host

__all__ = ["SYSTEM_PACKAGES", "install_packages", "missing_packages"]

SYSTEM_PACKAGES = {
    "ca-certificates": "certificates for downloads",
    "e2fsprogs": "mkfs.ext4 for sandboxes' disks",
    "erofs-utils": "mkfs.erofs for templates",
    "gcc": "builds gVisor's start-up helper",
    "iproute2": "network namespaces",
    "libc6-dev": "builds gVisor's start-up helper",
    "mmdebstrap": "builds templates",
    "mount": "sandboxes' disks",
    "nftables": "network rules",
    "procps": "process tools",
    "python3": "the interpreter that the daemons run on",
    "skopeo": "fetches images that become templates",
    "umoci": "unpacks them",
    "util-linux": "setpriv, losetup",
}
"""Package to what it is for."""


def missing_packages(host: Host) -> list[str]:
    """The system packages that are not installed."""
    states: dict[str, str] = {}
    # dpkg-query fails when it does not know one of the names, so ask for all.
    listing = host.read(["dpkg-query", "--show", "--showformat", "${Package} ${db:Status-Status}\n"]) or ""
    for line in listing.splitlines():
        name, _, state = line.partition(" ")
        states[name] = state
    return [name for name in SYSTEM_PACKAGES if states.get(name) != "installed"]


def install_packages(host: Host) -> None:
    """Install what is missing."""
    wait = ["-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3"]
    host.run(["apt-get", *wait, "update"], network=True, contained=False)
    host.run(
        ["apt-get", *wait, "install", "--yes", "--no-install-recommends", *missing_packages(host)],
        network=True,
        contained=False,
    )

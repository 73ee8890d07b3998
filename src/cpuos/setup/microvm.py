"""What microVMs are started from: QEMU, and the guest's kernel with a first root that holds modules and the agent.

    microvm/vmlinux  microvm/initrd  microvm/manifest.json      in the data directory

Kernel and modules are of the distribution's cloud kernel package, which is unpacked and not installed. What differs
between distributions stands in this file alone.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import lzma
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cpuos.errors import SetupRequired
from cpuos.setup import initrd
from cpuos.setup.agent import agent_is_current
from cpuos.setup.engine import Step
from cpuos.setup.firecracker import firecracker_step
from cpuos.setup.host import Host
from cpuos.setup.kernel import extract_kernel, unpack_zstd

if TYPE_CHECKING:
    from cpuos.runtimes.microvm.probe import Prober

__all__ = ["QEMU", "KernelSource", "build_image", "image_is_current", "microvm_steps", "module_order"]

QEMU = Path("/usr/bin/qemu-system-x86_64")
_QEMU_PACKAGES = ("qemu-system-x86",)
# Debian's and Ubuntu's names of packages that only depend on the newest kernel for virtual machines.
_KERNEL_PACKAGES = {"debian": "linux-image-cloud-amd64", "ubuntu": "linux-image-virtual"}
# Programs that unpack these, by package. Ubuntu compresses kernel and modules by zstd.
_KERNEL_TOOLS = {"ubuntu": {"zstd": "zstd"}}
_MODULES = ("virtio_mmio", "virtio_blk", "virtio_net", "virtio_rng", "erofs", "overlay")
_MODULE_FOLDERS = ("lib/modules", "usr/lib/modules")
_FOLDERS = ("dev", "proc", "sys", "lower", "upper", "new", "modules")
_APT = ("-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3")
_FORMAT = 1


class KernelSource:
    """Where the kernel comes from: the distribution, or a file with the folder of its modules."""

    def __init__(self, *, kernel: Path | None = None, modules: Path | None = None) -> None:
        self.kernel = kernel
        self.modules = modules

    @property
    def name(self) -> str:
        return str(self.kernel) if self.kernel else "distribution"


def microvm_steps(source: KernelSource, *, firecracker: str = "") -> list[Step]:
    """After the steps that every machine needs: the agent is one of them. `firecracker`: where its archive is, if it is
    wanted."""
    return [
        *([firecracker_step(firecracker)] if firecracker else []),
        Step(
            name="qemu",
            plan="installs QEMU by apt-get",
            is_done=lambda host: QEMU.exists(),
            run=_install_qemu,
            download_mib=17,
            disk_mib=84,
            duration_s=15,
        ),
        Step(
            name="guest kernel",
            plan="unpacks the distribution's cloud kernel, which is not installed here",
            is_done=partial(_kernel_is_there, source=source),
            run=partial(_fetch_kernel, source=source),
            download_mib=0 if source.kernel else 28,
            disk_mib=110,
            duration_s=15,
        ),
        Step(
            name="microvm image",
            plan="makes what microVMs start from: kernel, modules, agent",
            is_done=partial(image_is_current, source=source),
            run=partial(build_image, source=source),
            disk_mib=60,
            duration_s=5,
        ),
        Step(
            name="microvm probe",
            plan="boots a guest with KVM, and without, and keeps what was seen",
            is_done=partial(_is_probed, source=source),
            run=_probe,
            duration_s=10,
        ),
    ]


def image_is_current(host: Host, *, source: KernelSource) -> bool:
    """Whether kernel and initrd are as the manifest says, and made of this agent."""
    manifest = _read_manifest(host)
    if not agent_is_current(host):
        return False  # its step comes first, and then this one has to
    if manifest.get("format") != _FORMAT or manifest.get("source") != source.name:
        return False
    folder = host.settings.microvm_dir
    try:
        if manifest["agent"] != _digest(host.settings.agent_path):
            return False
        return all(manifest[name] == _digest(folder / name) for name in ("vmlinux", "initrd"))
    except OSError:
        return False


def build_image(host: Host, *, source: KernelSource) -> None:
    """Write `vmlinux` and `initrd`, and last the manifest with their digests."""
    folder = host.settings.microvm_dir
    folder.mkdir(parents=True, exist_ok=True)
    boot_image, modules = _unpacked(host, source)
    (folder / "manifest.json").unlink(missing_ok=True)
    extract_kernel(boot_image, folder / "vmlinux")
    data = initrd.pack(list(_entries(modules, agent=host.settings.agent_path)))
    (folder / "initrd.partial").write_bytes(data)
    (folder / "initrd.partial").replace(folder / "initrd")
    manifest = {
        "format": _FORMAT,
        "source": source.name,
        "kernel": boot_image.name,
        "agent": _digest(host.settings.agent_path),
        "vmlinux": _digest(folder / "vmlinux"),
        "initrd": _digest(folder / "initrd"),
    }
    partial_manifest = folder / "manifest.json.partial"
    partial_manifest.write_text(json.dumps(manifest, indent=1))
    partial_manifest.replace(folder / "manifest.json")


def module_order(folder: Path, wanted: tuple[str, ...] = _MODULES) -> list[Path]:
    """The modules with all that they need, each behind what it needs. One that the kernel has built in is left out."""
    there, inside = _modules(folder), _built_in(folder)
    found: list[Path] = []

    def add(name: str) -> None:
        path = there.get(name)
        if path is None:
            if name in inside:
                return
            raise SetupRequired(
                f"cannot use the guest's kernel: it has no module {name}",
                f"neither below {folder} nor built in",
                hint="cpuos setup microvm --help",
            )
        for needed in _depends(_module_bytes(path)):
            add(needed)
        if path not in found:
            found.append(path)

    for name in wanted:
        add(name)
    return found


def _entries(modules: Path | None, *, agent: Path) -> Iterator[initrd.Entry]:
    order = module_order(modules) if modules is not None else []
    yield from map(initrd.folder, _FOLDERS)
    # Until it has mounted its own the agent has only these; Go wants three open descriptors.
    yield initrd.device("dev/null", major=1, minor=3)
    yield initrd.device("dev/console", major=5, minor=1)
    names = [f"{_module_name(path)}.ko" for path in order]
    yield initrd.file("modules/order", "\n".join(names).encode())
    for name, path in zip(names, order, strict=True):
        yield initrd.file(f"modules/{name}", _module_bytes(path))
    yield initrd.file("init", agent.read_bytes(), executable=True)


def _prober(host: Host, folder: Path, *, fresh: bool = False) -> Prober:
    from cpuos.runtimes.microvm.probe import KEPT, Prober, candidates

    image, settings = host.settings.microvm_dir, host.settings
    vmms = candidates(settings.vmm_programs, rates=settings.device_rates)
    return Prober(image, kept=image / KEPT, folder=folder, vmms=vmms, fresh=fresh)


def _is_probed(host: Host, *, source: KernelSource) -> bool:
    if not image_is_current(host, source=source):
        return False
    try:
        return _prober(host, Path("/nonexistent")).is_known()
    except SetupRequired:
        return False


def _probe(host: Host) -> None:
    """What works here is no matter of set-up's success: the doctor tells it."""
    with tempfile.TemporaryDirectory(prefix="cpuos-probe-") as folder:
        for finding in asyncio.run(_prober(host, Path(folder), fresh=True).findings()):
            host.note(f"{finding.vmm}, {'kvm' if finding.kvm else 'tcg'}: {finding.evidence}")


def _install_qemu(host: Host) -> None:
    host.run(["apt-get", *_APT, "update"], network=True, contained=False)
    install = ["apt-get", *_APT, "install", "--yes", "--no-install-recommends", *_QEMU_PACKAGES]
    host.run(install, network=True, contained=False)


def _kernel_is_there(host: Host, *, source: KernelSource) -> bool:
    if image_is_current(host, source=source):
        return True  # what it was made of may be gone from the cache
    try:
        _unpacked(host, source)
    except SetupRequired:
        return False
    return True


def _fetch_kernel(host: Host, *, source: KernelSource) -> None:
    """Download the package and unpack what is needed of it, without installing anything."""
    if source.kernel is not None:
        _unpacked(host, source)
        return
    if platform.machine() != "x86_64":
        raise SetupRequired(f"cannot make a guest kernel for {platform.machine()}", "microVMs are for x86_64 so far")
    distribution = platform.freedesktop_os_release().get("ID", "")
    meta = _KERNEL_PACKAGES.get(distribution)
    if meta is None:
        raise SetupRequired(
            f"cannot find a kernel for guests on {distribution or 'this system'}",
            f"known are {', '.join(sorted(_KERNEL_PACKAGES))}",
            hint="cpuos setup microvm --kernel FILE --modules FOLDER",
        )
    work = _work(host)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    work.chmod(0o755)
    host.run(["apt-get", *_APT, "update"], network=True, contained=False)
    tools = _KERNEL_TOOLS.get(distribution, {})
    if lacking := [package for package, program in tools.items() if shutil.which(program) is None]:
        install = ["apt-get", *_APT, "install", "--yes", "--no-install-recommends", *lacking]
        host.run(install, network=True, contained=False)
    image, *others = _packages_behind(host, meta)
    _unpack_packages(host, [image, *others])
    extra = image.replace("linux-image-", "linux-modules-extra-", 1)
    if _lacking_modules(work / "unpacked") and _is_known(host, extra):
        _unpack_packages(host, [extra])
    for unneeded in ("usr/share", "usr/src"):
        shutil.rmtree(work / "unpacked" / unneeded, ignore_errors=True)
    (work / "complete").touch()


def _unpack_packages(host: Host, packages: list[str]) -> None:
    work = _work(host)
    host.run(["apt-get", *_APT, "-o", "APT::Sandbox::User=root", "download", *packages], cwd=work, network=True)
    for package in sorted(work.glob("*.deb")):
        host.run(["dpkg-deb", "--extract", package, work / "unpacked"])
        package.unlink()


def _lacking_modules(root: Path) -> set[str]:
    """What guests need and this kernel's modules do not have: Ubuntu keeps some, EROFS among them, in a package of
    their own."""
    folders = [path for place in _MODULE_FOLDERS for path in (root / place).glob("*")]
    return set(_MODULES) - {name for folder in folders for name in (*_modules(folder), *_built_in(folder))}


def _packages_behind(host: Host, meta: str) -> list[str]:
    """The package with the kernel itself, and where there is one that with its modules."""
    listed = host.read(["apt-cache", "depends", "--no-recommends", "--no-suggests", meta]) or ""
    images = re.findall(r"Depends: (linux-image-\S+)", listed)
    if not images:
        raise SetupRequired(f"cannot find a kernel for guests: {meta} names none", hint="apt-get update")
    modules = images[0].replace("linux-image-", "linux-modules-", 1)
    return [images[0], *([modules] if _is_known(host, modules) else [])]


def _is_known(host: Host, package: str) -> bool:
    return bool(host.read(["apt-cache", "show", "--no-all-versions", package]))


def _unpacked(host: Host, source: KernelSource) -> tuple[Path, Path | None]:
    """The kernel's file and the folder of its modules."""
    if source.kernel is not None:
        if not source.kernel.is_file():
            raise SetupRequired(f"cannot use kernel: {source.kernel}", "there is no such file")
        return source.kernel, source.modules
    root = _work(host) / "unpacked"
    kernels = sorted((root / "boot").glob("vmlinuz-*"))
    modules = [path for place in _MODULE_FOLDERS for path in (root / place).glob("*")]
    if not (_work(host) / "complete").exists() or not kernels or not modules:
        raise SetupRequired("cannot find the guest's kernel", "it was not unpacked yet", hint="cpuos setup microvm")
    return kernels[-1], modules[0]


def _work(host: Host) -> Path:
    return host.settings.cache_dir / "guest-kernel"


def _read_manifest(host: Host) -> dict[str, object]:
    try:
        return dict(json.loads((host.settings.microvm_dir / "manifest.json").read_text()))
    except (OSError, ValueError):
        return {}


def _digest(path: Path) -> str:
    with path.open("rb") as data:
        return "sha256:" + hashlib.file_digest(data, "sha256").hexdigest()


def _module_name(path: Path) -> str:
    return path.name.split(".ko")[0].replace("-", "_")


def _modules(folder: Path) -> dict[str, Path]:
    return {_module_name(path): path for path in sorted(folder.rglob("*.ko*"))}


def _built_in(folder: Path) -> set[str]:
    listed = folder / "modules.builtin"
    return {_module_name(Path(line)) for line in listed.read_text().split()} if listed.exists() else set()


def _module_bytes(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    if path.suffix == ".gz":
        return gzip.decompress(data)
    if path.suffix == ".zst":
        return unpack_zstd(data)
    return data


def _depends(module: bytes) -> list[str]:
    """What its `modinfo` section says it needs."""
    found = re.search(rb"(?:^|\0)depends=([^\0]*)\0", module)
    return [name.replace("-", "_") for name in found[1].decode().split(",") if name] if found else []

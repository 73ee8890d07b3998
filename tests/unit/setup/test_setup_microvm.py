"""What microVMs start from: the kernel out of its compressed file, modules in order, the archive of the first root."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cpuos.cli.main import main
from cpuos.errors import SetupRequired
from cpuos.settings import Settings, load_settings
from cpuos.setup import initrd
from cpuos.setup.host import Host
from cpuos.setup.kernel import extract_kernel, unpack_lz4
from cpuos.setup.microvm import KernelSource, build_image, image_is_current, microvm_steps, module_order

KERNEL = (
    b"\x7fELF"
    + b"".join(bytes([number % 7]) * (number % 300) for number in range(2000))
    + random.Random(1).randbytes(5000)
)


def _boot_image(payload: bytes, *, sectors: int = 4) -> bytes:
    data = bytearray((sectors + 1) * 512 + 100)
    data[0x1F1] = sectors
    data[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", data, 0x248, 100, len(payload))
    return bytes(data) + payload + b"what lies behind it"


def _lz4(data: bytes) -> bytes:
    """Blocks of literals alone are what the format allows at its simplest; `lz4` itself makes the others."""
    if shutil.which("lz4"):
        return subprocess.run(["lz4", "-l", "-c"], input=data, capture_output=True, check=True).stdout
    out = bytearray(b"\x02\x21\x4c\x18")
    count, left = bytearray(b"\xf0"), len(data) - 15
    while left >= 255:
        count.append(255)
        left -= 255
    count.append(left)
    return bytes(out + struct.pack("<I", len(count) + len(data)) + count + data)


def _alone(data: bytes) -> bytes:
    return lzma.compress(data, format=lzma.FORMAT_ALONE)


def _zstd(data: bytes) -> bytes:
    if shutil.which("zstd") is None:
        pytest.skip("no zstd here")
    return subprocess.run(["zstd", "--stdout"], input=data, capture_output=True, check=True).stdout


@pytest.mark.parametrize("compress", [_lz4, gzip.compress, lzma.compress, _alone, bz2.compress, _zstd])
def test_the_kernel_comes_out_as_it_went_in(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    payload = compress(KERNEL)
    if compress is not gzip.compress:  # gzip has the length itself
        payload += struct.pack("<I", len(KERNEL))
    (tmp_path / "vmlinuz").write_bytes(_boot_image(payload))
    extract_kernel(tmp_path / "vmlinuz", tmp_path / "vmlinux")
    assert (tmp_path / "vmlinux").read_bytes() == KERNEL


def test_copies_of_lz4_that_overlap_themselves() -> None:
    # Four literals, then a copy of 15 + 4 + 5 bytes from three bytes back, then literals to the end.
    block = b"\x4fabcd" + struct.pack("<H", 3) + b"\x05" + b"\x20xy"
    frame = b"\x02\x21\x4c\x18" + struct.pack("<I", len(block)) + block
    assert unpack_lz4(frame) == b"abcd" + b"bcd" * 8 + b"xy"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"MZ" + bytes(2000), "neither a bzImage nor an ELF file"),
        (_boot_image(b"????" + bytes(100)), "something unknown"),
        (_boot_image(gzip.compress(b"not a kernel")), "no ELF file"),
        (_boot_image(gzip.compress(KERNEL)[:-200]), "cannot be unpacked"),
        (_boot_image(b"\x02\x21\x4c\x18" + struct.pack("<I", 4) + b"\x10a\x09\x00" + bytes(4)), "cannot be unpacked"),
        (_boot_image(gzip.compress(KERNEL))[:1000] + bytes(1600), "no ELF file|names a place|something unknown"),
    ],
)
def test_what_is_no_kernel_is_refused(tmp_path: Path, data: bytes, why: str) -> None:
    (tmp_path / "vmlinuz").write_bytes(data)
    with pytest.raises(SetupRequired, match=why):
        extract_kernel(tmp_path / "vmlinuz", tmp_path / "vmlinux")
    assert not (tmp_path / "vmlinux").exists()


def _module(folder: Path, name: str, *depends: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = f"license=GPL\0depends={','.join(depends)}\0retpoline=Y\0".encode()
    (folder / name).write_bytes(b"\x7fELF" + bytes(20) + text)


def test_modules_come_behind_what_they_need(tmp_path: Path) -> None:
    _module(tmp_path / "drivers", "virtio_net.ko", "net_failover", "virtio-ring")
    _module(tmp_path / "drivers", "virtio-ring.ko")
    _module(tmp_path / "net", "net_failover.ko", "failover")
    _module(tmp_path / "net", "failover.ko")
    (tmp_path / "modules.builtin").write_text("kernel/fs/overlayfs/overlay.ko\n")
    found = [path.name for path in module_order(tmp_path, ("virtio_net", "overlay"))]
    assert found == ["failover.ko", "net_failover.ko", "virtio-ring.ko", "virtio_net.ko"]
    with pytest.raises(SetupRequired, match="no module erofs"):
        module_order(tmp_path, ("erofs",))


def test_the_archive_is_what_cpio_reads(tmp_path: Path) -> None:
    entries = [
        initrd.folder("dev"),
        initrd.device("dev/null", major=1, minor=3),
        initrd.file("init", b"#!program", executable=True),
        initrd.file("empty", b""),
    ]
    data = initrd.pack(entries)
    assert data == initrd.pack(entries)
    if shutil.which("cpio") is None:
        pytest.skip("no cpio here to read it with")
    listed = subprocess.run(["cpio", "--list", "--verbose", "--quiet"], input=data, capture_output=True, check=True)
    lines = listed.stdout.decode().splitlines()
    assert [line.split()[0] for line in lines] == ["drwxr-xr-x", "crw-------", "-rwxr-xr-x", "-rw-r--r--"]
    assert [line.split()[-1] for line in lines] == ["dev", "dev/null", "init", "empty"]


def test_an_image_is_current_until_one_of_its_parts_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuos.setup.agent.source_tree", lambda: None)  # as an installed package: no agent to build
    settings = load_settings(data_dir=tmp_path / "data")
    host = Host(settings, log=io.StringIO())
    settings.agent_dir.mkdir(parents=True)
    settings.agent_path.write_bytes(b"agent one")
    (tmp_path / "vmlinuz").write_bytes(_boot_image(gzip.compress(KERNEL)))
    for name in ("virtio_mmio", "virtio_blk", "virtio_net", "virtio_rng", "erofs", "overlay"):
        _module(tmp_path / "modules", f"{name}.ko")
    source = KernelSource(kernel=tmp_path / "vmlinuz", modules=tmp_path / "modules")
    assert not image_is_current(host, source=source)
    build_image(host, source=source)
    assert image_is_current(host, source=source)
    assert b"agent one" in (settings.microvm_dir / "initrd").read_bytes()
    assert not image_is_current(host, source=KernelSource())
    settings.agent_path.write_bytes(b"agent two")
    assert not image_is_current(host, source=source)
    build_image(host, source=source)
    (settings.microvm_dir / "vmlinux").write_bytes(b"another")
    assert not image_is_current(host, source=source)


def test_what_is_set_up_beside_the_rest_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["setup", "firecracker"]) != 0
    assert "microvm and storage" in capsys.readouterr().err


class _Archive(Host):
    """A host whose apt has these packages: name to the modules in it."""

    def __init__(self, settings: Settings, packages: dict[str, tuple[str, ...]]) -> None:
        super().__init__(settings, log=io.StringIO())
        self.packages = packages
        self.ran: list[list[str]] = []

    def run(self, argv: Sequence[str | Path], *, cwd: Path | None = None, **_: object) -> None:
        words = [str(word) for word in argv]
        self.ran.append(words)
        if words[0] == "apt-get" and "download" in words:
            for name in words[words.index("download") + 1 :]:
                (cwd / f"{name}.deb").touch()
        elif words[0] == "dpkg-deb":
            package, target = Path(words[2]).stem, Path(words[3])
            for module in self.packages[package]:
                _module(target / "lib/modules/6.8.0-31-generic/kernel", module)
            if package.startswith("linux-image-"):
                (target / "boot").mkdir(parents=True)
                (target / "boot/vmlinuz-6.8.0-31-generic").write_bytes(b"kernel")

    def read(self, argv: Sequence[str | Path], **_: object) -> str | None:
        if argv[1] == "depends":
            return f"{argv[-1]}\n  Depends: linux-image-6.8.0-31-generic\n"
        return "Package: it" if argv[-1] in self.packages else None


IMAGE, MODULES, EXTRA = (f"linux-{part}-6.8.0-31-generic" for part in ("image", "modules", "modules-extra"))
MOST = ("virtio_mmio.ko.zst", "virtio_blk.ko.zst", "virtio_net.ko.zst", "virtio_rng.ko.zst", "overlay.ko.zst")


@pytest.mark.parametrize(
    ("distribution", "packages", "fetched"),
    [
        pytest.param(
            "ubuntu", {IMAGE: (), MODULES: MOST, EXTRA: ("erofs.ko.zst",)}, {IMAGE, MODULES, EXTRA}, id="apart"
        ),
        pytest.param(
            "ubuntu", {IMAGE: (), MODULES: (*MOST, "erofs.ko.zst"), EXTRA: ()}, {IMAGE, MODULES}, id="together"
        ),
        pytest.param("debian", {IMAGE: (*MOST, "erofs.ko")}, {IMAGE}, id="with the kernel"),
        pytest.param("debian", {IMAGE: MOST}, {IMAGE}, id="nowhere"),
    ],
)
def test_modules_are_fetched_from_the_packages_that_hold_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    distribution: str,
    packages: dict[str, tuple[str, ...]],
    fetched: set[str],
) -> None:
    """Ubuntu's kernels for virtual machines come without EROFS; a package of more modules has it."""
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: {"ID": distribution})
    host = _Archive(load_settings(data_dir=tmp_path / "data"), packages)
    (step,) = [step for step in microvm_steps(KernelSource()) if step.name == "guest kernel"]
    step.run(host)
    downloads = [words[words.index("download") + 1 :] for words in host.ran if "download" in words]
    assert {name for words in downloads for name in words} == fetched


@pytest.mark.parametrize(
    ("distribution", "there", "installed"),
    [("ubuntu", False, [["zstd"]]), ("ubuntu", True, []), ("debian", False, [])],
)
def test_what_unpacks_the_kernel_is_installed_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distribution: str, there: bool, installed: list[list[str]]
) -> None:
    """Ubuntu compresses kernel and modules by zstd, and a minimal one has no such program."""
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: {"ID": distribution})
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if there else None)
    host = _Archive(load_settings(data_dir=tmp_path / "data"), {IMAGE: (*MOST, "erofs.ko")})
    (step,) = [step for step in microvm_steps(KernelSource()) if step.name == "guest kernel"]
    step.run(host)
    found = [words[words.index("--no-install-recommends") + 1 :] for words in host.ran if "install" in words]
    assert found == installed


def test_a_module_that_nothing_here_unpacks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "erofs.ko.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(SetupRequired, match="compressed by zstd") as told:
        module_order(tmp_path, ("erofs",))
    assert told.value.hint == "apt-get install --yes zstd"

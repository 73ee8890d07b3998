"""Proof of what a host can do: a machine is booted, and the word of the program inside is waited for.

An open /dev/kvm proves nothing, nor does a VMM that says its machine runs. What was found is kept with what it was
found on, and asked again when host, VMM or guest image are others.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
import secrets
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cpuos.errors import CpuosError, SetupRequired
from cpuos.runtimes.base import DeviceRates, Probe
from cpuos.runtimes.descriptors import is_readable
from cpuos.runtimes.microvm.firecracker import Firecracker
from cpuos.runtimes.microvm.image import GuestImage, find_image
from cpuos.runtimes.microvm.launch import CONTROL, Launch, user_for
from cpuos.runtimes.microvm.qemu import Qemu
from cpuos.runtimes.microvm.vmm import Machine, Vmm
from cpuos.types.sandbox import Isolation

__all__ = ["KEPT", "Finding", "Prober", "candidates"]

KEPT = "probe.json"
KVM_BOOT_S, EMULATED_BOOT_S = 10.0, 45.0
_MEMORY_MIB = 256
_MAX_SAID = 256 << 10


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What became of one candidate."""

    vmm: str
    kvm: bool
    works: bool
    evidence: str
    """What was seen: the word of the guest, or what came instead of it."""
    timed_out: bool = False
    """Nothing came in time, which on a host that is busy says little."""


def candidates(programs: Mapping[str, Path] | None = None, *, rates: Mapping[str, int] | None = None) -> list[Vmm]:
    """The strongest first: Firecracker, where its programs are known; then QEMU, with KVM and without."""
    found: list[Vmm] = []
    if os.path.exists("/dev/kvm"):
        named = programs or {}
        if {"firecracker", "jailer"} <= named.keys():
            own = DeviceRates(**(rates or {}))
            found.append(Firecracker(program=named["firecracker"], jailer=named["jailer"], rates=own))
        found.append(Qemu(kvm=True))
    return [*found, Qemu(kvm=False)]


class Prober:
    """Looks once, and remembers."""

    def __init__(
        self, image_dir: Path, *, kept: Path, folder: Path, vmms: Sequence[Vmm] | None = None, fresh: bool = False
    ) -> None:
        """`kept`: where findings are kept, beside those that set-up has made; `fresh`: do not believe either."""
        self._image_dir = image_dir
        self._kept = kept
        self._folder = folder
        self._vmms = candidates() if vmms is None else list(vmms)
        self._fresh = fresh
        self._asking = asyncio.Lock()
        self._found: tuple[str, list[Finding]] | None = None

    @property
    def seen(self) -> list[Finding]:
        """What was found so far."""
        return self._found[1] if self._found is not None else []

    async def probe(self) -> Probe:
        """The strongest that a guest has answered from."""
        try:
            findings = await self.findings()
            vmm, finding = self._best(findings)
        except CpuosError as problem:
            reason = f"{problem.why or problem.what}; run `{problem.hint or 'cpuos doctor'}`"
            return Probe(available=False, isolation=Isolation.EMULATED, detail="", reason=reason)
        level = Isolation.MICROVM if finding.kvm else Isolation.EMULATED
        return Probe(available=True, isolation=level, detail=f"{vmm.name} {_version(vmm)} {_way(vmm.kvm)}")

    async def vmm(self) -> Vmm:
        """The one to use."""
        return self._best(await self.findings())[0]

    def named(self, name: str) -> Vmm | None:
        """The one of this name, whatever was found of it: one that runs was begun by it."""
        return next((vmm for vmm in self._vmms if vmm.name == name), None)

    async def findings(self) -> list[Finding]:
        """Of all candidates up to the first that works."""
        async with self._asking:
            image = find_image(self._image_dir)
            if os.geteuid() != 0:
                raise SetupRequired("cannot boot a machine", "it needs root", code="needs_root", hint="sudo cpuos up")
            identity = await asyncio.to_thread(_identity, image, self._vmms)
            if self._found is None or self._found[0] != identity or not _any_works(self._found[1]):
                kept = None if self._fresh else await asyncio.to_thread(self._read, identity)
                findings = await self._look() if kept is None else kept
                if kept is None:
                    await asyncio.to_thread(self._write, identity, findings)
                self._found = (identity, findings)
            return self._found[1]

    def _best(self, findings: list[Finding]) -> tuple[Vmm, Finding]:
        for vmm, finding in zip(self._vmms, findings, strict=False):
            if finding.works:
                return vmm, finding
        why = "; ".join(f"{finding.vmm} {_way(finding.kvm)}: {finding.evidence}" for finding in findings)
        raise SetupRequired("cannot start a microVM", why or "no VMM is known", code="runtime_unavailable")

    async def _look(self) -> list[Finding]:
        findings = []
        for vmm in self._vmms:
            try:
                finding = await self._boot(vmm)
            except (OSError, CpuosError) as problem:
                finding = Finding(vmm=vmm.name, kvm=vmm.kvm, works=False, evidence=str(problem))
            findings.append(finding)
            if finding.works:
                break
        return findings

    async def _boot(self, vmm: Vmm) -> Finding:
        found = partial(Finding, vmm=vmm.name, kvm=vmm.kvm)
        if not vmm.program.exists():
            return found(works=False, evidence=f"{vmm.program} is not installed")
        await asyncio.to_thread(vmm.version)  # one that is known not to hold is not tried
        word = secrets.token_hex(8)
        answer = hashlib.sha256(word.encode()).hexdigest().encode()  # the kernel prints its command line, word and all
        limit_s = KVM_BOOT_S if vmm.kvm else EMULATED_BOOT_S
        own = self._folder / secrets.token_hex(4)
        (own / "root").mkdir(mode=0o700, parents=True)
        user = user_for(own.name, taken=())
        plan = Launch(name=own.name, root=own / "root", boot=self._image_dir, uid=user, kvm=vmm.kvm)
        try:
            started = asyncio.get_running_loop().time()
            said, ended = await _run(vmm, plan, word=word, answer=answer, limit_s=limit_s)
        finally:
            await asyncio.to_thread(shutil.rmtree, own, ignore_errors=True)
        if answer in said:
            took_s = asyncio.get_running_loop().time() - started
            return found(works=True, evidence=f"a guest answered after {took_s:.1f} s")
        seen = _what_was_seen(vmm, said, how="before it ended" if ended else f"in {limit_s:.0f} s")
        return found(works=False, evidence=seen, timed_out=not ended)

    def is_known(self) -> bool:
        """Whether a look at this host is kept, whatever came of it; blocks."""
        return bool(self._kept_for(_identity(find_image(self._image_dir), self._vmms)))

    def _read(self, identity: str) -> list[Finding] | None:
        """What is kept and can be believed, of two the one that found more. That nothing works, or that a stronger one
        did not answer in time, may be a busy hour's, and is asked again."""
        believed = [findings for findings in self._kept_for(identity) if _is_certain(findings)]
        return min(believed, key=len, default=None)  # the first that works is the last of each

    def _kept_for(self, identity: str) -> list[list[Finding]]:
        found = []
        for path in (self._kept, self._image_dir / KEPT):
            try:
                kept = json.loads(path.read_text())
                if kept["identity"] == identity:
                    found.append([Finding(**finding) for finding in kept["findings"]])
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return found

    def _write(self, identity: str, findings: list[Finding]) -> None:
        text = json.dumps({"identity": identity, "findings": [vars(finding) for finding in findings]}, indent=1)
        partial = self._kept.with_name(f".{self._kept.name}.{os.getpid()}")
        partial.write_text(text)
        partial.replace(self._kept)


def _any_works(findings: Sequence[Finding]) -> bool:
    return any(finding.works for finding in findings)


def _is_certain(findings: Sequence[Finding]) -> bool:
    return _any_works(findings) and not any(finding.timed_out for finding in findings)


def _probed(word: str) -> Machine:
    return Machine(
        kernel="/boot/vmlinux",
        initrd="/boot/initrd",
        arguments=f"-- --word {word}",
        cpu=1,
        memory_mib=_MEMORY_MIB,
        tells_console=True,
    )


async def _run(vmm: Vmm, plan: Launch, *, word: str, answer: bytes, limit_s: float) -> tuple[bytes, bool]:
    """What the machine says until it has answered, ends, or the time is up; and whether it has ended."""
    machine, control = _probed(word), plan.root.parent / CONTROL
    pid, output = await asyncio.to_thread(vmm.launch, plan, machine, control=control)
    reading = asyncio.create_task(asyncio.to_thread(_read_until, output, answer=answer, limit_s=limit_s))
    try:
        booting = asyncio.create_task(vmm.boot(control, machine))
        await asyncio.wait({reading, booting}, return_when=asyncio.FIRST_COMPLETED)
        if booting.done() and not reading.done():
            booting.result()
        said, ended = await reading
        if ended and not said.strip():  # then it is the call that it died of which tells more
            await asyncio.wait({booting}, timeout=1)
            if booting.done():
                booting.result()
        booting.cancel()
        return said, ended
    finally:
        await asyncio.to_thread(_end, pid)
        await asyncio.wait({reading})
        os.close(output)


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)  # a child that was not waited for: the number is still its own
    os.waitpid(pid, 0)


def _read_until(output: int, *, answer: bytes, limit_s: float) -> tuple[bytes, bool]:
    said, deadline = b"", time.monotonic() + limit_s
    while answer not in said and len(said) < _MAX_SAID:
        left = deadline - time.monotonic()
        if left <= 0 or not is_readable(output, limit_s=left):
            break
        piece = os.read(output, 65536)
        if not piece:
            return said, True
        said += piece
    return said, False


def _what_was_seen(vmm: Vmm, said: bytes, *, how: str) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    if not lines:
        opened = "/dev/kvm opens, the machine starts, but the" if vmm.kvm else "the machine starts, but the"
        return f"{opened} guest prints nothing {how}"
    return f"its guest did not come up {how}; the last that was said: {lines[-1][-200:]}"


def _identity(image: GuestImage, vmms: Sequence[Vmm]) -> str:
    """Of all that findings depend on: this host as it is booted, its processor, the VMMs, what guests start from."""
    parts = [image.identity, platform.release(), platform.version(), _processor()]
    for vmm in vmms:
        try:
            facts = vmm.program.stat()
            parts.append(f"{vmm.kvm} {facts.st_size} {facts.st_mtime_ns} {vmm.command(_probed('-'))}")
        except OSError:
            parts.append(f"{vmm.name} {vmm.kvm} none")
    try:
        parts.append(Path("/etc/machine-id").read_text())
    except OSError:
        pass
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _processor() -> str:
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.split("\t")[0].split(":")[0].strip() in wanted)


def _way(kvm: bool) -> str:
    return "kvm" if kvm else "tcg"


def _version(vmm: Vmm) -> str:
    try:
        return vmm.version()
    except OSError:
        return "of unknown version"

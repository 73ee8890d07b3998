"""`cpuos harden check`: whether this host holds what is let loose on it. Nothing is changed, and nothing is run.

Each rule is a function of what the host's files say. Where a rule comes from the guidance of Firecracker's makers for
hosts in production, or from the kernel's documentation, it says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cpuos.settings import Settings
from cpuos.setup.host_view import HostView

__all__ = ["Finding", "FindingState", "Place", "check_hardening", "finding_lines", "places_of"]

FIRECRACKER = "Firecracker, production host setup"
KERNEL = "kernel documentation"
OWN = "cpuOS"


class FindingState(StrEnum):
    """How a thing is."""

    OK = "ok"
    WARN = "warn"
    """It holds less than it could; whether that matters depends on who shares the host."""
    FAIL = "fail"
    """It is not to be run like this with programs that nobody trusts."""
    UNKNOWN = "unknown"
    """It cannot be told from here."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rule says of this host."""

    name: str
    state: FindingState
    evidence: str
    """What was read, and where."""
    fix: str = ""
    """What to do, where something is to be done."""
    source: str = OWN
    """Who says that it matters."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A file or folder of cpuOS, and who may do what with it."""

    name: str
    path: Path
    others_read: bool = True
    """Whether users that are not cpuOS's may read it."""


def check_hardening(view: HostView, *, places: list[Place], programs: dict[str, Path]) -> list[Finding]:
    """All rules, in the order in which they are shown. `programs`: Firecracker and its jailer, where they are known."""
    found = [finding for rule in _RULES for finding in rule(view)]
    found += [finding for place in places for finding in _look_at_place(view, place)]
    return [*found, *_look_at_programs(view, programs)]


def finding_lines(findings: list[Finding]) -> list[str]:
    """As text, and a sum."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<7}  {finding.name:<{width}}  {finding.evidence}")
        if finding.fix:
            lines.append(f"{'':7}  {'':{width}}  to do: {finding.fix}  [{finding.source}]")
    counts = {state: sum(finding.state is state for finding in findings) for state in FindingState}
    lines.append(", ".join(f"{count} {state}" for state, count in counts.items()))
    return lines


def places_of(settings: Settings) -> list[Place]:
    """What of an instance has to be kept from whom."""
    return [
        Place(name="data folder", path=settings.data_dir),
        Place(name="guest image", path=settings.microvm_dir),
        Place(name="templates", path=settings.template_dir),
        Place(name="state folder", path=settings.state_dir, others_read=False),
        Place(name="disks and keys", path=settings.node_state_dir, others_read=False),
        Place(name="run folder", path=settings.run_dir, others_read=False),
    ]


def _look_at_smt(view: HostView) -> Iterator[Finding]:
    path = "/sys/devices/system/cpu/smt/control"
    said = view.text(path)
    evidence = f"{path} says {said}"
    if said is None:
        yield _unknown("SMT", f"{path} cannot be read", fix="lscpu", source=FIRECRACKER)
    elif said in ("off", "forceoff", "notsupported", "notimplemented"):
        yield _ok("SMT", evidence, source=FIRECRACKER)
    else:
        fix = "boot with nosmt=force, where sandboxes of users who do not trust each other share the host"
        yield _warn("SMT", evidence, fix=fix, source=FIRECRACKER)


def _look_at_page_merging(view: HostView) -> Iterator[Finding]:
    path = "/sys/kernel/mm/ksm/run"
    said = view.text(path)
    if said is None:
        known = view.names("/sys/kernel/mm")
        finding = _ok if known else _unknown
        yield finding("KSM", "this kernel has none" if known else f"{path} cannot be read", source=FIRECRACKER)
    elif said == "1":
        yield _fail("KSM", f"{path} says 1: equal pages are merged", fix=f"echo 2 > {path}", source=FIRECRACKER)
    else:
        yield _ok("KSM", f"{path} says {said}", source=FIRECRACKER)


def _look_at_swap(view: HostView) -> Iterator[Finding]:
    path = "/proc/swaps"
    said = view.text(path)
    if said is None:
        yield _unknown("swap", f"{path} cannot be read", fix="swapon --show", source=FIRECRACKER)
        return
    areas = [line.split()[0] for line in said.splitlines()[1:] if line.strip()]
    stored = [area for area in areas if not Path(area).name.startswith("zram")]
    if not stored:
        yield _ok("swap", f"in memory: {', '.join(areas)}" if areas else "there is none", source=FIRECRACKER)
        return
    fix = f"swapoff {' '.join(stored)}, or put it on an encrypted volume with a key that no reboot outlives"
    evidence = f"memory of guests can be written to {', '.join(stored)}, and stay there"
    yield _warn("swap", evidence, fix=fix, source=FIRECRACKER)


def _look_at_kernel(view: HostView) -> Iterator[Finding]:
    said = view.text("/proc/sys/kernel/osrelease") or ""
    numbers = re.match(r"(\d+)\.(\d+)", said)
    if numbers is None:
        yield _unknown("kernel", "its version cannot be read", fix="uname -r")
        return
    if (int(numbers[1]), int(numbers[2])) < (5, 10):
        yield _fail(
            "kernel", f"{said}: Firecracker is tested from 5.10 on", fix="boot a newer kernel", source=FIRECRACKER
        )
        return
    evidence = f"{said}; whether it has all corrections only its distribution knows: keep it up to date"
    yield _ok("kernel", evidence, source=FIRECRACKER)


def _look_at_microcode(view: HostView) -> Iterator[Finding]:
    processors = view.text("/proc/cpuinfo") or ""
    found = {line.split(":", 1)[1].strip() for line in processors.splitlines() if line.startswith("microcode")}
    told = f"revision {', '.join(sorted(found))}" if found else "no revision is told"
    old = view.text("/sys/devices/system/cpu/vulnerabilities/old_microcode")
    fix = "install the distribution's package of microcode (intel-microcode, amd64-microcode), or new firmware; boot"
    if old is not None and old.startswith("Vulnerable"):
        yield _fail("microcode", f"{told}: the kernel knows a newer one", fix=fix, source=FIRECRACKER)
    elif len(found) > 1:
        yield _fail("microcode", f"{told}: processors differ", fix=fix, source=FIRECRACKER)
    elif old is None or not found:
        why = "this kernel does not say whether it is an old one"
        yield _unknown("microcode", f"{told}; {why}", fix=fix, source=FIRECRACKER)
    else:
        yield _ok("microcode", f"{told}; the kernel knows no newer one", source=FIRECRACKER)


def _look_at_mitigations(view: HostView) -> Iterator[Finding]:
    folder = "/sys/devices/system/cpu/vulnerabilities"
    names = [name for name in view.names(folder) if name != "old_microcode"]
    if not names:
        yield _unknown("mitigations", f"{folder} cannot be read", fix="lscpu", source=KERNEL)
        return
    fix = "docs.kernel.org/admin-guide/hw-vuln; first microcode, then boot without words that turn it off"
    good = 0
    for name in names:
        said = view.text(f"{folder}/{name}") or "Unknown: it cannot be read"
        evidence, title = f"{folder}/{name}: {said}", f"processor: {name}"
        if said.startswith("Vulnerable") or "KVM: Vulnerable" in said:
            yield _fail(title, evidence, fix=fix, source=KERNEL)
        elif "SMT vulnerable" in said:
            yield _warn(title, evidence, fix="boot with nosmt=force", source=KERNEL)
        elif said.startswith(("Not affected", "Mitigation", "KVM: Mitigation", "Processor vulnerable")):
            good += 1
        else:
            yield _unknown(title, evidence, fix=fix, source=KERNEL)
    yield _ok(
        "mitigations", f"{good} of {len(names)} known weaknesses of processors: absent, or mitigated", source=KERNEL
    )


# Words of the kernel's command line that take away what keeps guests apart (kernel-parameters.txt).
_WEAK_WORDS = {
    **{
        "nopti": "",
        "nospectre_v1": "",
        "nospectre_v2": "",
        "nospec_store_bypass_disable": "",
        "noibrs": "",
        "noibpb": "",
    },
    **{"pti": "off", "spectre_v2": "off", "spec_store_bypass_disable": "off", "l1tf": "off", "mds": "off"},
    **{
        "tsx_async_abort": "off",
        "srbds": "off",
        "mmio_stale_data": "off",
        "retbleed": "off",
        "kvm.nx_huge_pages": "off",
    },
    **{"gather_data_sampling": "off", "spec_rstack_overflow": "off", "spectre_v2_user": "off", "vmscape": "off"},
}


def _look_at_boot_line(view: HostView) -> Iterator[Finding]:
    path = "/proc/cmdline"
    said = view.text(path)
    if said is None:
        yield _unknown("boot line", f"{path} cannot be read", fix=f"cat {path}", source=KERNEL)
        return
    weak = [word for word in said.split() if _is_weak(word)]
    if weak:
        fix = f"boot without {' '.join(weak)}"
        yield _fail("boot line", f"{path}: {' '.join(weak)} leaves guests less apart", fix=fix, source=KERNEL)
    else:
        yield _ok("boot line", f"{path} turns no mitigation off", source=KERNEL)


def _is_weak(word: str) -> bool:
    name, _, value = word.partition("=")
    if name == "mitigations":
        return bool({"off", "no_guest_host", "no_guest_guest"} & set(value.split(",")))
    return _WEAK_WORDS.get(name) == value


def _look_at_huge_pages(view: HostView) -> Iterator[Finding]:
    affected = view.text("/sys/devices/system/cpu/vulnerabilities/itlb_multihit") or ""
    said = view.text("/sys/module/kvm/parameters/nx_huge_pages")
    if said is None or affected.startswith("Not affected"):
        return
    if said in ("N", "0", "never"):
        evidence = f"nx_huge_pages is {said} on a processor with iTLB multihit: a guest can stop the host"
        yield _fail("KVM huge pages", evidence, fix="boot with kvm.nx_huge_pages=auto", source=KERNEL)
    else:
        yield _ok("KVM huge pages", f"nx_huge_pages is {said}", source=KERNEL)


def _look_at_memory(view: HostView) -> Iterator[Finding]:
    controllers = [name for name in view.names("/sys/devices/system/edac/mc") if name.startswith("mc")]
    if controllers:
        yield _ok("memory", f"{len(controllers)} controllers report corrected errors (EDAC)", source=FIRECRACKER)
    else:
        evidence = "whether it has error correction and row refresh cannot be told from here"
        yield _unknown("memory", evidence, fix="dmidecode --type memory", source=FIRECRACKER)


def _look_at_groups(view: HostView) -> Iterator[Finding]:
    wanted, top = {"cpu", "cpuset", "memory", "pids"}, "/sys/fs/cgroup"
    unified = view.text(f"{top}/cgroup.controllers")
    found = set(unified.split()) if unified is not None else set(view.names(top))
    lacking = sorted(wanted - found)
    version = "v1" if unified is None else "v2"
    if lacking:
        evidence = f"{version} without {', '.join(lacking)}: a sandbox would have no such limit"
        yield _fail("control groups", evidence, fix="boot with systemd.unified_cgroup_hierarchy=1", source=FIRECRACKER)
    elif unified is None:
        evidence = "v1: limits hold; Firecracker's snapshots take long with it on kernels since 5.4"
        yield _warn("control groups", evidence, fix="boot with systemd.unified_cgroup_hierarchy=1", source=FIRECRACKER)
    else:
        yield _ok("control groups", f"v2 with {', '.join(sorted(wanted))}", source=FIRECRACKER)


def _look_at_limits(view: HostView) -> Iterator[Finding]:
    said = view.text("/proc/self/limits") or ""
    line = next((line for line in said.splitlines() if line.startswith("Max open files")), "")
    words = line.removeprefix("Max open files").split()
    if len(words) < 2:
        yield _unknown("open files", "/proc/self/limits cannot be read", fix="ulimit -Hn")
        return
    hard = words[1]
    if hard != "unlimited" and int(hard) < _OPEN_FILES:
        evidence = f"at most {hard} in one process: a node with many sandboxes needs {_OPEN_FILES}"
        yield _warn("open files", evidence, fix=f"ulimit -Hn {_OPEN_FILES}, or LimitNOFILE= of the node's unit")
    else:
        yield _ok("open files", f"at most {hard} in one process that is started from here")


_OPEN_FILES = 16384

# Doors of the host's kernel for programs that have left their sandbox: value that leaves it open, and what closes it.
_SYSCTLS = {
    "kernel/unprivileged_bpf_disabled": ("0", "1", "any user may load programs into the kernel"),
    "kernel/kptr_restrict": ("0", "1", "any user may read where the kernel lies in memory"),
    "kernel/dmesg_restrict": ("0", "1", "any user may read the kernel's log"),
    "vm/unprivileged_userfaultfd": ("1", "0", "any user may hold the kernel up while it copies"),
}


def _look_at_sysctls(view: HostView) -> Iterator[Finding]:
    for path, (weak, better, why) in _SYSCTLS.items():
        name, said = path.replace("/", "."), view.text(f"/proc/sys/{path}")
        if said is None:
            continue  # this kernel has no such door
        if said == weak:
            yield _warn(name, f"{said}: {why}", fix=f"sysctl -w {name}={better}", source=KERNEL)
        else:
            yield _ok(name, said, source=KERNEL)


def _look_at_kvm(view: HostView) -> Iterator[Finding]:
    facts = view.facts("/dev/kvm")
    if facts is None:
        fix = "turn virtualization on in the firmware, then modprobe kvm_intel or kvm_amd"
        yield _unknown("/dev/kvm", "there is none: no sandbox gets the level microvm here", fix=fix)
    elif facts.st_mode & 0o006:
        evidence = f"mode {facts.st_mode & 0o777:04o}: every user may run machines"
        yield _warn("/dev/kvm", evidence, fix='chmod o-rw /dev/kvm, and a udev rule with MODE="0660"')
    else:
        evidence = f"mode {facts.st_mode & 0o777:04o}; whether it boots a guest: sudo cpuos doctor"
        yield _ok("/dev/kvm", evidence)


def _look_at_jail_needs(view: HostView) -> Iterator[Finding]:
    lacking = [name for name in ("ipc", "mnt", "net", "pid", "uts") if name not in view.names("/proc/self/ns")]
    actions = view.text("/proc/sys/kernel/seccomp/actions_avail")
    if lacking:
        yield _fail("jail", f"no namespaces of the kind {', '.join(lacking)}", fix="boot a kernel that has them")
    elif actions is None or "kill" not in actions:
        yield _fail("jail", "this kernel has no seccomp filters", fix="boot a kernel with CONFIG_SECCOMP_FILTER")
    elif view.facts("/dev/net/tun") is None:
        yield _fail("jail", "there is no /dev/net/tun", fix="modprobe tun")
    else:
        yield _ok("jail", "namespaces, seccomp filters and /dev/net/tun are there")


_RULES: tuple[Callable[[HostView], Iterator[Finding]], ...] = (
    _look_at_smt,
    _look_at_page_merging,
    _look_at_swap,
    _look_at_kernel,
    _look_at_microcode,
    _look_at_mitigations,
    _look_at_boot_line,
    _look_at_huge_pages,
    _look_at_memory,
    _look_at_groups,
    _look_at_limits,
    _look_at_sysctls,
    _look_at_kvm,
    _look_at_jail_needs,
)


def _look_at_place(view: HostView, place: Place) -> Iterator[Finding]:
    facts = view.facts(str(place.path))
    if facts is None:
        yield _unknown(place.name, f"there is no {place.path}, or it cannot be looked at", fix="sudo cpuos up")
        return
    mode, told = facts.st_mode & 0o7777, f"{place.path}, owner {facts.st_uid}, mode {facts.st_mode & 0o777:04o}"
    if facts.st_uid != 0 or mode & 0o022:
        yield _fail(
            place.name, f"{told}: others than root write there", fix=f"chown root {place.path}; chmod go-w {place.path}"
        )
    elif not place.others_read and mode & 0o007:
        yield _fail(place.name, f"{told}: every user gets in", fix=f"chmod o= {place.path}")
    else:
        yield _ok(place.name, told)


def _look_at_programs(view: HostView, programs: dict[str, Path]) -> Iterator[Finding]:
    """The jailer takes its program and folders at their word: nobody but root may change them, or a folder above."""
    if not programs:
        yield _unknown("Firecracker", "not installed: microVMs run in QEMU", fix="sudo cpuos setup microvm")
    for name, path in programs.items():
        if view.facts(str(path)) is None:
            yield _fail(name, f"there is no {path}", fix=f"set CPUOS_{name.upper()}, or unset it")
            continue
        weak = [str(each) for each in (path, *path.parents) if _others_write(view, each)]
        if weak:
            fix = f"chown root {weak[0]}; chmod go-w {weak[0]}"
            yield _fail(name, f"others than root may change {', '.join(weak)}", fix=fix, source=FIRECRACKER)
        else:
            yield _ok(name, f"{path}: root alone may change it, and the folders above", source=FIRECRACKER)


def _others_write(view: HostView, path: Path) -> bool:
    facts = view.facts(str(path))
    if facts is None:
        return False
    sticky = facts.st_mode & 0o1000  # others may add to it, and change nothing of root's
    return facts.st_uid != 0 or bool(facts.st_mode & 0o022 and not sticky)


def _ok(name: str, evidence: str, *, source: str = OWN) -> Finding:
    return Finding(name=name, state=FindingState.OK, evidence=evidence, source=source)


def _warn(name: str, evidence: str, *, fix: str, source: str = OWN) -> Finding:
    return Finding(name=name, state=FindingState.WARN, evidence=evidence, fix=fix, source=source)


def _fail(name: str, evidence: str, *, fix: str, source: str = OWN) -> Finding:
    return Finding(name=name, state=FindingState.FAIL, evidence=evidence, fix=fix, source=source)


def _unknown(name: str, evidence: str, *, fix: str = "", source: str = OWN) -> Finding:
    return Finding(name=name, state=FindingState.UNKNOWN, evidence=evidence, fix=fix, source=source)

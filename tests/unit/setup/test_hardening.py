"""What `cpuos harden check` says of hosts that were written down: each rule with each answer it can give."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from cpuos.cli.main import main
from cpuos.settings import load_settings
from cpuos.setup.hardening import Finding, FindingState, Place, check_hardening, finding_lines, places_of
from cpuos.setup.host_view import HostView

VULNERABILITIES = "/sys/devices/system/cpu/vulnerabilities"
SWAPS = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority"
# Of a bare metal host with two sockets, as its files said it; the least that every rule reads.
GOOD = {
    "/sys/devices/system/cpu/smt/control": "forceoff",
    "/sys/kernel/mm/ksm/run": "0",
    "/proc/swaps": SWAPS,
    "/proc/sys/kernel/osrelease": "6.1.0-57-cloud-amd64",
    "/proc/cpuinfo": "processor\t: 0\nmicrocode\t: 0xd0003e7\n\nprocessor\t: 1\nmicrocode\t: 0xd0003e7\n",
    f"{VULNERABILITIES}/old_microcode": "Not affected",
    f"{VULNERABILITIES}/itlb_multihit": "KVM: Mitigation: Split huge pages",
    f"{VULNERABILITIES}/l1tf": "Mitigation: PTE Inversion; VMX: cache flushes, SMT disabled",
    f"{VULNERABILITIES}/meltdown": "Mitigation: PTI",
    f"{VULNERABILITIES}/spectre_v2": "Mitigation: Enhanced / Automatic IBRS; IBPB: conditional; RSB filling",
    f"{VULNERABILITIES}/srbds": "Not affected",
    "/proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro mitigations=auto,nosmt nosmt=force",
    "/sys/module/kvm/parameters/nx_huge_pages": "Y",
    "/sys/devices/system/edac/mc/mc0/mc_name": "Skylake Socket#0",
    "/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory hugetlb pids rdma misc",
    "/proc/self/limits": "Limit  Soft  Hard  Units\nMax open files   1024   1048576   files\n",
    "/proc/sys/kernel/unprivileged_bpf_disabled": "2",
    "/proc/sys/kernel/kptr_restrict": "1",
    "/proc/sys/kernel/dmesg_restrict": "1",
    "/proc/sys/vm/unprivileged_userfaultfd": "0",
    "/proc/sys/kernel/seccomp/actions_avail": "kill_process kill_thread trap errno user_notif trace log allow",
    **{f"/proc/self/ns/{name}": "" for name in ("ipc", "mnt", "net", "pid", "uts")},
    "/dev/kvm": "",
    "/dev/net/tun": "",
}
MODES = {"/dev/kvm": 0o660}


def host(folder: Path, **changes: str | None) -> HostView:
    """GOOD, with other files: None takes one away."""
    for path, text in {**GOOD, **changes}.items():
        if text is not None:
            place = folder / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text + "\n")
            place.chmod(MODES.get(path, 0o644))
    return HostView(root=folder)


def look(view: HostView, name: str) -> Finding:
    return next(finding for finding in check_hardening(view, places=[], programs={}) if finding.name == name)


def test_a_good_host_is_told_as_one(tmp_path: Path) -> None:
    found = check_hardening(host(tmp_path), places=[], programs={})
    assert {finding.name for finding in found if finding.state is not FindingState.OK} == {"Firecracker"}
    assert all(finding.evidence for finding in found)
    assert len({finding.name for finding in found}) == len(found)


def test_of_a_host_that_tells_nothing_nothing_is_claimed(tmp_path: Path) -> None:
    found = check_hardening(HostView(root=tmp_path), places=[], programs={})
    claimed = {finding.name for finding in found if finding.state is FindingState.OK}
    assert claimed == set()
    assert {"SMT", "KSM", "swap", "kernel", "microcode", "mitigations"} <= {finding.name for finding in found}


@pytest.mark.parametrize(
    ("changes", "name", "state", "words"),
    [
        ({"/sys/devices/system/cpu/smt/control": "on"}, "SMT", "warn", "says on"),
        ({"/sys/devices/system/cpu/smt/control": "off"}, "SMT", "ok", "says off"),
        ({"/sys/devices/system/cpu/smt/control": "notsupported"}, "SMT", "ok", "says notsupported"),
        ({"/sys/devices/system/cpu/smt/control": None}, "SMT", "unknown", "cannot be read"),
        ({"/sys/kernel/mm/ksm/run": "1"}, "KSM", "fail", "says 1"),
        ({"/sys/kernel/mm/ksm/run": "2"}, "KSM", "ok", "says 2"),
        ({"/proc/swaps": f"{SWAPS}\n/dev/sda2 partition 999 0 -2"}, "swap", "warn", "/dev/sda2"),
        ({"/proc/swaps": f"{SWAPS}\n/swap.img file 999 0 -2"}, "swap", "warn", "/swap.img"),
        ({"/proc/swaps": f"{SWAPS}\n/dev/zram0 partition 999 0 100"}, "swap", "ok", "in memory: /dev/zram0"),
        ({"/proc/sys/kernel/osrelease": "5.4.0-150-generic"}, "kernel", "fail", "tested from 5.10 on"),
        ({"/proc/sys/kernel/osrelease": "5.10.0"}, "kernel", "ok", "5.10.0"),
        ({"/proc/sys/kernel/osrelease": "6.1+"}, "kernel", "ok", "6.1+"),
        ({"/proc/sys/kernel/osrelease": "odd"}, "kernel", "unknown", "cannot be read"),
        ({f"{VULNERABILITIES}/old_microcode": "Vulnerable"}, "microcode", "fail", "knows a newer one"),
        ({f"{VULNERABILITIES}/old_microcode": None}, "microcode", "unknown", "does not say"),
        (
            {"/proc/cpuinfo": "microcode\t: 0x1\n\nmicrocode\t: 0x2\n"},
            "microcode",
            "fail",
            "0x1, 0x2: processors differ",
        ),
        ({f"{VULNERABILITIES}/mds": "Vulnerable: no microcode"}, "processor: mds", "fail", "no microcode"),
        ({f"{VULNERABILITIES}/mds": "Mitigation: Clear buffers; SMT vulnerable"}, "processor: mds", "warn", "SMT"),
        ({f"{VULNERABILITIES}/mds": "Unknown: No mitigations"}, "processor: mds", "unknown", "Unknown"),
        (
            {f"{VULNERABILITIES}/itlb_multihit": "KVM: Vulnerable"},
            "processor: itlb_multihit",
            "fail",
            "KVM: Vulnerable",
        ),
        ({"/proc/cmdline": "ro mitigations=off"}, "boot line", "fail", "mitigations=off"),
        ({"/proc/cmdline": "mitigations=auto,no_guest_host"}, "boot line", "fail", "no_guest_host"),
        ({"/proc/cmdline": "nopti l1tf=off"}, "boot line", "fail", "nopti l1tf=off"),
        ({"/proc/cmdline": "l1tf=full,force pti=on quiet"}, "boot line", "ok", "no mitigation off"),
        ({"/sys/module/kvm/parameters/nx_huge_pages": "never"}, "KVM huge pages", "fail", "never"),
        ({"/sys/devices/system/edac/mc/mc0/mc_name": None}, "memory", "unknown", "cannot be told"),
        ({"/sys/fs/cgroup/cgroup.controllers": "cpu memory pids"}, "control groups", "fail", "without cpuset"),
        ({"/proc/self/limits": "Max open files 1024 4096 files"}, "open files", "warn", "at most 4096"),
        ({"/proc/self/limits": "Max open files unlimited unlimited files"}, "open files", "ok", "unlimited"),
        ({"/proc/sys/kernel/unprivileged_bpf_disabled": "0"}, "kernel.unprivileged_bpf_disabled", "warn", "any user"),
        ({"/proc/sys/vm/unprivileged_userfaultfd": "1"}, "vm.unprivileged_userfaultfd", "warn", "any user"),
        ({"/dev/kvm": None}, "/dev/kvm", "unknown", "there is none"),
        ({"/dev/net/tun": None}, "jail", "fail", "/dev/net/tun"),
        ({"/proc/self/ns/uts": None}, "jail", "fail", "uts"),
        ({"/proc/sys/kernel/seccomp/actions_avail": None}, "jail", "fail", "seccomp"),
    ],
)
def test_each_rule(tmp_path: Path, changes: dict[str, str | None], name: str, state: str, words: str) -> None:
    found = look(host(tmp_path, **changes), name)
    assert (found.state, words in found.evidence) == (state, True), found
    assert bool(found.fix) == (found.state is not FindingState.OK)


def test_old_control_groups_are_enough_and_slow(tmp_path: Path) -> None:
    old = {f"/sys/fs/cgroup/{name}/tasks": "" for name in ("cpu", "cpuset", "memory", "pids")}
    found = look(host(tmp_path, **{"/sys/fs/cgroup/cgroup.controllers": None}, **old), "control groups")
    assert (found.state, found.evidence.startswith("v1: ")) == (FindingState.WARN, True)


def test_a_device_that_everybody_may_use(tmp_path: Path) -> None:
    view = host(tmp_path)
    (tmp_path / "dev/kvm").chmod(0o666)
    assert look(view, "/dev/kvm").state is FindingState.WARN


@pytest.mark.skipif(os.geteuid() != 0, reason="owners are root's to give")
@pytest.mark.parametrize(
    ("mode", "owner", "others_read", "state"),
    [
        (0o755, 0, True, "ok"),
        (0o755, 0, False, "fail"),
        (0o750, 0, False, "ok"),
        (0o777, 0, True, "fail"),
        (0o775, 0, True, "fail"),
        (0o700, 1000, False, "fail"),
    ],
)
def test_folders(tmp_path: Path, mode: int, owner: int, others_read: bool, state: str) -> None:
    (tmp_path / "var").mkdir()
    (tmp_path / "var").chmod(mode)
    os.chown(tmp_path / "var", owner, owner)
    place = Place(name="folder", path=Path("/var"), others_read=others_read)
    found = check_hardening(HostView(root=tmp_path), places=[place], programs={})
    assert next(finding for finding in found if finding.name == "folder").state == state


@pytest.mark.skipif(os.geteuid() != 0, reason="owners are root's to give")
@pytest.mark.parametrize(
    ("changed", "mode", "state"),
    [
        ("", 0, "ok"),
        ("opt/bin", 0o777, "fail"),
        ("opt", 0o1777, "ok"),
        ("opt/bin/jailer", 0o775, "fail"),
        ("opt", 0o770, "fail"),
    ],
)
def test_programs_are_root_s_alone_up_to_the_top(tmp_path: Path, changed: str, mode: int, state: str) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "opt/bin").mkdir(parents=True)
    (tmp_path / "opt/bin/jailer").touch()
    if changed:
        (tmp_path / changed).chmod(mode)
    found = check_hardening(HostView(root=tmp_path), places=[], programs={"jailer": Path("/opt/bin/jailer")})
    assert next(finding for finding in found if finding.name == "jailer").state == state


def test_a_named_program_that_is_not_there(tmp_path: Path) -> None:
    found = check_hardening(HostView(root=tmp_path), places=[], programs={"jailer": Path("/none")})
    assert "CPUOS_JAILER" in next(finding for finding in found if finding.name == "jailer").fix


def test_the_text_ends_with_a_sum(tmp_path: Path) -> None:
    lines = finding_lines(check_hardening(host(tmp_path), places=[], programs={}))
    assert lines[-1].endswith("0 warn, 0 fail, 1 unknown")


def test_this_host_is_looked_at_and_not_changed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPUOS_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("CPUOS_RUN_DIR", str(tmp_path / "run"))
    code = main(["harden", "check", "--json"])
    found = json.loads(capfd.readouterr().out)["findings"]
    assert code == int(any(finding["state"] == "fail" for finding in found))
    assert {finding["state"] for finding in found} <= {"ok", "warn", "fail", "unknown"}
    fields = {field.name for field in dataclasses.fields(Finding)}
    assert all(set(finding) == fields for finding in found)
    assert not (tmp_path / "data").exists()
    names = {place.name for place in places_of(load_settings())}
    assert names <= {finding["name"] for finding in found}

"""What is tried on the machine of `test_nested`: microVMs by KVM, in a machine whose processor has SVM.

Its processor is translated, and its clock counts instructions: no time is a measure of anything.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from checks import FOLDER, Skipped, answers, come_up, cpuos, main, run, stop, until

SIZES = ("--memory", "256MiB", "--disk", "256MiB", "--timeout", "3h")
FIRECRACKER = Path("/opt/firecracker")
CONFORMANCE_S = 5 * 3600


def described(name: str) -> dict[str, object]:
    listed = json.loads(cpuos("ls", "--json"))["sandboxes"]
    return next(sandbox for sandbox in listed if sandbox["name"] == name)


def test_its_processor_has_svm_and_kvm_takes_it() -> None:
    assert "svm" in Path("/proc/cpuinfo").read_text().split()
    until(Path("/dev/kvm").exists)
    assert "kvm_amd" in run("lsmod").stdout


def test_set_up_boots_a_guest_by_kvm() -> None:
    told = run(f"{FOLDER}/.venv/bin/python", f"{FOLDER}/tests/machine/set_up_small.py", "microvm")
    kept = json.loads(Path("/var/lib/cpuos/microvm/probe.json").read_text())["findings"]
    by_kvm = [finding for finding in kept if finding["vmm"] == "qemu" and finding["kvm"]]
    assert [finding["works"] for finding in by_kvm] == [True], (kept, told.stderr)
    assert "a guest answered" in by_kvm[0]["evidence"]


def test_doctor_shows_it() -> None:
    checks = json.loads(cpuos("doctor", "--json", check=False))["checks"]
    (line,) = [check for check in checks if check["name"] == "microvm"]
    assert line["state"] == "ok", line
    assert line["evidence"].startswith("level microvm (qemu "), line
    assert " kvm); qemu kvm: a guest answered after" in line["evidence"], line


def test_the_units_come_up_with_it() -> None:
    come_up()
    stop()
    run("systemctl", "start", "cpuos.target")
    until(answers)


def test_a_sandbox_is_a_microvm() -> None:
    """The runtime is not named: `auto` takes the strongest that was proved."""
    cpuos("create", "--template", "base", "--name", "one", "--min-isolation", "microvm", *SIZES)
    found = described("one")
    assert found["isolation"] == "microvm", found
    assert str(found["isolation_detail"]).startswith("qemu "), found
    assert str(found["isolation_detail"]).endswith(" kvm"), found
    (command,) = [line for line in run("ps", "-eo", "args").stdout.splitlines() if "-M" in line or "microvm," in line]
    assert "-accel kvm" in command, command


def test_a_command_runs() -> None:
    assert cpuos("exec", "one", "--", "echo", "hello") == "hello\n"
    assert cpuos("exec", "one", "uname -r") != os.uname().release
    assert "hypervisor" in cpuos("exec", "one", "cat /proc/cpuinfo")
    cpuos("exec", "one", "echo kept > kept; sleep 30000 & echo $! > pid")


def test_a_pause_ends_its_vmm_and_a_call_brings_it_back() -> None:
    cpuos("pause", "one")
    assert "microvm," not in run("ps", "-eo", "args").stdout
    assert cpuos("exec", "one", "cat kept; kill -0 $(cat pid) && echo lives") == "kept\nlives\n"


def test_a_snapshot_is_begun_with_and_both_go_on_apart() -> None:
    snapshot = cpuos("snapshot", "one").strip()
    cpuos("create", "--snapshot", snapshot, "--name", "two", "--timeout", "3h")
    assert described("two")["isolation"] == "microvm"
    assert cpuos("exec", "two", "cat kept; kill -0 $(cat pid) && echo lives; echo two > kept") == "kept\nlives\n"
    assert cpuos("exec", "one", "cat kept") == "kept\n"
    assert cpuos("exec", "one", "cat /proc/sys/kernel/random/uuid") != cpuos(
        "exec", "two", "cat /proc/sys/kernel/random/uuid"
    )


def test_a_node_that_is_killed_finds_it_again() -> None:
    os.kill(int(run("systemctl", "show", "-p", "MainPID", "--value", "cpuos-node").stdout), 9)
    until(lambda: cpuos("exec", "one", "kill -0 $(cat pid) && echo lives", check=False) == "lives\n")
    until(answers)


def test_nothing_is_left_of_those_that_were_killed() -> None:
    cpuos("kill", "one", "two")
    until(lambda: "microvm," not in run("ps", "-eo", "args").stdout, within_s=60)


def test_conformance_in_firecracker() -> None:
    """Where its program and jailer were given: the suite of a host that has both."""
    if not FIRECRACKER.exists():
        raise Skipped("CPUOS_FIRECRACKER and CPUOS_JAILER name no programs")
    stop()
    environment = [f"CPUOS_{name.upper()}={FIRECRACKER / name}" for name in ("firecracker", "jailer")]
    suite = ["-m", "pytest", "-q", "-rs", "--timeout", "3600", "tests/runtimes/test_firecracker_conformance.py"]
    words = ["env", "-C", FOLDER, *environment, f"{FOLDER}/.venv/bin/python", *suite]
    done = run(*words, check=False, timeout_s=CONFORMANCE_S)
    told = done.stdout[-6000:] + done.stderr[-1000:]
    assert done.returncode == 0, told
    # All skipped is no proof.
    assert " passed" in done.stdout.splitlines()[-1], told


if __name__ == "__main__":
    main(globals())

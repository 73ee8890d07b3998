"""What is tried on the machine of `test_whole_machine`: cpuOS as its units run it, on control groups v2."""

from __future__ import annotations

import json
import os
from pathlib import Path

from checks import answers, come_up, cpuos, main, run, stop, until

GROUPS = Path("/sys/fs/cgroup")


def group() -> Path:
    (found,) = (path for path in GROUPS.glob("cpuos-*/*") if path.is_dir())
    return found


def processes() -> list[int]:
    """Of all sandboxes."""
    return [int(pid) for path in GROUPS.glob("cpuos-*/*/cgroup.procs") for pid in path.read_text().split()]


def test_it_is_what_is_meant() -> None:
    assert run("stat", "-fc", "%T", str(GROUPS)).stdout.strip() == "cgroup2fs"
    flags = next(line.split()[3] for line in Path("/proc/mounts").read_text().splitlines() if line.split()[1] == "/run")
    assert {"nosuid", "nodev", "noexec"} <= set(flags.split(","))


def test_the_units_come_up() -> None:
    come_up()


def test_doctor_finds_nothing_missing() -> None:
    found = json.loads(cpuos("doctor", "--json", check=False))["checks"]
    # The other templates are not on this machine.
    missing = [one for one in found if one["state"] == "missing" and not one["name"].startswith("template ")]
    assert not missing, missing
    assert any(one["name"] == "control groups" and one["evidence"].startswith("v2 ") for one in found), found


def test_a_command_runs() -> None:
    cpuos("create", "--template", "base", "--name", "one", "--memory", "256MiB", "--disk", "256MiB", "--timeout", "2h")
    assert cpuos("exec", "one", "--", "echo", "hello") == "hello\n"
    cpuos("exec", "one", "echo kept > kept; sync; sleep 3000 & echo $! > pid")


def test_limits_are_in_its_group() -> None:
    assert (group() / "memory.max").read_text().strip() == str(256 << 20)
    assert int((group() / "pids.max").read_text()) > 0
    assert (group() / "cpu.max").read_text().split()[0] == "200000"


def test_memory_that_is_used_up_is_told_and_the_sandbox_goes_on() -> None:
    told = json.loads(cpuos("exec", "--json", "one", "head -c 700M /dev/zero | tail -c 600M | wc -c", check=False))
    assert told["limit_reached"]["limit"] == "memory", told
    assert cpuos("exec", "one", "cat", "kept") == "kept\n"


def test_processes_that_are_used_up_are_told_and_the_sandbox_goes_on() -> None:
    many = "for i in $(seq 600); do sleep 30 & done; wait"
    told = json.loads(cpuos("exec", "--json", "--timeout", "60s", "one", many, check=False))
    assert told["limit_reached"]["limit"] == "processes", told
    until(lambda: cpuos("exec", "one", "cat kept", check=False) == "kept\n", within_s=120)


def test_a_pause_frees_it_and_a_call_brings_it_back() -> None:
    cpuos("pause", "one")
    assert processes() == []
    assert cpuos("exec", "one", "cat kept; kill -0 $(cat pid) && echo lives") == "kept\nlives\n"


def test_a_node_that_is_killed_finds_it_again() -> None:
    before = set(processes())
    os.kill(int(run("systemctl", "show", "-p", "MainPID", "--value", "cpuos-node").stdout), 9)
    until(lambda: cpuos("exec", "one", "cat kept", check=False) == "kept\n")
    assert before & set(processes())
    until(answers)


def test_a_stop_pauses_all_and_a_start_brings_them_back() -> None:
    stop()
    assert processes() == []
    run("systemctl", "start", "cpuos.target")
    until(answers)
    assert cpuos("exec", "one", "cat kept; kill -0 $(cat pid) && echo lives") == "kept\nlives\n"


def test_a_data_volume_may_have_flags() -> None:
    """As hardening guides ask for: nothing with special rights, no devices."""
    cpuos("kill", "one")
    stop()
    # What is kept over a stop would keep the mounts as they were, too.
    for path in ("/run/cpuos/ns/mnt", "/run/cpuos/ns"):
        run("umount", "-l", path, check=False)
    run("mount", "--bind", "/var/lib/cpuos", "/var/lib/cpuos")
    run("mount", "-o", "remount,bind,nosuid,nodev", "/var/lib/cpuos")
    run("systemctl", "start", "cpuos.target")
    until(answers)
    cpuos("create", "--template", "base", "--name", "two", "--memory", "256MiB", "--disk", "256MiB", "--timeout", "2h")
    assert cpuos("exec", "two", "sudo id -u; echo more > more; cat more") == "0\nmore\n"


def test_nothing_is_left_of_those_that_were_killed() -> None:
    for line in cpuos("ls", "--json").splitlines():
        for sandbox in json.loads(line).get("sandboxes", []):
            cpuos("kill", sandbox["id"])
    until(lambda: not [path for path in GROUPS.glob("cpuos-*/*") if path.is_dir()], within_s=60)
    mounted = [line for line in Path("/proc/mounts").read_text().splitlines() if "/sandboxes/" in line]
    assert not mounted, mounted


if __name__ == "__main__":
    main(globals())

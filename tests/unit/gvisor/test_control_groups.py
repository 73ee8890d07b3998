"""Control groups of both versions, on trees that look like the kernel's."""

from __future__ import annotations

import pytest

from cpuos.runtimes.limits import ControlGroups

ID = "a" * 20
GROUP = f"cpuos-abcdef/{ID}"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture(params=[1, 2])
def groups(request, tmp_path):
    if request.param == 2:
        write(tmp_path / "cgroup.controllers", "cpu memory pids")
        group = tmp_path / GROUP
        write(group / "memory.current", "1000000\n")
        write(group / "memory.stat", "anon 100000\nfile 700000\nfile_mapped 5\nshmem 300000\nkernel 200000\n")
        write(group / "memory.events", "low 0\nhigh 0\nmax 3\noom 1\noom_kill 1\noom_group_kill 0\n")
        write(group / "cpu.stat", "usage_usec 2500000\nuser_usec 1\n")
    else:
        memory = tmp_path / "memory" / GROUP
        write(memory / "memory.usage_in_bytes", "1000000\n")
        stat = "cache 1\nrss 1\nshmem 1\ntotal_cache 700000\ntotal_rss 100000\ntotal_shmem 300000\n"
        write(memory / "memory.stat", stat)
        write(memory / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
        write(tmp_path / "cpuacct" / GROUP / "cpuacct.usage", "2500000000\n")
    found = ControlGroups("abcdef", root=tmp_path)
    assert found.version == request.param
    return found


def test_measures(groups):
    gauge = groups.gauge(ID)
    try:
        assert gauge.read() == 600000, "page cache does not count, shmem does"
        assert gauge.read(above=2000000) == 1000000, "below the mark the upper bound is enough"
        assert gauge.host_kills() == 1
    finally:
        gauge.close()
    assert groups.cpu_seconds(ID) == 2.5
    assert groups.was_oom_killed(ID)
    assert not groups.was_oom_killed("b" * 20)
    assert groups.list() == [ID]
    assert groups.oci_path(ID) == f"/{GROUP}"


def test_nothing_there_is_fine(groups):
    groups.kill("b" * 20)
    groups.remove("b" * 20)
    with pytest.raises(OSError):
        groups.gauge("b" * 20)


def test_parent_gets_cpus_before_its_children(tmp_path):
    write(tmp_path / "cpuset" / "cpuset.cpus", "0-1\n")
    write(tmp_path / "cpuset" / "cpuset.mems", "0\n")
    (tmp_path / "memory").mkdir()
    write(tmp_path / "cpuset" / "cpuos-abcdef" / "cpuset.cpus", "\n")
    write(tmp_path / "cpuset" / "cpuos-abcdef" / "cpuset.mems", "\n")
    ControlGroups("abcdef", root=tmp_path).prepare()
    assert (tmp_path / "cpuset" / "cpuos-abcdef" / "cpuset.cpus").read_text() == "0-1\n"
    assert (tmp_path / "memory" / "cpuos-abcdef").is_dir()

"""What every runtime that can pause must do: pause, resume, snapshots and clones, asked through the public SDK.

A test module subclasses `LifecycleConformance` as it does `SandboxConformance`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from cpuos import Client, DataPack, Sandbox, Snapshot
from cpuos.errors import Conflict, CpuosError, InvalidRequest, NotFound, SandboxGone
from cpuos.testing.instance import Instance
from cpuos.testing.waiting import wait_until
from cpuos.types.sandbox import SandboxState

__all__ = ["LifecycleConformance"]

# Counts in memory alone and tells each number once.
COUNTER = "n=0; while true; do n=$((n+1)); echo $n; sleep 0.05; done"


class LifecycleConformance:
    """Each test has a sandbox of its own: what it leaves must not hide what the next one should find."""

    known_failures: ClassVar[dict[str, str]] = {}
    impossible: ClassVar[dict[str, str]] = {}
    """Tests of what a runtime cannot do by its nature, which would only wait for it in vain."""
    own_kernel: ClassVar[bool] = False
    """Its guests' kernels write to disks of their own: of one that died all is there that was synced, also outside of
    /workspace, and no more is promised."""
    create_options: ClassVar[dict[str, Any]] = {
        **{"template": "base", "memory": "256MiB", "disk": "256MiB", "cpu": 1, "timeout": "10m"}
    }

    packs: ClassVar[bool] = True
    """It takes data packs (Capability.PACKS)."""

    @pytest.fixture(autouse=True)
    def _known_failure(self, request: pytest.FixtureRequest) -> None:
        name = request.node.originalname
        if reason := self.impossible.get(name):
            pytest.skip(reason)
        if reason := self.known_failures.get(name):
            request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    @pytest.fixture
    def host(self, instance: Instance) -> Instance:
        """Where the sandboxes run: tests end their processes from outside."""
        return instance

    @pytest.fixture
    def sandbox(self, client: Client) -> Iterator[Sandbox]:
        with Sandbox.create(client=client, **self.create_options) as sandbox:
            yield sandbox

    def lose(self, host: Instance, sandbox: Sandbox) -> None:
        """Its process ends, without a word to anybody."""
        if self.own_kernel:
            sandbox.exec("sync", user="root", check=True)
        host.kill_sandbox(sandbox.id)
        wait_until(lambda: sandbox.refresh().state is SandboxState.LOST)

    # data packs

    def test_packs_are_those_that_it_was_made_with(self, client: Client, sandbox: Sandbox) -> None:
        sandbox.exec("mkdir data && echo read > data/file && echo mine > kept", check=True)
        pack = DataPack.of(sandbox, "conformance", "/workspace/data")
        has_pack = {"packs": {"/data/pack": pack.name}}
        try:
            with pytest.raises(Conflict) as caught:
                sandbox.attach_packs(has_pack["packs"])
            assert caught.value.code == "packs_fixed"
            assert "cpuos create --pack /data/pack=conformance" in caught.value.hint
            assert not sandbox.exec("test -e /data/pack").ok
            if not self.packs:
                with pytest.raises(InvalidRequest, match="data packs"):
                    Sandbox.create(client=client, **has_pack, **self.create_options)
                return
            snapshot = sandbox.snapshot(memory=False)
            with Sandbox.create(client=client, snapshot=snapshot, **has_pack) as other:
                snapshot.delete()
                assert other.exec("cat kept /data/pack/file", check=True).stdout == "mine\nread\n"
                other.attach_packs(has_pack["packs"])
                other.pause()
                assert other.exec("cat /data/pack/file", check=True).stdout == "read\n"
                assert not other.exec("touch /data/pack/new", user="root").ok
        finally:
            DataPack.delete(pack.name, client=client)

    # pause and resume

    def test_processes_and_files_come_back(self, sandbox: Sandbox) -> None:
        sandbox.exec("mkdir -p deep && echo kept > deep/file && echo tmp > /tmp/outside", check=True)
        job = sandbox.spawn(COUNTER)
        wait_until(lambda: job.output().count(b"\n") > 5)
        sandbox.pause()
        assert sandbox.state is SandboxState.PAUSED
        assert sandbox.expires_at is None
        sandbox.resume()
        assert (sandbox.state, sandbox.info.reason) == (SandboxState.RUNNING, "")
        before = job.output().count(b"\n")
        wait_until(lambda: job.output().count(b"\n") > before + 5)
        numbers = job.output().decode().split()
        assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
        assert sandbox.exec("cat deep/file /tmp/outside", check=True).stdout == "kept\ntmp\n"
        job.kill()

    def test_both_verbs_can_be_repeated(self, sandbox: Sandbox) -> None:
        for _ in range(3):
            sandbox.pause()
            sandbox.pause()
            sandbox.resume()
            sandbox.resume()
        assert sandbox.exec("echo here").stdout == "here\n"

    def test_a_call_resumes_it(self, sandbox: Sandbox) -> None:
        sandbox.files.write("data", b"bytes")
        for call in (
            lambda: sandbox.exec("cat data", check=True).stdout_raw,
            lambda: sandbox.files.read("data"),
            lambda: sandbox.shell().run("cat data").stdout_raw,
        ):
            sandbox.pause()
            assert call() == b"bytes"
            wait_until(lambda: sandbox.refresh().state is SandboxState.RUNNING)

    def test_one_that_is_not_to_be_resumed_by_calls_says_so(self, client: Client) -> None:
        with Sandbox.create(client=client, auto_resume=False, **self.create_options) as sandbox:
            sandbox.pause()
            with pytest.raises(CpuosError) as caught:
                sandbox.exec("true")
            assert caught.value.code == "sandbox_paused"
            assert sandbox.refresh().state is SandboxState.PAUSED
            sandbox.resume()
            assert sandbox.exec("echo here").stdout == "here\n"

    def test_a_waiting_client_gets_every_byte_over_a_pause(self, sandbox: Sandbox) -> None:
        lines: list[str] = []
        job = sandbox.spawn("for n in $(seq 1 60); do echo $n; sleep 0.05; done; exit 3", on_stdout=lines.append)
        wait_until(lambda: job.output().count(b"\n") > 10)
        sandbox.pause()
        sandbox.resume()
        result = job.wait(timeout=60)
        assert (result.status, result.exit_code) == ("exited", 3)
        assert result.stdout == "".join(f"{number}\n" for number in range(1, 61))
        assert lines == [str(number) for number in range(1, 61)]

    def test_a_time_limit_stands_still_while_it_is_paused(self, sandbox: Sandbox) -> None:
        job = sandbox.spawn("sleep 1.5; echo done", timeout=4)
        sandbox.pause()
        time.sleep(5)  # time itself is what is tested
        sandbox.resume()
        result = job.wait(timeout=30)
        assert (result.status, result.stdout) == ("exited", "done\n")

    def test_the_clock_is_right_at_once(self, sandbox: Sandbox) -> None:
        sandbox.pause()
        time.sleep(2)  # time itself is what is tested
        sandbox.resume()
        before = time.time()
        told = float(sandbox.exec("date +%s.%N", check=True).stdout)
        assert before - 0.5 < told < time.time() + 0.5

    def test_kill_of_a_paused_one(self, sandbox: Sandbox) -> None:
        sandbox.pause()
        sandbox.kill()
        assert sandbox.state is SandboxState.STOPPED
        with pytest.raises(SandboxGone):
            sandbox.resume()

    def test_session_time_stands_still(self, sandbox: Sandbox) -> None:
        sandbox.set_timeout("60s")
        sandbox.pause()
        left = sandbox.info.left_s
        assert left is not None
        assert 50 < left <= 60
        sandbox.set_timeout("500s")
        sandbox.resume()
        assert sandbox.expires_at is not None
        assert 490 < sandbox.expires_at.timestamp() - time.time() <= 500

    # snapshots and clones

    def test_a_snapshot_is_a_moment(self, client: Client, sandbox: Sandbox) -> None:
        sandbox.files.write("a", b"then")
        with_snapshot = sandbox.snapshot()
        try:
            sandbox.files.write("a", b"now")
            with Sandbox.create(snapshot=with_snapshot, client=client) as other:
                assert other.files.read("a") == b"then"
                other.files.write("a", b"other")
                assert sandbox.files.read("a") == b"now"
                assert (other.info.memory_mib, other.info.template) == (256, "base")
            with Sandbox.create(snapshot=with_snapshot, client=client) as third:
                assert third.files.read("a") == b"then"
        finally:
            with_snapshot.delete()

    def test_a_snapshot_of_a_paused_one(self, client: Client, sandbox: Sandbox) -> None:
        sandbox.files.write("a", b"kept")
        sandbox.pause()
        snapshot = sandbox.snapshot()
        try:
            assert sandbox.refresh().state is SandboxState.PAUSED
            with Sandbox.create(snapshot=snapshot, client=client) as other:
                assert other.files.read("a") == b"kept"
            assert sandbox.files.read("a") == b"kept"
        finally:
            snapshot.delete()

    def test_processes_go_on_in_each_clone(self, sandbox: Sandbox) -> None:
        sandbox.exec(f"({COUNTER}) > /workspace/count 2>/dev/null & disown", check=True)
        wait_until(lambda: sandbox.files.read("count").count(b"\n") > 3)
        clones = sandbox.fork(3)
        for clone in clones:
            first = clone.files.read("count").count(b"\n")
            wait_until(lambda clone=clone, first=first: clone.files.read("count").count(b"\n") > first + 3)
            numbers = clone.files.read("count").decode().split()
            assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
        for clone in clones:
            clone.kill()
        first = sandbox.files.read("count").count(b"\n")
        wait_until(lambda: sandbox.files.read("count").count(b"\n") > first + 3)

    def test_clones_are_not_each_other(self, sandbox: Sandbox) -> None:
        """What would tie them together differs: names, machine ids, randomness."""
        told = "hostname; echo $(cat /etc/machine-id); cat /proc/sys/kernel/random/uuid; od -An -N8 -tx8 /dev/urandom"
        clones = sandbox.fork(3)
        answers = [one.exec(told, check=True).stdout.splitlines() for one in (sandbox, *clones)]
        for column in zip(*answers, strict=True):
            assert len(set(column)) == 4, column
        for clone in clones:
            clone.kill()

    def test_files_of_clones_are_apart(self, sandbox: Sandbox) -> None:
        clones = sandbox.fork(3)
        for number, clone in enumerate(clones):
            clone.files.write("own", b"%d" % number)
        assert [clone.files.read("own") for clone in clones] == [b"0", b"1", b"2"]
        assert not sandbox.files.exists("own")
        for clone in clones:
            clone.kill()

    def test_files_alone(self, client: Client, sandbox: Sandbox) -> None:
        sandbox.exec("echo kept > a; sleep 4711 & disown", check=True)
        snapshot = sandbox.snapshot(memory=False)
        try:
            assert snapshot.info.memory is False
            assert sandbox.exec("pgrep -fc '^sleep 4711'").stdout == "1\n"
            with Sandbox.create(snapshot=snapshot, client=client) as other:
                assert other.files.read("a") == b"kept\n"
                assert other.exec("pgrep -fc '^sleep 4711'").stdout == "0\n"
        finally:
            snapshot.delete()

    def test_a_snapshot_outlives_its_sandbox(self, client: Client) -> None:
        with Sandbox.create(client=client, **self.create_options) as sandbox:
            sandbox.files.write("a", b"kept")
            snapshot = sandbox.snapshot("outlives")
        try:
            assert [one.id for one in Snapshot.list(sandbox=sandbox.id, client=client)] == [snapshot.id]
            with Sandbox.create(snapshot="outlives", client=client) as other:
                assert other.files.read("a") == b"kept"
                with pytest.raises(InvalidRequest):
                    Sandbox.create(snapshot="outlives", cpu=2, client=client)
        finally:
            snapshot.delete()
        with pytest.raises(NotFound):
            Snapshot.get(snapshot.id, client=client)

    def test_a_clone_of_a_clone(self, client: Client, sandbox: Sandbox) -> None:
        sandbox.files.write("a", b"1")
        (second,) = sandbox.fork()
        second.files.write("b", b"2")
        second.pause()
        (third,) = second.fork()
        assert (third.files.read("a"), third.files.read("b")) == (b"1", b"2")
        assert third.info.expires_at is not None
        for one in (second, third):
            one.kill()

    def test_a_name_is_taken_once(self, sandbox: Sandbox) -> None:
        snapshot = sandbox.snapshot("taken-once")
        try:
            with pytest.raises(Conflict):
                sandbox.snapshot("taken-once")
        finally:
            snapshot.delete()
        sandbox.snapshot("taken-once").delete()

    # lost, and made anew

    def test_a_lost_one_is_made_anew_with_what_was_kept(self, host: Instance, sandbox: Sandbox) -> None:
        sandbox.exec("mkdir -p /opt/kept && echo then > /opt/kept/root", user="root", check=True)
        sandbox.pause()
        sandbox.resume()
        sandbox.exec("echo now > /opt/kept/root", user="root", check=True)
        digest = sandbox.exec("head -c 3000000 /dev/urandom | tee data | sha256sum", check=True).stdout
        job = sandbox.spawn("sleep 1000")
        stale = Sandbox.connect(sandbox.id, client=sandbox._client)
        self.lose(host, sandbox)
        recreated = sandbox.recreate()
        assert recreated is not None
        assert (sandbox.state, sandbox.info.generation, sandbox.info.reason) == (SandboxState.RUNNING, 2, "")
        assert (recreated.workspace, recreated.root) == ("synced" if self.own_kernel else "all", "saved")
        assert recreated.root_age_s is not None
        assert 0 <= recreated.root_age_s < 300
        assert sandbox.exec("sha256sum < data", check=True).stdout == digest
        assert sandbox.exec("cat /opt/kept/root", user="root", check=True).stdout == (
            "now\n" if self.own_kernel else "then\n"
        )
        assert sandbox.exec("pgrep -fc '^sleep 1000'").stdout == "0\n"
        assert job.refresh().status == "sandbox_lost"
        assert stale.refresh().generation == 2
        assert Snapshot.list(sandbox=sandbox.id, client=sandbox._client) == []
        assert sandbox.recreate() == recreated  # it runs: nothing is done

    def test_what_was_never_saved_does_not_come_back(self, host: Instance, client: Client) -> None:
        with Sandbox.create(client=client, root_checkpoint_interval=0, **self.create_options) as sandbox:
            sandbox.exec("echo x > /opt/gone && echo x > /workspace/here", user="root", check=True)
            self.lose(host, sandbox)
            recreated = sandbox.recreate()
            assert recreated is not None
            assert (recreated.root, recreated.root_age_s) == ("template", None)
            assert sandbox.info.reason == "recreated without the files outside of /workspace"
            assert sandbox.exec("ls /opt/gone /workspace/here").stdout == "/workspace/here\n"

    def test_its_root_is_saved_by_itself(self, host: Instance, client: Client) -> None:
        with Sandbox.create(client=client, root_checkpoint_interval="1s", **self.create_options) as sandbox:
            work = "for i in $(seq 100000); do :; done"  # one in which next to nothing happens is passed over
            for number in range(2):
                sandbox.exec(f"mkdir -p /opt/kept; echo {number} > /opt/kept/number; {work}", user="root", check=True)
                time.sleep(6)  # time itself is what is tested: its interval, and what a slow save puts between two
            self.lose(host, sandbox)
            recreated = sandbox.recreate()
            assert recreated is not None
            assert recreated.root_age_s is not None
            assert recreated.root_age_s < 12
            assert sandbox.exec("cat /opt/kept/number", user="root", check=True).stdout == "1\n"

    def test_it_is_lost_and_made_anew_again_and_again(self, host: Instance, sandbox: Sandbox) -> None:
        for generation in (2, 3, 4):
            sandbox.exec(f"echo {generation} >> log", check=True)
            self.lose(host, sandbox)
            sandbox.recreate()
            assert sandbox.info.generation == generation
        assert sandbox.files.read("log") == b"2\n3\n4\n"
        sandbox.pause()
        sandbox.resume()
        assert sandbox.exec("cat log").stdout == "2\n3\n4\n"
        (copy,) = sandbox.fork()
        assert copy.files.read("log") == b"2\n3\n4\n"
        copy.kill()

    def test_only_a_lost_one_is_made_anew(self, sandbox: Sandbox) -> None:
        assert sandbox.recreate() is None
        assert sandbox.info.generation == 1
        sandbox.pause()
        with pytest.raises(Conflict):
            sandbox.recreate()
        sandbox.kill()
        with pytest.raises(SandboxGone):
            sandbox.recreate()

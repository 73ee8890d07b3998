"""What the figures share: a private instance, one sandbox in it with the bare tools beside it, the daemons' memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.bare import ControlExec, RawTcp
from cpuos import Sandbox
from cpuos.client import Client
from cpuos.testing.instance import Instance
from cpuos.testing.memory import resident_mib

__all__ = ["Stage", "prefer", "put_first"]

_SAMPLE_S = 0.05
_HIGHEST = -20
_GROUPS = Path("/sys/fs/cgroup")


def put_first(instance_id: str, *, processes: Iterable[int] = ()) -> None:
    """Have an instance's sandboxes, and these processes with their sessions, come before what else runs on the host.

    Both sides of a ratio gain alike. On a busy machine it would else tell mostly how often each side has to wait for
    a processor.
    """
    for shares, most in ((_GROUPS / "cpu", "cpu.shares 262144"), (_GROUPS, "cpu.weight 10000")):
        name, value = most.split()
        group = shares / f"cpuos-{instance_id}"
        if (shares / name).exists() or (shares / "cgroup.controllers").exists():
            group.mkdir(exist_ok=True)
            if (group / name).exists():
                (group / name).write_text(value)
    for process in processes:
        prefer(process)


def prefer(process: int) -> None:
    """Have a process with its threads and its session come before what else runs on the host."""
    for thread in os.listdir(f"/proc/{process}/task"):
        with suppress(ProcessLookupError, FileNotFoundError):  # threads and children end at any time
            os.setpriority(os.PRIO_PROCESS, int(thread), _HIGHEST)
            for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split():
                with suppress(ProcessLookupError, FileNotFoundError):
                    prefer(int(child))  # the node's workers are its children
    session = Path(f"/proc/{process}/autogroup")  # where sessions are scheduled as groups, it is theirs that counts
    if session.exists():
        session.write_text(str(_HIGHEST))


class Stage:
    """Made on use: a figure that needs no sandbox starts none."""

    def __init__(self, *, rounds: int) -> None:
        self.rounds = rounds
        """Turns of the long measurements; short ones take many times as many."""
        self.growth_mib: dict[str, float] = {}
        """The most that each daemon grew over a large transfer so far."""
        self.kept: dict[str, Any] = {}
        """What one figure has measured and another tells of too."""
        self._stack = ExitStack()

    def close(self) -> None:
        self._stack.close()

    @cached_property
    def instance(self) -> Instance:
        instance = self._stack.enter_context(Instance(runtime="gvisor"))
        put_first(instance.settings.instance_id, processes=[os.getpid(), *instance.pids().values()])
        return instance

    @cached_property
    def client(self) -> Client:
        return self.instance.client()

    @cached_property
    def folder(self) -> Path:
        """Scratch space that goes with the instance."""
        folder = self.instance.folder / "bench"
        folder.mkdir(mode=0o700)
        return folder

    @cached_property
    def sandbox(self) -> Sandbox:
        """Warmed up; its disk leaves room for others on a small machine."""
        sandbox = self._stack.enter_context(Sandbox.create(client=self.client, disk="2GiB", timeout="2h"))
        for _ in range(20):
            sandbox.exec(["true"], check=True)
        return sandbox

    @cached_property
    def control(self) -> ControlExec:
        """gVisor's own way into the same sandbox."""
        root = self.instance.run_dir / "runtimes" / "gvisor" / "root"
        control = ControlExec(root / f"runsc-{self.sandbox.id}.sock", self.sandbox.id)
        self._stack.callback(control.close)
        return control

    @cached_property
    def raw(self) -> RawTcp:
        """Plain TCP to a program in the same sandbox."""
        program = Path(__file__).with_name("guest_tcp.py")
        self.sandbox.files.write("/tmp/guest_tcp.py", program.read_bytes())
        job = self.sandbox.spawn(["python3", "/tmp/guest_tcp.py"])
        while not job.output():
            if job.refresh().status.ended:
                raise RuntimeError("the sandbox's end of the plain connections did not start")
        self._stack.callback(job.kill)
        return RawTcp(self.router)

    @cached_property
    def router(self) -> Path:
        """The network namespace beside the sandbox's, from where its ports are reached with nothing in between."""
        node = self.instance.pids()["node"]  # the network's names are in the node's own mount namespace
        return Path(f"/proc/{node}/root{self.instance.run_dir}/netns/{self.sandbox.id}.slot/router")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note how far the daemons' own memory rises above where it is now."""
        pids = self.instance.pids()
        before = {part: resident_mib(pid) for part, pid in pids.items()}
        ended = threading.Event()

        def sample() -> None:
            last = False
            while not last:
                last = ended.wait(_SAMPLE_S)
                for part, pid in pids.items():
                    grown = resident_mib(pid) - before[part]
                    self.growth_mib[part] = max(self.growth_mib.get(part, 0.0), grown)

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            yield
        finally:
            ended.set()
            sampler.join()

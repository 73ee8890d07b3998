"""Random lifecycle operations of several clients while parts and sandboxes are killed, and what must hold all along.

Each sandbox's files are known: what was acknowledged as synced must be there, nothing that was never tried may be.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from chaos_boxes import LOOK, Box, Seen, Snap
from cpuos import Client, Sandbox, Snapshot
from cpuos.errors import ERRORS, CpuosError
from cpuos.testing.instance import Instance
from cpuos.testing.waiting import wait_until
from cpuos.types.sandbox import Recreated, SandboxState

__all__ = ["SHAPE", "Chaos"]

S = SandboxState
SHAPE = {"template": "base", "cpu": 1, "memory": "256MiB", "disk": "64MiB", "timeout": "1h"}
MAX_BOXES, MAX_SNAPS, CLIENTS = 5, 3, 4
CALL_S = 200.0
# Without a fork: for a moment that would be a second process of its name.
_COUNTER = """mkfifo /tmp/never; exec -a chaos-counter bash -c '
exec 3<>/tmp/never; n=0; while :; do n=$((n+1)); echo $n >/tmp/n; read -t 1 -u 3; done'"""
_CALL = "call"
_WRITE = """set -e; mkdir -p c ~/c; yes {name} | head -n {lines} > ~/c/{name}
cp ~/c/{name} c/.{name}; sync c/.{name}; mv c/.{name} c/{name}; sync c"""
_LINES = 500
# Parts are away, states change under a call, a sandbox was killed: answers that say so. All else is a fault.
_AWAY = {"server_unavailable", "gateway_unavailable", "node_unavailable", "idempotency_in_progress"}
_MOVED = {"wrong_state", "sandbox_paused", "freeze_failed", "agent_unresponsive"}
_ENDED = {"sandbox_lost", "sandbox_stopped"}
_NEVER = datetime.min.replace(tzinfo=UTC)
_SNAPSHOTS = {"snapshot_not_found", "snapshot_in_use"}


class Chaos:
    """`run` does so many operations; `faults` has what should never have come."""

    def __init__(self, instance: Instance, *, seed: int, operations: int) -> None:
        self.instance = instance
        self.seed = seed
        self.operations = operations
        self.boxes: dict[str, Box] = {}
        self.gone: dict[str, Box] = {}
        """Those whose process was killed."""
        self.snaps: dict[str, Snap] = {}
        self.faults: list[str] = []
        self.tally: Counter[str] = Counter()
        self._begun = 0
        self._calls = 0
        self._untold: list[tuple[str, str]] = []
        """Verbs of calls that failed, each with the label of what it may have made, or what it was to end."""
        self._names = 0
        self._lock = threading.Condition()
        self._mine = threading.local()

    def run(self) -> None:
        killer = threading.Thread(target=self._guard, args=("killer", self._kill_parts))
        clients = [
            threading.Thread(target=self._guard, args=(f"client {number}", self._client, number))
            for number in range(CLIENTS)
        ]
        for thread in [killer, *clients]:
            thread.start()
        killer.join()
        # A command waits with its paused sandbox for someone to resume it.
        waker = self.instance.client()
        while any(client.is_alive() for client in clients):
            for client in clients:
                client.join(0.5)
            with contextlib.suppress(CpuosError):
                for info in Sandbox.list(state="paused", client=waker):
                    Sandbox.connect(info.id, client=waker).resume()

    def wrong(self, fault: str) -> None:
        with self._lock:
            self.faults.append(fault)

    def _guard(self, name: str, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except BaseException as error:  # a thread's end must not go unseen
            self.wrong(f"{name}: {''.join(traceback.format_exception(error))}")
            with self._lock:
                self._begun = self.operations
                self._lock.notify_all()

    # what is killed

    def _kill_parts(self) -> None:
        dice = random.Random(f"{self.seed} killer")
        at = 0
        while True:
            at += dice.randint(6, 14)
            with self._lock:
                self._lock.wait_for(lambda at=at: self._begun >= min(at, self.operations))
                if self._begun >= self.operations:
                    return
            time.sleep(dice.uniform(0, 0.5))  # somewhere in what runs now
            what = dice.choice(["server", "gateway", "node", "sandbox", "sandbox", "two"])
            self.tally[f"kill {what}"] += 1
            if what == "sandbox":
                self._shoot(dice)
            else:
                for part in dice.sample(["server", "gateway", "node"], 2) if what == "two" else [what]:
                    self.instance.kill(part)
                self.instance.wait_ready()

    def _shoot(self, dice: random.Random) -> None:
        with self._lock:
            alive = [box for box in self.boxes.values() if not (box.shot or box.ended)]
        if len(alive) < 2:
            return
        self._shoot_box(dice.choice(sorted(alive, key=lambda box: box.id)))

    def _shoot_box(self, box: Box, *, again: bool = False) -> None:
        with contextlib.suppress(OSError, TypeError, KeyError, ValueError):  # it is paused, or in between
            pid = self.instance.sandbox_process(box.id)
            process = os.pidfd_open(pid)
            try:
                words = Path(f"/proc/{pid}/cmdline").read_text()
                if box.id in words and str(self.instance.run_dir) in words:
                    with self._lock:
                        if box.shot and not again:
                            return
                        if not box.shot:
                            box.home_when_shot = box.home
                        box.shot, box.home, box.count = True, set(), None
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            finally:
                os.close(process)

    # what clients do

    def _client(self, number: int) -> None:
        dice = random.Random(f"{self.seed} client {number}")
        self._mine.outcome, self._mine.untold = "", None
        client = self.instance.client()
        verbs: dict[Callable[[random.Random, Client], None], int] = {
            self.create: 8,
            self.write: 30,
            self.check: 12,
            self.pause: 15,
            self.resume: 8,
            self.snapshot: 8,
            self.create_from_snapshot: 7,
            self.fork: 4,
            self.recreate: 8,
            self.kill: 5,
            self.delete_snapshot: 4,
        }
        while True:
            with self._lock:
                if self._begun >= self.operations:
                    return
                self._begun += 1
                self._lock.notify_all()
            verb = dice.choices(list(verbs), weights=list(verbs.values()))[0]
            with self._lock:
                if not self.boxes:
                    verb = self.create
                elif len(self.boxes) >= MAX_BOXES and verb in (self.create, self.create_from_snapshot, self.fork):
                    verb = self.kill
                elif len(self.snaps) >= MAX_SNAPS and verb == self.snapshot:
                    verb = self.delete_snapshot
                elif not self.snaps and verb in (self.create_from_snapshot, self.delete_snapshot):
                    verb = self.snapshot
            verb(dice, client)
            if self._mine.outcome in _AWAY:
                wait_until(lambda: is_well(client), within_s=CALL_S)  # else all that is left meets nothing but this
            if self._mine.untold is not None:
                self._end_untold(client, *self._mine.untold)
                self._untold.append(self._mine.untold)
                self._mine.untold = None

    def end_untold(self, client: Client) -> None:
        """What a failed call went on with after its caller had looked."""
        for verb, what in self._untold:
            self._end_untold(client, verb, what)

    def _end_untold(self, client: Client, verb: str, what: str) -> None:
        """As a caller who was not told how it ended: what was made is found by its label, what is to end is ended."""
        until, boxes, snaps = time.monotonic() + CALL_S, [], []
        while time.monotonic() < until:
            with contextlib.suppress(CpuosError):
                boxes = [one for one in Sandbox.list(client=client) if what in (one.id, one.labels.get(_CALL))]
                snaps = [one for one in Snapshot.list(client=client) if what in (one.id, one.labels.get(_CALL))]
                if not boxes and not snaps:
                    return
                for box in boxes:
                    Sandbox.connect(box.id, client=client).kill()
                for snap in snaps:
                    Snapshot.get(snap.id, client=client).delete()
                with self._lock:
                    self.tally[f"{verb}: made, untold"] += len(boxes) + len(snaps)
            time.sleep(0.2)
        self.wrong(f"{verb}: what it may have made ({what}) does not end: {boxes} {snaps}")

    def create(self, dice: random.Random, client: Client) -> None:
        with self._call("create", makes=True) as labels:
            sandbox = Sandbox.create(client=client, labels=labels, **SHAPE)
            box = Box(id=sandbox.id)
            self._add(box)
            self._begin_count(box, sandbox)

    def _begin_count(self, box: Box, sandbox: Sandbox) -> None:
        with self._call("count", box=box):
            lives = box.lives
            sandbox.spawn(_COUNTER)
            with self._lock:
                if not box.shot and box.lives == lives:
                    box.count = 0

    def create_from_snapshot(self, dice: random.Random, client: Client) -> None:
        snap = self._pick_snap(dice)
        if snap is None:
            return
        with self._call("create from snapshot", makes=True, allowed=_SNAPSHOTS) as labels:
            made = Sandbox.create(snapshot=snap.id, timeout="1h", labels=labels, client=client)
            self._add(snap.born(made.id))

    def fork(self, dice: random.Random, client: Client) -> None:
        if (box := self._pick(dice)) is None:
            return
        with self._call("fork", box=box, makes=True) as labels:
            with self._lock:
                before = box.moment()
            made = Sandbox.connect(box.id, client=client).fork(dice.choice([1, 1, 2]), labels=labels)
            moment = self._snap("", box, before, memory=True)
            for sandbox in made:
                self._add(moment.born(sandbox.id))

    def _snap(self, snapshot_id: str, box: Box, before: Box, *, memory: bool) -> Snap:
        """Of one that was `before` when it began. One that was made anew meanwhile may be of before or after that."""
        with self._lock:
            same = box.lives == before.lives and not box.shot
            return Snap(
                id=snapshot_id,
                acknowledged=frozenset(before.acknowledged),
                tried=frozenset(box.tried),
                home=frozenset(before.home if same else before.home & box.home),
                count=before.count if memory and same else None,
            )

    def snapshot(self, dice: random.Random, client: Client) -> None:
        if (box := self._pick(dice)) is None:
            return
        with self._call("snapshot", box=box, makes=True) as labels:
            memory = dice.random() < 0.75
            with self._lock:
                before = box.moment()
            made = Sandbox.connect(box.id, client=client).snapshot(memory=memory, labels=labels)
            snap = self._snap(made.id, box, before, memory=memory)
            with self._lock:
                self.snaps[snap.id] = snap

    def delete_snapshot(self, dice: random.Random, client: Client) -> None:
        snap = self._pick_snap(dice)
        if snap is None:
            return
        with self._lock:
            self.snaps.pop(snap.id, None)  # whatever comes of it: it may be gone
        with self._call("delete snapshot", ends=snap.id, allowed=_SNAPSHOTS):
            Snapshot.get(snap.id, client=client).delete()

    def write(self, dice: random.Random, client: Client) -> None:
        if (box := self._pick(dice)) is None:
            return
        with self._lock:
            self._names += 1
            name = f"f-{box.id}-{self._names}"
            box.tried.add(name)
            lives = box.lives
        with self._call("write", box=box, waits=True):
            sandbox = Sandbox.connect(box.id, client=client)
            result = sandbox.exec(_WRITE.format(name=name, lines=_LINES), timeout="120s")
            if result.ok:
                with self._lock:
                    box.acknowledged.add(name)
                    box.written_at[name] = datetime.now(UTC)
                    if box.lives == lives and not box.shot:
                        box.home.add(name)
            elif result.status == "exited":
                self.wrong(f"write in {box.id}: {result}")

    def check(self, dice: random.Random, client: Client) -> None:
        if (box := self._pick(dice)) is not None:
            with self._call("check", box=box, waits=True):
                self.look(box, client)

    def pause(self, dice: random.Random, client: Client) -> None:
        if (box := self._pick(dice)) is None:
            return
        with self._call("pause", box=box):
            box.pauses += 1
            Sandbox.connect(box.id, client=client).pause()

    def resume(self, dice: random.Random, client: Client) -> None:
        if (box := self._pick(dice)) is None:
            return
        with self._call("resume", box=box):
            Sandbox.connect(box.id, client=client).resume()

    def recreate(self, dice: random.Random, client: Client) -> None:
        """Kill the process of one, unless one is lost already, and make that anew."""
        with self._lock:
            lost = sorted((box for box in self.gone.values() if box.shot and not box.ended), key=lambda box: box.id)
        box = dice.choice(lost) if lost else self._pick(dice)
        if box is None:
            return
        if not box.shot:
            self._shoot_box(box)
        if not box.shot:
            return  # it has no process now
        with self._call("recreate", box=box):
            sandbox = Sandbox.connect(box.id, client=client)
            recreated = self._recreate_at_last(box, sandbox)
            with self._lock:
                if recreated is None or not box.shot:
                    return  # ended by another, or another has made it anew
                saved_at = recreated.root_at if recreated.root == "saved" else None
                until = saved_at - timedelta(seconds=2) if saved_at else _NEVER
                box.home = {name for name in box.home_when_shot if box.written_at.get(name, _NEVER) < until}
                box.shot, box.lives, box.generation = False, box.lives + 1, sandbox.info.generation
                self.gone.pop(box.id, None)
                self.boxes[box.id] = box
            if recreated.workspace != "all":
                self.wrong(f"recreate of {box.id}: {recreated}")
            self._begin_count(box, Sandbox.connect(box.id, client=client))  # another may have made it: with its ticket

    def _recreate_at_last(self, box: Box, sandbox: Sandbox) -> Recreated | None:
        """As a patient client; None where another has ended it."""
        until = time.monotonic() + CALL_S
        while True:
            try:
                if sandbox.refresh().state is S.LOST:
                    sandbox.recreate()
                if sandbox.refresh().generation > box.generation and sandbox.info.state in (S.RUNNING, S.PAUSED):
                    return sandbox.info.recreated
                if sandbox.info.state is S.PAUSED:  # it was shot while it was resumed, and is paused as before
                    with contextlib.suppress(CpuosError):
                        sandbox.resume()
                    self._shoot_box(box, again=True)
                elif sandbox.info.state is S.RUNNING:  # the shot met what a pause has just ended; else it finds nothing
                    self._shoot_box(box, again=True)
                raise TimeoutError("it is not lost yet, or being made")
            except (CpuosError, TimeoutError) as error:
                if box.ended:
                    return None
                code = error.code if isinstance(error, CpuosError) else "wrong_state"
                if code not in _AWAY | _MOVED | {"capacity_exceeded"} or time.monotonic() > until:
                    self.wrong(f"recreate of {box.id}: {error!r}: {error}")
                    return None
                time.sleep(0.2)

    def kill(self, dice: random.Random, client: Client) -> None:
        if (box := self._pick(dice)) is None:
            return
        box.ended = True
        with self._lock:
            self.boxes.pop(box.id, None)
        with self._call("kill", box=box, ends=box.id):
            Sandbox.connect(box.id, client=client).kill()

    def look(self, box: Box, client: Client, *, root: bool = True) -> None:
        """Its files and its counting process are as they must be; without `root` only those of /workspace."""
        with self._lock:
            must, home, count, lives = set(box.acknowledged), set(box.home), box.count, box.lives
        sandbox = Sandbox.connect(box.id, client=client)
        result = sandbox.exec(LOOK, timeout="120s")
        if result.status != "exited":
            return  # it was cut off, and says so
        with self._lock:
            may = set(box.tried)
            if box.shot or box.lives != lives:  # which of its lives this is of is not known
                home, count = set(), None
        seen = Seen.read(result.stdout)
        for place, found in (("/workspace", seen.workspace), ("~", seen.home))[: 2 if root else 1]:
            torn = {name for name, digest in found.items() if digest != _digest(name)}
            needed = must
            if place == "~":
                needed = home
                torn -= may - home  # one that is being written, or was when its root was saved
            if lost := needed - found.keys():
                self.wrong(f"{box.id} has lost of {place}: {sorted(lost)}: {result}")
            if (strange := found.keys() - may) or torn:
                self.wrong(f"{box.id} has in {place} what is not its own: {sorted(strange)}, or torn: {sorted(torn)}")
        if count is not None:
            reason = sandbox.refresh().reason
            if seen.counters != "1" or (seen.count is not None and seen.count < count):
                self.wrong(f"{box.id}: {seen.counters} processes count, to {seen.count}, it was {count}; {reason!r}")
            box.count = max(count, seen.count or 0)

    # what they have of it

    def _add(self, box: Box) -> None:
        with self._lock:
            self.boxes[box.id] = box

    def _pick(self, dice: random.Random) -> Box | None:
        with self._lock:
            boxes = list(self.boxes.values())
        return dice.choice(boxes) if boxes else None

    def _pick_snap(self, dice: random.Random) -> Snap | None:
        with self._lock:
            snaps = list(self.snaps.values())
        return dice.choice(snaps) if snaps else None

    @contextlib.contextmanager
    def _call(
        self,
        verb: str,
        *,
        box: Box | None = None,
        makes: bool = False,
        waits: bool = False,
        ends: str = "",
        allowed: set[str] = frozenset(),
    ) -> Iterator[dict[str, str]]:
        """A call ends with its result or an error that may come, in its time. One that `waits` does so while the
        sandbox is paused. What it `makes` has the labels that this yields."""
        with self._lock:
            self._calls += 1
            label = str(self._calls)
        began, pauses, lives = time.monotonic(), box.pauses if box else 0, box.lives if box else 0
        outcome = "ok"
        try:
            yield {_CALL: label}
        except CpuosError as error:
            outcome = error.code
            what = f"{verb} of {box.id if box else ''}: {error.code}: {error}"
            may = _AWAY | _MOVED | _ENDED | allowed | {"capacity_exceeded"}
            if box is not None and (box.shot or box.lives != lives):
                may |= {"stale_generation"}  # what knows the generation of before is void
            if error.code not in ERRORS or error.code not in may:
                self.wrong(what)
            if box is not None and error.code in _ENDED:
                with self._lock:
                    told_of_now = box.lives == lives
                    if told_of_now and self.boxes.pop(box.id, None) is not None:
                        self.gone[box.id] = box
                    if told_of_now and not (box.shot or box.ended):
                        self.faults.append(what)
            if makes:
                self._mine.untold = (verb, label)
            elif ends and error.code not in _ENDED | {"snapshot_not_found"}:
                self._mine.untold = (verb, ends)
        took = time.monotonic() - began
        if took > CALL_S and not (waits and box is not None and box.pauses != pauses):
            self.wrong(f"{verb} took {took:.0f} s: {outcome}")
        self._mine.outcome = outcome
        with self._lock:
            self.tally[f"{verb}: {outcome}"] += 1


def is_well(client: Client) -> bool:
    try:
        return bool(client.health()["status"] == "ok")
    except CpuosError:
        return False


def _digest(name: str) -> str:
    return hashlib.sha256(f"{name}\n".encode() * _LINES).hexdigest()

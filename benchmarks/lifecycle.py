"""Pause, resume, copies and a warm interpreter, through the public SDK."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from benchmarks.results import Measured, block_ratios, percentile
from benchmarks.stage import Stage
from cpuos import Sandbox, Snapshot
from cpuos.client import Client

__all__ = [
    "ASK_COLD",
    "ASK_WARM",
    "WARM_SHAPE",
    "first_sum",
    "fork_of_8",
    "list_of_many",
    "pause",
    "resume_by_call",
    "resume_to_exec",
    "save_warm",
    "warm_pandas",
]

_COPIES = 8
_SHAPE = {"cpu": 1, "memory": "256MiB", "disk": "512MiB", "timeout": "30m"}
_SUM = "print(int(pandas.DataFrame({'a': range(1000)}).sum().sum()))"
# Imported once; each connection gets a sum that is worked out for it.
_WARM = f"""
import contextlib, io, pandas, socket
listener = socket.create_server(("127.0.0.1", 7000))
print("warm", flush=True)
while True:
    connection, _ = listener.accept()
    with connection, contextlib.redirect_stdout(io.StringIO()) as text:
        {_SUM}
        connection.sendall(text.getvalue().encode())
"""
ASK_WARM = ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/7000; cat <&3"]
ASK_COLD = ["python3", "-c", f"import pandas; {_SUM}"]
WARM_SHAPE = {**_SHAPE, "memory": "1GiB"}


def pause(stage: Stage) -> Measured:
    """An idle sandbox of 256 MiB until nothing of it is left but files."""
    return _paused_and_resumed(stage)[0]


def resume_to_exec(stage: Stage) -> Measured:
    """The same, from `resume()` to the result of its first command."""
    return _paused_and_resumed(stage)[1]


def resume_by_call(stage: Stage) -> Measured:
    """A command for a paused sandbox, which resumes it, until its result."""
    times = []
    with Sandbox.create(client=stage.client, **_SHAPE) as sandbox:
        for _ in range(3 * stage.rounds):
            sandbox.pause()
            times.append(_seconds(lambda: sandbox.exec(["true"], check=True)))
    return _milliseconds(times)


def fork_of_8(stage: Stage) -> Measured:
    """Eight running copies, each of which has answered a command."""
    times = []
    with Sandbox.create(client=stage.client, **_SHAPE) as sandbox:
        sandbox.exec(["true"], check=True)
        for _ in range(max(3, stage.rounds)):
            since = time.perf_counter()
            copies = sandbox.fork(_COPIES)
            for copy in copies:
                copy.exec(["true"], check=True)
            times.append(time.perf_counter() - since)
            for copy in copies:
                copy.kill()
    return Measured(value=statistics.median(times), spread=(min(times), max(times)), detail={"n": len(times)})


def warm_pandas(stage: Stage) -> Measured:
    """A sum by a restored Python that has pandas imported, against a cold start that imports it first."""
    warm, cold = [], []
    snapshot = save_warm(stage.client)
    try:
        for _ in range(max(3, stage.rounds)):
            warm.append(first_sum(stage.client, ASK_WARM, snapshot=snapshot))
            cold.append(first_sum(stage.client, ASK_COLD, **WARM_SHAPE))
    finally:
        snapshot.delete()
    return Measured(
        value=statistics.median(cold) / statistics.median(warm),
        spread=block_ratios(cold, warm),
        detail={"n": len(warm), "warm_ms": _p50(warm), "cold_ms": _p50(cold)},
    )


def save_warm(client: Client) -> Snapshot:
    """Of a Python that has pandas imported."""
    with Sandbox.create(client=client, **WARM_SHAPE) as sandbox:
        job = sandbox.spawn(["python3", "-c", _WARM])
        while b"warm" not in job.output():
            time.sleep(0.05)
        return sandbox.snapshot()


def list_of_many(stage: Stage) -> Measured:
    """All records, with those of the ended sandboxes of this run."""
    times = [_seconds(lambda: Sandbox.list(client=stage.client, state="all")) for _ in range(10 * stage.rounds)]
    return _milliseconds(times)


def _paused_and_resumed(stage: Stage) -> tuple[Measured, Measured]:
    pauses, resumes = [], []
    with Sandbox.create(client=stage.client, **_SHAPE) as sandbox:
        sandbox.exec(["true"], check=True)
        for _ in range(3 * stage.rounds):
            pauses.append(_seconds(sandbox.pause))
            since = time.perf_counter()
            sandbox.resume()
            sandbox.exec(["true"], check=True)
            resumes.append(time.perf_counter() - since)
    return _milliseconds(pauses), _milliseconds(resumes)


def first_sum(client: Client, command: Sequence[str], **wanted: object) -> float:
    """Seconds from the create to the sum."""
    since = time.perf_counter()
    sandbox = Sandbox.create(client=client, **wanted)
    try:
        result = sandbox.exec(command, check=True)
        spent = time.perf_counter() - since
        if result.stdout != "499500\n":
            raise RuntimeError(f"the sum is wrong: {result.stdout!r}")
    finally:
        sandbox.kill()
    return spent


def _seconds(work: Callable[[], object]) -> float:
    since = time.perf_counter()
    work()
    return time.perf_counter() - since


def _p50(times: Sequence[float]) -> float:
    return round(1e3 * statistics.median(times), 1)


def _milliseconds(times: Sequence[float]) -> Measured:
    milliseconds = [1e3 * spent for spent in times]
    return Measured(
        value=statistics.median(milliseconds),
        spread=(min(milliseconds), max(milliseconds)),
        detail={"n": len(times), "p90": round(percentile(milliseconds, 0.9), 1)},
    )

"""DNS of two sandboxes in one worker: what a flood from one of them costs the other."""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.results import Measured, block_ratios, percentile
from benchmarks.stage import Stage
from cpuos.node.network.workers.messages import Open, Start
from cpuos.node.network.workers.supervisor import StartCall, Worker
from cpuos.types.network import EffectivePolicy, NetworkPolicy, PolicyLayer

__all__ = ["dns_neighbour"]

_PROBES = 150  # of one turn
_GAP_S = 0.002
_HIGHEST = -20


def dns_neighbour(stage: Stage) -> Measured:
    """p95 of a sandbox's cached questions while another asks 2,000 a second, over the same without the other.

    No sandbox is started: the sockets are on loopback, and the rule that drops most of a flood before them is absent.
    """
    return asyncio.run(_measure(max(6, 3 * stage.rounds)))


async def _measure(rounds: int) -> Measured:
    with _resolver() as port, _sockets() as (flooded, probed):
        start = Start(resolvers=["127.0.0.1"], resolver_port=port)
        async with Worker("dns", start=lambda: StartCall(message=start)) as worker:
            for number, pair in enumerate((flooded, probed)):
                await worker.request(_open(number), descriptors=[end.fileno() for end in pair])
            for process in (worker.pid, os.getpid()):
                os.setpriority(os.PRIO_PROCESS, process or 0, _HIGHEST)
            with _flood(flooded[0].getsockname()[1]) as order:
                return await asyncio.to_thread(_take_turns, rounds, order, probed[0].getsockname())


def _take_turns(rounds: int, order: subprocess.Popen[bytes], address: tuple[str, int]) -> Measured:
    assert order.stdin is not None
    quiet, flooded = [], []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as prober:
        prober.settimeout(2)
        prober.connect(address)
        _probe(prober)
        for _ in range(rounds):
            for word, times in ((b"stop\n", quiet), (b"go\n", flooded)):
                order.stdin.write(word)
                order.stdin.flush()
                time.sleep(0.3)
                times.append(percentile(_probe(prober), 0.95))
    return Measured(
        value=statistics.median(flooded) / statistics.median(quiet),
        spread=block_ratios(flooded, quiet),
        detail={
            "n": rounds * _PROBES,
            "quiet_p95_ms": round(1e3 * statistics.median(quiet), 2),
            "flooded_p95_ms": round(1e3 * statistics.median(flooded), 2),
        },
    )


def _probe(prober: socket.socket) -> list[float]:
    times = []
    for number in range(_PROBES):
        question = _question(number, f"n{number % 50}.example")
        begin = time.perf_counter()
        prober.send(question)
        while prober.recv(1500)[:2] != question[:2]:
            pass
        times.append(time.perf_counter() - begin)
        time.sleep(_GAP_S)
    return times


def _question(number: int, name: str) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack(">6H", number, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", 1, 1)


def _open(number: int) -> Open:
    policy = EffectivePolicy(version=1, layers=[PolicyLayer(origin="sandbox", policy=NetworkPolicy())])
    return Open(sandbox=f"{number:020}", policy=policy)


@contextmanager
def _sockets() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    pairs = [(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket()) for _ in range(2)]
    for datagrams, streams in pairs:
        datagrams.bind(("127.0.0.1", 0))
        streams.bind(("127.0.0.1", 0))
        streams.listen()
    try:
        yield pairs
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


@contextmanager
def _resolver() -> Iterator[int]:
    """Knows an address for every name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.bind(("127.0.0.1", 0))

        def run() -> None:
            while True:
                data, sender = end.recvfrom(1500)
                if len(data) <= 12:
                    return
                question = data[12 : data.index(b"\0", 12) + 5]
                record = struct.pack(">HHHIH4B", 0xC00C, 1, 1, 300, 4, 93, 184, 215, 14)
                end.sendto(data[:2] + struct.pack(">5H", 0x8180, 1, 1, 0, 0) + question + record, sender)

        serving = threading.Thread(target=run)
        serving.start()
        try:
            yield end.getsockname()[1]
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
                last.sendto(b"end", end.getsockname())
            serving.join()


@contextmanager
def _flood(port: int) -> Iterator[subprocess.Popen[bytes]]:
    flood = subprocess.Popen([sys.executable, "-m", "benchmarks.names", str(port)], stdin=subprocess.PIPE)
    try:
        yield flood
    finally:
        flood.communicate()


def _flood_when_told(port: int) -> None:
    """2,000 questions a second between "go" and "stop", three quarters of them for 50 names, the rest for new ones."""
    flooding, ended = threading.Event(), threading.Event()

    def send() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.connect(("127.0.0.1", port))
            number = 0
            while not ended.is_set():
                if not flooding.wait(0.05):
                    continue
                for _ in range(20):
                    number += 1
                    name = f"n{number % 50}.example" if number % 4 else f"new{number}.example"
                    sender.send(_question(number & 65535, name))
                time.sleep(0.01)

    sending = threading.Thread(target=send)
    sending.start()
    for line in sys.stdin:
        if line.strip() == "go":
            flooding.set()
        else:
            flooding.clear()
    ended.set()
    sending.join()


if __name__ == "__main__":
    _flood_when_told(int(sys.argv[1]))

"""The runtimes of this node, and what probing them proved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping

import structlog

from cpuos.errors import SetupRequired
from cpuos.runtimes.base import Probe, Runtime
from cpuos.types.node import RuntimeFacts
from cpuos.types.sandbox import Isolation

__all__ = ["RuntimeTable"]

log = structlog.get_logger("cpuos.node")

PROBE_LIMIT_S = 60.0
RETRY_S = 30.0


class RuntimeTable:
    """Probes boot something, so each runs once; one that failed is asked again when its answer is old."""

    def __init__(self, runtimes: Mapping[str, Runtime], *, now: Callable[[], float] = time.monotonic) -> None:
        self._runtimes = dict(runtimes)
        self._now = now
        self._probes: dict[str, tuple[float, asyncio.Task[Probe]]] = {}

    def __iter__(self) -> Iterator[Runtime]:
        return iter(self._runtimes.values())

    def find(self, name: str) -> Runtime | None:
        return self._runtimes.get(name)

    async def get(self, name: str) -> tuple[Runtime, Probe]:
        """The runtime, proved to work here."""
        runtime = self._runtimes.get(name)
        if runtime is None:
            raise SetupRequired(
                f"cannot use runtime: {name!r}",
                f"this node has: {', '.join(sorted(self._runtimes)) or 'none'}",
                code="runtime_unavailable",
                hint="cpuos doctor",
            )
        probe = await self.probe(name)
        if not probe.available:
            raise SetupRequired(
                f"cannot use runtime: {name!r}", probe.reason, code="runtime_unavailable", hint="cpuos doctor"
            )
        return runtime, probe

    def start(self) -> None:
        """Begin to probe now, so that the first caller need not wait."""
        for name in self._runtimes:
            self._probing(name)

    async def probe(self, name: str) -> Probe:
        return await asyncio.shield(self._probing(name))

    def _probing(self, name: str) -> asyncio.Task[Probe]:
        started, task = self._probes.get(name, (0.0, None))
        if task is not None and task.done() and not task.result().available and self._now() - started > RETRY_S:
            task = None
        if task is None:
            task = asyncio.create_task(self._probe(self._runtimes[name]))
            self._probes[name] = (self._now(), task)
        return task

    async def facts(self) -> list[RuntimeFacts]:
        facts = []
        for name in sorted(self._runtimes):
            probe = await self.probe(name)
            facts.append(
                RuntimeFacts(
                    name=name,
                    available=probe.available,
                    isolation=probe.isolation,
                    detail=probe.detail,
                    reason=probe.reason,
                )
            )
        return facts

    async def close(self) -> None:
        tasks = [task for _, task in self._probes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for runtime in self._runtimes.values():
            await runtime.close()

    async def _probe(self, runtime: Runtime) -> Probe:
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                probe = await runtime.probe()
        except Exception as error:
            log.exception("probe failed", runtime=runtime.name)
            reason = f"the probe failed: {str(error) or type(error).__name__}"
            return Probe(available=False, isolation=Isolation.NONE, detail="", reason=reason)
        log.info("runtime probed", runtime=runtime.name, available=probe.available, reason=probe.reason)
        return probe

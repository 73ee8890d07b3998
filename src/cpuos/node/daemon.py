"""The daemon: takes its namespace, lock and sockets, makes host and journal agree, and serves until it is told to stop.

Sandboxes outlive it: they are not its children, and a later daemon adopts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import grp
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import structlog
import uvicorn

from cpuos.errors import CpuosError, PlatformError, SetupRequired
from cpuos.node import host
from cpuos.node.admission import AdmissionRules
from cpuos.node.api import create_api
from cpuos.node.assembly import Assembly
from cpuos.node.dial import DialServer
from cpuos.node.facts import NodeFactsReader, read_name
from cpuos.node.gateway_news import GatewayNews
from cpuos.node.identity import load_identity
from cpuos.node.images import ImageStore
from cpuos.node.journal import Journal
from cpuos.node.kept_templates import KeptTemplates
from cpuos.node.listening import listen
from cpuos.node.logs import configure_logs
from cpuos.node.network.limits import NetworkLimits
from cpuos.node.network.network import Network, NetworkConfig
from cpuos.node.packs import PackStore
from cpuos.node.peers import checked_protocol
from cpuos.node.pool import PoolLimits
from cpuos.node.resources import Disks, Slots
from cpuos.node.runtime_table import RuntimeTable
from cpuos.node.service import NodeService
from cpuos.node.steps import Checkpoint
from cpuos.node.storage import DiskStore, enter_mount_namespace, mount_alone
from cpuos.node.storage.ballast import Ballast
from cpuos.node.stored import Stored
from cpuos.node.template_store import TemplateStore
from cpuos.node.templates import Templates
from cpuos.node.volume import Volume
from cpuos.plugins import RuntimeHost, load_runtimes
from cpuos.runtimes.base import Runtime
from cpuos.settings import Settings, load_settings
from cpuos.types.sandbox import SandboxCreate

__all__ = ["NodeParts", "held_state", "host_parts", "main", "running_node", "serve"]

log = structlog.get_logger("cpuos.node")

SOCKET_MODE = 0o660
SHUTDOWN_S = 5
POOL_SHARE = 16
"""One part in so many of the host's memory is for ready sandboxes, unless the settings say otherwise."""


@dataclass(frozen=True, kw_only=True)
class NodeParts:
    """What differs between a real node and a fake one."""

    runtimes: dict[str, Runtime]
    disks: Disks
    slots: Slots
    checkpoint: Checkpoint = lambda point: None


@dataclass(frozen=True, kw_only=True)
class _Node:
    service: NodeService
    facts: NodeFactsReader
    store: TemplateStore
    packs: PackStore
    stored: Stored


def main() -> None:
    """`python -m cpuos.node`."""
    settings = load_settings()
    configure_logs(settings.log_level)
    try:
        if os.geteuid() != 0:
            raise SetupRequired(
                "cannot start the node daemon",
                "it makes namespaces and mounts",
                code="needs_root",
                hint="sudo cpuos up",
            )
        os.umask(0o077)
        _raise_descriptor_limit()
        for folder in (settings.state_dir, settings.run_dir):
            _make_shared_folder(folder)
        # Before the first thread: the kernel moves only a single thread into another mount namespace.
        enter_mount_namespace(settings.run_dir / "ns" / "mnt")
        with held_state(settings):
            asyncio.run(serve(settings, parts=lambda: host_parts(settings)))
    except CpuosError as error:
        log.error("node stopped", what=error.what, why=error.why, hint=error.hint)
        raise SystemExit(1) from None


def host_parts(settings: Settings) -> NodeParts:
    """The parts of a real node."""
    bin_dir = settings.run_dir / "bin"
    mount_alone(settings.data_dir / "bin", bin_dir)
    runtime_host = RuntimeHost(
        instance_id=settings.instance_id,
        data_dir=settings.data_dir,
        state_dir=settings.node_state_dir / "runtimes",
        run_dir=settings.run_dir / "runtimes",
        bin_dir=bin_dir,
        programs=settings.vmm_programs,
        rates=settings.device_rates,
        on_oom=GatewayNews(settings.gateway_socket).tell_killed,
    )
    return NodeParts(
        runtimes=load_runtimes(runtime_host, names=_runtime_names(settings)),
        disks=DiskStore(
            settings.node_state_dir / "disks",
            stock=settings.node_state_dir / "disk-stock",
            hold=settings.disk_hold,
        ),
        slots=Network(_network_config(settings)),
    )


def _runtime_names(settings: Settings) -> list[str]:
    """That of the settings, and microVMs where set-up has prepared them: placement takes the strongest that works."""
    prepared = settings.runtime == "gvisor" and (settings.microvm_dir / "manifest.json").exists()
    return [settings.runtime, *(["microvm"] if prepared else [])]


def _network_config(settings: Settings) -> NetworkConfig:
    return NetworkConfig(
        folder=settings.run_dir / "netns",
        instance_id=settings.instance_id,
        block=settings.network_block,
        uplink=settings.network_uplink,
        exceptions=tuple(settings.network_exceptions),
        dns_servers=tuple(settings.dns_servers),
        pool=settings.network_pool if settings.runtime != "microvm" else 0,
        tap_pool=settings.network_pool if settings.runtime == "microvm" else 0,
        max_sandboxes=settings.max_sandboxes,
        state_dir=settings.network_state_dir,
        socket_path=settings.records_socket,
        peer_uids=(settings.server_uid, settings.gateway_uid),
        limits=NetworkLimits.of_rates(
            connections=settings.network_connections,
            new_connections_per_s=settings.network_new_connections_per_s,
            packets_per_s=settings.network_packets_per_s,
            megabytes_per_s=settings.network_mib_per_s,
            names_per_s=settings.network_names_per_s,
        ),
    )


def _create_node(settings: Settings, parts: NodeParts) -> _Node:
    """Wire the service of one instance; nothing is started yet."""
    state = settings.node_state_dir
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    identity = load_identity(settings.node_identity_key)
    runtimes = RuntimeTable(parts.runtimes)
    built = settings.node_state_dir / "templates"
    templates = Templates(settings.template_dir, built=built)
    store = TemplateStore(
        built, max_bytes=settings.template_max_mib << 20, reserve_bytes=settings.disk_reserve_mib << 20
    )
    store.clear_partial()
    assembly = Assembly(
        workdirs=state / "sandboxes",
        agent=settings.agent_dir,
        node_public_key=identity.public_key,
        runtimes=runtimes,
        disks=parts.disks,
        slots=parts.slots,
        images=ImageStore(state / "snapshots"),
    )
    volume = Volume(state, ballast=Ballast(state / "ballast", size_bytes=settings.disk_ballast_mib << 20))
    news = GatewayNews(settings.gateway_socket)
    packs = PackStore(
        state / "packs", max_bytes=settings.pack_max_mib << 20, reserve_bytes=settings.disk_reserve_mib << 20
    )
    packs.store.clear_partial()
    service = NodeService(
        assembly=assembly,
        journal=Journal(state / "journal"),
        identity=identity,
        templates=KeptTemplates(state / "template-images", templates=templates),
        runtimes=runtimes,
        boot_id=host.boot_id(),
        rules=_admission_rules(settings),
        short_memory=partial(host.short_of_memory, mark_mib=settings.memory_pressure_mib),
        volume=volume,
        packs=packs,
        halted=news.tell_halted,
        door=news,
        pool=_pool_limits(settings),
        root_interval_s=settings.root_checkpoint_interval_s,
        checkpoint=parts.checkpoint,
    )
    facts = NodeFactsReader(
        name=read_name(state / "name"),
        volume=volume,
        templates=templates,
        runtimes=runtimes,
        admission=service.admission,
        pressure=lambda: service.pressure.facts,
        packs=packs,
    )
    stored = service.stored(settings, node=facts.name)
    return _Node(service=service, facts=facts, store=store, packs=packs, stored=stored)


def _admission_rules(settings: Settings) -> AdmissionRules:
    return AdmissionRules(
        max_sandboxes=settings.max_sandboxes,
        cpu_overcommit=settings.cpu_overcommit,
        memory_overcommit=settings.memory_overcommit,
        memory_reserve_mib=settings.memory_reserve_mib,
        disk_overcommit=settings.disk_overcommit,
        disk_reserve_mib=settings.disk_reserve_mib,
        processes_overcommit=settings.processes_overcommit,
    )


def _pool_limits(settings: Settings) -> PoolLimits:
    memory_mib = settings.pool_memory_mib
    return PoolLimits(
        memory_mib=host.memory_mib() // POOL_SHARE if memory_mib == "auto" else memory_mib,
        volume=settings.node_state_dir,
        keep=[(SandboxCreate(**kind), count) for kind, count in settings.pool_kept],
        runtime=settings.runtime,
        max_age=timedelta(seconds=settings.pool_max_age_s),
        settle_s=settings.pool_settle_s,
    )


async def serve(settings: Settings, *, parts: Callable[[], NodeParts]) -> None:
    """Serve until SIGTERM or SIGINT. Sandboxes run on."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with running_node(settings, parts=parts()):
        log.info("node ready", instance=settings.instance_id, socket=str(settings.node_socket))
        await stopped.wait()
        log.info("node stops", instance=settings.instance_id)


@asynccontextmanager
async def running_node(settings: Settings, *, parts: NodeParts) -> AsyncIterator[NodeService]:
    """A node that answers on its two sockets; the lock on the state directory is the caller's."""
    node = _create_node(settings, parts)
    await node.service.recover()
    gid = _group_of_sockets()
    _make_shared_folder(settings.run_dir)
    api_socket = listen(settings.node_socket, kind=socket.SOCK_STREAM, mode=SOCKET_MODE, gid=gid)
    dial_socket = listen(settings.dial_socket, kind=socket.SOCK_SEQPACKET, mode=SOCKET_MODE, gid=gid)
    dial = DialServer(node.service, allowed_uids=[settings.gateway_uid, os.geteuid()])
    server = _Server(_server_config(node, allowed_uids=[settings.server_uid, os.geteuid()]))
    serving = asyncio.create_task(server.serve(sockets=[api_socket]))
    dial.start(dial_socket)
    node.service.start()
    try:
        await _until_started(server, serving)
        yield node.service
    finally:
        server.should_exit = True
        node.service.changes.close()
        node.service.pool.stop()
        await asyncio.gather(serving, return_exceptions=True)
        api_socket.close()
        await dial.close()
        await node.service.close()


class _Server(uvicorn.Server):
    """Signals belong to the daemon, which has more to stop than HTTP."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


def _server_config(node: _Node, *, allowed_uids: list[int]) -> uvicorn.Config:
    return uvicorn.Config(
        create_api(node.service, node.facts, node.store, packs=node.packs, stored=node.stored),
        http=checked_protocol(allowed_uids),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )


async def _until_started(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    while not server.started:
        if serving.done():
            await serving
            raise PlatformError("cannot start the node daemon", "its API did not start")
        await asyncio.sleep(0.005)


@contextlib.contextmanager
def held_state(settings: Settings):  # type: ignore[no-untyped-def]
    """One daemon a state directory: the kernel gives the lock back however the daemon ends."""
    settings.node_state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = settings.node_state_dir / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(descriptor, 20, 0).decode() or "unknown"
            raise PlatformError(
                "cannot start the node daemon",
                f"process {pid} serves {settings.node_state_dir} already",
                hint="cpuos status",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _make_shared_folder(folder: Path) -> None:
    """A folder through which the other daemons reach their own; one that is there keeps its mode."""
    if folder.is_dir():
        return
    folder.mkdir(mode=0o750, parents=True)
    folder.chmod(0o750)
    gid = _group_of_sockets()
    if gid is not None:
        os.chown(folder, 0, gid)


def _raise_descriptor_limit() -> None:
    """Each sandbox holds some descriptors, and the usual soft limit is 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _group_of_sockets() -> int | None:
    try:
        return grp.getgrnam("cpuos").gr_gid if os.geteuid() == 0 else None
    except KeyError:
        return None

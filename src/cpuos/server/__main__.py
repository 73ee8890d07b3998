"""`python -m cpuos.server`: serve until told to stop; `… key NAME`: make one more API key and print it."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import structlog
import uvicorn
import uvloop

from cpuos.bounded import BoundedProtocol
from cpuos.errors import CpuosError, SetupRequired
from cpuos.logstream import LogStream
from cpuos.node.client import LocalNodeClient
from cpuos.scheduler.base import CapacityRules
from cpuos.server.app import create_app
from cpuos.server.clock import utc_now
from cpuos.server.connections import LocalConnectionRecords
from cpuos.server.control_plane import ServerOptions, open_control_plane
from cpuos.server.db.database import Database
from cpuos.server.db.migrate import upgrade_database
from cpuos.server.first_start import make_first_key, make_key, write_first_key
from cpuos.server.gateway import LocalGatewayControl
from cpuos.server.packs import PackRules
from cpuos.server.retention import RetentionRules
from cpuos.server.tickets import load_ticket_key, publish_public_key
from cpuos.settings import Settings, load_settings, publish_endpoint, read_endpoint
from cpuos.types.alarms import parse_alarms
from cpuos.types.exceptions import parse_exceptions

__all__ = ["main"]

STOP_CALLS_S = 8
"""How long a stopping server goes on with the calls at work."""
_log = structlog.get_logger("cpuos.server")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cpuos.server", description=__doc__)
    verbs = parser.add_subparsers(dest="verb")
    verbs.add_parser("serve", help="the default")
    key = verbs.add_parser("key", help="make an API key of the default workspace, print it as JSON")
    key.add_argument("name")
    arguments = parser.parse_args()
    os.umask(0o077)
    try:
        settings = load_settings()
        _log_to_stderr(settings.log_level)
        if arguments.verb == "key":
            print(json.dumps({"api_key": asyncio.run(_make_key(settings, name=arguments.name))}))
        else:
            lock = _only_server(settings.server_state_dir / "server.lock")
            with lock, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(settings))
    except CpuosError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


async def _serve(settings: Settings) -> None:
    listening = _listen(settings.api_host, settings.api_port)
    options = _options(settings)
    await asyncio.to_thread(upgrade_database, options.database_url)
    publish_public_key(load_ticket_key(settings.server_ticket_key), settings.server_public_key)
    async with Database(options.database_url) as database:
        if key := await make_first_key(database, utc_now):
            write_first_key(settings.first_key_file, key)
    node = LocalNodeClient(settings.node_socket)
    gateway = LocalGatewayControl(settings.gateway_socket)
    records = LocalConnectionRecords(settings.records_socket)
    async with open_control_plane(options, node=node, gateway=gateway, records=records) as plane:
        config = uvicorn.Config(
            create_app(plane),
            http=BoundedProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
        )
        config.timeout_graceful_shutdown = STOP_CALLS_S
        server = _Server(config)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.end)
        gc.collect()
        gc.freeze()  # what start-up made stays: the collector need not look at it in the middle of calls
        port = listening.getsockname()[1]
        publish_endpoint(settings.server_endpoint, settings.api_public_url or f"http://{settings.api_host}:{port}")
        _log.info("server ready", port=port)
        await server.serve(sockets=[listening])
    await node.aclose()
    await gateway.aclose()
    await records.aclose()


class _Server(uvicorn.Server):
    """Ends by our signal handlers: uvicorn's own raise the signal again, and the clean-up after it would not run."""

    def end(self) -> None:
        self.force_exit = self.should_exit  # asked twice: do not wait for the calls at work
        self.should_exit = True

    def capture_signals(self) -> AbstractContextManager[None]:
        return nullcontext()


def _options(settings: Settings) -> ServerOptions:
    return ServerOptions(
        database_url=settings.server_db_url,
        ticket_key=settings.server_ticket_key,
        data_url=lambda: settings.gateway_public_url or read_endpoint(settings.gateway_endpoint),
        inner_data_url=lambda: read_endpoint(settings.gateway_endpoint),
        preview_url=lambda: read_endpoint(settings.preview_endpoint),
        template_max_mib=settings.template_max_mib,
        workspace_templates_mib=settings.workspace_templates_mib,
        workspace_layers_mib=settings.workspace_layers_mib,
        packs=PackRules(max_mib=settings.pack_max_mib, workspace_mib=settings.workspace_packs_mib),
        capacity=CapacityRules(
            allow_emulated=settings.allow_emulated,
            cpu_overcommit=settings.cpu_overcommit,
            memory_overcommit=settings.memory_overcommit,
            memory_reserve_mib=settings.memory_reserve_mib,
            disk_overcommit=settings.disk_overcommit,
            disk_reserve_mib=settings.disk_reserve_mib,
        ),
        pressure_idle_s=settings.pressure_idle_s,
        alarms=parse_alarms(settings.alarms),
        alarm_interval_s=settings.alarm_interval_s,
        record_retention_s=settings.record_retention_s,
        connection_records=settings.connection_records,
        connection_retention_s=settings.connection_retention_s,
        retention=RetentionRules(
            audit_s=settings.audit_retention_s,
            sandboxes_s=settings.sandbox_retention_s,
            archive=settings.audit_archive_dir,
        ),
        network_exceptions=parse_exceptions(settings.network_exceptions),
    )


async def _make_key(settings: Settings, *, name: str) -> str:
    await asyncio.to_thread(upgrade_database, settings.server_db_url)
    async with Database(settings.server_db_url) as database:
        return await make_key(database, utc_now, name=name)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise SetupRequired(
            f"cannot listen on {host} port {port}",
            os.strerror(error.errno or 0),
            hint="CPUOS_API_PORT=0 chooses a free port",
        ) from error
    return listening


@contextmanager
def _only_server(path: Path) -> Iterator[None]:
    """Guards the database against a second server of the same instance."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SetupRequired(
                "cannot start the server: another one runs on this state directory",
                str(path.parent),
                hint="cpuos status",
            ) from error
        yield


def _log_to_stderr(level: str) -> None:
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(LogStream()),
    )


if __name__ == "__main__":
    sys.exit(main())

"""`python -m cpuos.gateway`: the gateway's process."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import replace

import structlog
import uvloop

from cpuos.gateway.access import Gateway
from cpuos.gateway.previews.serve import PreviewListener, serve_previews
from cpuos.gateway.service import open_gateway, serve_gateway
from cpuos.gateway.spool import SpoolLimits
from cpuos.logstream import LogStream
from cpuos.node.client import DialClient
from cpuos.settings import Settings, load_settings, publish_endpoint

MEMORY_LIMIT_VARIABLE = "CPUOS_GATEWAY_MEMORY_BYTES"
MEMORY_BYTES = 2 << 30


def main() -> None:
    """Serve until SIGTERM or SIGINT. What runs in sandboxes goes on; the next process takes it up."""
    os.umask(0o077)
    _configure_logs()
    _set_limits()
    uvloop.run(_serve(load_settings()))


async def _serve(settings: Settings) -> None:
    log = structlog.get_logger("gateway")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    settings.gateway_run_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
    spool_limits = SpoolLimits(
        head_bytes=settings.output_head_bytes,
        tail_bytes=settings.output_tail_bytes,
        sandbox_bytes=settings.output_sandbox_bytes,
        ended_bytes=settings.output_ended_bytes,
    )
    dialler = DialClient(settings.dial_socket)
    peers = frozenset({0, os.geteuid(), settings.server_uid})
    async with (
        open_gateway(
            settings.gateway_state_dir,
            public_key=settings.server_public_key,
            dialler=dialler,
            limit_reader=dialler,
            records_socket=settings.records_socket,
            spool_limits=spool_limits,
            preview_domain=settings.preview_domain,
        ) as gateway,
        serve_gateway(
            gateway,
            host=settings.gateway_host,
            port=settings.gateway_port,
            control_socket=settings.gateway_socket,
            control_peers=peers,
        ) as url,
        serve_previews(gateway.previews, _preview_listener(settings)) as preview_url,
        _preview_paths(gateway, settings),
    ):
        publish_endpoint(settings.preview_endpoint, preview_url)
        publish_endpoint(settings.gateway_endpoint, settings.gateway_public_url or url)
        log.info("gateway.ready", url=url)
        await stop.wait()
        log.info("gateway.stopping")
    for endpoint in (settings.gateway_endpoint, settings.preview_endpoint):
        with suppress(FileNotFoundError):
            endpoint.unlink()


def _preview_paths(gateway: Gateway, settings: Settings) -> AbstractAsyncContextManager[object]:
    if not settings.preview_path_mode:
        return nullcontext()
    listener = replace(_preview_listener(settings), port=settings.preview_path_port, public_url="", by_path=True)
    return serve_previews(gateway.previews, listener)


def _preview_listener(settings: Settings) -> PreviewListener:
    return PreviewListener(
        host=settings.preview_host,
        port=settings.preview_port,
        public_url=settings.preview_public_url,
        tls_cert=settings.preview_tls_cert,
        tls_key=settings.preview_tls_key,
    )


def _configure_logs() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(LogStream()),
        cache_logger_on_first_use=True,
    )


def _set_limits() -> None:
    """Descriptors up to the hard limit; memory far above any need: a fault ends this process, never the host."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    told = os.environ.get(MEMORY_LIMIT_VARIABLE, "")
    memory = int(told) if told.isdigit() else MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))


if __name__ == "__main__":
    main()

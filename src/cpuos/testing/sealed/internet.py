"""The fake internet as one process in a network namespace of its own: `python -m cpuos.testing.sealed.internet FD`.

It owns every address there is. FD is a stream on which the test asks, one JSON object a line.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import json
import os
import socket
import ssl
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cpuos.node import syscalls
from cpuos.node.network.netlink import RouteNetlink
from cpuos.testing.sealed.addresses import HOST_GATEWAY
from cpuos.testing.sealed.certificates import Authority
from cpuos.testing.sealed.resolver import Resolver

__all__ = ["Internet", "main"]

HTTP_PORTS, TLS_PORTS = (80, 8080, 3128), (443, 8443, 853)
MAIL_PORTS, ECHO_TCP_PORTS = (25, 465, 587), (7, 22, 5000)
ECHO_UDP_PORTS = (7, 123, 443, 853, 5353, 5000)
_IP_PKTINFO = 8
_MAX_KEPT = 20000


class Internet:
    def __init__(self, folder: Path) -> None:
        self.authority = Authority()
        self.resolver = Resolver()
        self.connections: list[dict[str, Any]] = []
        self.packets: list[dict[str, Any]] = []
        self.docroot: Path | None = None
        self._context = self.authority.server_context(folder)

    async def serve(self, device: str) -> None:
        for port in HTTP_PORTS:
            await asyncio.start_server(self._http, "0.0.0.0", port, backlog=1024)
        for port in TLS_PORTS:
            await asyncio.start_server(self._http, "0.0.0.0", port, ssl=self._context, backlog=1024)
        for port in MAIL_PORTS:
            await asyncio.start_server(self._mail, "0.0.0.0", port)
        for port in ECHO_TCP_PORTS:
            await asyncio.start_server(self._echo, "0.0.0.0", port, backlog=1024)
        await asyncio.start_server(self._names, "0.0.0.0", 53, backlog=1024)
        self._listen_udp(53, self._answer_name)
        for port in ECHO_UDP_PORTS:
            self._listen_udp(port, self._answer_echo)
        self._sniff(device)

    # what came, as the wire saw it

    def _sniff(self, device: str) -> None:
        wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.htons(3))
        wire.setsockopt(socket.SOL_SOCKET, 33, 32 << 20)  # SO_RCVBUFFORCE
        wire.bind((device, 3))

        def read() -> None:
            while True:
                try:
                    frame, address = wire.recvfrom(128)
                except BlockingIOError:
                    return
                seen = _describe(frame)
                # The host asks for its gateway, and answers it, at times of its own.
                of_gateway = (seen["protocol"], seen["destination"]) == ("arp", HOST_GATEWAY)
                if address[2] != socket.PACKET_OUTGOING and not of_gateway:  # type: ignore[attr-defined]
                    self._keep(self.packets, seen)

        asyncio.get_running_loop().add_reader(wire, read)

    def _keep(self, log: list[dict[str, Any]], entry: dict[str, Any]) -> None:
        if len(log) < _MAX_KEPT:
            log.append(entry)

    def _connected(self, writer: asyncio.StreamWriter, protocol: str) -> dict[str, Any]:
        server, client = writer.get_extra_info("sockname"), writer.get_extra_info("peername")
        tls = writer.get_extra_info("ssl_object")
        entry = {
            "at": time.time(),
            "protocol": protocol,
            "server": server[0],
            "port": server[1],
            "client": client[0],
            "client_port": client[1],
            "sni": getattr(tls, "asked_name", None),
            "host": None,
            "path": None,
            "bytes": 0,
        }
        self._keep(self.connections, entry)
        return entry

    # servers

    async def _http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tls = writer.get_extra_info("ssl_object") is not None
        entry = self._connected(writer, "tls" if tls else "http")
        try:
            while head := await _head(reader):
                method, target, headers = head
                body = int(headers.get("content-length", "0"))
                while body > 0:
                    piece = await reader.read(min(body, 1 << 18))
                    if not piece:
                        return
                    body -= len(piece)
                    entry["bytes"] += len(piece)
                entry["host"], entry["path"] = headers.get("host"), target
                await self._respond(writer, method, target, entry=entry, headers=headers)
                if headers.get("connection", "").lower() == "close":
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, ssl.SSLError):
            return
        finally:
            writer.close()

    async def _respond(
        self,
        writer: asyncio.StreamWriter,
        method: str,
        target: str,
        *,
        entry: dict[str, Any],
        headers: dict[str, str],
    ) -> None:
        url = urlsplit(target)
        asked = parse_qs(url.query)
        status, extra, body = "200 OK", "", b""
        static = self._file(url.path)
        opens = self._file("/v2/authorization")
        if opens is not None and url.path.startswith("/v2/") and headers.get("authorization") != opens.read_text():
            status, extra = "401 Unauthorized", 'WWW-Authenticate: Basic realm="test"\r\n'
        elif static is not None and static.is_file() and "/manifests/" in url.path:  # a registry of images
            body = static.read_bytes()
            extra = f"Content-Type: {json.loads(body)['mediaType']}\r\n"
        elif static is not None:
            body = static.read_bytes() if static.is_file() else _listing(static)
            extra = "Content-Type: text/html\r\n" if static.is_dir() else ""
        elif self.docroot is not None and url.path.startswith(("/simple/", "/debian/", "/v2/")):
            status = "404 Not Found"
        elif url.path == "/redirect":
            status, extra = "302 Found", f"Location: {asked['to'][0]}\r\n"
        elif url.path.startswith("/bytes/"):
            await _stream(writer, int(url.path.split("/")[2]))
            return
        elif url.path == "/slow":
            await asyncio.sleep(float(asked.get("s", ["1"])[0]))
        else:
            seen = {**entry, "method": method, "path": target, "headers": headers}
            body, extra = json.dumps(seen).encode(), "Content-Type: application/json\r\n"
        writer.write(f"HTTP/1.1 {status}\r\n{extra}Content-Length: {len(body)}\r\n\r\n".encode())
        if method != "HEAD":
            writer.write(body)
        await writer.drain()

    def _file(self, path: str) -> Path | None:
        if self.docroot is None:
            return None
        found = (self.docroot / path.lstrip("/")).resolve()
        inside = found.is_relative_to(self.docroot.resolve())
        return found if inside and path != "/" and found.exists() else None

    async def _mail(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connected(writer, "mail")
        writer.write(b"220 mail.example.test ESMTP\r\n")
        await _echo_on(reader, writer)

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connected(writer, "tcp")
        await _echo_on(reader, writer)

    async def _names(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connected(writer, "dns")
        await self.resolver.serve_stream(reader, writer)

    def _listen_udp(self, port: int, answer: Any) -> None:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        made.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        made.bind(("0.0.0.0", port))
        loop = asyncio.get_running_loop()

        def read() -> None:
            for _ in range(64):
                try:
                    packet, ancillary, _, client = made.recvmsg(65535, 64)
                except OSError:
                    return
                server = socket.inet_ntoa(ancillary[0][2][8:12])
                wire = answer(packet, server=server, client=client[0], port=port)
                if wire is None:
                    continue
                source = [(socket.IPPROTO_IP, _IP_PKTINFO, struct.pack("=I4s4s", 0, socket.inet_aton(server), b""))]
                delay = self.resolver.delay_s if port == 53 else 0
                loop.call_later(delay, _send_from, made, wire, source, client)

        loop.add_reader(made, read)

    def _answer_name(self, packet: bytes, *, server: str, client: str, port: int) -> bytes | None:
        return self.resolver.answer(packet, transport="udp", server=server, client=client)

    def _answer_echo(self, packet: bytes, *, server: str, client: str, port: int) -> bytes:
        row = {"protocol": "udp", "server": server, "port": port, "client": client, "bytes": len(packet)}
        self._keep(
            self.connections, {"at": time.time(), "client_port": 0, "sni": None, "host": None, "path": None, **row}
        )
        return packet

    # the test's questions

    def ask(self, question: dict[str, Any]) -> Any:
        match question["op"]:
            case "dns":
                self.resolver.set(question["row"])
            case "dns_mood":
                self.resolver.delay_s, self.resolver.broken = question["delay_s"], question["broken"]
            case "queries":
                return list(self.resolver.queries)
            case "connections":
                return list(self.connections)
            case "packets":
                return list(self.packets)
            case "docroot":
                self.docroot = Path(question["folder"]) if question["folder"] else None
            case "clear":
                for log in (self.resolver.queries, self.connections, self.packets):
                    log.clear()
            case "authority":
                return base64.b64encode(self.authority.pem).decode()
            case _:
                raise ValueError(question["op"])
        return None


def _describe(frame: bytes) -> dict[str, Any]:
    kind = int.from_bytes(frame[12:14], "big")
    if kind == 0x0806 and len(frame) >= 42:
        addresses = (str(ipaddress.IPv4Address(frame[at : at + 4])) for at in (28, 38))
        return {"protocol": "arp", **dict(zip(("source", "destination"), addresses, strict=True)), "port": None}
    if kind != 0x0800 or len(frame) < 34:
        return {"protocol": f"ethertype 0x{kind:04x}", "source": "", "destination": "", "port": None}
    header = (frame[14] & 15) * 4
    protocol = {1: "icmp", 6: "tcp", 17: "udp"}.get(frame[23], f"ip {frame[23]}")
    rest = frame[14 + header :]
    return {
        "protocol": protocol,
        "source": str(ipaddress.IPv4Address(frame[26:30])),
        "destination": str(ipaddress.IPv4Address(frame[30:34])),
        "port": int.from_bytes(rest[2:4], "big") if protocol in ("tcp", "udp") and len(rest) >= 4 else None,
    }


async def _head(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]] | None:
    text = await reader.readuntil(b"\r\n\r\n")
    lines = text.decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ", 2)
    headers = dict(line.split(":", 1) for line in lines[1:] if ":" in line)
    return method, target, {name.lower(): value.strip() for name, value in headers.items()}


async def _stream(writer: asyncio.StreamWriter, size: int) -> None:
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode())
    piece = bytes(1 << 18)
    while size > 0:
        writer.write(piece[:size])
        size -= len(piece)
        await writer.drain()


async def _echo_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        return
    finally:
        writer.close()


def _send_from(made: socket.socket, wire: bytes, source: list[Any], client: Any) -> None:
    try:
        made.sendmsg([wire], source, 0, client)
    except OSError:
        return  # a full buffer or a client that went: the internet promises nothing


def _listing(folder: Path) -> bytes:
    names = sorted(path.name + ("/" if path.is_dir() else "") for path in folder.iterdir())
    return "".join(f'<a href="{name}">{name}</a><br>\n' for name in names).encode()


async def _serve(control: socket.socket, folder: Path) -> None:
    reader, writer = await asyncio.open_connection(sock=control)
    internet: Internet | None = None
    writer.write(b'{"answer": "ready"}\n')
    while line := await reader.readline():
        question = json.loads(line)
        try:
            if question["op"] == "serve":
                internet = Internet(folder)
                await internet.serve(question["device"])
                answer = None
            else:
                assert internet is not None
                answer = internet.ask(question)
            reply = {"answer": answer}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        writer.write(json.dumps(reply).encode() + b"\n")
        await writer.drain()


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    syscalls.unshare(syscalls.CLONE_NEWNET)
    for name in ("all", "default"):
        Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")
    with RouteNetlink() as own:
        own.set_up("lo")
    with tempfile.TemporaryDirectory(prefix="cpuos-internet-") as folder:
        asyncio.run(_serve(control, Path(folder)))
    os._exit(0)


if __name__ == "__main__":
    main()

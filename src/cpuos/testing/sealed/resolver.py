"""The fake internet's name server: answers from a table, at whatever address it is asked."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import dns.edns
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

__all__ = ["Resolver"]


class Resolver:
    """Rows are {"name", "type", "ttl", "values"}; lists in `values` are given out in turn, the last for ever."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], dict[str, Any]] = {}
        self.queries: list[dict[str, Any]] = []
        self.delay_s = 0.0
        self.broken = ""
        """"silent": no answer at all; "servfail"; "truncate": over UDP, always."""

    def set(self, row: dict[str, Any]) -> None:
        key = (row["name"].lower().rstrip("."), row["type"])
        if row["values"]:
            self._rows[key] = {**row, "turn": 0}
        else:
            self._rows.pop(key, None)

    def answer(self, packet: bytes, *, transport: str, server: str, client: str) -> bytes | None:
        try:
            query = dns.message.from_wire(packet)
            question = query.question[0]
        except (Exception, IndexError):
            return None
        name = question.name.to_text().lower().rstrip(".")
        kind = dns.rdatatype.to_text(question.rdtype)
        seen = {"name": name, "type": kind, "transport": transport, "server": server, "client": client}
        self.queries.append(seen)
        if self.broken == "silent":
            return None
        response = dns.message.make_response(query, recursion_available=True)
        if self.broken == "servfail":
            response.set_rcode(dns.rcode.SERVFAIL)
        elif not self._fill(response, name, kind):
            known = any(known_name == name for known_name, _ in self._rows)
            response.set_rcode(dns.rcode.NOERROR if known else dns.rcode.NXDOMAIN)
        wire = response.to_wire(max_size=65535)
        if transport == "udp" and (len(wire) > max(query.payload, 512) or self.broken == "truncate"):
            cut = dns.message.make_response(query, recursion_available=True)
            cut.flags |= dns.flags.TC
            wire = cut.to_wire()
        return wire

    def _fill(self, response: dns.message.Message, name: str, kind: str) -> bool:
        """Follow aliases as a recursive server does."""
        for _ in range(12):
            row = self._rows.get((name, kind))
            if row is not None:
                response.answer.append(self._rrset(name, row))
                return True
            alias = self._rows.get((name, "CNAME"))
            if alias is None:
                return False
            rrset = self._rrset(name, alias)
            response.answer.append(rrset)
            name = rrset[0].target.to_text().lower().rstrip(".")
        return True

    def _rrset(self, name: str, row: dict[str, Any]) -> dns.rrset.RRset:
        values = row["values"]
        if isinstance(values[0], list):
            values = values[min(row["turn"], len(values) - 1)]
            row["turn"] += 1
        return dns.rrset.from_text_list(f"{name}.", row["ttl"], "IN", row["type"], values)

    # transports

    async def serve_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server, client = writer.get_extra_info("sockname")[0], writer.get_extra_info("peername")[0]
        try:
            while True:
                (length,) = struct.unpack("!H", await reader.readexactly(2))
                packet = await reader.readexactly(length)
                await asyncio.sleep(self.delay_s)
                wire = self.answer(packet, transport="tcp", server=server, client=client)
                if wire is None:
                    return
                writer.write(struct.pack("!H", len(wire)) + wire)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

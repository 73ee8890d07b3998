"""What is written down of connections, from what kernel, forwarder and peek tell."""

from __future__ import annotations

import json
from datetime import datetime
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peek_rig import policy_of

from cpuos.node.network.conntrack import Flow
from cpuos.node.network.records.book import LATE_S, Book
from cpuos.node.network.records.gathering import Gathering, Refusal
from cpuos.node.network.records.journal import RecordsJournal
from cpuos.node.network.records.nflog import LoggedPacket, read_packets
from cpuos.node.network.records.reports import read_report

SANDBOX, OTHER = "s" * 20, "o" * 20
WEB, SLOT = IPv4Address("93.184.215.14"), IPv4Address("10.231.0.4")


class Rig:
    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.options = folder, options
        self.now = 1000.0
        self.start()

    def start(self) -> None:
        self.book = Book(lambda state: RecordsJournal(self.folder, state=state, **self.options), now=self.now)

    def restart(self) -> None:
        """As after SIGKILL, all written."""
        self.book.journal.flush()
        self.start()

    def open(
        self, *layers: Any, sandbox: str = SANDBOX, version: int = 1, address: IPv4Address = SLOT, is_new: bool = False
    ) -> None:
        policy = policy_of(*(layers or ["internet"]), version=version)
        self.book.open(sandbox, policy, exemptions=[], address=address, is_new=is_new)

    def log(self, prefix: str, address: IPv4Address = WEB, *, sandbox: str = SANDBOX, **changes: Any) -> None:
        packet = {"protocol": "tcp", "source_port": 40000, "port": 443, "begins": True, "sequence": None, **changes}
        source = IPv4Address("10.0.0.2")
        self.book.log_packet(
            sandbox, LoggedPacket(prefix=prefix, source=source, address=address, **packet), now=self.now
        )

    def tell(self, **report: Any) -> None:
        read = read_report(json.dumps({"sandbox": SANDBOX, **report}).encode())
        assert read is not None
        self.book.take(read, now=self.now)

    def end(self, *, source: IPv4Address = SLOT, **changes: Any) -> None:
        flow = {"protocol": "tcp", "source_port": 40000, "address": WEB, "port": 443, "mapped_port": 0, **changes}
        self.book.end_flow(
            Flow(source=source, answered_by=WEB, mark=0, bytes_sent=70, bytes_received=900, key=b"", **flow),
            now=self.now,
        )

    def settle(self, seconds: float = 2.0) -> None:
        self.now += seconds
        self.book.settle(self.now)
        self.book.settle(self.now)

    def entries(self, after: int = 0) -> list[dict[str, Any]]:
        self.book.journal.flush()
        return self.book.journal.page(after, limit=5000)[0]


@pytest.fixture
def rig(tmp_path):
    made = Rig(tmp_path / "journal")
    yield made
    made.book.journal.close()


def test_a_connection_opens_and_closes_with_its_bytes(rig):
    rig.open()
    rig.tell(event="resolved", name="web.test", address=str(WEB))
    rig.log("a 1")
    rig.log("a 1")  # the same packet again, as there was no answer
    rig.end()
    rig.end()
    opened, closed = rig.entries()
    assert opened == {
        "seq": 1,
        "at": "1970-01-01T00:16:40+00:00",
        "sandbox": SANDBOX,
        "event": "open",
        "connection": 1,
        "kind": "tcp",
        "name": "web.test",
        "address": str(WEB),
        "port": 443,
        "rule": "internet",
        "count": 1,
        "bytes_sent": None,
        "bytes_received": None,
    }
    assert closed == {**opened, "seq": 2, "event": "closed", "bytes_sent": 70, "bytes_received": 900}


def test_a_changed_source_port_is_the_only_one_it_can_be(rig):
    rig.open()
    rig.log("a 1")
    rig.end(source_port=50001)
    assert [entry["event"] for entry in rig.entries()] == ["open", "closed"]
    rig.log("a 1", source_port=1)
    rig.log("a 1", source_port=2)
    rig.end(source_port=3)  # either could be it
    assert [entry["event"] for entry in rig.entries()].count("closed") == 1


def test_the_slot_tells_sandboxes_apart(rig):
    rig.open()
    rig.open(sandbox=OTHER, address=IPv4Address("10.231.0.5"))
    rig.log("a 1")
    rig.log("a 1", sandbox=OTHER)
    rig.end(source=IPv4Address("10.231.0.5"))
    assert [(entry["sandbox"], entry["event"]) for entry in rig.entries()][-1] == (OTHER, "closed")


def test_what_the_peek_carries_is_counted_by_the_peek(rig):
    rig.open({"allow": ["web.test"]})
    place = {"address": str(WEB), "port": 443, "source_port": 40000}
    rig.tell(event="open", id="a-1", name="web.test", rule="sandbox allow web.test", **place)
    rig.tell(event="closed", id="a-1", bytes_sent=5, bytes_received=6)
    rig.end()
    opened, closed = rig.entries()
    assert (opened["name"], opened["rule"]) == ("web.test", "sandbox allow web.test")
    assert (closed["connection"], closed["bytes_sent"], closed["bytes_received"]) == (opened["connection"], 5, 6)


def test_what_a_dead_peek_left_open_is_ended_by_the_kernel(rig):
    rig.open()
    rig.tell(event="open", id="a-1", address=str(WEB), port=443, source_port=40000, rule="internet")
    rig.end()
    rig.tell(event="closed", id="a-1", bytes_sent=5, bytes_received=6)
    assert [entry["bytes_sent"] for entry in rig.entries()] == [None, 70]


def test_unread_connections_get_the_name_that_was_answered(rig):
    rig.open({"allow": ["git.test:22", "other.test:22"]})
    rig.tell(event="resolved", name="other.test", address=str(WEB))
    rig.tell(event="open", id="a-1", address=str(WEB), port=22, rule="sandbox allow git.test:22")
    [opened] = rig.entries()
    assert (opened["name"], opened["rule"]) == ("other.test", "sandbox allow other.test:22")


REFUSED = [
    ({"address": IPv4Address("169.254.169.254"), "port": 80}, "always blocked: link-local"),
    ({"port": 25}, "always blocked: SMTP"),
    ({"address": IPv4Address("80.90.100.10")}, "always blocked: the host's own address"),
    ({"protocol": "other", "port": None}, "always blocked: a protocol other than TCP, UDP and ping"),
    ({"begins": False}, "always blocked: a packet that begins no connection"),
    ({"prefix": "d 1 limit"}, "limit: too many connections"),
    ({}, "not in the sandbox allow list"),
    ({"prefix": "d 2"}, "sandbox network off"),
    ({"address": IPv4Address("1.2.3.4")}, "the address is not current for the name: look it up again"),
    ({"port": 853, "address": IPv4Address("1.2.3.4")}, "not in the sandbox allow list"),
    ({"prefix": "gibberish"}, "sandbox network off"),
]


@pytest.mark.parametrize(("packet", "rule"), REFUSED, ids=[rule for _, rule in REFUSED])
def test_refusals_in_words(rig, packet, rule):
    rig.open({"allow": ["web.test"]})
    rig.open("off", version=2)
    rig.book.host_addresses = [IPv4Address("80.90.100.10")]
    rig.tell(event="resolved", name="web.test", address="1.2.3.4")
    rig.log(**{"prefix": "d 1", **packet})
    rig.settle()
    [entry] = rig.entries()
    assert (entry["event"], entry["rule"]) == ("refused", rule)


@pytest.mark.parametrize(
    ("packet", "rule"),
    [
        ({"address": IPv4Address("1.2.3.4")}, "no uplink"),
        ({"address": IPv4Address("1.2.9.9")}, "the address is not current for the name: look it up again"),
        ({"address": IPv4Address("5.6.7.8")}, "not in the sandbox allow list"),
        ({"address": IPv4Address("10.1.2.3")}, "always blocked: private"),
    ],
    ids=["allowed and not reached", "reached", "not allowed", "blocked"],
)
def test_a_refusal_for_want_of_a_way(rig, packet, rule):
    """Of what the policy allows; what it does not is told as its own."""
    rig.open({"allow": ["web.test"]})
    rig.book.reach = [IPv4Network("1.2.9.0/24")]
    for address in ("1.2.3.4", "1.2.9.9"):
        rig.tell(event="resolved", name="web.test", address=address)
    rig.log(**{"prefix": "d 1", **packet})
    rig.settle()
    assert [(entry["event"], entry["rule"]) for entry in rig.entries()] == [("refused", rule)]


def test_equal_refusals_are_one_with_a_count(rig):
    rig.open("off")
    for port in (80, 80, 80, 443):
        rig.log("d 1", port=port)
    rig.tell(event="refused", kind="dns", name="web.test", rule="sandbox network off")
    rig.book.settle(rig.now + 0.5)
    assert rig.entries() == []
    rig.settle()
    counts = [(entry["kind"], entry["name"], entry["port"], entry["count"]) for entry in rig.entries()]
    assert counts == [("tcp", None, 80, 3), ("tcp", None, 443, 1), ("dns", "web.test", None, 1)]


def test_a_scan_is_counted_and_not_written_line_by_line(rig):
    rig.open("off")
    for port in range(10000, 15000):
        rig.log("d 1", port=port)
    rig.settle()
    entries = rig.entries()
    assert len(entries) == 65
    assert sum(entry["count"] for entry in entries) == 5000
    assert (entries[-1]["address"], entries[-1]["port"], entries[-1]["rule"]) == (None, None, "sandbox network off")


def test_refusals_of_one_sandbox_behind_a_number(rig):
    rig.open("off")
    rig.open("off", sandbox=OTHER)
    rig.log("d 1", port=1)
    found, following, complete = rig.book.refusals(SANDBOX, 0)
    assert ([entry["port"] for entry in found], complete) == ([1], True)
    rig.log("d 1", port=2)
    rig.log("d 1", port=3, sandbox=OTHER)
    found, following, _ = rig.book.refusals(SANDBOX, following)
    assert [entry["port"] for entry in found] == [2]
    assert rig.book.refusals(SANDBOX, following)[0] == []
    [first, *_] = rig.book.refusals(SANDBOX, 0)[0]
    assert {**rig.entries()[0], "until": first["at"]} == first
    for port in range(2000):
        rig.log("d 1", port=port)
        rig.settle(1.1)
    found, _, complete = rig.book.refusals(SANDBOX, 0)
    assert (len(found), complete) == (512, False)
    assert rig.book.refusals(SANDBOX, found[-2]["seq"])[2] is True


def test_equal_refusals_that_are_one_say_when_the_last_of_them_came(rig):
    rig.open("off")
    begun = rig.now
    rig.log("d 1", port=1)
    rig.now += 0.4
    rig.log("d 1", port=1)
    [one] = rig.book.refusals(SANDBOX, 0)[0]
    moments = [datetime.fromisoformat(one[name]).timestamp() for name in ("at", "until")]
    assert (one["count"], moments) == (2, pytest.approx([begun, begun + 0.4], abs=0.01))


def test_the_routers_counters_are_the_authority(rig):
    rig.open()
    rig.log("a 1")
    for _ in range(3):
        rig.log("d 1", port=25)
    rig.book.count(SANDBOX, allowed=1, refused=3, now=rig.now)
    rig.settle()
    assert [entry["event"] for entry in rig.entries()] == ["open", "refused"]
    rig.book.count(SANDBOX, allowed=3, refused=10, now=rig.now)
    rig.book.count(SANDBOX, allowed=3, refused=10, now=rig.now)
    gaps = [(entry["verdict"], entry["count"]) for entry in rig.entries() if entry["event"] == "gap"]
    assert gaps == [("refused", 7), ("allowed", 2)]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_router_made_anew_counts_for_itself(rig, restarted):
    """As after a pause: the sandbox had another before, with counts of its own."""
    rig.open("off")
    for port in range(50):
        rig.log("d 1", port=port)
    rig.book.count(SANDBOX, allowed=0, refused=500, now=rig.now)
    rig.book.close(SANDBOX, now=rig.now)
    rig.open("off", version=2, is_new=True)
    if restarted:
        rig.restart()
        rig.open("off", version=2)
    rig.log("d 2", port=1)
    rig.book.count(SANDBOX, allowed=0, refused=101, now=rig.now)
    rig.book.count(SANDBOX, allowed=0, refused=101, now=rig.now)
    gaps = [entry["count"] for entry in rig.entries() if entry["event"] == "gap"]
    assert gaps == [450, 100]


def test_a_known_loss_is_not_told_twice(rig):
    rig.open()
    rig.book.log_lost(SANDBOX, 4, now=rig.now)
    rig.book.count(SANDBOX, allowed=1, refused=5, now=rig.now)
    gaps = [(entry["verdict"], entry["count"]) for entry in rig.entries()]
    assert gaps == [(None, 4), ("refused", 1), ("allowed", 1)]


def test_counters_that_begin_anew(rig):
    rig.open()
    for _ in range(10):
        rig.log("d 1")
    rig.book.count(SANDBOX, allowed=0, refused=1, now=rig.now, is_beginning=True)
    rig.book.count(SANDBOX, allowed=0, refused=3, now=rig.now)
    assert [entry["count"] for entry in rig.entries()] == [2]


def test_lost_reports_are_a_gap(rig):
    rig.open()
    rig.tell(event="lost", count=12)
    assert [(entry["kind"], entry["count"]) for entry in rig.entries()] == [("gap", 12)]


def test_lost_ends_are_a_gap_where_something_is_open(rig):
    rig.open()
    rig.open(sandbox=OTHER)
    rig.log("a 1")
    rig.book.ends_lost(now=rig.now)
    assert [(entry["sandbox"], entry["event"]) for entry in rig.entries()] == [(SANDBOX, "open"), (SANDBOX, "gap")]


def test_ends_that_come_after_the_sandbox(rig):
    rig.open()
    rig.log("a 1")
    rig.log("a 1", port=80)
    rig.book.close(SANDBOX, now=rig.now)
    rig.end()
    assert rig.entries()[-1]["bytes_received"] == 900
    rig.settle(LATE_S + 1)
    last = rig.entries()[-1]
    assert (last["event"], last["port"], last["bytes_sent"]) == ("closed", 80, None)
    assert len(rig.entries()) == 4


def test_the_peek_may_tell_of_ends_after_the_sandbox(rig):
    rig.open()
    rig.tell(event="open", id="a-1", address=str(WEB), port=443, source_port=40000, rule="internet")
    rig.book.close(SANDBOX, now=rig.now)
    rig.tell(event="closed", id="a-1", bytes_sent=5, bytes_received=6)
    assert [entry["bytes_sent"] for entry in rig.entries()] == [None, 5]


def test_a_restart_knows_what_was_open_and_what_was_counted(rig):
    rig.open()
    rig.log("a 1")
    rig.log("d 1", port=25)
    rig.settle()
    rig.restart()
    rig.open()
    rig.end()
    rig.log("a 1", port=80)
    rig.book.count(SANDBOX, allowed=2, refused=1, now=rig.now)
    events = [(entry["event"], entry["connection"]) for entry in rig.entries()]
    assert events == [("open", 1), ("refused", 2), ("closed", 1), ("open", 3)]
    rig.book.count(SANDBOX, allowed=2, refused=6, now=rig.now)
    assert rig.entries()[-1]["count"] == 5
    assert [entry["port"] for entry in rig.book.refusals(SANDBOX, 0)[0]] == [25]


def test_a_restart_after_many_segments_knows_as_much(tmp_path):
    rig = Rig(tmp_path / "journal", segment_bytes=2000)
    rig.open()
    rig.log("a 1", port=22)
    for number in range(200):
        rig.log("a 1", source_port=number)
        rig.end(source_port=number)
        rig.settle(0.1)
        rig.book.journal.page(rig.book.journal.last, limit=1)
    assert len(list((tmp_path / "journal").glob("*.jsonl"))) <= 3
    for _ in range(2):
        rig.restart()
    rig.open()
    rig.book.count(SANDBOX, allowed=201, refused=0, now=rig.now)
    rig.end(port=22)
    last = rig.entries()[-1]
    assert (last["event"], last["port"], last["connection"]) == ("closed", 22, 1)


def test_pages(tmp_path):
    rig = Rig(tmp_path / "journal", segment_bytes=3000, max_segments=1000)
    rig.open()
    for port in range(300):
        rig.log("a 1", port=port)
        rig.book.journal.flush()
    after, seen = 0, []
    while True:
        entries, following = rig.book.journal.page(after, limit=7)
        if not entries:
            break
        seen += entries
        after = following
    assert [entry["port"] for entry in seen] == list(range(300))
    assert [entry["seq"] for entry in seen] == list(range(1, 301))
    assert following == after == 300


def test_a_journal_that_nobody_reads_stays_small_and_says_what_went(tmp_path):
    rig = Rig(tmp_path / "journal", segment_bytes=3000, max_segments=4)
    rig.open()
    for port in range(300):
        rig.log("a 1", port=port)
        rig.settle(0.01)
    assert len(list((tmp_path / "journal").glob("*.jsonl"))) <= 4
    entries = rig.entries()
    assert entries[0]["seq"] > 1
    seen = {entry["port"] for entry in entries if entry["event"] == "open"}
    told = sum(entry["count"] for entry in entries if entry["event"] == "gap")
    assert told > 0
    assert len(seen) < 300


def test_a_full_disk_is_a_gap_afterwards(tmp_path, monkeypatch):
    rig = Rig(tmp_path / "journal")
    rig.open()
    real = rig.book.journal._descriptor
    full = open("/dev/full", "w")  # noqa: SIM115
    rig.book.journal._descriptor = full.fileno()
    monkeypatch.setattr("os.ftruncate", lambda *rest: None)
    for port in range(5):
        rig.log("a 1", port=port)
    rig.book.settle(rig.now)
    rig.book.journal._descriptor = real
    rig.settle()
    [gap] = [entry for entry in rig.entries() if entry["event"] == "gap"]
    assert (gap["seq"], gap["count"]) == (1, 5)
    full.close()


def test_a_torn_line_is_dropped(tmp_path):
    rig = Rig(tmp_path / "journal")
    rig.open()
    rig.log("a 1")
    rig.restart()
    path = next((tmp_path / "journal").glob("*.jsonl"))
    path.write_bytes(path.read_bytes() + b'{"seq": 2, "sandb')
    rig.restart()
    rig.open()
    rig.end()
    assert [entry["seq"] for entry in rig.entries()] == [1, 2]


@pytest.mark.parametrize("broken", [b"{}\n", b"\xff\xfe\n", b'{"seq": 9, "sandbox": "x"}\n', b"[]\n"])
@pytest.mark.parametrize("place", ["state", "journal"])
def test_what_a_bad_disk_has_made_of_it_stops_nothing(tmp_path, place, broken):
    rig = Rig(tmp_path / "journal")
    rig.open()
    rig.log("a 1")
    rig.book.journal.flush()
    if place == "state":
        (tmp_path / "journal" / "state").write_bytes(broken)
    else:
        path = next((tmp_path / "journal").glob("*.jsonl"))
        path.write_bytes(broken + path.read_bytes())
    rig.restart()
    rig.open()
    rig.log("a 1", port=80)
    opened = [entry for entry in rig.entries() if entry.get("event") == "open"]
    assert [entry["port"] for entry in opened] == [443, 80]
    assert len({entry["connection"] for entry in opened}) == 2


def test_numbers_are_not_used_again_after_a_power_cut(tmp_path):
    rig = Rig(tmp_path / "journal")
    rig.open()
    rig.log("a 1")
    rig.book.journal.flush()
    path = tmp_path / "journal" / "state"
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot": "another"}))
    rig.start()
    rig.open()
    rig.log("a 1", port=80)
    assert rig.entries()[-1]["seq"] > 100_000
    instance = rig.book.journal.instance
    rig.restart()
    assert rig.book.journal.instance == instance


@given(st.binary(max_size=300))
def test_any_bytes_of_a_log_socket_are_borne(data):
    for packet in read_packets(data):
        assert packet.prefix is not None


@given(st.binary(max_size=60), st.binary(max_size=20))
def test_any_packet_is_read_as_numbers(payload, prefix):
    def attribute(kind: int, value: bytes) -> bytes:
        length = (4 + len(value)).to_bytes(2, "little")
        return length + kind.to_bytes(2, "little") + value + b"\0" * (-len(value) % 4)

    body = b"\2\0\0\5" + attribute(10, prefix + b"\0") + attribute(9, payload)
    message = (16 + len(body)).to_bytes(4, "little") + b"\0\4" + b"\0\0" + bytes(8) + body
    for packet in read_packets(message):
        assert packet.protocol in ("tcp", "udp", "icmp", "other")
        assert packet.port is None or 0 <= packet.port < 65536


@given(st.binary(max_size=200))
def test_any_report_is_read_or_refused(data):
    read_report(data)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 200), st.floats(0, 3)), max_size=300))
def test_nothing_that_is_gathered_is_lost(events):
    gathering, now, taken = Gathering(), 0.0, 0
    for port, step in events:
        gathering.add(Refusal("tcp", None, "1.2.3.4", port, "off"), at=now, is_logged=True)
        now += step
        held = gathering.take(now)
        assert len(held) <= 65
        taken += sum(one.count for one in held)
    assert taken + sum(one.count for one in gathering.take()) == len(events)

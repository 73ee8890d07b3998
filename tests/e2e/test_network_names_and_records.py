"""Host names on connections, and the record of connections, on real sandboxes in a sealed world."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from cpuos import Network, Sandbox
from cpuos.testing.sealed import addresses
from refusals import told_refusals

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]

# Asks (address, port, name in TLS or "", Host) for a page; tells the status, or what came instead.
ASK = """
import http.client, json, socket, ssl, sys
for address, port, name, host in json.loads(sys.argv[1]):
    made = http.client.HTTPConnection(host or "x", port)
    try:
        made.sock = socket.create_connection((address, port), 20)
        if name is not None:
            context = ssl.create_default_context(cafile="/tmp/ca.pem")
            context.check_hostname = bool(name)
            context.verify_mode = ssl.CERT_REQUIRED if name else ssl.CERT_NONE
            made.sock = context.wrap_socket(made.sock, server_hostname=name or None)
        made.request("GET", "/bytes/100000" if name else "/", headers={"Host": host})
        answer = made.getresponse()
        print(json.dumps([answer.status, len(answer.read())]))
    except (OSError, http.client.HTTPException) as error:
        print(json.dumps([type(error).__name__, 0]))
"""
NAME, OTHER, DENIED = "www.allowed.example", "api.allowed.example", "www.denied.example"


@pytest.fixture
def sandbox(sealed, sealed_instance):
    for name in (NAME, OTHER, DENIED):
        sealed.names.set(name, [addresses.WEB])
    network = Network(allow=["*.allowed.example"])
    with Sandbox.create(client=sealed_instance.client(), template="python", network=network) as made:
        made.files.write("/tmp/ca.pem", sealed.authority)
        assert made.exec(["getent", "hosts", NAME]).exit_code == 0
        yield made


def ask(sandbox: Sandbox, *tries: tuple[str, int, str | None, str]) -> list[object]:
    result = sandbox.exec(["python3", "-c", ASK, json.dumps(tries)])
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(lines) == len(tries), (result.stdout, result.stderr)
    return [status for status, _ in lines]


def until(condition, *, limit_s: float = 60.0):
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def test_names_in_tls_and_http(sealed, sandbox):
    sealed.clear()
    web = addresses.WEB
    assert ask(
        sandbox,
        (web, 443, NAME, NAME),
        (web, 443, DENIED, NAME),
        (web, 443, "", NAME),
        (web, 80, None, OTHER),
        (web, 80, None, DENIED),
        (web, 80, None, web),
        (addresses.OTHER_WEB, 443, NAME, NAME),
    ) == [
        200,
        "ConnectionResetError",
        "ConnectionResetError",
        200,
        "ConnectionResetError",
        "ConnectionResetError",
        "ConnectionRefusedError",
    ]
    assert {(seen.sni, seen.host) for seen in sealed.connections()} == {(NAME, NAME), (None, OTHER)}


def test_connections_are_recorded_with_names_rules_and_bytes(sandbox):
    web = addresses.WEB
    ask(
        sandbox,
        (web, 443, NAME, NAME),
        (web, 443, DENIED, DENIED),
        (web, 22, None, ""),
        (addresses.METADATA, 80, None, ""),
    )
    sandbox.exec(["getent", "hosts", DENIED])

    def recorded():
        found = {(one.name, one.address, one.port, one.rule): one for one in sandbox.audit.connections()}
        carried = found.get((NAME, web, 443, "sandbox allow *.allowed.example"))
        return found if carried is not None and carried.ended_at is not None and len(found) >= 5 else None

    found = until(recorded)
    carried = found.pop((NAME, web, 443, "sandbox allow *.allowed.example"))
    assert carried.verdict == "allowed"
    assert carried.bytes_received > 100_000
    assert 300 < carried.bytes_sent < 10_000
    assert {(key, one.verdict.value) for key, one in found.items()} == {
        ((DENIED, web, 443, "not in the sandbox allow list"), "refused"),
        ((NAME, web, 22, "not in the sandbox allow list"), "refused"),
        ((None, addresses.METADATA, 80, "always blocked: link-local"), "refused"),
        ((DENIED, None, None, "not in the sandbox allow list"), "refused"),
    }


def test_a_command_tells_what_it_was_refused(sandbox):
    program = ["python3", "-c", ASK, json.dumps([(addresses.WEB, 443, DENIED, DENIED)])]
    result = told_refusals(lambda: sandbox.exec(program))
    assert [(one.name, one.port, one.rule) for one in result.refused_connections] == [
        (DENIED, 443, "not in the sandbox allow list")
    ]


def test_a_killed_peek_fails_closed_and_heals(sandbox, sealed_instance):
    place = (addresses.WEB, 443, NAME, NAME)
    assert ask(sandbox, place) == [200]
    pid = sealed_instance.helper("peek")
    assert pid
    os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    assert ask(sandbox, (addresses.WEB, 443, DENIED, DENIED))[0] in ("ConnectionRefusedError", "ConnectionResetError")
    until(lambda: ask(sandbox, place) == [200])


def test_what_a_killed_records_worker_missed_is_a_gap(sandbox, sealed_instance):
    ask(sandbox, (addresses.WEB, 22, None, ""))
    until(lambda: sandbox.audit.connections())
    pid = sealed_instance.helper("records")
    assert pid
    os.kill(pid, signal.SIGSTOP)
    for _ in range(3):
        ask(sandbox, (addresses.WEB, 23, None, ""))
    os.kill(pid, signal.SIGKILL)
    [gap] = until(lambda: [one for one in sandbox.audit.connections() if one.kind == "gap"])
    assert gap.count == 3
    assert [one.port for one in sandbox.audit.connections(verdict="refused") if one.port is not None] == [22]

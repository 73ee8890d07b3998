"""Configuration, retries, tickets and queries: the parts that decide without doing any I/O."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

import cpuos
from cpuos.client._http import (
    PATIENT,
    Retry,
    Ticket,
    TransportFailure,
    answer_error,
    encode_query,
    needs_httpx,
    proxy_of,
)
from cpuos.client.config import load_config
from cpuos.errors import AuthenticationError, Conflict, InvalidRequest, Unavailable

ROOT = Path(cpuos.__file__).parents[2]


def test_the_plain_client_is_as_generated() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/gen_sync.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_importing_takes_nothing_along() -> None:
    code = "import sys, cpuos; print(sorted(sys.modules.keys() & {'httpx2', 'pydantic', 'asyncio', 'json', 'anyio'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_public_names_are_there() -> None:
    for name in cpuos.__all__:
        assert getattr(cpuos, name) is not None
    assert cpuos.Sandbox.__name__ == "Sandbox"
    with pytest.raises(AttributeError):
        _ = cpuos.nothing


def test_both_clients_have_the_same_calls() -> None:
    def public(cls: type) -> set[str]:
        return {name for name in vars(cls) if not name.startswith("_")}

    assert public(cpuos.Sandbox) == public(cpuos.AsyncSandbox)
    assert public(cpuos.Client) == public(cpuos.AsyncClient)


def test_configuration_order(tmp_path: Path) -> None:
    def load(**environ: str):
        return load_config(environ=environ, home=tmp_path)

    with pytest.raises(AuthenticationError) as caught:
        load()
    assert (caught.value.code, caught.value.hint) == ("key_missing", "cpuos up")
    stored = tmp_path / ".config/cpuos/credentials.json"
    stored.parent.mkdir(parents=True)
    stored.write_text(json.dumps({"api_url": "http://10.1.1.1:7070/", "api_key": "cpk_stored", "more": 1}))
    assert (load().api_url, load().api_key) == ("http://10.1.1.1:7070", "cpk_stored")
    assert load(CPUOS_API_KEY="cpk_env").api_key == "cpk_env"
    assert load_config("https://x.test", "cpk_arg", environ={}, home=tmp_path).api_url == "https://x.test"
    assert "cpk_stored" not in repr(load())


def test_a_stored_key_goes_only_to_its_own_server(tmp_path: Path) -> None:
    stored = tmp_path / ".config/cpuos/credentials.json"
    stored.parent.mkdir(parents=True)
    stored.write_text(json.dumps({"api_url": "http://127.0.0.1:7070", "api_key": "cpk_stored"}))
    with pytest.raises(AuthenticationError):
        load_config("http://evil.test", environ={}, home=tmp_path)


@pytest.mark.parametrize("text", ["not json", "[]", '{"api_key": 5}', ""])
def test_a_broken_credentials_file(tmp_path: Path, text: str) -> None:
    stored = tmp_path / ".config/cpuos/credentials.json"
    stored.parent.mkdir(parents=True)
    stored.write_text(text)
    with pytest.raises((AuthenticationError, InvalidRequest)):
        load_config(environ={}, home=tmp_path)


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:7070", "http://", "x"])
def test_bad_urls(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        load_config(url, "cpk_x", environ={}, home=tmp_path)


def test_retries_are_bounded_and_only_where_safe() -> None:
    sent, unsent = TransportFailure("x", sent=True), TransportFailure("x", sent=False)
    assert Retry(PATIENT, repeatable=False).after_failure(sent) is None
    assert Retry(PATIENT, repeatable=False).after_failure(unsent) is not None
    retry = Retry(PATIENT, repeatable=True)
    waits = []
    while (delay := retry.after_failure(sent)) is not None:
        waits.append(delay)
    assert len(waits) == PATIENT.attempts - 1
    assert 8 < sum(waits) < 16
    retry.progress()
    assert retry.after_failure(sent) is not None
    assert Retry(PATIENT, repeatable=True).after_error(Unavailable("x")) is not None
    assert Retry(PATIENT, repeatable=False).after_error(Unavailable("x")) is None
    assert Retry(PATIENT, repeatable=True).after_error(Conflict("x")) is None


def test_a_tickets_age_is_told_by_the_servers_clock() -> None:
    now = [100.0]
    server_now = datetime(2030, 1, 1, tzinfo=UTC)
    ticket = Ticket(
        data_url="http://x/",
        ticket="t",
        expires_at=server_now + timedelta(minutes=10),
        date=format_datetime(server_now, usegmt=True),
        clock=lambda: now[0],
    )
    assert (ticket.data_url, ticket.fresh) == ("http://x", True)
    now[0] += 530
    assert ticket.fresh
    now[0] += 20
    assert not ticket.fresh


def test_queries_carry_any_bytes() -> None:
    values = {"path": "a/b c?&=#%+\udcff🤣\n", "depth": 2, "recursive": True, "user": None, "label": ["a:b", "c"]}
    assert encode_query(values) == (
        "?path=a/b%20c%3F%26%3D%23%25%2B%FF%F0%9F%A4%A3%0A&depth=2&recursive=true&label=a%3Ab&label=c"
    )
    assert encode_query({"a": None}) == ""


def test_answers_that_are_no_errors_of_ours() -> None:
    error = answer_error(502, b"<html>Bad Gateway</html>")
    assert error.code == "internal"
    assert "502" in error.what
    assert answer_error(404, b'{"error":{"code":"of_tomorrow","what":"w","why":"y","try":"t"}}').why == "y"
    assert answer_error(404, b'{"error":[]}').code == "internal"


def test_calls_to_this_machine_pass_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.test:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert proxy_of("http://127.0.0.1:7070") is None
    assert proxy_of("http://localhost:7070") is None
    assert proxy_of("http://cpuos.test:7070") == "http://proxy.test:3128"
    assert needs_httpx("http://cpuos.test:7070")
    assert needs_httpx("https://127.0.0.1")
    assert not needs_httpx("http://127.0.0.1")

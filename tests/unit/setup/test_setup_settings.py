"""Settings: where they come from, and what wrong ones say."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuos.errors import InvalidRequest
from cpuos.settings import load_settings, publish_endpoint, read_endpoint


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATA_DIR", "STATE_DIR", "RUN_DIR", "API_PORT", "GATEWAY_PORT"):
        monkeypatch.delenv(f"CPUOS_{name}", raising=False)


def test_defaults() -> None:
    settings = load_settings()
    assert settings.data_dir == Path("/var/lib/cpuos")
    assert settings.state_dir == Path("/var/lib/cpuos/state")
    assert settings.node_socket == Path("/run/cpuos/node.sock")
    assert (settings.api_port, settings.gateway_port) == (7070, 7071)


def test_order_is_argument_environment_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text("api_port = 1\ngateway_port = 2\nmax_sandboxes = 3\n")
    monkeypatch.setenv("CPUOS_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("CPUOS_API_PORT", "11")
    monkeypatch.setenv("CPUOS_GATEWAY_PORT", "12")
    settings = load_settings(api_port=21)
    assert (settings.api_port, settings.gateway_port, settings.max_sandboxes) == (21, 12, 3)
    assert settings.state_dir == tmp_path / "state"


def test_an_instance_is_named_by_its_state(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    one, same, other = (load_settings(state_dir=tmp_path / name).instance_id for name in ("real", "link", "other"))
    assert one == same != other
    assert len(one) == 6
    int(one, 16)


def test_a_child_gets_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path, api_port=0, template_host_ca=True)
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    assert load_settings() == settings


@pytest.mark.parametrize(
    ("name", "value"), [("api_port", 70000), ("max_sandboxes", 0), ("cpu_overcommit", 0.5), ("api_port", "x")]
)
def test_a_wrong_value_is_named(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=name):
        load_settings(**{name: value})


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("api_port = = 1")
    with pytest.raises(InvalidRequest, match=r"config\.toml"):
        load_settings(data_dir=tmp_path)


def test_endpoints(tmp_path: Path) -> None:
    path = tmp_path / "endpoint.json"
    assert read_endpoint(path) is None
    publish_endpoint(path, "http://127.0.0.1:7")
    assert read_endpoint(path) == "http://127.0.0.1:7"
    assert path.stat().st_mode & 0o777 == 0o640
    for wrong in ("", "{", "[]", '{"url": 3}', "3"):
        path.write_text(wrong)
        assert read_endpoint(path) is None

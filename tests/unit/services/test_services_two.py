"""Two installations on one machine: neither takes what is the other's, and none is removed with the other."""

from __future__ import annotations

import json
import os
import pwd
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuos import services
from cpuos.cli.installation import name_place
from cpuos.cli.main import main
from cpuos.errors import AuthenticationError, Conflict
from cpuos.services import ownership, removal
from cpuos.services.control import Stopped, down, up
from cpuos.services.ownership import claim_run_dir, other_owner, require_free_ports
from cpuos.services.processes import find_process
from cpuos.services.record import Record, write_record
from cpuos.services.removal import Left, Removal, uninstall
from cpuos.settings import Settings, load_settings
from cpuos.setup import source, users
from cpuos.setup.host import Host

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of this test's own: run directory, `cpuos` command, users, and nothing of the real one."""
    link = tmp_path / "bin" / "cpuos"
    link.parent.mkdir()
    for module in (removal, source):
        monkeypatch.setattr(module, "LINK", link)
    monkeypatch.setattr(removal, "DEFAULT_DATA_DIR", tmp_path / "default")
    monkeypatch.setattr(removal, "existing", lambda names: set())
    monkeypatch.setattr(removal, "down", lambda settings, *, uid: Stopped(was_running=False))
    monkeypatch.setattr(removal, "_remove_network", lambda settings: [])
    return tmp_path


def installation(machine: Path, name: str) -> Settings:
    settings = load_settings(data_dir=machine / name, state_dir=machine / name / "state", run_dir=machine / "run")
    command = settings.venv_dir / "current" / "bin" / "cpuos"
    command.parent.mkdir(parents=True)
    command.write_text("")
    settings.state_dir.mkdir()
    settings.run_dir.mkdir(exist_ok=True)
    return settings


def make_alive(settings: Settings) -> None:
    """As if its supervisor ran: this very process."""
    claim_run_dir(settings)
    own = find_process(os.getpid())
    assert own is not None
    write_record(settings, Record(supervisor=own, python="python", settings=settings.environment()))


def test_a_run_directory_that_lives_is_not_taken(machine: Path) -> None:
    one, two = installation(machine, "one"), installation(machine, "two")
    claim_run_dir(one)
    assert other_owner(two) is None, "nothing of the first one lives"
    make_alive(one)
    assert other_owner(one) is None
    with pytest.raises(Conflict, match="another installation runs from") as refused:
        up(two, prepare=False)
    assert str(one.state_dir) in refused.value.why
    assert refused.value.hint.startswith(f"CPUOS_RUN_DIR={two.run_dir}-2 CPUOS_API_PORT=")
    with pytest.raises(Conflict, match="cannot stop"):
        down(two)
    (two.run_dir / "state-directory").unlink()
    assert other_owner(two) == one.state_dir, "of an earlier version: its record tells"


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("part", ["api", "gateway", "preview"])
def test_a_taken_port_names_its_setting(machine: Path, listener: int, part: str) -> None:
    ports = {"api_port": 0, "gateway_port": 0, "preview_port": 0}
    require_free_ports(load_settings(**ports))
    with pytest.raises(Conflict, match=f"something else listens on 127.0.0.1:{listener}") as refused:
        require_free_ports(load_settings(**{**ports, f"{part}_port": listener}))
    name = f"CPUOS_{part.upper()}_PORT"
    assert f"{name} is {listener}" in refused.value.why
    given = dict(word.split("=") for word in refused.value.hint.removesuffix(" cpuos up").split())
    assert len(set(given.values())) == 3
    assert not any(ownership._is_taken("127.0.0.1", int(port)) for port in given.values())


def test_the_command_of_another_installation_stays(machine: Path) -> None:
    one, two = installation(machine, "one"), installation(machine, "two")
    assert source.link_command(one) is None
    assert source.link_command(two) == source.LINK.resolve()
    uninstall(two, purge=True, uid=0)
    assert source.LINK.resolve() == (one.venv_dir / "current" / "bin" / "cpuos").resolve()
    assert not two.data_dir.exists()
    uninstall(one, uid=0)
    assert source.LINK.exists(), "without --purge it is there for another `cpuos up`"
    assert str(source.LINK) in uninstall(one, purge=True, uid=0).removed
    assert not os.path.lexists(source.LINK)


def test_an_installation_beside_one_that_runs_is_removed_without_stopping_it(machine: Path) -> None:
    one, two = installation(machine, "one"), installation(machine, "two")
    make_alive(one)
    done = uninstall(two, purge=True, uid=0)
    assert (one.run_dir / "parts.json").exists()
    assert not two.data_dir.exists()
    assert [(left.what, left.is_failure) for left in done.left] == [(str(one.run_dir), False)]


def test_what_cannot_be_removed_keeps_nothing_else(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = installation(machine, "one")
    source.link_command(one)
    remove_tree = removal.remove_tree

    def refuse(folder: Path) -> None:
        if folder == one.run_dir:
            raise Conflict(f"cannot remove {folder}", "still mounted: x", hint="umount x")
        remove_tree(folder)

    def fail(settings: Settings) -> list[str]:
        raise OSError("the kernel said no")

    monkeypatch.setattr(removal, "remove_tree", refuse)
    monkeypatch.setattr(removal, "remove_groups", fail)
    done = uninstall(one, purge=True, uid=0)
    assert [(left.what, left.why, left.hint) for left in done.left] == [
        ("control groups", "the kernel said no", "cpuos doctor"),
        (str(one.run_dir), "still mounted: x", "umount x"),
    ]
    assert not one.data_dir.exists()
    assert not os.path.lexists(source.LINK)


def test_the_command_stays_while_there_is_something_to_remove(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = installation(machine, "one")
    source.link_command(one)
    monkeypatch.setattr(removal, "_daemons_of", lambda settings: ["4242"])
    done = uninstall(one, purge=True, uid=0)
    assert [(left.what, left.hint) for left in done.left] == [(str(one.data_dir), "ps -fp 4242")]
    assert source.LINK.exists()
    assert not one.state_dir.exists()


def test_a_tree_goes_but_for_what_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cpuos.setup.trees import remove_tree

    for name in ("a", "b", "c"):
        (tmp_path / "tree" / name).mkdir(parents=True)
        (tmp_path / "tree" / name / "file").write_text("")
    unlink = os.unlink

    def refuse(path: str, *, dir_fd: int | None = None) -> None:
        if os.readlink(f"/proc/self/fd/{dir_fd}").endswith("/b"):
            raise PermissionError(1, "Operation not permitted")
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(Conflict) as refused:
        remove_tree(tmp_path / "tree")
    assert [path.name for path in (tmp_path / "tree").iterdir()] == ["b"]
    assert "b/file stays: Operation not permitted" in refused.value.why


@pytest.fixture
def accounts(machine: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Users and group of a made-up machine; nothing on the real one is added or removed."""
    found: set[str] = set()

    def run(self: Host, argv: list[str], *, contained: bool) -> None:
        verb, name = argv[0], argv[-1]
        assert verb in ("groupadd", "useradd", "usermod", "userdel", "groupdel")
        if verb in ("groupadd", "useradd"):
            found.add(name)
        elif verb in ("userdel", "groupdel"):
            found.remove(name)

    monkeypatch.setattr(Host, "run", run)
    monkeypatch.setattr(users, "_exists", lambda look_up, name: name in found)
    monkeypatch.setattr(removal, "existing", users.existing)
    monkeypatch.setattr(removal, "processes_of_users", lambda names: [])
    return found


def set_up_users(settings: Settings) -> None:
    with open(os.devnull, "w") as log:
        users.create_users(Host(settings, log=log))


def test_users_go_with_the_installation_that_made_them(machine: Path, accounts: set[str]) -> None:
    one = installation(machine, "one")
    set_up_users(one)
    assert accounts == {*users.USERS, users.GROUP} == users.users_made(one)
    done = uninstall(one, purge=True, uid=0)
    assert (accounts, done.left) == (set(), [])


def test_users_that_were_there_stay(machine: Path, accounts: set[str]) -> None:
    accounts |= {users.USERS[0], users.GROUP}
    before = set(accounts)
    one = installation(machine, "one")
    set_up_users(one)
    made = {*users.USERS} - before
    assert users.users_made(one) == made
    (left,) = uninstall(one, purge=True, uid=0).left
    assert not left.is_failure
    assert f"did not make cpuos, {users.USERS[0]}" in left.why
    assert left.hint.startswith("userdel ")
    assert accounts == {*users.USERS, users.GROUP}


def test_users_that_something_needs_stay(machine: Path, accounts: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = installation(machine, "one"), installation(machine, "two")
    set_up_users(one)
    source.link_command(two)
    (left,) = uninstall(one, purge=True, uid=0).left
    assert str(two.data_dir) in left.why
    os.unlink(source.LINK)
    three = installation(machine, "three")
    accounts.clear()
    set_up_users(three)
    monkeypatch.setattr(removal, "processes_of_users", lambda names: ["77", "78"])
    (left,) = uninstall(three, purge=True, uid=0).left
    assert (left.why, left.hint) == ("processes run as them: 77, 78", "ps -fp 77")
    assert accounts == {*users.USERS, users.GROUP}
    assert not three.data_dir.exists()


def test_processes_of_users_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = pwd.struct_passwd((users.USERS[0], "x", 4242, 4242, "", "/nonexistent", "/bin/false"))
    monkeypatch.setattr(users, "_exists", lambda look_up, name: name == users.USERS[0])
    monkeypatch.setattr(pwd, "getpwnam", lambda name: entry)
    for pid, uid in (("12", 4242), ("7", 4242), ("13", 0), ("self", 4242)):
        (tmp_path / pid).mkdir()
        os.chown(tmp_path / pid, uid, 0)
    assert users.processes_of_users({*users.USERS, users.GROUP}, root=tmp_path) == ["7", "12"]


def test_uninstall_tells_what_stays(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    users_stay = Left(what="the users", why="another made them", hint="userdel x", is_failure=False)
    folder_stays = Left(what="/data", why="still mounted: /data/x", hint="umount /data/x")
    done = Removal(removed=["/run/x"], left=[users_stay])
    monkeypatch.setattr(services, "uninstall", lambda *, purge: done)
    assert main(["uninstall", "--purge"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "removed /run/x\n"
    assert shown.err.splitlines() == [
        *("left: the users", "another made them", "try: userdel x"),
        "left are: the users; the reasons stand above",
    ]
    done.left.append(folder_stays)
    assert main(["uninstall", "--purge", "--json"]) == 1
    assert [left["what"] for left in json.loads(capsys.readouterr().out)["left"]] == ["the users", "/data"]
    for options, removed, last in (
        (["--purge"], ["/run/x"], "nothing of it is left"),
        (["--purge"], [], "nothing of it was here"),
        ([], ["/run/x"], "the data directory and `cpuos` are left; to remove them too: cpuos uninstall --purge"),
    ):
        done.left.clear()
        done.removed[:] = removed
        assert main(["uninstall", *options]) == 0
        assert capsys.readouterr().err == f"{last}\n"


def test_status_tells_whose_parts_it_shows(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = installation(machine, "first"), installation(machine, "second")
    make_alive(first)
    monkeypatch.setenv("HOME", str(machine))
    monkeypatch.setenv("CPUOS_API_KEY", "cpk_x")
    monkeypatch.setenv("CPUOS_API_URL", "http://127.0.0.1:9")
    for settings in (first, second):
        for name, value in settings.environment().items():
            monkeypatch.setenv(name, value)
        assert main(["status"]) == 1
        shown = capsys.readouterr().out.splitlines()
        assert shown[0] == f"installation  {settings.data_dir}, runs from {machine / 'run'}"
        assert ("not running" in shown[1]) == (settings is second)
        assert "client        http://127.0.0.1:9 by CPUOS_API_URL, key in CPUOS_API_KEY" in shown
        assert any(str(first.log_dir / "node.log") in line for line in shown), "the logs are of those that are shown"
    assert f"try: CPUOS_STATE_DIR={first.state_dir} cpuos status" in shown[2]
    assert main(["status", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["other"] == str(first.state_dir)


def test_a_wrong_key_and_a_silent_server_name_who_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "credentials.json"
    place.write_text(json.dumps({"api_url": "http://127.0.0.1:9", "api_key": "cpk_x"}))
    monkeypatch.setenv("CPUOS_RUN_DIR", str(tmp_path))
    for name in ("CPUOS_API_KEY", "CPUOS_API_URL"):
        monkeypatch.delenv(name, raising=False)
    assert main(["ls"]) == 1
    assert capsys.readouterr().err.splitlines()[1].endswith(f"; asked was http://127.0.0.1:9, by {place}")
    error = AuthenticationError("cannot use the key", "it is not known")
    name_place(error)
    assert error.why == f"it is not known; asked was http://127.0.0.1:9, by {place} with the key in {place}"

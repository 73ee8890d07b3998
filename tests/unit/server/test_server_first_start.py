"""The first key, and the file that a user finds it in."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path

import pytest
from sqlalchemy import select

from control_plane import Installation
from cpuos.errors import SetupRequired
from cpuos.server.db.models import ApiKey
from cpuos.server.first_start import make_first_key, make_key, write_credentials, write_first_key


async def test_one_first_key_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    installation = Installation(folder=tmp_path)
    async with installation.serve() as server:
        assert installation.key.startswith("cpk_")
        assert await make_first_key(server.plane.database, installation.clock) is None
        more = await make_key(server.plane.database, installation.clock, name="ci")
        async with server.plane.database.read() as connection:
            hashes = (await connection.execute(select(ApiKey.secret_hash))).scalars().all()
    assert len(hashes) == 2
    kept = b"".join(path.read_bytes() for path in tmp_path.glob("cpuos.db*"))  # noqa: ASYNC240
    for key in (installation.key, more):
        assert key.encode() not in kept
        assert key.rpartition("_")[2].encode() not in kept


def test_credentials_are_private(tmp_path: Path) -> None:
    path = tmp_path / "home" / ".config" / "cpuos" / "credentials.json"
    write_credentials(path, uid=os.geteuid(), gid=os.getegid(), api_url="http://a", key="cpk_1")
    write_credentials(path, uid=os.geteuid(), gid=os.getegid(), api_url="http://a", key="cpk_2")
    assert json.loads(path.read_text()) == {"api_url": "http://a", "api_key": "cpk_2"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["credentials.json"]


def test_the_first_key_file_is_private(tmp_path: Path) -> None:
    write_first_key(tmp_path / "first-key.json", "cpk_1")
    assert json.loads((tmp_path / "first-key.json").read_text()) == {"api_key": "cpk_1"}
    assert stat.S_IMODE((tmp_path / "first-key.json").stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="writes as another user")
def test_root_writes_as_the_user_and_no_further() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        check_other_user(Path(folder))


def check_other_user(folder: Path) -> None:
    home, roots = folder / "home", folder / "roots"
    home.mkdir()
    os.chown(home, 65534, 65534)
    roots.mkdir(mode=0o700)
    path = home / ".config" / "cpuos" / "credentials.json"
    write_credentials(path, uid=65534, gid=65534, api_url="http://a", key="cpk_1")
    assert path.stat().st_uid == 65534
    (home / "planted").symlink_to(roots)
    with pytest.raises(SetupRequired):
        write_credentials(home / "planted" / "credentials.json", uid=65534, gid=65534, api_url="http://a", key="k")
    assert list(roots.iterdir()) == []

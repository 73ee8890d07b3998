"""The first key, and the file that a user finds it in."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from sqlalchemy import select

from control_plane import Installation
from cpuos.server.db.models import ApiKey
from cpuos.server.first_start import make_first_key, make_key, write_first_key


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
        # The secret itself may hold an underscore, so it is cut off at the second one, not at the last.
        secret = key.split("_", 2)[2]
        assert len(secret) == 43
        assert secret.encode() not in kept


def test_the_first_key_file_is_private(tmp_path: Path) -> None:
    write_first_key(tmp_path / "first-key.json", "cpk_1")
    assert json.loads((tmp_path / "first-key.json").read_text()) == {"api_key": "cpk_1"}
    assert stat.S_IMODE((tmp_path / "first-key.json").stat().st_mode) == 0o600

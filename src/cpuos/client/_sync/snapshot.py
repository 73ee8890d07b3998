# Generated from src/cpuos/client/_async/snapshot.py by scripts/gen_sync.py; edit that.
"""Snapshot: what one sandbox was at one moment, to make others of."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from urllib.parse import quote

from cpuos.client._backend_sync import shielded
from cpuos.client._parse import parse_answer
from cpuos.client._sync.client import Client
from cpuos.client._sync.forks import fork
from cpuos.client._sync.sandbox import Sandbox
from cpuos.types.snapshot import Snapshot as SnapshotInfo
from cpuos.types.snapshot import SnapshotList, SnapshotState

__all__ = ["Snapshot"]


class Snapshot:
    """Kept until it is deleted. `Sandbox.create(snapshot=…)` makes one sandbox of it, `fork` several."""

    def __init__(self, client: Client | None = None, info: SnapshotInfo | None = None, *, owns: bool = False) -> None:
        if not isinstance(client, Client) or info is None:
            name = type(self).__name__
            raise TypeError(f"{name}.get(ID) finds a snapshot, sandbox.snapshot() makes one; not {name}(…)")
        self._client = client
        self._owns_client = owns
        self._info = info

    @classmethod
    def get(cls, ref: str, *, client: Client | None = None) -> Snapshot:
        """An existing snapshot by id, name or unique prefix of its id."""
        used = client or Client()
        try:
            answer = used.server.call("GET", _path(ref))
        except BaseException:
            if client is None:
                shielded(used.close, timeout_s=1.0)
            raise
        return cls(used, parse_answer(SnapshotInfo, answer.body), owns=client is None)

    @classmethod
    def list(cls, *, sandbox: str | None = None, client: Client | None = None) -> builtins.list[SnapshotInfo]:
        """Records of the workspace's snapshots, newest first; with `sandbox` those of that one. `get` opens one."""
        used = client or Client()
        try:
            answer = used.server.call("GET", "/v1/snapshots", query={"sandbox": sandbox})
        finally:
            if client is None:
                shielded(used.close, timeout_s=1.0)
        return parse_answer(SnapshotList, answer.body).snapshots

    def fork(
        self,
        count: int = 1,
        *,
        timeout: str | float | None = None,
        labels: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> builtins.list[Sandbox]:
        """So many running sandboxes that begin with it: all of them, or an error and none."""
        return fork(self._client, f"{_path(self.id)}/fork", count, timeout=timeout, labels=labels, key=idempotency_key)

    def delete(self) -> None:
        """Remove it. Sandboxes that began with it live on."""
        answer = self._client.server.call("DELETE", _path(self.id))
        self._info = parse_answer(SnapshotInfo, answer.body)
        self.close()

    def close(self) -> None:
        """End this object's connections; the snapshot stays."""
        if self._owns_client:
            self._client.close()

    @property
    def id(self) -> str:
        """Twenty letters and digits; its first four or more name it in the command line."""
        return self._info.id

    @property
    def name(self) -> str | None:
        """As given when it was made."""
        return self._info.name

    @property
    def state(self) -> SnapshotState:
        """The state as last read."""
        return self._info.state

    @property
    def info(self) -> SnapshotInfo:
        """The whole record as last read."""
        return self._info

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name or self.id} {self.state}>"


def _path(ref: str) -> str:
    return f"/v1/snapshots/{quote(ref, safe='')}"

"""AsyncClient: one configuration and one set of connections for any number of sandboxes."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from cpuos.client._async.alarms import AsyncAlarmAccess
from cpuos.client._async.connection import AsyncServer
from cpuos.client._async.http import AsyncHttp
from cpuos.client._async.network import AsyncWorkspaceAccess
from cpuos.client._http import Answer
from cpuos.client._parse import make_request, parse_answer
from cpuos.client.config import load_config
from cpuos.types.audit import AuditList
from cpuos.types.storage import Prune, Pruned, Storage
from cpuos.types.units import parse_duration_s

__all__ = ["AsyncClient"]

# Every file is looked at.
_STORAGE_S = 300.0


class AsyncClient:
    """Server, key and connections. Sandbox calls make one for themselves when none is given.

    `api_url` and `api_key` come from the arguments, else CPUOS_API_URL and CPUOS_API_KEY, else the file that
    `cpuos up` writes.
    """

    def __init__(self, api_url: str | None = None, api_key: str | None = None) -> None:
        self.config = load_config(api_url, api_key)
        self.http = AsyncHttp()
        self.server = AsyncServer(self.http, url=self.config.api_url, key=self.config.api_key)
        self.network = AsyncWorkspaceAccess(self.server)
        self.alarms = AsyncAlarmAccess(self.server)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.config.api_url}>"

    async def call(self, method: str, path: str, **options: Any) -> Answer:
        """Any call of the REST API under /v1; errors raise."""
        return await self.server.call(method, path, **options)

    async def get_json(self, path: str, **query: Any) -> Any:
        """Answer of a GET as plain data: `get_json("/v1/capacity")`."""
        import json

        return json.loads((await self.server.call("GET", path, query=query)).body)

    async def health(self) -> dict[str, Any]:
        """Version and state of the parts; needs no valid key."""
        return await self.get_json("/v1/health")

    async def templates(self) -> list[dict[str, Any]]:
        """The installed templates."""
        answer = await self.get_json("/v1/templates")
        return answer["templates"]

    async def audit(
        self, *, sandbox: str | None = None, action: str | None = None, after: int | None = None, limit: int = 100
    ) -> AuditList:
        """Audit entries, oldest first; `next_after` of the answer continues."""
        query = {"sandbox": sandbox, "action": action, "after": after, "limit": limit}
        return parse_answer(AuditList, (await self.server.call("GET", "/v1/audit", query=query)).body)

    async def storage(self) -> Storage:
        """What takes room on the nodes, over all workspaces; needs a key with the permission `nodes.write`."""
        answer = await self.server.call("GET", "/v1/storage", read_timeout_s=_STORAGE_S)
        return parse_answer(Storage, answer.body)

    async def prune(self, *, dry_run: bool = True, layers_unused: str | float | None = None) -> Pruned:
        """Remove what nobody needs; unless `dry_run=False` is given, only say what that is. What steps of builds have
        left goes when no build has begun with it for the time `layers_unused`, a day."""
        values: dict[str, Any] = {"dry_run": dry_run}
        if layers_unused is not None:
            values["layers_unused_s"] = parse_duration_s(layers_unused, name="layers_unused")
        body = make_request(Prune, values, doing="prune")
        answer = await self.server.call("POST", "/v1/storage/prune", content=body, read_timeout_s=_STORAGE_S)
        return parse_answer(Pruned, answer.body)

    async def close(self) -> None:
        """End the open connections; a later call opens new ones."""
        await self.http.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

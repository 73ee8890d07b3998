"""Origins that need TLS or a proxy, by httpx2."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Mapping

import httpx2

from cpuos.client._httpx import as_failure, pool_options, timeouts

__all__ = ["HttpxAnswer", "HttpxOrigin"]


class HttpxOrigin:
    """One server; `AsyncHttp` makes it where sockets alone do not do."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._transport = httpx2.AsyncHTTPTransport(**pool_options(url))

    async def open(
        self,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str],
        content: bytes | AsyncIterable[bytes] | None,
        read_timeout_s: float,
    ) -> HttpxAnswer:
        request = httpx2.Request(
            method, self._url + target, headers=headers, content=content, extensions=timeouts(read_timeout_s)
        )
        try:
            return HttpxAnswer(await self._transport.handle_async_request(request))
        except httpx2.HTTPError as error:
            raise as_failure(error) from error

    async def close(self) -> None:
        await self._transport.aclose()


class HttpxAnswer:
    def __init__(self, response: httpx2.Response) -> None:
        self._response = response
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._response.stream:  # type: ignore[union-attr]
                yield chunk
        except httpx2.HTTPError as error:
            raise as_failure(error) from error

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def close(self) -> None:
        try:
            await self._response.aclose()
        except httpx2.HTTPError as error:
            raise as_failure(error) from error

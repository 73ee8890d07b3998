"""Origins that need TLS or a proxy, by httpx2."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import httpx2

from cpuos.client._httpx import as_failure, pool_options, timeouts

__all__ = ["HttpxAnswer", "HttpxOrigin"]


class HttpxOrigin:
    """One server; `Http` makes it where sockets alone do not do."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._transport = httpx2.HTTPTransport(**pool_options(url))

    def open(
        self,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str],
        content: bytes | Iterable[bytes] | None,
        read_timeout_s: float,
    ) -> HttpxAnswer:
        request = httpx2.Request(
            method, self._url + target, headers=headers, content=content, extensions=timeouts(read_timeout_s)
        )
        try:
            return HttpxAnswer(self._transport.handle_request(request))
        except httpx2.HTTPError as error:
            raise as_failure(error) from error

    def close(self) -> None:
        self._transport.close()


class HttpxAnswer:
    def __init__(self, response: httpx2.Response) -> None:
        self._response = response
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers

    def chunks(self) -> Iterator[bytes]:
        try:
            yield from self._response.stream  # type: ignore[misc]
        except httpx2.HTTPError as error:
            raise as_failure(error) from error

    def read(self) -> bytes:
        return b"".join(self.chunks())

    def close(self) -> None:
        try:
            self._response.close()
        except httpx2.HTTPError as error:
            raise as_failure(error) from error

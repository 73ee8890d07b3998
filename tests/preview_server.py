"""Runs inside a sandbox (or beside a fake one): a server with all that previews have to carry. Standard library only.

    python3 preview_server.py ADDRESS PORT [--debugger] [--log]

With `--debugger` it answers as Chromium's debugging port does: to nobody who calls it by another name than localhost.
"""

import asyncio
import base64
import hashlib
import json
import sys
import time

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
PIECE = bytes(1 << 18)


async def serve(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if "--log" in sys.argv:
                print(head.partition(b"\r\n")[0].decode("latin-1"), flush=True)
            target = head.split(b" ", 2)[1].decode("latin-1")
            headers = {}
            for line in head.split(b"\r\n")[1:-2]:
                name, _, value = line.partition(b":")
                headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")
            if not await answer(target, headers, head, reader=reader, writer=writer):
                return
            await writer.drain()
    except (asyncio.IncompleteReadError, OSError):
        pass
    finally:
        writer.close()


async def answer(target, headers, head, *, reader, writer):
    path, _, query = target.partition("?")
    if DEBUGGER and headers["host"].partition(":")[0] not in ("localhost", "127.0.0.1"):
        give(writer, b"Host header is specified and is not an IP address or localhost.", status=b"500 Error")
    elif headers.get("upgrade") == "websocket":
        await websocket(headers, head, reader=reader, writer=writer)
        return False
    elif path == "/json/version" and DEBUGGER:
        url = f"ws://{headers['host']}/devtools/browser/6c7a4e0c-3b1f-4f8e-9a55-d2b0e1f0a1b2"
        give(writer, json.dumps({"Browser": "Test/1", "webSocketDebuggerUrl": url}).encode())
    elif path == "/events":
        await events(int(query), writer)
    elif path == "/download":
        await download(int(query), writer)
    elif path == "/upload":
        give(writer, await upload(headers, reader))
    elif path == "/cookies":
        cookies = b"Set-Cookie: a=1; Domain=preview.localhost\r\nSet-Cookie: __Host-cpuos-preview=x; Path=/; Secure\r\n"
        give(writer, b"ok", extra=cookies + b"Strict-Transport-Security: max-age=9; includeSubDomains\r\n")
    else:
        give(writer, head)
    return True


def give(writer, body, *, status=b"200 OK", extra=b""):
    writer.write(
        b"HTTP/1.1 %b\r\nContent-Type: text/plain\r\n%bContent-Length: %d\r\n\r\n" % (status, extra, len(body))
    )
    writer.write(body)


async def events(count, writer):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(count):
        await asyncio.sleep(0.1)
        event = b"data: %f\n\n" % time.time()
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await writer.drain()
    writer.write(b"0\r\n\r\n")


async def download(count, writer):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % count)
    while count:
        writer.write(PIECE[: min(count, len(PIECE))])
        count -= min(count, len(PIECE))
        await writer.drain()


async def upload(headers, reader):
    digest, left, size = hashlib.sha1(), int(headers["content-length"]), 0
    while left:
        piece = await reader.read(min(left, 1 << 18))
        left -= len(piece)
        size += len(piece)
        digest.update(piece)
    return b"%d %b" % (size, digest.hexdigest().encode())


async def websocket(headers, head, *, reader, writer):
    """Says the head that it was sent, then echoes; short messages from the client only."""
    accept = base64.b64encode(hashlib.sha1(headers["sec-websocket-key"].encode() + GUID).digest())
    writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n")
    writer.write(b"Sec-WebSocket-Accept: %b\r\n\r\n\x81\x7e%b%b" % (accept, len(head).to_bytes(2, "big"), head))
    while True:
        first, length = await reader.readexactly(2)
        mask = await reader.readexactly(4)
        data = bytes(byte ^ mask[index % 4] for index, byte in enumerate(await reader.readexactly(length & 0x7F)))
        writer.write(bytes([first, len(data)]) + data)
        if first & 0x0F == 8:
            return


async def main():
    async with await asyncio.start_server(serve, sys.argv[1], int(sys.argv[2]), limit=1 << 20) as server:
        print("ready", flush=True)
        await server.serve_forever()


DEBUGGER = "--debugger" in sys.argv
if __name__ == "__main__":
    asyncio.run(main())

"""Runs inside the sandbox: a small HTTP/1.1 server that keeps connections, and echoes WebSocket messages."""

import asyncio
import base64
import hashlib

PORT = 9001
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
BODY = b"x" * 1000
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


async def serve(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"\r\nsec-websocket-key:" in head.lower():
                key = head.lower().index(b"\r\nsec-websocket-key:") + 20
                accept = hashlib.sha1(head[key:].split(b"\r\n", 1)[0].strip() + GUID).digest()
                writer.write(
                    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                    b"Sec-WebSocket-Accept: " + base64.b64encode(accept) + b"\r\n\r\n"
                )
                await echo(reader, writer)
                return
            writer.write(ANSWER)
    except (asyncio.IncompleteReadError, OSError):
        pass
    finally:
        writer.close()


async def echo(reader, writer):
    """Short messages only."""
    while True:
        first, length = await reader.readexactly(2)
        mask = await reader.readexactly(4)
        data = bytes(byte ^ mask[index % 4] for index, byte in enumerate(await reader.readexactly(length & 0x7F)))
        if first & 0x0F == 8:
            writer.write(bytes([0x88, len(data)]) + data)
            return
        writer.write(bytes([first, len(data)]) + data)


async def main():
    async with await asyncio.start_server(serve, "0.0.0.0", PORT) as server:
        print("ready", flush=True)
        await server.serve_forever()


asyncio.run(main())

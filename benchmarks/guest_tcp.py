"""Runs inside the sandbox: takes and gives bytes over plain TCP, with nothing of the product in between.

A connection begins with 64 bytes that say what it is for: `sink COUNT`, `source COUNT` or `cat PATH`.
"""

import socket
import subprocess

PIECE = 1 << 20
ORDER_BYTES = 64


def main() -> None:
    listener = socket.create_server(("0.0.0.0", 9000))
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        with connection:
            verb, _, argument = connection.recv(ORDER_BYTES, socket.MSG_WAITALL).decode().strip().partition(" ")
            if verb == "sink":
                sink(connection, int(argument))
            elif verb == "source":
                source(connection, int(argument))
            else:
                subprocess.run(["cat", argument], stdout=connection.fileno(), check=True)


def sink(connection: socket.socket, count: int) -> None:
    buffer = bytearray(PIECE)
    while count:
        taken = connection.recv_into(buffer)
        if not taken:
            return
        count -= taken
    connection.sendall(b"k")


def source(connection: socket.socket, count: int) -> None:
    piece = memoryview(bytes(PIECE))
    while count:
        connection.sendall(piece[: min(PIECE, count)])
        count -= min(PIECE, count)


main()

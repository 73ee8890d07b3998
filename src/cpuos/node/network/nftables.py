"""nft scripts run by libnftables in this process: an `nft` process costs 20 ms, this 1 to 2 (network-facts 5)."""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections.abc import Callable
from typing import Any

from cpuos.errors import PlatformError, SetupRequired
from cpuos.runtimes.descriptors import SELECT_LIMIT

__all__ = ["NftContext"]

_LIBRARY = "libnftables.so.1"
_OUTPUT_JSON = 1 << 4  # nftables/libnftables.h
_MAX_WORDS = 600
# Numbers that other threads may take between the check and the library's own socket.
_SPARE_NUMBERS = 64
# The library keeps tables of its own that no lock of it guards: one script at a time in this process.
_ONE_AT_A_TIME = threading.Lock()


class NftContext:
    """A context of the library, which keeps a netlink socket in the namespace of the thread that opened it.

    The library may open that socket anew while it runs a script, so scripts too run in a thread in that namespace.
    """

    def __init__(self) -> None:
        self._library = _load()
        with _ONE_AT_A_TIME:
            _require_low_number()
            self._context = self._library.nft_ctx_new(0)
            if not self._context:
                raise PlatformError("cannot open a context of nftables", "out of memory")
            self._library.nft_ctx_buffer_output(self._context)
            self._library.nft_ctx_buffer_error(self._context)

    def run(self, script: str) -> None:
        """One transaction: all of it holds afterwards, or nothing has changed."""
        self._run(script, flags=0)

    def query(self, command: str) -> list[dict[str, Any]]:
        """What a `list` command shows."""
        text = self._run(command, flags=_OUTPUT_JSON)
        return list(json.loads(text)["nftables"]) if text else []

    def close(self) -> None:
        """Free it; again is fine. The socket would hold the namespace."""
        with _ONE_AT_A_TIME:
            context, self._context = self._context, None
            if context:
                self._library.nft_ctx_free(context)

    def _run(self, script: str, *, flags: int) -> str:
        with _ONE_AT_A_TIME:
            if not self._context:
                raise PlatformError("cannot run nft rules", "the context is closed")
            self._library.nft_ctx_output_set_flags(self._context, flags)
            code = self._library.nft_run_cmd_from_buffer(self._context, script.encode())
            # Reading empties the buffers, so both are read each time.
            output = _text(self._library.nft_ctx_get_output_buffer, self._context)
            words = _text(self._library.nft_ctx_get_error_buffer, self._context)
            self._drop_cache()
        if code != 0:
            raise PlatformError("cannot apply nft rules", words.strip()[:_MAX_WORDS] or "nftables did not say why")
        return output

    def _drop_cache(self) -> None:
        """What it has read of the rules is of no use any more, and is a megabyte and more for each context."""
        self._library.nft_ctx_set_dry_run(self._context, True)  # it keeps nothing of a dry run
        self._library.nft_run_cmd_from_buffer(self._context, b"")
        self._library.nft_ctx_set_dry_run(self._context, False)


def _require_low_number() -> None:
    """The library's socket gets the lowest number that is free, and has to lie below `SELECT_LIMIT`."""
    free = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    os.close(free)
    if free >= SELECT_LIMIT - _SPARE_NUMBERS:
        raise PlatformError(
            "cannot open a context of nftables",
            f"this process has {free} descriptors, and the library takes none from {SELECT_LIMIT} on",
            hint="lower max_sandboxes",
        )


def _load() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as problem:
        raise SetupRequired(
            f"cannot load {_LIBRARY}", str(problem), hint="run `sudo apt-get install libnftables1`"
        ) from problem
    library.nft_ctx_new.restype = ctypes.c_void_p
    library.nft_ctx_new.argtypes = [ctypes.c_uint32]
    library.nft_ctx_free.restype = None
    library.nft_ctx_output_set_flags.argtypes = [ctypes.c_void_p, ctypes.c_uint]
    library.nft_ctx_output_set_flags.restype = None
    library.nft_ctx_set_dry_run.argtypes = [ctypes.c_void_p, ctypes.c_bool]
    library.nft_ctx_set_dry_run.restype = None
    library.nft_run_cmd_from_buffer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    for name in ("nft_ctx_free", "nft_ctx_buffer_output", "nft_ctx_buffer_error"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    for name in ("nft_ctx_get_output_buffer", "nft_ctx_get_error_buffer"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
        getattr(library, name).restype = ctypes.c_char_p
    return library


def _text(read: Callable[[int], bytes | None], context: int) -> str:
    return (read(context) or b"").decode(errors="replace")

"""Two processes of one run (`pytest -n 2`): tests of real sandboxes follow each other in the one, in the order of a
plain run, and the other takes what else there is, file by file.

Most of their time goes by in waiting. Two real instances at once would also count each other's latencies and memory.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

__all__ = ["LaneScheduling"]

REAL = {"docs", "e2e", "machine", "runtimes", "security"}


class LaneScheduling(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        """The work unit of a test: one process takes all of it. The largest goes first."""
        file = PurePosixPath(nodeid.partition("::")[0])
        return "real sandboxes" if REAL & set(file.parts) else str(file)

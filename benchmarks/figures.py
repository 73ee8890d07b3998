"""The figures: what is measured, and the value that each has to keep. The README's table says the same in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.commands import exec_true
from benchmarks.lifecycle import fork_of_8, list_of_many, pause, resume_by_call, resume_to_exec, warm_pandas
from benchmarks.names import dns_neighbour
from benchmarks.outside import tcp_outside, tcp_outside_in_user_space
from benchmarks.peek import peek_connect, peek_download
from benchmarks.previews import preview_messages, preview_request
from benchmarks.ready import against_bare, at_once, pandas, to_exec, to_exec_slowest
from benchmarks.results import Measured
from benchmarks.slots import policy_change, slot_from_pool
from benchmarks.stage import Stage
from benchmarks.starts import create_to_first_exec
from benchmarks.transfers import download, growth, stdout, upload
from benchmarks.weights import help_time, idle_weight, import_time

__all__ = ["FIGURES", "Figure"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    name: str
    limit: float
    at_least: bool = False
    """The limit is a floor; else it is a ceiling."""
    unit: str = "x"
    measure: Callable[[Stage], Measured]

    def is_met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    @property
    def goal(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g} {self.unit}"


# In the order in which they are measured: memory growth is noted over the transfers before it.
FIGURES = (
    Figure(name="exec_true", limit=1.8, measure=exec_true),
    Figure(name="create_to_first_exec", limit=1.6, measure=create_to_first_exec),
    Figure(name="upload_256mib", limit=0.5, at_least=True, measure=upload),
    Figure(name="download_256mib", limit=0.5, at_least=True, measure=download),
    Figure(name="stdout_200mb", limit=0.5, at_least=True, measure=stdout),
    Figure(name="growth_mib", limit=64, unit="MiB", measure=growth),
    Figure(name="idle_pss_mib", limit=45, unit="MiB", measure=idle_weight),
    Figure(name="tcp_outside", limit=0.7, at_least=True, measure=tcp_outside),
    Figure(name="tcp_user_uplink", limit=0.45, at_least=True, measure=tcp_outside_in_user_space),
    Figure(name="slot_ms", limit=5, unit="ms", measure=slot_from_pool),
    Figure(name="policy_ms", limit=5, unit="ms", measure=policy_change),
    Figure(name="peek_download", limit=0.7, at_least=True, measure=peek_download),
    Figure(name="peek_connect", limit=5.0, measure=peek_connect),
    Figure(name="dns_neighbour", limit=2.0, measure=dns_neighbour),
    Figure(name="preview_request", limit=3.0, measure=preview_request),
    Figure(name="preview_messages", limit=1000, at_least=True, unit="/s", measure=preview_messages),
    Figure(name="pause_ms", limit=1000, unit="ms", measure=pause),
    Figure(name="resume_to_exec_ms", limit=400, unit="ms", measure=resume_to_exec),
    Figure(name="resume_by_call_ms", limit=500, unit="ms", measure=resume_by_call),
    Figure(name="fork_of_8_s", limit=2.5, unit="s", measure=fork_of_8),
    Figure(name="warm_pandas", limit=5.0, at_least=True, measure=warm_pandas),
    Figure(name="ready_to_exec_ms", limit=50, unit="ms", measure=to_exec),
    Figure(name="ready_to_exec_p99_ms", limit=150, unit="ms", measure=to_exec_slowest),
    Figure(name="ready_50_at_once_ms", limit=1000, unit="ms", measure=at_once),
    Figure(name="ready_pandas", limit=5.0, at_least=True, measure=pandas),
    Figure(name="ready_against_bare", limit=5.0, at_least=True, measure=against_bare),
    Figure(name="list_ms", limit=200, unit="ms", measure=list_of_many),
    Figure(name="import_ms", limit=250, unit="ms", measure=import_time),
    Figure(name="help_s", limit=0.5, unit="s", measure=help_time),
)

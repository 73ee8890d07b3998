"""What a restarted daemon does with each record it finds: a pure decision, kept apart from doing it."""

from __future__ import annotations

from enum import StrEnum

from cpuos.node.journal import Record, Stage

__all__ = ["HOST_RESTARTED", "Recovery", "decide"]

HOST_RESTARTED = "the host restarted"


class Recovery(StrEnum):
    ADOPT = "adopt"  # take over the watch; when it is not there, report it dead
    UNDO = "undo"  # its create was never answered: remove all of it and its record
    END = "end"  # dead: report it so, and remove what is left of it on the host
    DELETE = "delete"  # finish the delete that was begun
    KEEP = "keep"  # only a mark against late calls


def decide(record: Record, *, boot_id: str) -> Recovery:
    if record.stage is Stage.GONE:
        return Recovery.KEEP
    if record.stage is Stage.DELETING:
        return Recovery.DELETE
    if record.stage is Stage.CREATING:
        return Recovery.UNDO
    if record.stage is Stage.DEAD or record.boot_id != boot_id:
        return Recovery.END
    return Recovery.ADOPT

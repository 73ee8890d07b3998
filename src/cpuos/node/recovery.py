"""What a restarted daemon does with each record it finds: a pure decision, kept apart from doing it."""

from __future__ import annotations

from enum import StrEnum

from cpuos.node.journal import Record, Stage

__all__ = ["Recovery", "decide"]


class Recovery(StrEnum):
    ADOPT = "adopt"  # take over the watch; when it is not there, report it dead, or paused where its image is kept
    REVERT = "revert"  # adopt it, and say that it goes on: what was being saved of it is given up
    PARK = "park"  # its image is whole: it is paused, and all but files is taken away
    UNDO = "undo"  # its create was never answered: remove all of it and its record
    END = "end"  # dead: report it so, and remove what is left of it on the host
    DELETE = "delete"  # finish the delete that was begun
    KEEP = "keep"  # a mark against late calls, or a paused one of which only files are there


def decide(record: Record, *, boot_id: str, has_image: bool = False) -> Recovery:
    """`has_image`: the image of a pause is there, whole."""
    rebooted = record.boot_id != boot_id
    match record.stage:
        case Stage.GONE:
            return Recovery.KEEP
        case Stage.DELETING:
            return Recovery.DELETE
        case Stage.CREATING:
            return Recovery.UNDO
        case Stage.READY:
            return Recovery.UNDO if rebooted else Recovery.ADOPT
        case Stage.DEAD:
            return Recovery.END
        case Stage.PAUSED:
            return Recovery.KEEP if record.parked else Recovery.PARK
        case Stage.RESUMING:  # the process that it may have has told nobody anything
            return Recovery.PARK
        case Stage.PAUSING if rebooted:
            return Recovery.PARK if has_image else Recovery.END
        case Stage.SAVING | Stage.PAUSING if not rebooted:
            return Recovery.REVERT
        case Stage.RUNNING if rebooted and record.unsettled and has_image:
            return Recovery.PARK
        case _:
            return Recovery.END if rebooted else Recovery.ADOPT

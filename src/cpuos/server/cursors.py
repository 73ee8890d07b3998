"""How far the journals of other processes have been taken over: one number a journal, moved with what it stands for."""

from __future__ import annotations

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from cpuos.server.db.database import Database
from cpuos.server.db.models import JournalCursor

__all__ = ["cursor_of", "take_cursor"]


async def cursor_of(database: Database, source: str) -> int:
    """Where to go on reading; 0 for a journal never read."""
    statement = select(JournalCursor.next_seq).where(JournalCursor.source == source)
    async with database.read() as connection:
        return (await connection.execute(statement)).scalar_one_or_none() or 0


async def take_cursor(connection: AsyncConnection, source: str, *, expected: int, following: int) -> bool:
    """Move the cursor in the transaction of its entries: both are kept, or neither. False: another reader was here."""
    moved = update(JournalCursor).where(JournalCursor.source == source, JournalCursor.next_seq == expected)
    if (await connection.execute(moved.values(next_seq=following))).rowcount == 1:
        return True
    known = select(JournalCursor.next_seq).where(JournalCursor.source == source)
    if (await connection.execute(known)).one_or_none() is not None:
        return False
    await connection.execute(insert(JournalCursor).values(source=source, next_seq=following))
    return expected == 0

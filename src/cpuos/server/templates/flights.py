"""Equal builds at once are one build: the first works, the others wait for how it ends.

What it makes is theirs too. Of its failures they share only what they would come to themselves: one of the recipe's own
commands ended with an error, in a sandbox of the same size. Whatever else ends it (somebody cancels it, its sandbox or
node dies, its time is up, its files are not what was announced) is its own, and one of those that wait does the work.
"""

from __future__ import annotations

import asyncio

from cpuos.types.template import Build, TemplateBuild

__all__ = ["Flight", "Flights"]


class Flight:
    """A build at work, for those that wait for it."""

    def __init__(self, request: TemplateBuild) -> None:
        self._request = request
        self._landed: asyncio.Future[Build | None] = asyncio.get_running_loop().create_future()
        self._of_recipe = False

    async def landed(self) -> Build | None:
        """The ended build; None: it got no sandbox."""
        return await asyncio.shield(self._landed)

    def is_shared(self, request: TemplateBuild) -> bool:
        """Whether this one would fail as the ended build did."""
        own = {"name": request.name, "fresh": request.fresh, "timeout_s": request.timeout_s}
        return self._of_recipe and self._request.model_copy(update=own) == request

    def land(self, build: Build | None, *, of_recipe: bool) -> None:
        self._of_recipe = of_recipe
        if not self._landed.done():
            self._landed.set_result(build)


class Flights:
    """One for each key. Between a look that finds none and the start of one nothing may wait."""

    def __init__(self) -> None:
        self._flights: dict[str, Flight] = {}

    def find(self, key: str) -> Flight | None:
        return self._flights.get(key)

    def begin(self, key: str, request: TemplateBuild) -> Flight:
        """In the place of one that is there: who wants it done anew waits for nobody."""
        flight = self._flights[key] = Flight(request)
        return flight

    def land(self, key: str, flight: Flight, build: Build | None, *, of_recipe: bool = False) -> None:
        """Let those know that wait for it. They find it no more."""
        if self._flights.get(key) is flight:
            del self._flights[key]
        flight.land(build, of_recipe=of_recipe)

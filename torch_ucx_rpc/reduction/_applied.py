"""The pushes that an asynchronous server has applied: `Applied`."""

from __future__ import annotations

# So many pushes of a trainer may overtake an earlier one.
_MOST_BEYOND = 1024


class Applied:
    """The pushes of each trainer that an asynchronous server has applied; they may come in any order, and twice."""

    def __init__(self) -> None:
        # By life: all below this number have been applied, and of those from it on, these.
        self._below: dict[int, int] = {}
        self._beyond: dict[int, set[int]] = {}

    def add(self, life: int, push: int) -> bool:
        """False if it was there."""
        below, beyond = self._below.get(life, 0), self._beyond.setdefault(life, set())
        if push < below or push in beyond:
            return False
        beyond.add(push)
        if len(beyond) > _MOST_BEYOND:
            # Another host has applied the missing ones, after its last save.
            below = min(beyond)
        while below in beyond:
            beyond.remove(below)
            below += 1
        self._below[life] = below
        return True

    def to_dict(self) -> dict[int, list[int]]:
        """By life, the number below which all have been applied, and then those from it on."""
        return {life: [below, *sorted(self._beyond[life])] for life, below in self._below.items()}

    @classmethod
    def from_dict(cls, values: dict[int, list[int]]) -> Applied:
        made = cls()
        for life, (below, *beyond) in values.items():
            made._below[life], made._beyond[life] = below, set(beyond)
        return made

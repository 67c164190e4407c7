"""The schedules of one pipeline, one for each number of micro-batches (`Schedules`)."""

from __future__ import annotations

from torch_ucx_rpc.pipeline import _schedule
from torch_ucx_rpc.pipeline._errors import ScheduleError
from torch_ucx_rpc.pipeline._schedule import Schedule

__all__ = ["Schedules"]


class Schedules:
    """The schedules of a name or a text, for a number of workers.

    Args:
        name: name of a schedule, or a text in torch's format.
        workers: number of workers; each runs one row.
        stages_per_worker: number of stages; None: what the schedule says, or its default.

    Raises ScheduleError or ValueError if it cannot run.
    """

    def __init__(self, name: str, workers: int, stages_per_worker: int | None) -> None:
        self.name = name
        self.workers = workers
        self.stages = _count_stages(name, workers, stages_per_worker)
        self._known: dict[int, Schedule] = {}

    def of(self, micro_batches: int) -> Schedule:
        """Return the schedule of a step."""
        if micro_batches not in self._known:
            self._known[micro_batches] = _schedule.build(self.name, self.workers, self.stages, micro_batches)
        return self._known[micro_batches]


def _count_stages(name: str, workers: int, per_worker: int | None) -> int:
    if _schedule.is_text(name):
        rows = _schedule.parse(name)
        stages = 1 + max(action.stage for row in rows for action in row)
        if per_worker is not None and per_worker * workers != stages:
            raise ScheduleError(f"the schedule has {stages} stages, and stages_per_worker={per_worker} asks for others")
        return stages
    if per_worker is None:
        per_worker = _schedule.stages_per_worker(name)
    if not isinstance(per_worker, int) or per_worker < 1:
        raise ValueError(f"stages_per_worker must be a whole number, 1 at least, and not {per_worker!r}")
    return workers * per_worker

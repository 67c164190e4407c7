"""The actions of each worker in turn: schedules as data, in torch's text, and the proof that they end.

A schedule has a *row* for each worker: the actions it takes, in order. Actions have torch's notation: ``2F3`` is the
forward of micro-batch 3 through stage 2, ``1B0`` the backward of micro-batch 0 through stage 1. A backward is either
whole (``B``) or in two halves: ``I`` for the gradient of the stage's input, ``W`` for those of its weights. The text is
that of ``torch.distributed.pipelining`` (``PipelineScheduleMulti._dump_csv``): a line for each worker, commas between
actions, empty cells for idle time. Cells about communication (``SEND_F``, ``RECV_B``, ``UNSHARD``, ``REDUCE_GRAD``,
...) have no effect: here values travel when they are made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch.distributed.pipelining import schedules

from torch_ucx_rpc.pipeline._errors import ScheduleError

__all__ = ["Action", "Row", "Schedules"]

# The named schedules, with the stages that each gives a worker by default.
_NAMED = {"gpipe": 1, "1F1B": 1, "interleaved": 2, "zero-bubble": 1}
_NAMES = ", ".join(_NAMED)


class Action(NamedTuple):
    """One cell of a schedule."""

    stage: int
    kind: str
    """``"F"``, ``"B"``, ``"I"`` or ``"W"``."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Row = tuple[Action, ...]


class Schedules:
    """The rows of all calls of one pipeline. This object travels to the workers, which make the same rows.

    Args:
        name: name of a schedule, or a text in torch's format.
        workers: number of workers; each runs one row.
        per_worker: number of stages on each worker; None for the number in the schedule, or its default.
        chunks: number of micro-batches of most steps.

    Raises ScheduleError if the schedule cannot run.
    """

    def __init__(self, name: str, workers: int, per_worker: int | None, chunks: int) -> None:
        self._name = name
        self._workers = workers
        self._known: dict[tuple[str, int], Sequence[Row]] = {}
        if _is_text(name):
            self.stages = 1 + max(action.stage for row in _parse(name) for action in row)
        else:
            self.stages = workers * (per_worker or _stages_per_worker(name))
        if per_worker is not None and per_worker * workers != self.stages:
            raise ScheduleError(
                f"the schedule has {self.stages} stages, and stages_per_worker={per_worker} asks for another number"
            )
        # The row of each stage.
        homes = {action.stage: number for number, row in enumerate(self.rows("step", chunks)) for action in row}
        self.worker_of = tuple(homes[stage] for stage in range(self.stages))

    def rows(self, kind: str, micro_batches: int) -> Sequence[Row]:
        """Return the rows of a "step", or of only its "forward", or of the "backward" of a forward.

        A forward takes each micro-batch through all stages. A backward takes them in autograd's order, that of a stack.
        """
        key = kind, micro_batches
        if key not in self._known:
            numbers = range(micro_batches)
            if kind == "step":
                self._known[key] = _step(self._name, self._workers, self.stages, micro_batches)
            elif kind == "forward":
                self._known[key] = _one_way(self.worker_of, self._workers, "F", numbers)
            else:
                self._known[key] = _one_way(self.worker_of, self._workers, "B", reversed(numbers))
        return self._known[key]


def _step(name: str, workers: int, stages: int, micro_batches: int) -> Sequence[Row]:
    """Return the rows of a named schedule, of one of torch's classes by its name, or of a text; checked."""
    rows: Sequence[Row]
    if name == "gpipe":
        # Huang et al. 2019, https://arxiv.org/abs/1811.06965: all forwards, then all backwards.
        places = [stage % workers for stage in range(stages)]
        both = [_one_way(places, workers, kind, range(micro_batches)) for kind in "FB"]
        rows = [ahead + back for ahead, back in zip(*both, strict=True)]
    elif name in _NAMED:
        rows = _interleaved(workers, stages, micro_batches, zero_bubble=name == "zero-bubble")
    elif _is_text(name):
        rows = _parse(name)
    else:
        rows = _torchs(name, workers, stages, micro_batches)
    _check(rows, workers, stages, micro_batches)
    return rows


def _stages_per_worker(name: str) -> int:
    return _NAMED.get(name) or (1 if issubclass(_class_of(name), schedules.PipelineScheduleSingle) else 2)


# ------------------------------------------------------------------------------------------------------------ text

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_PASSED_OVER = re.compile(r"OVERLAP_F_B|\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")


def _parse(text: str) -> Sequence[Row]:
    rows = []
    lines = [line for line in text.strip("\n").splitlines() if line.strip()]
    for number, line in enumerate(lines):
        row: list[Action] = []
        # torch writes two actions that overlap as "(0F1;1B0)OVERLAP_F_B".
        for word in filter(None, re.split(r"[,;()\s]+", line)):
            if found := _ACTION.fullmatch(word):
                row.append(Action(int(found[1]), found[2], int(found[3])))
            elif not _PASSED_OVER.fullmatch(word):
                raise ScheduleError(
                    f"{word!r} in line {number + 1} of the schedule is no action. An action is a stage, one of F, B, I "
                    f"and W, and a micro-batch, such as 2F3; actions are separated by commas. The named schedules are "
                    f"{_NAMES}."
                )
        rows.append(tuple(row))
    return tuple(rows)


def _is_text(schedule: str) -> bool:
    """Whether this is a schedule itself rather than the name of one; ``1F1B`` is a name."""
    return bool(re.search(r"\d+[FBIW]\d+\s*(,|\)|;|$)", schedule, re.MULTILINE))


# ------------------------------------------------------------------------------------------------- named schedules


def _one_way(worker_of: Sequence[int], workers: int, kind: str, numbers: Iterable[int]) -> Sequence[Row]:
    numbers = list(numbers)
    stages = range(len(worker_of)) if kind == "F" else reversed(range(len(worker_of)))
    rows: list[list[Action]] = [[] for _ in range(workers)]
    for stage in stages:
        rows[worker_of[stage]] += [Action(stage, kind, number) for number in numbers]
    return tuple(map(tuple, rows))


def _interleaved(workers: int, stages: int, micro_batches: int, zero_bubble: bool) -> Sequence[Row]:
    """Interleave several stages on each worker: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473. With one stage
    on each worker this is 1F1B, https://arxiv.org/abs/1806.03377 (PipeDream-Flush).

    With ``zero_bubble`` the weights' half of the backward fills time that would be idle: ZB1P of Qi et al. 2023,
    https://arxiv.org/abs/2401.10241. torch's ScheduleInterleaved1F1B and ScheduleInterleavedZeroBubble make the same
    rows, but need at least two stages for each worker. Here one is enough.
    """
    if stages % workers:
        raise ScheduleError(
            f"{stages} stages cannot be interleaved over {workers} workers: each worker must have the same number of "
            f"stages. Give a multiple of {workers} stages, or name the schedule as text."
        )
    local = stages // workers
    rounds = max(1, micro_batches // workers)
    # Rounds have equal size, as torch demands; if that is impossible, the whole step is one round.
    a_round = micro_batches // rounds if micro_batches % rounds == 0 else micro_batches
    total = local * micro_batches
    rows = []
    for worker in range(workers):
        for_each = 1 if zero_bubble or local == 1 else 2
        ahead = min((local - 1) * a_round + for_each * (workers - 1 - worker), total)

        def forward(count: int, worker: int = worker) -> int:
            return (count // a_round) % local * workers + worker

        def backward(count: int, worker: int = worker, ahead: int = ahead) -> int:
            return (local - 1 - ((count - ahead) // a_round) % local) * workers + worker

        late = worker if zero_bubble else 0
        rows.append(
            schedules._get_1f1b_rank_ops(  # type: ignore[no-untyped-call]
                local, workers, ahead, total - ahead, ahead, worker, forward, backward, late, zero_bubble
            )
        )
    return _read(rows)


def _torchs(name: str, workers: int, stages: int, micro_batches: int) -> Sequence[Row]:
    """Return the rows of any schedule that torch has under this name."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    made = _class_of(name)
    local = None if issubclass(made, schedules.PipelineScheduleSingle) else stages // workers
    try:
        return _read(get_schedule_ops(made, workers, micro_batches, local))
    except (AssertionError, ValueError) as error:
        raise ScheduleError(
            f"torch's schedule {name!r} cannot be made for {workers} workers, {stages} stages and {micro_batches} "
            f"micro-batches: {error}"
        ) from error


def _class_of(name: str) -> Any:
    try:
        return schedules.get_schedule_class(name)
    except ValueError:
        raise ScheduleError(
            f"there is no schedule {name!r}. The named schedules are {_NAMES}, the classes of "
            f"torch.distributed.pipelining by their names, and a text such as '0F0,0B0'."
        ) from None


def _read(rows: Iterable[Iterable[Any]]) -> Sequence[Row]:
    """Return the rows of torch's own actions. Their text has the format of `_parse`."""
    return _parse("\n".join(",".join("" if cell is None else str(cell) for cell in row) or "," for row in rows))


# ------------------------------------------------------------------------------------------------------- the proof


def _check(rows: Sequence[Row], workers: int, stages: int, micro_batches: int) -> None:
    """Raise ScheduleError, which names the fault and its place, if the rows are not a step that ends."""
    if len(rows) != workers:
        raise ScheduleError(
            f"the schedule has {len(rows)} lines, but there are {workers} workers: write a line for each worker, in "
            f"the order in which they are given."
        )
    homes: dict[int, int] = {}
    seen: set[Action] = set()
    for line, row in enumerate(rows, 1):
        for action in row:
            if action.stage >= stages or action.micro_batch >= micro_batches:
                raise ScheduleError(
                    f"{action} in line {line} of the schedule is beyond the stages, 0 to {stages - 1}, or the "
                    f"micro-batches, 0 to {micro_batches - 1}: write the schedule for chunks={micro_batches}, or give "
                    f"a batch of as many samples at least as the schedule has micro-batches."
                )
            if homes.setdefault(action.stage, line) != line:
                raise ScheduleError(
                    f"stage {action.stage} is in lines {homes[action.stage]} and {line} of the schedule: a stage lives "
                    f"on one worker, whose line has all its actions."
                )
            if action in seen:
                raise ScheduleError(f"{action} stands twice in line {line} of the schedule: take one out.")
            seen.add(action)
    for stage in range(stages):
        for number in range(micro_batches):
            halves = [kind for kind in "IW" if (stage, kind, number) in seen]
            if halves and (stage, "B", number) in seen:
                raise ScheduleError(
                    f"the schedule has {stage}B{number} and also {stage}{halves[0]}{number}: B is I and W in one; keep "
                    f"one of them."
                )
            for kind, what in ("F", "forward"), *[(kind, "backward") for kind in ("IW" if halves else "B")]:
                if (stage, kind, number) not in seen:
                    raise ScheduleError(
                        f"the schedule lacks {stage}{kind}{number}, the {what} of micro-batch {number}: add it."
                    )
    _check_ends(rows, stages)


def _check_ends(rows: Sequence[Row], stages: int) -> None:
    """Take the actions of all rows as soon as they can be taken. Raises ScheduleError on a deadlock."""
    done: set[Action] = set()
    left = [list(reversed(row)) for row in rows]

    def missing(action: Action) -> Action | None:
        """Return an action that must come before this one and has not come."""
        stage, kind, number = action
        # The backward of the next stage may be in halves.
        needed = {"F": [(stage - 1, "F")], "W": [(stage, "I")]}.get(kind, [(stage, "F"), (stage + 1, "BI")])
        for other, kinds in needed:
            if 0 <= other < stages and not any((other, one, number) in done for one in kinds):
                candidates = [Action(other, one, number) for one in kinds]
                return next(one for one in candidates if any(one in row for row in rows))
        return None

    while ready := [row for row in left if row and missing(row[-1]) is None]:
        for row in ready:
            while row and missing(row[-1]) is None:
                done.add(row.pop())
    waits = [
        f"line {line} stops at {row[-1]}, which needs {missing(row[-1])}" for line, row in enumerate(left, 1) if row
    ]
    if waits:
        raise ScheduleError(
            f"the schedule would never end: {'; '.join(waits)}. Put each action behind what it needs: a forward behind "
            f"that of the stage before, a backward behind that of the stage after."
        )

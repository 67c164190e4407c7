"""The actions of each worker in turn: schedules as data, in torch's text, and the proof that they end.

A schedule has a *row* for each worker: the actions it takes, in order. An action is torch's: ``2F3`` is the forward of
micro-batch 3 through stage 2, ``1B0`` the backward of micro-batch 0 through stage 1, which is either whole (``B``) or
in two halves: ``I`` for the gradient of the stage's input, ``W`` for those of its weights. The text is that of
``torch.distributed.pipelining`` (``PipelineScheduleMulti._dump_csv``): a line for each worker, commas between
actions, empty cells for idle time. Cells about communication (``SEND_F``, ``RECV_B``, ``UNSHARD``, ``REDUCE_GRAD``,
...) are passed over: here values travel when they are made.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.distributed.pipelining import schedules

from torch_ucx_rpc.pipeline._errors import ScheduleError

__all__ = ["NAMES", "Action", "Row", "Schedule", "Schedules", "backward_only", "forward_only", "parse"]

NAMES = ("gpipe", "1F1B", "interleaved", "zero-bubble")


class Action(NamedTuple):
    """One cell of a schedule."""

    stage: int
    kind: str
    """``"F"``, ``"B"``, ``"I"`` or ``"W"``."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Row = tuple[Action, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Rows of a schedule that have been checked."""

    rows: tuple[Row, ...]
    micro_batches: int
    stages: int

    @property
    def worker_of(self) -> tuple[int, ...]:
        """The row of each stage."""
        found = {action.stage: number for number, row in enumerate(self.rows) for action in row}
        return tuple(found[stage] for stage in range(self.stages))


class Schedules:
    """The schedules of one pipeline, one for each number of micro-batches.

    Args:
        name: name of a schedule, or a text in torch's format.
        workers: number of workers; each runs one row.
        per_worker: number of stages; None: what the schedule says, or its default.

    Raises ScheduleError if it cannot run.
    """

    def __init__(self, name: str, workers: int, per_worker: int | None) -> None:
        self._name = name
        self._workers = workers
        self._known: dict[int, Schedule] = {}
        if not _is_text(name):
            self.stages = workers * (per_worker or _stages_per_worker(name))
            return
        self.stages = 1 + max(action.stage for row in parse(name) for action in row)
        if per_worker is not None and per_worker * workers != self.stages:
            raise ScheduleError(
                f"the schedule has {self.stages} stages, and stages_per_worker={per_worker} asks for others"
            )

    def of(self, micro_batches: int) -> Schedule:
        """Return the schedule of a step."""
        if micro_batches not in self._known:
            self._known[micro_batches] = _build(self._name, self._workers, self.stages, micro_batches)
        return self._known[micro_batches]


# ------------------------------------------------------------------------------------------------------------ text

_CELL = re.compile(r"(\d+)([FBIW])(\d+)\Z")
_COMMUNICATION = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)(\d*)\Z")
_TOGETHER = re.compile(r"\(([^()]*)\)OVERLAP_F_B\Z")


def parse(text: str) -> tuple[Row, ...]:
    """The rows of a schedule's text. Raises ScheduleError, which names the bad cell."""
    rows = []
    lines = [line for line in text.strip("\n").splitlines() if line.strip()]
    for number, line in enumerate(lines):
        row: list[Action] = []
        for cell in line.split(","):
            for word in _words_of(cell.strip()):
                if found := _CELL.match(word):
                    row.append(Action(int(found[1]), found[2], int(found[3])))
                elif not _COMMUNICATION.match(word):
                    raise ScheduleError(
                        f"{word!r} in line {number + 1} of the schedule is no action. An action is a stage, one of F, "
                        f"B, I and W, and a micro-batch, such as 2F3; actions are separated by commas. The named "
                        f"schedules are {', '.join(NAMES)}."
                    )
        rows.append(tuple(row))
    return tuple(rows)


def _words_of(cell: str) -> list[str]:
    if together := _TOGETHER.match(cell):
        return [word.strip() for word in together[1].split(";") if word.strip()]
    return [cell] if cell else []


def _is_text(schedule: str) -> bool:
    """Whether this is a schedule itself rather than the name of one; ``1F1B`` is a name."""
    return bool(re.search(r"\d+[FBIW]\d+\s*(,|\)|;|$)", schedule, re.MULTILINE))


# ------------------------------------------------------------------------------------------------- named schedules


def _build(name: str, workers: int, stages: int, micro_batches: int) -> Schedule:
    """A named schedule, or one of torch's classes by its name (``"ZBVZeroBubble"``), or a text; checked."""
    key = name.lower().replace("_", "-")
    if key in {"gpipe", "fill-drain"}:
        rows = _gpipe(workers, stages, micro_batches)
    elif key in {"1f1b", "interleaved", "zero-bubble"}:
        rows = _interleaved(workers, stages, micro_batches, zero_bubble=key == "zero-bubble")
    elif _is_text(name):
        rows = parse(name)
    else:
        rows = _torchs(name, workers, stages, micro_batches)
    return _check(rows, workers=workers, stages=stages, micro_batches=micro_batches)


def _stages_per_worker(name: str) -> int:
    """Return how many stages a schedule gives each worker by default."""
    if name.lower() in {known.lower() for known in (*NAMES, "1f1b", "fill-drain", "zero_bubble")}:
        return 2 if name.lower() == "interleaved" else 1
    try:
        made = schedules.get_schedule_class(name)
    except ValueError:
        return 1
    return 1 if issubclass(made, schedules.PipelineScheduleSingle) else 2


def forward_only(worker_of: Sequence[int], workers: int, micro_batches: int) -> tuple[Row, ...]:
    """Return rows that take each micro-batch forward through all stages."""
    return tuple(
        tuple(
            Action(stage, "F", number)
            for stage in range(len(worker_of))
            if worker_of[stage] == worker
            for number in range(micro_batches)
        )
        for worker in range(workers)
    )


def backward_only(
    worker_of: Sequence[int], workers: int, micro_batches: int, *, last_first: bool = False
) -> tuple[Row, ...]:
    """Return the backward of `forward_only`; with ``last_first`` in autograd's order, that of a stack."""
    numbers = range(micro_batches)
    return tuple(
        tuple(
            Action(stage, "B", number)
            for stage in reversed(range(len(worker_of)))
            if worker_of[stage] == worker
            for number in (reversed(numbers) if last_first else numbers)
        )
        for worker in range(workers)
    )


def _round_robin(workers: int, stages: int) -> list[int]:
    return [stage % workers for stage in range(stages)]


def _gpipe(workers: int, stages: int, micro_batches: int) -> tuple[Row, ...]:
    """Huang et al. 2019, https://arxiv.org/abs/1811.06965: all forwards, then all backwards."""
    places = _round_robin(workers, stages)
    ahead = forward_only(places, workers, micro_batches)
    back = backward_only(places, workers, micro_batches)
    return tuple(first + second for first, second in zip(ahead, back, strict=True))


def _interleaved(workers: int, stages: int, micro_batches: int, zero_bubble: bool) -> tuple[Row, ...]:
    """Several stages a worker: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473; with one stage a worker 1F1B,
    https://arxiv.org/abs/1806.03377 (PipeDream-Flush).

    With ``zero_bubble`` the weights' half of the backward is put off into what would be idle time: ZB1P of Qi et al.
    2023, https://arxiv.org/abs/2401.10241. Torch's ScheduleInterleaved1F1B and ScheduleInterleavedZeroBubble make the
    same rows, but want two stages for each worker at least; here one is enough.
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


def _torchs(name: str, workers: int, stages: int, micro_batches: int) -> tuple[Row, ...]:
    """Read any schedule that torch knows by name as data."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    try:
        made = schedules.get_schedule_class(name)
    except ValueError:
        raise ScheduleError(
            f"there is no schedule {name!r}. The named schedules are {', '.join(NAMES)}, the classes of "
            f"torch.distributed.pipelining by their names, and a text such as '0F0,0B0'."
        ) from None
    local = None if issubclass(made, schedules.PipelineScheduleSingle) else stages // workers
    try:
        actions = get_schedule_ops(made, workers, micro_batches, local)
    except (AssertionError, ValueError) as error:
        raise ScheduleError(
            f"torch's schedule {name!r} cannot be made for {workers} workers, {stages} stages and {micro_batches} "
            f"micro-batches: {error}"
        ) from error
    return _read(actions)


def _read(rows: Iterable[Iterable[Any]]) -> tuple[Row, ...]:
    """Take over torch's own actions, by their text."""
    return parse("\n".join(",".join("" if cell is None else str(cell) for cell in row) or "," for row in rows))


# ------------------------------------------------------------------------------------------------------- the proof


def _check(rows: Sequence[Row], *, workers: int, stages: int, micro_batches: int) -> Schedule:
    """Check rows. Raises ScheduleError, which names the fault and its place, if they could not end."""
    if len(rows) != workers:
        raise ScheduleError(
            f"the schedule has {len(rows)} lines, but there are {workers} workers: write a line for each worker, in "
            f"the order in which they are given."
        )
    places: dict[int, int] = {}
    seen: dict[Action, int] = {}
    for worker, row in enumerate(rows):
        for action in row:
            if action.stage >= stages:
                raise ScheduleError(
                    f"{action} in line {worker + 1} of the schedule is about stage {action.stage}, but the stages are "
                    f"0 to {stages - 1}."
                )
            if action.micro_batch >= micro_batches:
                raise ScheduleError(
                    f"{action} in line {worker + 1} of the schedule is about micro-batch {action.micro_batch}, but "
                    f"there are {micro_batches}: write the schedule for chunks={micro_batches}, or give a batch of as "
                    f"many samples at least as the schedule has micro-batches."
                )
            if places.setdefault(action.stage, worker) != worker:
                raise ScheduleError(
                    f"stage {action.stage} is in lines {places[action.stage] + 1} and {worker + 1} of the schedule: a "
                    f"stage lives on one worker, whose line has all its actions."
                )
            if action in seen:
                raise ScheduleError(f"{action} stands twice in line {worker + 1} of the schedule: take one out.")
            seen[action] = worker
    _check_complete(seen, stages, micro_batches)
    _check_ends(rows, stages)
    return Schedule(tuple(map(tuple, rows)), micro_batches, stages)


def _check_complete(seen: Mapping[Action, int], stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        for number in range(micro_batches):
            forward, whole, inputs, weights = (Action(stage, kind, number) for kind in "FBIW")
            if forward not in seen:
                raise ScheduleError(f"the schedule lacks {forward}, the forward of micro-batch {number}: add it.")
            if whole in seen and (inputs in seen or weights in seen):
                raise ScheduleError(
                    f"the schedule has {whole} and also a half of it ({inputs}, {weights}): B is I and W in one; keep "
                    f"either."
                )
            if whole not in seen and (inputs not in seen or weights not in seen):
                missing = (
                    whole if inputs not in seen and weights not in seen else inputs if weights in seen else weights
                )
                raise ScheduleError(f"the schedule lacks {missing}, of the backward of micro-batch {number}: add it.")


def _needs(action: Action, stages: int) -> list[tuple[Action, ...]]:
    """Return the actions that must come earlier: one of each tuple."""
    stage, kind, number = action
    if kind == "F":
        return [(Action(stage - 1, "F", number),)] if stage > 0 else []
    if kind == "W":
        return [(Action(stage, "I", number),)]
    found: list[tuple[Action, ...]] = [(Action(stage, "F", number),)]
    if stage < stages - 1:
        found.append((Action(stage + 1, "B", number), Action(stage + 1, "I", number)))
    return found


def _check_ends(rows: Sequence[Row], stages: int) -> None:
    """Take the actions of all rows as soon as they can be taken. Raises ScheduleError on a deadlock."""
    done: set[Action] = set()
    places = [0] * len(rows)
    progress = True
    while progress:
        progress = False
        for worker, row in enumerate(rows):
            while places[worker] < len(row):
                action = row[places[worker]]
                if not all(any(one in done for one in some) for some in _needs(action, stages)):
                    break
                done.add(action)
                places[worker] += 1
                progress = True
    stuck = [worker for worker, row in enumerate(rows) if places[worker] < len(row)]
    if stuck:
        raise ScheduleError(_deadlock(rows, places, stuck, done, stages))


def _deadlock(rows: Sequence[Row], places: Sequence[int], stuck: Sequence[int], done: set[Action], stages: int) -> str:
    waits = []
    for worker in stuck:
        action = rows[worker][places[worker]]
        missing = next(some for some in _needs(action, stages) if not any(one in done for one in some))
        wanted = next((one for one in missing if any(one in row for row in rows)), missing[0])
        home = next((number for number, row in enumerate(rows) if wanted in row), None)
        where = "which no line has" if home is None else f"which comes later in line {home + 1}"
        waits.append(f"line {worker + 1} stops at {action}, which needs {wanted}, {where}")
    return (
        "the schedule would never end: "
        + "; ".join(waits)
        + ". Put each action behind what it needs: a forward behind "
        "that of the stage before, a backward behind that of the stage after."
    )

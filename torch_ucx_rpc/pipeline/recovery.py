"""When a worker is lost: another takes its place, the last checkpoint is loaded, and what came after it is done again.

With spares the driver keeps a journal of what it has told the workers since the last save, batches included. After the
load the journal is played back, so a loop that only sees ``step`` and ``optimizer.step`` sees nothing of the loss but
the time: all losses are those of an undisturbed run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torch_ucx_rpc.pipeline.build import cannot_be_rebuilt
from torch_ucx_rpc.pipeline.errors import PipelineError, StageLostError
from torch_ucx_rpc.pipeline.scaler import GradScaler
from torch_ucx_rpc.pipeline.values import map_tensors

if TYPE_CHECKING:
    from torch_ucx_rpc.pipeline.driver import DistributedPipeline

__all__ = ["Recovery", "replace"]

T = TypeVar("T")


class Recovery:
    """The spares of a pipeline, its last checkpoint, and the journal since."""

    def __init__(self, spares: Sequence[tuple[str, str]]) -> None:
        self._spares = list(spares)
        self._journal: list[tuple[Any, ...]] | None = [] if spares else None
        self._saved: str | None = None
        self._repeatable = True
        self._playing = False
        self._forgotten: list[int] = []

    # ----------------------------------------------------------------------------------------------------- the journal

    def record(self, entry: tuple[Any, ...]) -> None:
        """Keep what must be done again after a loss."""
        if self._journal is not None and not self._playing:
            self._journal.append(map_tensors(lambda one: one.detach().clone(), entry))

    def cannot_repeat(self) -> None:
        """Gradients that come by ``backward()`` are the caller's affair: the journal does not have them."""
        self._repeatable = self._playing

    def forget(self, pipe: DistributedPipeline, number: int) -> None:
        """A call's output has gone without a backward: what is kept for it may go. Called by the garbage collector."""
        self._forgotten.append(number)

    def protect(self, pipe: DistributedPipeline, entry: tuple[Any, ...] | None, run: Callable[[], T]) -> T:
        """Run, and run again after each loss that a spare makes good. ``entry`` is for the journal."""
        while True:
            try:
                while self._forgotten:
                    pipe._crew.send_later("forget", {"call": self._forgotten.pop()})
                result = run()
            except StageLostError as lost:
                if self._playing:
                    raise
                self._recover(pipe, lost)
            else:
                if entry is not None:
                    self.record(entry)
                return result

    def optimizer_step(
        self, pipe: DistributedPipeline, number: int, groups: list[dict[str, Any]], scaler: GradScaler | None
    ) -> None:
        """A step of the workers' optimizers; nobody waits for it unless a scaler has to know."""
        scale = None if scaler is None else scaler.get_scale()

        def run() -> bool:
            finite = True
            if scale is not None:
                factor = torch.tensor(1.0 / scale)
                finite = all(pipe._order("scale_gradients", {"factor": factor, "check": True}))
            if finite:
                pipe._flush()
                pipe._crew.send_later("optimizer_step", {"optimizer": number, "groups": groups})
            return finite

        finite = self.protect(pipe, ("optimizer_step", number, groups, scale), run)
        if scaler is not None:
            scaler.update(finite)

    # ---------------------------------------------------------------------------------------------------- a loss

    def _recover(self, pipe: DistributedPipeline, lost: StageLostError) -> None:
        """Put spares in the place of the lost, and bring all to where they were. Raises StageLostError if that cannot
        be."""
        if not self._spares:
            raise lost
        if self._saved is None:
            raise StageLostError(
                f"lost {', '.join(map(repr, lost.workers))}, and nothing has been saved yet for a "
                "spare to begin from: call "
                f"pipe.save(path) once before the first step",
                workers=lost.workers,
                stages=lost.stages,
            )
        self._playing = True
        # What schedulers have set since the checkpoint stays: the loop is where it was.
        groups = [optimizer.groups_by_name() for optimizer in pipe._optimizers]
        try:
            while True:
                try:
                    self._fill(pipe, lost)
                    self._restore(pipe, self._saved)
                    if not self._repeatable:
                        raise PipelineError(
                            f"{', '.join(map(repr, lost.workers))} has been replaced and "
                            f"{self._saved} loaded, but what came "
                            f"after it cannot be done again, since it went through pipe(x).backward(): go on from the "
                            f"checkpoint, or save more often"
                        ) from lost
                    self._play(pipe)
                except StageLostError as again:
                    lost = again
                else:
                    return
        finally:
            self._playing = False
            for optimizer, values in zip(pipe._optimizers, groups, strict=True):
                optimizer.load_groups(values)
            if not self._repeatable:
                self._repeatable = True
                self._journal = [("train", pipe.training)]

    def _fill(self, pipe: DistributedPipeline, lost: StageLostError) -> None:
        for worker in lost.workers:
            while True:
                if not self._spares:
                    raise lost
                try:
                    replace(pipe, worker, self._spares.pop(0))
                    break
                except PipelineError:
                    # The spare is lost as well, or cannot make the stage: the next one.
                    if not self._spares:
                        raise
                    worker = next(place.worker for place in pipe._crew.places if place.lost)

    def _play(self, pipe: DistributedPipeline) -> None:
        for name, *values in self._journal or []:
            if name == "step":
                args, kwargs, target, scale = values
                pipe._step(args, kwargs, target, None if scale is None else GradScaler(scale), None)
            elif name == "optimizer_step":
                number, groups, scale = values
                self.optimizer_step(pipe, number, groups, None if scale is None else GradScaler(scale))
            elif name == "zero_grad":
                pipe.zero_grad(*values)
            elif name == "clip_grad_norm":
                pipe.clip_grad_norm_(*values)
            elif name == "train":
                pipe.train(*values)

    # --------------------------------------------------------------------------------------------------- checkpoints

    def save(self, pipe: DistributedPipeline, path: str | os.PathLike[str], asynchronous: bool) -> Any:
        from torch_ucx_rpc import checkpoint

        try:
            return self._save(pipe, path, asynchronous)
        except checkpoint.CheckpointError:
            if not self._spares:
                raise
            # Perhaps a worker was lost meanwhile: then this puts a spare in its place.
            pipe.synchronize()
            return self._save(pipe, path, asynchronous)

    def _save(self, pipe: DistributedPipeline, path: str | os.PathLike[str], asynchronous: bool) -> Any:
        from torch_ucx_rpc import checkpoint

        pipe.synchronize()
        # The journal begins here, whether or not the files are written yet.
        journal, self._journal = self._journal, None if self._journal is None else [("train", pipe.training)]
        try:
            written = checkpoint.save(_everything(pipe), path, asynchronous=asynchronous)
        except BaseException:
            self._journal = journal
            raise
        if not asynchronous:
            self._saved = os.fspath(path)
            self._repeatable = True
            return None
        began = self._journal

        def finished(future: Any) -> None:
            if future.exception() is None:
                self._saved = os.fspath(path)
            elif journal is not None and began is not None:
                # As if it had not been tried: the former checkpoint and all since then.
                began[:0] = journal

        assert written is not None
        written.add_done_callback(finished)
        return written

    def load(self, pipe: DistributedPipeline, path: str | os.PathLike[str] | None) -> None:
        where = self._saved if path is None else os.fspath(path)
        if where is None:
            raise ValueError("nothing has been saved yet: give the folder of a checkpoint")
        self._restore(pipe, where)
        if self._journal is not None:
            self._journal = [("train", pipe.training)]
        self._saved = where
        self._repeatable = True

    def _restore(self, pipe: DistributedPipeline, path: str) -> None:
        from torch_ucx_rpc import checkpoint

        checkpoint.load(_everything(pipe, not self._playing), path)
        pipe._zero_grad = None
        pipe._order("zero_grad", {"set_to_none": True})
        pipe._order("set_values", {})


def _everything(pipe: DistributedPipeline, here: bool = True) -> dict[str, Any]:
    """What `DistributedPipeline.save` writes; model and optimizer under the names that they usually have."""
    from torch_ucx_rpc.pipeline.state import RandomState

    state: dict[str, Any] = {"model": pipe}
    for number, optimizer in enumerate(pipe._optimizers):
        state["optim" if number == 0 else f"optim{number}"] = optimizer
    state["random"] = RandomState(pipe, here)
    return state


def replace(pipe: DistributedPipeline, worker: str, by: tuple[str, str]) -> None:
    """Make the stages of ``worker`` on ``by`` and tell all the others."""
    crew = pipe._crew
    rows = [row for row, place in enumerate(crew.places) if place.worker == worker]
    if not rows:
        raise ValueError(f"no stage runs on {worker!r}; the stages run on {', '.join(map(repr, pipe.workers))}")
    for row in rows:
        for stage in crew.stages_of[row]:
            if (error := cannot_be_rebuilt(pipe._specs[stage])) is not None:
                raise error
    crew.give_up_unsettled()
    for row in rows:
        crew.close_place(crew.places[row])
        crew.places[row] = crew.place(*by)
        crew.places[row].is_new = True
    pipe._sent_rows = {(row, key) for row, key in pipe._sent_rows if row not in rows}
    try:
        pipe._create(rows)
    except BaseException:
        for row in rows:
            crew.places[row].lost = True
        raise
    if any(place.lost for place in crew.places):
        # Several have died: the last one to be replaced tells the others.
        return
    crew.reset(pipe._routes())
    new = [place.is_new for place in crew.places]
    for optimizer in pipe._optimizers:
        crew.settle(crew.send("optimizer", [optimizer.description() if one else None for one in new]))
    if pipe._requires_grad is not None:
        crew.do("requires_grad", {"requires_grad": pipe._requires_grad})
    for place in crew.places:
        place.is_new = False

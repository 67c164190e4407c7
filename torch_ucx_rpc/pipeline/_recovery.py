"""Recovery from a lost worker: the driver puts a spare in its place, loads the last checkpoint, and repeats later
orders.

With spares the driver keeps a journal of its orders since the last save, batches included. After the load the driver
repeats the journal. So a training loop of ``step`` and ``optimizer.step`` notices only a delay: it gets the same losses
as in an undisturbed run.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch_ucx_rpc.pipeline._errors import PipelineError, StageLostError
from torch_ucx_rpc.pipeline._remote import Parts, RemoteModel
from torch_ucx_rpc.pipeline._values import map_tensors

__all__ = ["Recovery"]

T = TypeVar("T")
P = ParamSpec("P")


# A line of the journal: a method of the crew that gives an order, and arguments with copies of their tensors. None
# stands for gradients of ``pipe(x).backward()``. No order follows a None, since no recovery can go further.
_Entry = tuple[Callable[..., Any], tuple[Any, ...]] | None


@dataclasses.dataclass
class _Checkpoint:
    """A checkpoint that a recovery may begin from."""

    path: str
    optimizers: int
    """Number of optimizers at the save."""
    has_gradients: bool
    """Whether it includes the gradients."""
    written: Any
    """The future of a save that is perhaps not complete yet, or None."""
    journal: list[_Entry]
    """The orders after this checkpoint, until the next one."""


class Recovery:
    """Gives orders, and repeats them once a spare has replaced a lost worker.

    It has the spares, the last checkpoint, and the journal since then.

    It belongs to the driver's thread.
    """

    def __init__(self, model: RemoteModel, spares: Sequence[tuple[str, str]]) -> None:
        self.model = model
        self._crew = model.crew
        self._spares = list(spares)
        # The last complete checkpoint, if there is any, and one that is being written. Only spares need the journals.
        self._checkpoints: list[_Checkpoint] = []
        self._playing = False

    # ------------------------------------------------------------------------------------------------------- orders

    def do(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Give an order by a method of the crew, and write it into the journal. Each time that a spare replaces a lost
        worker, give the order again."""
        result = self.ask(method, *args, **kwargs)
        self.record(method, *args, **kwargs)
        return result

    def ask(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Give an order that changes nothing, so the journal does not need it."""
        while True:
            try:
                return method(*args, **kwargs)
            except StageLostError as lost:
                if self._playing:
                    raise
                self._recover(lost)

    def gather(self, name: str, *arguments: Any) -> dict[str, Any]:
        """Return the workers' answers to an order that changes nothing, put together."""
        found: dict[str, Any] = {}
        for some in self.ask(self._crew.do, name, *arguments):
            found.update(some)
        return found

    def synchronize(self) -> None:
        """Wait until the workers have carried out all orders. Raises the first error of any of them."""
        self.ask(self._crew.do, "synchronize")

    def record(self, method: Callable[..., Any], *args: Any) -> None:
        """Write an order into the journal."""
        if not self._spares or not self._checkpoints or self._playing:
            return
        if (written := self._checkpoints[-1].written) is not None and written.done():
            self._settle_save()
            if not self._checkpoints:
                return  # the save has failed
        journal = self._checkpoints[-1].journal
        if not journal or journal[-1] is not None:
            entry = method, map_tensors(lambda one: one.detach().clone(), args)
            # This comes last: if Ctrl-C comes before, the order is undone.
            journal.append(entry)

    def record_unrepeatable(self) -> None:
        """Write down that the workers got gradients which no recovery can repeat."""
        if self._checkpoints:
            self._checkpoints[-1].journal.append(None)

    def _new_journal(self) -> list[_Entry]:
        return [
            (self._crew.do, ("train", self.model.mode)),
            (self._crew.later, ("requires_grad", self.model.requires_grad())),
        ]

    # ------------------------------------------------------------------------------------------------------- a loss

    def _recover(self, lost: StageLostError) -> None:
        """Replace lost workers by spares, and restore the state of all workers. Raises StageLostError if that is
        impossible."""
        if not self._spares:
            raise lost
        self._settle_save()
        if not self._checkpoints:
            raise StageLostError(
                f"lost {', '.join(map(repr, lost.workers))}, and nothing has been saved yet for a spare to begin from: "
                f"call pipe.save(path) once before the first step",
                workers=lost.workers,
                stages=lost.stages,
            )
        [checkpoint] = self._checkpoints
        self._playing = True
        # Values that schedulers have set since the checkpoint stay: the loop has not gone back.
        groups = [optimizer.groups_by_name() for optimizer in self.model.optimizers]
        try:
            while True:
                try:
                    self._fill(lost)
                    self._begin_from(checkpoint)
                    entries = [entry for entry in checkpoint.journal if entry is not None]
                    if len(entries) < len(checkpoint.journal):
                        checkpoint.journal = self._new_journal()
                        raise PipelineError(
                            f"{', '.join(map(repr, lost.workers))} has been replaced and {checkpoint.path} loaded, but "
                            f"the steps after it cannot be repeated, since they went through pipe(x).backward(): go "
                            f"on from the checkpoint, or save more often"
                        ) from lost
                    for method, args in entries:
                        method(*args)
                except StageLostError as again:
                    if not self._spares:
                        raise
                    lost = again
                else:
                    return
        finally:
            self._playing = False
            for optimizer, values in zip(self.model.optimizers, groups, strict=True):
                optimizer.load_groups(values)

    def _fill(self, lost: StageLostError) -> None:
        """Replace each lost worker by a spare, or by the next one if the spare is lost too or cannot make the stage."""
        while workers := [place.worker for place in self._crew.places if place.lost]:
            if not self._spares:
                raise lost
            try:
                self.model.replace(workers[0], self._spares.pop(0))
            except PipelineError:
                if not self._spares:
                    raise

    # --------------------------------------------------------------------------------------------------- checkpoints

    def save(self, path: str | os.PathLike[str], asynchronous: bool) -> Any:
        """Write a checkpoint, from which the journal begins. Returns None, or a future if asynchronous."""
        from torch_ucx_rpc import checkpoint

        try:
            return self._save(path, asynchronous)
        except (StageLostError, checkpoint.CheckpointError):
            if not self._spares:
                raise
            # If a worker was lost during the save, the next order replaces it by a spare.
            return self._save(path, asynchronous)

    def _save(self, path: str | os.PathLike[str], asynchronous: bool) -> Any:
        from torch_ucx_rpc import checkpoint

        self._settle_save()
        self.synchronize()
        everything = self._everything()
        if self._spares:
            # A repetition may begin with a step of an optimizer.
            everything["gradients"] = self._gradients()
        # Do not recover during a save: it would save the values that recovery has loaded.
        playing, self._playing = self._playing, True
        try:
            written = checkpoint.save(everything, path, asynchronous=asynchronous)
        finally:
            self._playing = playing
        where = str(Path(path).absolute())
        count, has_gradients = len(self.model.optimizers), bool(self._spares)
        self._checkpoints.append(_Checkpoint(where, count, has_gradients, written, self._new_journal()))
        if not asynchronous:
            self._settle_save()
        return written

    def _settle_save(self) -> None:
        """Wait for the last asynchronous save. The journal then begins from that save, or from the save before if it
        failed."""
        kept: list[_Checkpoint] = []
        for one in self._checkpoints:
            if one.written is None or one.written.exception() is None:
                one.written = None
                kept = [one]
            elif kept:
                # The journal goes on as if this save had not been tried.
                kept[0].journal += one.journal
        self._checkpoints = kept

    def load(self, path: str | os.PathLike[str] | None) -> None:
        """Load a checkpoint, by default the last one saved."""
        self._settle_save()
        if path is None:
            if not self._checkpoints:
                raise ValueError("nothing has been saved yet: give the folder of a checkpoint")
            path = self._checkpoints[0].path
        self.synchronize()
        where = str(Path(path).absolute())
        self._restore(where, self._everything())
        self._checkpoints = [_Checkpoint(where, len(self.model.optimizers), False, None, self._new_journal())]

    def _begin_from(self, saved: _Checkpoint) -> None:
        """Restore the state that all workers had at a save. Raises StageLostError if another worker is lost during
        it."""
        from torch_ucx_rpc import checkpoint

        try:
            # The driver's own random numbers go on, since its loop has not gone back.
            self._restore(saved.path, self._everything(saved.optimizers, here=False))
            if saved.has_gradients:
                checkpoint.load({"gradients": self._gradients()}, saved.path)
        except checkpoint.CheckpointError:
            # If the load failed because another worker was lost, this raises StageLostError.
            self.synchronize()
            raise

    def _restore(self, path: str, everything: dict[str, Any]) -> None:
        from torch_ucx_rpc import checkpoint

        checkpoint.load(everything, path)
        self.model.on_loaded()

    def _gradients(self) -> Parts:
        return Parts(self.model.parts("gradients", optional=True))

    def _everything(self, optimizers: int | None = None, here: bool = True) -> dict[str, Any]:
        """Return the parts of a checkpoint, under their usual names: model, random numbers, and all optimizers or the
        first ``optimizers``."""
        everything: dict[str, Any] = {"model": self.model}
        for number, optimizer in enumerate(self.model.optimizers[:optimizers]):
            everything["optim" if number == 0 else f"optim{number}"] = optimizer
        everything["random"] = Parts(self.model.parts("random", optional=True, here=here))
        return everything

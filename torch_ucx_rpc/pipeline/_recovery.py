"""Recovery from a lost worker: a spare takes its place, the last checkpoint is loaded, and later work is repeated.

With spares the driver keeps a journal of its orders since the last save, batches included. After the load the journal
is played back, so a loop that only sees ``step`` and ``optimizer.step`` notices only the time: all losses are those of
an undisturbed run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from torch_ucx_rpc.pipeline._calls import Circumstances
from torch_ucx_rpc.pipeline._engine import Engine
from torch_ucx_rpc.pipeline._errors import PipelineError, StageLostError
from torch_ucx_rpc.pipeline._values import Packet, map_tensors

__all__ = ["Recovery"]

T = TypeVar("T")
P = ParamSpec("P")


class _Entry(NamedTuple):
    """A line of the journal: a method of the engine, and arguments with copies of their tensors."""

    method: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Saved(NamedTuple):
    """A checkpoint that a recovery begins from."""

    path: str
    optimizers: int
    """Number of optimizers at the save."""
    has_gradients: bool
    """Whether its gradients existed where the journal begins."""


class _Pending(NamedTuple):
    """A checkpoint that is still being written. Recoveries begin from it afterwards."""

    saved: _Saved
    written: Any
    """The future of the save."""
    journal: list[_Entry] | None
    """The journal since the checkpoint before."""
    repeatable: bool
    """Whether that journal can be repeated."""


class Recovery:
    """An engine that survives losses: its spares, its last checkpoint, and the journal since.

    It belongs to the driver's thread, except `forget`.
    """

    def __init__(self, engine: Engine, spares: Sequence[tuple[str, str]]) -> None:
        self._engine = engine
        self._spares = list(spares)
        # None without spares, which alone could play it back.
        self._journal: list[_Entry] | None = [] if spares else None
        self._saved: _Saved | None = None
        # A save whose files are still being written.
        self._pending: _Pending | None = None
        self._repeatable = True
        self._playing = False
        self._forgotten: list[int] = []

    # ------------------------------------------------------------------------------------------- what the driver does

    def do(self, method: Callable[Concatenate[Engine, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the engine, again after each loss that a spare makes good, and write it into the journal."""
        result = self.ask(method, *args, **kwargs)
        self._record(method, *args, **kwargs)
        return result

    def ask(self, method: Callable[Concatenate[Engine, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the same with a method that changes nothing, so the journal does not need it."""
        while True:
            try:
                if self._forgotten:
                    forgotten, self._forgotten = self._forgotten, []
                    self._engine.forget(forgotten)
                return method(self._engine, *args, **kwargs)
            except StageLostError as lost:
                if self._playing:
                    raise
                self._recover(lost)

    def zero_grad(self, set_to_none: bool) -> None:
        """It travels with the next call, so no worker can be lost now."""
        self._engine.zero_grad(set_to_none)
        self._record(Engine.zero_grad, set_to_none)

    def forward(self, around: Circumstances, args: Any, kwargs: Any) -> tuple[int, int, list[Any], list[Packet]]:
        """Do `Engine.forward` for a call that can have a backward. The result begins with the crew that ran it."""
        number, inputs, outputs = self.ask(Engine.forward, around, args, kwargs, grad=True)
        if self._engine.training:
            # A repetition repeats random numbers and statistics, and has no backward.
            self._record(Engine.infer, around, args, kwargs)
        return self._engine.crews, number, inputs, outputs

    def backward(self, crew: int, number: int, gradients: list[Any], input_gradients: bool) -> dict[int, Any]:
        """Run the backward of a call. No spare can make up for a loss in it: the lost worker had a part of the
        graph."""
        if crew != self._engine.crews:
            raise PipelineError(
                "a worker was lost, or replaced, since this output was computed, and what it kept for the way back is "
                "gone: call the pipeline again"
            )
        found = self._engine.backward(number, gradients, input_gradients)
        # The journal does not have these gradients; the caller is responsible for them.
        self._repeatable = False
        return found

    def forget(self, number: int) -> None:
        """Free what the workers keep for a call whose output has gone without a backward. The garbage collector calls
        this."""
        self._forgotten.append(number)

    def _record(self, method: Callable[Concatenate[Engine, P], Any], *args: P.args, **kwargs: P.kwargs) -> None:
        if self._journal is not None and not self._playing:
            if self._repeatable:
                copies = map_tensors(lambda one: one.detach().clone(), (args, kwargs))
                self._journal.append(_Entry(method, *copies))
            if self._pending is not None and self._pending.written.done():
                self._settle_save()

    def _begin_journal(self) -> None:
        if self._journal is not None:
            self._journal = [_Entry(Engine.train, (self._engine.mode,), {})]

    # ---------------------------------------------------------------------------------------------------- a loss

    def _recover(self, lost: StageLostError) -> None:
        """Replace lost workers by spares, and restore the state of all. Raises StageLostError if that is impossible."""
        if not self._spares:
            raise lost
        self._settle_save()
        if self._saved is None:
            raise StageLostError(
                f"lost {', '.join(map(repr, lost.workers))}, and nothing has been saved yet for a spare to begin from: "
                f"call pipe.save(path) once before the first step",
                workers=lost.workers,
                stages=lost.stages,
            )
        self._playing = True
        # Values that schedulers have set since the checkpoint stay: the loop has not gone back.
        groups = [optimizer.groups_by_name() for optimizer in self._engine.optimizers]
        try:
            while True:
                try:
                    self._fill(lost)
                    self._begin_from(self._saved)
                    if not self._repeatable:
                        raise PipelineError(
                            f"{', '.join(map(repr, lost.workers))} has been replaced and {self._saved.path} loaded, "
                            f"but what came after it cannot be done again, since it went through pipe(x).backward(): "
                            f"go on from the checkpoint, or save more often"
                        ) from lost
                    for method, args, kwargs in self._journal or ():
                        method(self._engine, *args, **kwargs)
                except StageLostError as again:
                    if not self._spares:
                        raise
                    lost = again
                else:
                    return
        finally:
            self._playing = False
            for optimizer, values in zip(self._engine.optimizers, groups, strict=True):
                optimizer.load_groups(values)
            if not self._repeatable:
                self._repeatable = True
                self._begin_journal()

    def _fill(self, lost: StageLostError) -> None:
        """Replace each lost worker by a spare."""
        for worker in lost.workers:
            while True:
                if not self._spares:
                    raise lost
                try:
                    self._engine.replace(worker, self._spares.pop(0))
                    break
                except PipelineError:
                    # The spare is lost too, or cannot make the stage: try the next one.
                    if not self._spares:
                        raise
                    worker = next(place.worker for place in self._engine.crew.places if place.lost)

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
        self.ask(Engine.synchronize)
        everything = self._everything()
        if self._journal is not None:
            # A repetition may begin with a step of an optimizer.
            everything["gradients"] = self._gradients()
        # The journal begins here, whether or not the files are written yet.
        journal = self._journal
        self._begin_journal()
        # Do not recover during a save: it would save the values that recovery has loaded.
        playing, self._playing = self._playing, True
        try:
            written = checkpoint.save(everything, path, asynchronous=asynchronous)
        except BaseException:
            self._journal = journal
            raise
        finally:
            self._playing = playing
        saved = _Saved(
            str(Path(path).absolute()), len(self._engine.optimizers), has_gradients="gradients" in everything
        )
        if asynchronous:
            self._pending = _Pending(saved, written, journal, self._repeatable)
        else:
            self._saved = saved
        self._repeatable = True
        return written

    def _settle_save(self) -> None:
        """Wait for the last asynchronous save. The journal then begins from it, or from the one before if it failed."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        if pending.written.exception() is None:
            self._saved = pending.saved
        elif pending.journal is not None and self._journal is not None:
            # The save counts as not tried: the earlier checkpoint and the whole journal since then remain.
            self._journal[:0] = pending.journal
            self._repeatable = self._repeatable and pending.repeatable

    def load(self, path: str | os.PathLike[str] | None) -> None:
        """Load a checkpoint, by default the last one saved."""
        self._settle_save()
        where = self._saved.path if path is None and self._saved is not None else path
        if where is None:
            raise ValueError("nothing has been saved yet: give the folder of a checkpoint")
        self.ask(Engine.synchronize)
        self._restore(str(Path(where).absolute()), self._everything())
        self._begin_journal()
        self._saved = _Saved(str(Path(where).absolute()), len(self._engine.optimizers), has_gradients=False)
        self._repeatable = True

    def _begin_from(self, saved: _Saved) -> None:
        """Restore the state of all at a save. Raises StageLostError if another worker is lost during it."""
        from torch_ucx_rpc import checkpoint

        try:
            # The driver's own random numbers go on, since its loop has not gone back.
            self._restore(saved.path, self._everything(saved.optimizers, here=False))
            if saved.has_gradients:
                checkpoint.load({"gradients": self._gradients()}, saved.path)
        except checkpoint.CheckpointError:
            # If the load failed because another worker was lost, this raises StageLostError.
            self._engine.synchronize()
            raise
        self._engine.make_optimizers(saved.optimizers)

    def _restore(self, path: str, everything: dict[str, Any]) -> None:
        from torch_ucx_rpc import checkpoint

        checkpoint.load(everything, path)
        self._engine.on_loaded()

    def _gradients(self) -> Any:
        from torch_ucx_rpc.pipeline._state import Gradients

        return Gradients(self._engine.crew.places)

    def _everything(self, optimizers: int | None = None, here: bool = True) -> dict[str, Any]:
        """Return the parts of a checkpoint; model and optimizers, or only the first, under their usual names."""
        from torch_ucx_rpc.pipeline._state import RandomState

        everything: dict[str, Any] = {"model": self._engine}
        for number, optimizer in enumerate(self._engine.optimizers[:optimizers]):
            everything["optim" if number == 0 else f"optim{number}"] = optimizer
        everything["random"] = RandomState(self._engine.crew.places, here)
        return everything

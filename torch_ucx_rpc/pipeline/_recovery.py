"""When a worker is lost: another takes its place, the last checkpoint is loaded, and what came after it is done again.

With spares the driver keeps a journal of what it has told the workers since the last save, batches included. After the
load the journal is played back, so a loop that only sees ``step`` and ``optimizer.step`` sees nothing of the loss but
the time: all losses are those of an undisturbed run.
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
    """A line of the journal: a method of the engine, with arguments of which the tensors are copies."""

    method: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Saved(NamedTuple):
    """A checkpoint to begin from."""

    path: str
    optimizers: int
    """How many there were."""
    has_gradients: bool
    """Whether the gradients that it has were there where the journal begins."""


class _Pending(NamedTuple):
    """A checkpoint that will be the one to begin from, once it is written."""

    saved: _Saved
    written: Any
    """Its future."""
    journal: list[_Entry] | None
    """What had been done since the checkpoint before."""
    repeatable: bool
    """Whether that could be done again."""


class Recovery:
    """An engine that survives losses: its spares, its last checkpoint, and the journal since.

    It belongs to the driver's thread, but for `forget`.
    """

    def __init__(self, engine: Engine, spares: Sequence[tuple[str, str]]) -> None:
        self._engine = engine
        self._spares = list(spares)
        # None: there is nobody to play it back to.
        self._journal: list[_Entry] | None = [] if spares else None
        self._saved: _Saved | None = None
        # A save whose files are still being written.
        self._pending: _Pending | None = None
        self._repeatable = True
        self._playing = False
        self._forgotten: list[int] = []

    # ------------------------------------------------------------------------------------------- what the driver does

    def do(self, method: Callable[Concatenate[Engine, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the engine, and again after each loss that a spare makes good; the journal has it then."""
        result = self.ask(method, *args, **kwargs)
        self._record(method, *args, **kwargs)
        return result

    def ask(self, method: Callable[Concatenate[Engine, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same for what changes nothing, and need not be done again later."""
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
        """It travels with the next call: nothing can be lost now."""
        self._engine.zero_grad(set_to_none)
        self._record(Engine.zero_grad, set_to_none)

    def forward(self, around: Circumstances, args: Any, kwargs: Any) -> tuple[int, int, list[Any], list[Packet]]:
        """A call that can have a way back: `Engine.forward`, and before it the crew that this was on."""
        number, inputs, outputs = self.ask(Engine.forward, around, args, kwargs, grad=True)
        if self._engine.training:
            # For the random numbers and the statistics; a repetition has no way back.
            self._record(Engine.infer, around, args, kwargs)
        return self._engine.crews, number, inputs, outputs

    def backward(self, crew: int, number: int, gradients: list[Any], input_gradients: bool) -> dict[int, Any]:
        """The way back of a call. No spare makes a loss in it good: the lost worker had a part of the graph."""
        if crew != self._engine.crews:
            raise PipelineError(
                "a worker was lost, or replaced, since this output was computed, and what it kept for the way back is "
                "gone: call the pipeline again"
            )
        found = self._engine.backward(number, gradients, input_gradients)
        # These gradients are the caller's affair: the journal does not have them.
        self._repeatable = False
        return found

    def forget(self, number: int) -> None:
        """A call's output has gone without a backward: what is kept for it may go. Called by the garbage collector."""
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
        """Put spares in the place of the lost, and bring all to where they were. Raises StageLostError if that cannot
        be."""
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
        # What schedulers have set since the checkpoint stays: the loop is where it was.
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
        """Put a spare in the place of each lost worker."""
        for worker in lost.workers:
            while True:
                if not self._spares:
                    raise lost
                try:
                    self._engine.replace(worker, self._spares.pop(0))
                    break
                except PipelineError:
                    # The spare is lost as well, or cannot make the stage: the next one.
                    if not self._spares:
                        raise
                    worker = next(place.worker for place in self._engine.crew.places if place.lost)

    # --------------------------------------------------------------------------------------------------- checkpoints

    def save(self, path: str | os.PathLike[str], asynchronous: bool) -> Any:
        """Write a checkpoint, from which the journal begins. Returns None, or if asynchronous a future."""
        from torch_ucx_rpc import checkpoint

        try:
            return self._save(path, asynchronous)
        except (StageLostError, checkpoint.CheckpointError):
            if not self._spares:
                raise
            # Perhaps a worker was lost meanwhile: the next order puts a spare in its place.
            return self._save(path, asynchronous)

    def _save(self, path: str | os.PathLike[str], asynchronous: bool) -> Any:
        from torch_ucx_rpc import checkpoint

        self._settle_save()
        self.ask(Engine.synchronize)
        everything = self._everything()
        if self._journal is not None:
            # The first thing that is done again may be a step of an optimizer.
            everything["gradients"] = self._gradients()
        # The journal begins here, whether or not the files are written yet.
        journal = self._journal
        self._begin_journal()
        # No recovery while it is being saved: what is loaded then would be taken for what was to be saved.
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
        """See the last asynchronous save to its end: what is done since then counts from it, or from the one before."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        if pending.written.exception() is None:
            self._saved = pending.saved
        elif pending.journal is not None and self._journal is not None:
            # As if it had not been tried: the former checkpoint and all since then.
            self._journal[:0] = pending.journal
            self._repeatable = self._repeatable and pending.repeatable

    def load(self, path: str | os.PathLike[str] | None) -> None:
        """Read a checkpoint, by default the last one saved."""
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
        """Bring all to where they were at a save. Raises StageLostError if another worker is lost meanwhile."""
        from torch_ucx_rpc import checkpoint

        try:
            # The driver's own random numbers go on: its loop is where it was.
            self._restore(saved.path, self._everything(saved.optimizers, here=False))
            if saved.has_gradients:
                checkpoint.load({"gradients": self._gradients()}, saved.path)
        except checkpoint.CheckpointError:
            # If it failed because another worker was lost, this says so.
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
        """What a checkpoint has; model and optimizers, or the first of them, under the names that they usually have."""
        from torch_ucx_rpc.pipeline._state import RandomState

        everything: dict[str, Any] = {"model": self._engine}
        for number, optimizer in enumerate(self._engine.optimizers[:optimizers]):
            everything["optim" if number == 0 else f"optim{number}"] = optimizer
        everything["random"] = RandomState(self._engine.crew.places, here)
        return everything

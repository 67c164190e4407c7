"""A model whose stages live on a crew (`RemoteModel`): it makes them, and makes them again on other workers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch._C._distributed_rpc import PyRRef

from torch_ucx_rpc._workers.life import life
from torch_ucx_rpc._workers.lost import was_lost
from torch_ucx_rpc.pipeline import _build, _host
from torch_ucx_rpc.pipeline._crew import Crew, tell
from torch_ucx_rpc.pipeline._errors import PipelineError
from torch_ucx_rpc.pipeline._partition import Partition, lent_names
from torch_ucx_rpc.pipeline._schedule import Schedules
from torch_ucx_rpc.pipeline._stages import HostConfig

__all__ = ["Parts", "RemoteModel"]


class Parts(NamedTuple):
    """An object that `torch_ucx_rpc.checkpoint` saves and loads by its parts."""

    parts: list[Any]

    def checkpoint_parts(self) -> list[Any]:
        return self.parts


class RemoteParameter(nn.Parameter):
    """A parameter as the driver knows it: shape, type and ``requires_grad``, but neither values nor a gradient.

    Without an error, functions that look for gradients, such as ``torch.nn.utils.clip_grad_norm_``, would do nothing.
    """

    @property
    def grad(self) -> Any:
        raise PipelineError(_WHERE_GRADIENTS_ARE)

    @grad.setter
    def grad(self, value: Any) -> None:
        raise PipelineError(_WHERE_GRADIENTS_ARE)


_WHERE_GRADIENTS_ARE = (
    "the gradient of a pipeline's parameter is on its worker: call pipe.clip_grad_norm_(), pipe.zero_grad() or "
    "pipe.gradients(), which returns copies"
)


class RemoteModel:
    """The stages of a pipeline. It belongs to the driver's thread.

    After StageLostError it is unusable until `replace` and the load of a checkpoint.
    """

    def __init__(
        self,
        crew: Crew,
        partition: Partition,
        schedules: Schedules,
        *,
        loss: Callable[..., Any] | None,
        rematerialize: bool,
        training: bool,
    ) -> None:
        self.crew = crew
        self.partition = partition
        self.specs = partition.specs
        self.schedules = schedules
        self.loss = loss
        self.rematerialize = rematerialize
        # The mode in which the model was given, and the mode set for all modules since then.
        self._given_training = training
        self.mode: bool | None = None
        # Each is a `PipelineOptimizer` of this model.
        self.optimizers: list[Any] = []
        # How often workers have been replaced: a call's backward needs the crew of its forward.
        self.crews = 0
        try:
            # Parameters by the names of the undivided model and in its order, with shapes and without values.
            self.parameters = self._proxies(self._create(range(len(crew.places))))
        except BaseException:
            crew.close()
            raise
        # Which parameters want a gradient, as the workers know it.
        self._trained = self._trained_now()
        # A spare gets the structure of a lost worker's stages from here, and the values from a checkpoint.
        for spec in self.specs:
            if isinstance(spec.module, nn.Module):
                spec.module = _build.Skeleton(spec.module)
        self._finalizer = weakref.finalize(self, Crew.close, crew)
        self._finalizer.atexit = False

    def close(self) -> None:
        """Free the stages on the workers. Without this call, the end of this object frees them."""
        self._finalizer()

    # --------------------------------------------------------------------------------------------------- making it

    def _create(self, rows: Sequence[int]) -> dict[int, Any]:
        """Make the stages of these rows on their workers. Returns descriptions of their parameters, by stage."""
        crew, calls = self.crew, []
        # The first call imports this package. Two calls at once would do so in two threads, and one of them would find
        # an incomplete module.
        workers = {crew.places[row].worker for row in rows}
        try:
            for call in [rpc.rpc_async(worker, _host.progress, ("", None), timeout=0) for worker in workers]:
                call.wait()
        except RuntimeError as error:
            raise PipelineError(f"one of {', '.join(sorted(workers))} cannot be reached: {error}") from error
        for row in rows:
            place = crew.places[row]
            config = HostConfig(
                host=place.host,
                row=row,
                schedules=self.schedules,
                specs=[self.specs[stage] for stage in crew.stages_of[row]],
                device=place.device,
                routes=crew.routes(),
                loss=self.loss,
                rematerialize=self.rematerialize,
                driver=rpc.get_worker_info().name,
                driver_session=life().number,
                driver_box=crew.name,
                tell=tell,
                epoch=crew.present.number,
                mode=self.mode,
                optimizers=[optimizer.description() for optimizer in self.optimizers],
            )
            try:
                calls.append((place, rpc.rpc_async(place.info, _host.create, (config,), timeout=0)))
            except Exception as error:
                if was_lost(error):
                    raise PipelineError(f"worker {place.worker!r} cannot be reached: {error}") from error
                raise PipelineError(
                    f"stages {crew.stages_of[row]} cannot be sent to worker {place.worker!r}: {error}. Modules and the "
                    f"loss are pickled: define them at the top of a module rather than in a function or as a lambda, "
                    f"or let the worker make the stage: pipeline.Built('package.module:name')."
                ) from error
        found: dict[int, Any] = {}
        for place, call in calls:
            try:
                described, failure, traceback = call.wait()
            except RuntimeError as error:
                raise PipelineError(f"worker {place.worker!r} cannot be reached: {error}") from error
            if described is None:
                raise PipelineError(f"worker {place.worker!r} cannot make its stages: {failure}\n\n{traceback}")
            found.update(described)
        return found

    def _proxies(self, found: dict[int, Any]) -> dict[str, nn.Parameter]:
        made: dict[str, nn.Parameter] = {}
        lent = lent_names(self.specs)
        for stage in sorted(found):
            for name, shape, dtype, requires_grad in found[stage]:
                if name not in lent:
                    made[name] = RemoteParameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad)
            info = self.partition.infos[stage]
            if info.parameters is None:
                info.parameters = sum(torch.Size(shape).numel() for _, shape, _, _ in found[stage])
        order = [name for name in self.partition.names or made if name in made]
        return {name: made[name] for name in [*order, *(name for name in made if name not in order)]}

    def replace(self, worker: str, by: tuple[str, str]) -> None:
        """Make the stages of a lost worker on another one, given by name and device, and let all others know."""
        crew = self.crew
        rows = [row for row, place in enumerate(crew.places) if place.worker == worker]
        if not rows:
            names = ", ".join(repr(place.worker) for place in crew.places)
            raise ValueError(f"no stage runs on {worker!r}; the stages run on {names}")
        if not all(crew.places[row].lost for row in rows):
            with contextlib.suppress(PipelineError):
                crew.do("synchronize")  # This order finds a lost worker.
        if not all(crew.places[row].lost for row in rows):
            raise PipelineError(
                f"worker {worker!r} is alive, and only a lost worker can be replaced. To move its stages, save, make "
                f"another pipeline, and load."
            )
        for row in rows:
            for stage in crew.stages_of[row]:
                if isinstance(self.specs[stage].module, PyRRef):
                    raise PipelineError(
                        f"stage {stage} was given as an RRef, which died with its owner: give it as Built(...), or as "
                        f"a module, so that another worker can build it"
                    )
        self.crews += 1
        for row in rows:
            crew.close_place(crew.places[row])
            crew.places[row] = crew.place(*by)
        try:
            self._create(rows)
        except BaseException:
            for row in rows:
                crew.places[row].lost = True
            raise
        crew.later("routes", crew.routes())
        self._trained = ()

    # ---------------------------------------------------------------------------------------- what the workers know

    def requires_grad(self) -> dict[str, bool]:
        """Tell which parameters want a gradient now, by all names that stages have for them."""
        wanted = {name: one.requires_grad for name, one in self.parameters.items()}
        wanted.update({lent: wanted[owned] for lent, owned in lent_names(self.specs).items()})
        return wanted

    def changed_requires_grad(self) -> dict[str, bool] | None:
        """Return `requires_grad` if it has changed since the workers learned it. The caller must then send the result
        to the workers."""
        trained = self._trained_now()
        if trained == self._trained:
            return None
        self._trained = trained
        return self.requires_grad()

    def _trained_now(self) -> tuple[bool, ...]:
        return tuple(one.requires_grad for one in self.parameters.values())

    @property
    def training(self) -> bool:
        """Tell whether the model as a whole is in training mode."""
        return self._given_training if self.mode is None else self.mode

    def parts(self, *what: Any, optional: bool = False, here: bool = True) -> list[Any]:
        """Return the parts of `_state` that the workers write, for `torch_ucx_rpc.checkpoint`; without ``here``, leave
        out those in the driver's process."""
        # This import is here because it also imports torch.distributed.checkpoint, which takes long.
        from torch_ucx_rpc.checkpoint import Part

        return [
            Part(place.worker, _host.collect, _host.room, _host.apply, (place.host, what), optional)
            for place in self.crew.places
            if here or not place.is_here
        ]

    def checkpoint_parts(self) -> list[Any]:
        """Return the parts of the model, for `torch_ucx_rpc.checkpoint`."""
        return self.parts("model")

    def on_loaded(self) -> None:
        """After a checkpoint has filled the stages: drop the gradients, and copy tied values to all their users."""
        self.crew.later("zero_grad", True)
        self.crew.do("share_tied_values")

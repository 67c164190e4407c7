"""A model whose stages live on a crew (`RemoteModel`): it makes them, and makes them again on other workers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch._C._distributed_rpc import PyRRef

from torch_ucx_rpc.pipeline import _build, _host
from torch_ucx_rpc.pipeline._crew import Crew, tell
from torch_ucx_rpc.pipeline._errors import PipelineError
from torch_ucx_rpc.pipeline._messages import HostConfig
from torch_ucx_rpc.pipeline._partition import Partition, lent_names
from torch_ucx_rpc.pipeline._schedule import Row

__all__ = ["RemoteModel"]


class RemoteModel:
    """The stages of a pipeline. It belongs to the driver's thread.

    After StageLostError it is unusable until `replace` and the load of a checkpoint.
    """

    def __init__(
        self,
        crew: Crew,
        partition: Partition,
        *,
        loss: Callable[..., Any] | None,
        rematerialize: bool,
        training: bool,
    ) -> None:
        self.crew = crew
        self.partition = partition
        self.specs = partition.specs
        self.loss = loss
        self.rematerialize = rematerialize
        # The mode in which the model was given, and the mode set for all modules since then.
        self._given_training = training
        self.mode: bool | None = None
        # Each is a `PipelineOptimizer`, which is made of this model.
        self.optimizers: list[Any] = []
        # Parameters by the names of the undivided model and in its order, with shapes and without values.
        self.parameters: dict[str, nn.Parameter] = {}
        # How often workers have been replaced: a call's backward needs the crew of its forward.
        self.crews = 0
        # Rows of the schedules that the workers know, by key of the call.
        self._rows: dict[Any, Sequence[Row]] = {}
        try:
            self.parameters = self._proxies(self._create(range(len(crew.places))))
        except BaseException:
            crew.close()
            raise
        # Which parameters want a gradient, as the workers know it.
        self._trained = self._trained_at_first = self._trained_now()
        # A spare gets the structure of a lost worker's stages from here, and the values from a checkpoint.
        for spec in self.specs:
            spec.module = _build.skeleton(spec.module)
        self._finalizer = weakref.finalize(self, Crew.close, crew)
        self._finalizer.atexit = False

    def close(self) -> None:
        """Free the stages on the workers. Without this call they are freed with this object."""
        self._finalizer()

    # --------------------------------------------------------------------------------------------------- making it

    def _create(self, rows: Sequence[int]) -> dict[int, Any]:
        """Make the stages of these rows on their workers. Returns descriptions of their parameters, by stage."""
        calls = []
        for row in rows:
            place = self.crew.places[row]
            config = HostConfig(
                host=place.host,
                row=row,
                specs=[self.specs[stage] for stage in self.crew.stages_of[row]],
                device=place.device,
                routes=self.crew.routes(),
                loss=self.loss,
                rematerialize=self.rematerialize,
                driver=rpc.get_worker_info().name,
                driver_session=self.crew.session,
                driver_box=self.crew.name,
                tell=tell,
                epoch=self.crew.epoch,
                mode=self.mode,
            )
            try:
                calls.append((place, rpc.rpc_async(place.info, _host.create, (config,), timeout=0)))
            except Exception as error:
                if _build.travels(config):
                    raise PipelineError(f"worker {place.worker!r} cannot be reached: {error}") from error
                raise PipelineError(
                    f"stages {self.crew.stages_of[row]} cannot be sent to worker {place.worker!r}: {error}. Modules "
                    f"and the loss are pickled: define them at the top of a module rather than in a function or as a "
                    f"lambda, or let the worker make the stage: pipeline.Built('package.module:name')."
                ) from error
        found: dict[int, Any] = {}
        for place, call in calls:
            try:
                outcome = call.wait()
            except RuntimeError as error:
                raise PipelineError(f"worker {place.worker!r} cannot be reached: {error}") from error
            if outcome[0] != "ok":
                raise PipelineError(f"worker {place.worker!r} cannot make its stages: {outcome[1]}\n\n{outcome[2]}")
            found.update(outcome[1])
        return found

    def _proxies(self, found: dict[int, Any]) -> dict[str, nn.Parameter]:
        made: dict[str, nn.Parameter] = {}
        lent = lent_names(self.specs)
        for stage in sorted(found):
            for name, shape, dtype, requires_grad in found[stage]:
                if name not in lent:
                    made[name] = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad)
            info = self.partition.infos[stage]
            if info.parameters is None:
                info.parameters = sum(torch.Size(shape).numel() for _, shape, _, _ in found[stage])
        order = [name for name in self.partition.names or made if name in made]
        return {name: made[name] for name in [*order, *(name for name in made if name not in order)]}

    def replace(self, worker: str, by: tuple[str, str]) -> None:
        """Make the stages of ``worker`` on another one, given by name and device, and tell all the others."""
        crew = self.crew
        rows = [row for row, place in enumerate(crew.places) if place.worker == worker]
        if not rows:
            names = ", ".join(repr(place.worker) for place in crew.places)
            raise ValueError(f"no stage runs on {worker!r}; the stages run on {names}")
        for row in rows:
            for stage in crew.stages_of[row]:
                if isinstance(self.specs[stage].module, PyRRef):
                    raise PipelineError(
                        f"stage {stage} was given as an RRef, which died with its owner: give it as Built(...), or as "
                        f"a module, so that another worker can build it"
                    )
        crew.renew()
        self.crews += 1
        for row in rows:
            crew.close_place(crew.places[row])
            crew.places[row] = crew.place(*by)
            crew.places[row].is_new = True
        try:
            self._create(rows)
        except BaseException:
            for row in rows:
                crew.places[row].lost = True
            raise
        if any(place.lost for place in crew.places):
            # Several workers have died: the replacement of the last one tells the others.
            return
        crew.do("crew", {"routes": crew.routes(), "rows": list(self._rows.items())})
        new = [place.is_new for place in crew.places]
        for optimizer in self.optimizers:
            crew.settle(crew.send("optimizer", [optimizer.description() if one else None for one in new]))
        if self._trained != self._trained_at_first:
            self._trained = ()
        for place in crew.places:
            place.is_new = False

    # ---------------------------------------------------------------------------------------- what the workers know

    def announce(self, key: Any, rows: Sequence[Row]) -> None:
        """Let the workers know the rows for calls with this key."""
        if key not in self._rows:
            self._rows[key] = rows
            self.crew.later("rows", [(key, rows)])

    def requires_grad(self) -> dict[str, bool]:
        """Tell which parameters want a gradient now, by all names that stages have for them."""
        wanted = {name: one.requires_grad for name, one in self.parameters.items()}
        wanted.update({lent: wanted[owned] for lent, owned in lent_names(self.specs).items()})
        return wanted

    def changed_requires_grad(self) -> dict[str, bool] | None:
        """Return `requires_grad` if the workers do not know it. They must then be told."""
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

    def checkpoint_parts(self) -> list[Any]:
        """Return the parts of the model that each worker writes, for `torch_ucx_rpc.checkpoint`."""
        # This imports torch.distributed.checkpoint, which takes longer than all the rest.
        from torch_ucx_rpc.pipeline import _state

        return _state.model_parts(self.crew.places)

    def on_loaded(self) -> None:
        """After a checkpoint has filled the stages: drop the gradients, and copy tied values to all their users."""
        self.crew.later("zero_grad", True)
        self.crew.do("set_values", {})

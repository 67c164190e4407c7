"""A model's stages on a crew, and batches through them (`Engine`): the driver's side, as long as no worker is lost.

One step: the batch is divided, each worker gets its row of the schedule and its part of the batch by one order, the
workers send each other what the stages make of it, and the last one answers with the loss.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed.rpc as rpc
from torch import nn

from torch_ucx_rpc.pipeline import _build, _host, _schedule
from torch_ucx_rpc.pipeline._calls import Circumstances, divided, packets
from torch_ucx_rpc.pipeline._crew import Crew, tell
from torch_ucx_rpc.pipeline._errors import PipelineError
from torch_ucx_rpc.pipeline._messages import HostConfig, Request
from torch_ucx_rpc.pipeline._partition import Partition, lent_names
from torch_ucx_rpc.pipeline._schedule import Schedules
from torch_ucx_rpc.pipeline._values import Packet, merge

__all__ = ["Engine", "RemoteOptimizer"]


class Done(NamedTuple):
    """The results of a step or an evaluation."""

    loss: torch.Tensor
    losses: list[Any]
    """For each micro-batch what the loss function returned, without gradient."""
    output: Any
    """The model's output, if it was wanted."""
    events: list[Any]
    """For each row its actions with their times, if they were recorded."""


class RemoteOptimizer(Protocol):
    """The state of a `PipelineOptimizer` that must survive the loss of a worker."""

    def description(self) -> dict[str, Any]:
        """Return the settings from which a worker makes its part."""

    def groups_by_name(self) -> list[dict[str, Any]]:
        """Return the parameter groups, with names of parameters."""

    def load_groups(self, groups: list[dict[str, Any]]) -> None:
        """Take over the values of such groups."""

    def checkpoint_parts(self) -> list[Any]:
        """Return the parts that each worker writes, for `torch_ucx_rpc.checkpoint`."""


class Engine:
    """The stages of a pipeline. It belongs to the driver's thread.

    Failures of workers are raised: StageError, and StageLostError for a worker that is gone. After that the engine is
    unusable until `replace` and the load of a checkpoint.

    Args:
        crew: the workers.
        partition: the model, divided into stages.
        schedules: the pipeline's schedules; the crew's ``worker_of`` comes from them.
        chunks: micro-batches of a step.
        loss: function of output and target.
        rematerialize: compute activations again on the way back.
        training: whether the model was given in training mode.
    """

    def __init__(
        self,
        crew: Crew,
        partition: Partition,
        schedules: Schedules,
        *,
        chunks: int,
        loss: Callable[..., Any] | None,
        rematerialize: bool,
        training: bool,
    ) -> None:
        self.crew = crew
        self.partition = partition
        self.specs = partition.specs
        self.chunks = chunks
        self.loss = loss
        self.rematerialize = rematerialize
        # The mode in which the model was given, and the mode set for all modules since then.
        self._given_training = training
        self.mode: bool | None = None
        self.optimizers: list[RemoteOptimizer] = []
        # Parameters by the names of the undivided model and in its order, with shapes and without values.
        self.parameters: dict[str, nn.Parameter] = {}
        # How often workers have been replaced: a call's backward needs the crew of its forward.
        self.crews = 0
        self._schedules = schedules
        # Rows that the workers know, by row and key of the call.
        self._sent_rows: set[tuple[int, Any]] = set()
        self._calls = itertools.count()
        try:
            self.parameters = self._proxies(self._create(range(len(crew.places))))
        except BaseException:
            crew.close()
            raise
        # Whether the loss returns (sum, count), once that is known.
        self._has_counts: bool | None = None
        # Which parameters want a gradient, as the workers know it.
        self._trained = self._trained_at_first = tuple(one.requires_grad for one in self.parameters.values())
        # A spare gets the structure of a lost worker's stages from here, and the values from a checkpoint.
        for spec in self.specs:
            spec.module = _build.skeleton(spec.module)
            spec.evaluation_module = _build.skeleton(spec.evaluation_module)
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
                training=self._given_training,
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
                if (error := _build.cannot_be_rebuilt(self.specs[stage])) is not None:
                    raise error
        crew.renew()
        self.crews += 1
        for row in rows:
            crew.close_place(crew.places[row])
            crew.places[row] = crew.place(*by)
            crew.places[row].is_new = True
        self._sent_rows = {(row, key) for row, key in self._sent_rows if row not in rows}
        try:
            self._create(rows)
        except BaseException:
            for row in rows:
                crew.places[row].lost = True
            raise
        if any(place.lost for place in crew.places):
            # Several workers have died: the replacement of the last one tells the others.
            return
        crew.do("crew", {"routes": crew.routes()})
        new = [place.is_new for place in crew.places]
        for optimizer in self.optimizers:
            crew.settle(crew.send("optimizer", [optimizer.description() if one else None for one in new]))
        self._trained = self._trained_at_first if self._trained == self._trained_at_first else ()
        for place in crew.places:
            place.is_new = False

    # -------------------------------------------------------------------------------------------------------- batches

    def step(
        self,
        around: Circumstances,
        args: Any,
        kwargs: Any,
        target: Any,
        *,
        grad: bool = True,
        scale: float | None = None,
        shows_output: bool = False,
        record: bool = False,
    ) -> Done:
        """Run forward and backward of a batch; without ``grad`` only forward. ``target`` and ``scale`` may be None."""
        count, inputs, targets = self._divided(args, kwargs, () if target is None else (target,))
        rows = self._schedules.of(count).rows if grad else self._forward_rows(count)
        # The first loss shows whether losses have counts.
        apart = grad and self._has_counts is not False
        request = Request(
            ("step" if grad else "forward", count),
            next(self._calls),
            count,
            targets=targets,
            grad=grad,
            scale=scale,
            shows_output=shows_output,
            record=record,
            apart=apart,
        )
        results = self._run(request, rows, inputs, around)
        last = results[self.crew.worker_of[-1]]
        self._has_counts = self._has_counts or "factor" in last
        if apart:
            self.crew.later("weigh", last.get("factor", 1.0))
        output = merge([value for value, _ in last["outputs"]]) if shows_output else None
        return Done(last["loss"], last["losses"], output, [result.get("events") for result in results])

    def infer(self, around: Circumstances, args: Any, kwargs: Any) -> Any:
        """Return the output of a batch, without gradients."""
        _, _, outputs = self.forward(around, args, kwargs, grad=False)
        return merge([value for value, _ in outputs])

    def forward(
        self, around: Circumstances, args: Any, kwargs: Any, *, grad: bool
    ) -> tuple[int, list[Any], list[Packet]]:
        """Run a forward. Returns the number of the call, and arguments and output of each micro-batch."""
        count, inputs, _ = self._divided(args, kwargs, ())
        request = Request(("forward", count), next(self._calls), count, grad=grad, to_driver=True)
        results = self._run(request, self._forward_rows(count), inputs, around)
        return request.call, inputs, results[self.crew.worker_of[-1]]["outputs"]

    def backward(self, number: int, gradients: list[Any], input_gradients: bool) -> dict[int, Any]:
        """Run the backward of a call, with the gradients of its outputs by micro-batch. Returns those of its inputs, by
        stage."""
        count = len(gradients)
        rows = _schedule.backward_only(self.crew.worker_of, len(self.crew.places), count, last_first=True)
        request = Request(
            ("backward", count), number, count, output_gradients=gradients, input_gradients=input_gradients
        )
        found: dict[int, Any] = {}
        for result in self._run(request, rows, None, None):
            found.update(result.get("input_gradients", {}))
        return found

    def _forward_rows(self, count: int) -> Sequence[_schedule.Row]:
        return _schedule.forward_only(self.crew.worker_of, len(self.crew.places), count)

    def _divided(self, args: Any, kwargs: Any, target: tuple[Any, ...]) -> tuple[int, list[Any], list[Any]]:
        return divided(self.partition, self.chunks, args, kwargs, target)

    def _run(
        self, request: Request, rows: Sequence[_schedule.Row], batch: list[Any] | None, around: Circumstances | None
    ) -> list[dict[str, Any]]:
        """Have all workers carry out a call. Returns each worker's answer. ``batch`` and ``around`` are None for a
        backward, which takes those of its forward."""
        self.crew.check()
        if around is not None:
            request = request._replace(autocast=around.autocast)
            self._train_only(around.trained)
        inputs = {} if batch is None else packets(self.specs, batch, grad=request.to_driver and request.grad)
        requests = []
        for row, stages in enumerate(self.crew.stages_of):
            mine = request._replace(
                row=None if (row, request.row_key) in self._sent_rows else rows[row],
                inputs={stage: inputs[stage] for stage in stages if stage in inputs},
            )
            if row != self.crew.worker_of[-1]:
                # Only the last stage has a loss and an output.
                mine = mine._replace(targets=None if mine.targets is None else [], output_gradients=None)
            requests.append(mine)
        adds_gradients = requests[0].adds_gradients
        results: list[dict[str, Any]] = self.crew.settle(self.crew.send("run", requests, adds_gradients=adds_gradients))
        self._sent_rows.update((row, request.row_key) for row in range(len(requests)))
        return results

    def _train_only(self, trained: tuple[bool, ...]) -> None:
        """Tell the workers which parameters want a gradient, where that has changed."""
        if trained == self._trained:
            return
        wanted = dict(zip(self.parameters, trained, strict=True))
        wanted.update({lent: wanted[owned] for lent, owned in lent_names(self.specs).items()})
        self.crew.later("requires_grad", wanted)
        self._trained = trained

    # ------------------------------------------------------------------------------------------------------ the model

    def order(self, name: str, payload: dict[str, Any]) -> list[Any]:
        """Have all workers carry out an order after all earlier ones. Returns their answers."""
        return self.crew.do(name, payload)

    def synchronize(self) -> None:
        """Wait until the workers have carried out all orders. Raises the first error of any of them."""
        self.order("synchronize", {})

    def forget(self, numbers: list[int]) -> None:
        """Free what the workers keep for these calls, which will have no backward."""
        self.crew.later("forget", numbers)

    def gather(self, name: str) -> dict[str, Any]:
        """Return the answers to an order, put together."""
        found: dict[str, Any] = {}
        for some in self.order(name, {}):
            found.update(some)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load all values, by the names of the undivided model."""
        self.order("load_state_dict", {"state": state})

    @property
    def training(self) -> bool:
        """Tell whether the model as a whole is in training mode."""
        return self._given_training if self.mode is None else self.mode

    def train(self, mode: bool | None) -> None:
        """Set the mode of all modules. None: back to the modes in which they were given."""
        self.order("train", {"mode": mode})
        self.mode = mode

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop all gradients. This travels with the next order."""
        self.crew.later("zero_grad", set_to_none)

    def clip_grad_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Clip all gradients. Returns their norm before that."""
        norms: dict[str, torch.Tensor] = {}
        for some in self.order("gradient_norms", {"norm_type": float(norm_type)}):
            norms.update(some)
        in_order = [norms[name] for name in self.parameters if name in norms]
        if not in_order:
            return torch.tensor(0.0)
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(in_order), norm_type)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(f"the norm of order {norm_type} of the gradients is not finite: they cannot be clipped")
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        self.order("scale_gradients", {"factor": factor})
        return total

    def divide_gradients(self, number: int, scale: float) -> bool:
        """Divide the gradients of an optimizer's parameters. Returns whether all are finite."""
        return all(self.order("scale_gradients", {"factor": torch.tensor(1.0 / scale), "optimizer": number}))

    def optimizer_step(self, number: int, groups: list[dict[str, Any]]) -> None:
        """Have the workers' optimizers take a step, without waiting for it."""
        self.crew.send_later("optimizer_step", {"optimizer": number, "groups": groups})

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def checkpoint_parts(self) -> list[Any]:
        """Return the parts of the model that each worker writes, for `torch_ucx_rpc.checkpoint`."""
        # This imports torch.distributed.checkpoint, which takes longer than all the rest.
        from torch_ucx_rpc.pipeline import _state

        self.synchronize()
        return _state.model_parts(self.crew.places)

    def make_optimizers(self, first: int) -> None:
        """Remake the optimizers from number ``first`` on: a checkpoint older than they are does not have them."""
        for optimizer in self.optimizers[first:]:
            self.order("optimizer", optimizer.description())

    def on_loaded(self) -> None:
        """After a checkpoint has filled the stages: drop the gradients, and copy tied values to all their users."""
        self.zero_grad(True)
        self.order("set_values", {})

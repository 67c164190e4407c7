"""`DistributedPipeline`: the model as the training loop sees it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch._C._distributed_rpc import _get_current_rpc_agent

from torch_ucx_rpc.pipeline import build, host, partition, recovery, schedule, table, trace
from torch_ucx_rpc.pipeline.crew import Crew
from torch_ucx_rpc.pipeline.errors import PipelineError, ScheduleError
from torch_ucx_rpc.pipeline.function import call_with_autograd
from torch_ucx_rpc.pipeline.host import HostConfig, Request
from torch_ucx_rpc.pipeline.optimizer import PipelineOptimizer
from torch_ucx_rpc.pipeline.schedule import Schedule
from torch_ucx_rpc.pipeline.values import Packet, batch_size, map_tensors, merge, pack, split
from torch_ucx_rpc.pipeline.wiring import INPUT

__all__ = ["DistributedPipeline"]


class DistributedPipeline:
    """A model whose stages live on workers and train micro-batches at the same time.

    Works on any backend of ``torch.distributed.rpc``. The process that makes it, the *driver*, may be one of the
    workers.

    Args:
        model: an ``nn.Sequential``; or any module that torch can trace; or a list of stages, each an ``nn.Module``,
            ``pipeline.Built(...)`` (made by its worker) or an RRef to a module. The workers train copies: the model
            itself stays as it is.
        workers: where the stages run: names of workers, WorkerInfos, or ``"name/cuda:0"`` where a device is meant.
        balance: the number of layers of each stage; or ``"parameters"`` (the default), or ``"profile"``: by the time
        that
            layers take for ``sample``, measured on the driver.
        sample: a batch, for profiling and tracing: a tensor, a tuple of arguments, or a dict of keyword arguments.
        split_spec: torch's split points, ``{"layers.8": SplitPoint.BEGINNING}``; the model is traced.
        schedule: ``"gpipe"``, ``"1F1B"``, ``"interleaved"``, ``"zero-bubble"``; the name of a class of torch's
        schedules; or
            a text in torch's format.
        chunks: micro-batches of a step. A smaller batch is divided into as many as it has samples.
        stages_per_worker: 2 by default for ``"interleaved"``, else 1; with a text, what the text says.
        rematerialize: keep only the inputs of stages and compute activations again on the way back.
        loss: ``loss(output, target)``, a scalar; runs on the worker of the last stage.
        spares: workers that take the place of lost ones. They begin from a checkpoint: `save` one before the first
        step.

    Raises ValueError, TypeError, ScheduleError or PipelineError, with the cure, for what cannot be.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[Any],
        workers: Sequence[Any],
        *,
        balance: Sequence[int] | str | None = None,
        sample: Any = None,
        split_spec: Mapping[str, Any] | None = None,
        schedule: str = "1F1B",
        chunks: int = 1,
        stages_per_worker: int | None = None,
        rematerialize: bool = False,
        loss: Callable[..., Any] | None = None,
        spares: Sequence[Any] = (),
    ) -> None:
        if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
            raise ValueError(f"chunks must be a whole number of micro-batches, 1 at least, and not {chunks!r}")
        if loss is not None and not callable(loss):
            raise TypeError(f"loss must be a function of the output and the target, and not a {type(loss).__name__}")
        places = [_place(worker) for worker in workers]
        spare_places = [_place(worker) for worker in spares]
        if not places:
            raise ValueError("a pipeline needs one worker at least")
        for one in places + spare_places:
            if (places + spare_places).count(one) > 1:
                raise ValueError(
                    f"{one[0]!r} is given twice: a worker (or a device of it, 'name/cuda:1') runs one "
                    "row of the schedule. "
                    f"For several stages on each worker there is stages_per_worker=."
                )
        self.chunks = chunks
        self.schedule = schedule
        self.loss = loss
        self.rematerialize = rematerialize
        self.training = model.training if isinstance(model, nn.Module) else True
        self._rows = len(places)
        self._schedules: dict[int, Schedule] = {}
        self._stages = _count_stages(schedule, self._rows, stages_per_worker)
        # What the schedule forbids is found before anything runs.
        self._worker_of = self._schedule_of(chunks).worker_of
        self._partition = partition.divide(
            model, self._stages, balance=balance, sample=sample, split_spec=split_spec, chunks=chunks
        )
        self._specs = self._partition.specs
        self._crew = Crew(places)
        for stage, row in enumerate(self._worker_of):
            self._crew.stages_of[row].append(stage)
        self._sent_rows: set[tuple[int, Any]] = set()
        self._optimizers: list[PipelineOptimizer] = []
        self._zero_grad: bool | None = None
        self._requires_grad: bool | None = None
        self._recovery = recovery.Recovery(spare_places)
        self._parameters: dict[str, nn.Parameter] = {}
        try:
            self._parameters = self._proxies(self._create(range(self._rows)))
            for worker, _ in spare_places:
                rpc.rpc_sync(host._worker_info(worker), host.prepare)
        except BaseException:
            self._crew.close()
            raise
        # What replaces a lost worker gets the structure from here, and the values from a checkpoint.
        for spec in self._specs:
            spec.module = build.skeleton(spec.module)
            spec.evaluation_module = build.skeleton(spec.evaluation_module)
        self._finalizer = weakref.finalize(self, Crew.close, self._crew)
        self._finalizer.atexit = False

    # --------------------------------------------------------------------------------------------------- making it

    def _schedule_of(self, micro_batches: int) -> Schedule:
        if micro_batches not in self._schedules:
            self._schedules[micro_batches] = schedule.build(self.schedule, self._rows, self._stages, micro_batches)
        return self._schedules[micro_batches]

    def _create(self, rows: Sequence[int]) -> dict[int, Any]:
        """Make the stages of these rows on their workers; what is known of their parameters, by stage."""
        calls = []
        for row in rows:
            place = self._crew.places[row]
            config = HostConfig(
                pipeline=place.host,
                specs=[self._specs[stage] for stage in self._crew.stages_of[row]],
                device=place.device,
                routes=self._routes(),
                loss=self.loss,
                rematerialize=self.rematerialize,
                first_order=self._crew.number,
                training=self.training,
            )
            try:
                calls.append((place, rpc.rpc_async(place.info, host.create, (config,), timeout=0)))
            except (AttributeError, TypeError, build.PICKLING_ERRORS) as error:
                raise PipelineError(
                    f"stages {self._crew.stages_of[row]} cannot be sent to worker {place.worker!r}: "
                    f"{error}. Modules and "
                    "the loss are pickled: define them at the top of a module rather than in a "
                    "function or as a lambda, "
                    f"or let the worker make the stage: pipeline.Built('package.module:name')."
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

    def _routes(self) -> list[tuple[str, str]]:
        return [(self._crew.places[row].worker, self._crew.places[row].host) for row in self._worker_of]

    def _proxies(self, found: dict[int, Any]) -> dict[str, nn.Parameter]:
        """Parameters by the names of the undivided model and in its order, with shapes and without values."""
        made: dict[str, nn.Parameter] = {}
        for stage in sorted(found):
            lent = {self._specs[stage].prefix + tie.name for tie in self._specs[stage].ties if tie.owner != stage}
            for name, shape, dtype, requires_grad in found[stage]:
                if name not in lent:
                    made[name] = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad)
            info = self._partition.infos[stage]
            if info.parameters is None:
                info.parameters = sum(torch.Size(shape).numel() for _, shape, _, _ in found[stage])
        order = [name for name in self._partition.names or made if name in made]
        return {name: made[name] for name in [*order, *(name for name in made if name not in order)]}

    # ------------------------------------------------------------------------------------------------------- training

    def step(self, *args: Any, target: Any = None, scaler: Any = None, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of a batch: gradients are added to those on the workers.

        Args:
            args, kwargs: those of the model. Tensors are divided into micro-batches along dimension 0, evenly or
            nearly so;
                everything else goes to each.
            target: second argument of the loss, divided in the same way. None: the loss gets the output alone.
            scaler: a `GradScaler`, whose scale the loss is multiplied with on its way back.

        Returns the mean of the micro-batches' losses, a scalar tensor without gradient.

        Raises StageError when a stage raises; StageLostError when a worker is lost and no spare is left. Either way the
        step has been undone: gradients that were not there before are gone again, and its memory is given back. What
        batch norms have counted stays counted.
        """
        return self._step(args, kwargs, target, scaler, None)

    def _step(self, args: Any, kwargs: Any, target: Any, scaler: Any, events: list[Any] | None) -> torch.Tensor:
        if self.loss is None:
            raise PipelineError("step() needs a loss: give DistributedPipeline(..., loss=...), or call pipe(x) instead")
        scale = None if scaler is None else scaler.get_scale()
        count, inputs, targets = self._divide(args, kwargs, () if target is None else (target,))
        entry = ("step", args, kwargs, target, scale)

        def run() -> torch.Tensor:
            rows = self._schedule_of(count)
            results = self._run(("step", count), rows.rows, count, inputs, targets=targets, scale=scale, events=events)
            loss: torch.Tensor = results[self._worker_of[-1]]["loss"]
            return loss

        return self._recovery.protect(self, entry, run)

    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """The loss of a batch, as `step` has it, without gradients. Call `eval` before and `train` after."""
        if self.loss is None:
            raise PipelineError("evaluate() needs a loss: give DistributedPipeline(..., loss=...)")
        count, inputs, targets = self._divide(args, kwargs, () if target is None else (target,))

        def run() -> torch.Tensor:
            rows = schedule.forward_only(self._worker_of, self._rows, count)
            results = self._run(("forward", count), rows, count, inputs, targets=targets, grad=False)
            loss: torch.Tensor = results[self._worker_of[-1]]["loss"]
            return loss

        return self._recovery.protect(self, None, run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a batch. In grad mode its backward works, once: it runs on the stages.

        Outputs of the micro-batches are concatenated along dimension 0. Any number of calls may wait for their
        backward, so loops over the model work; what a call keeps on the workers goes with its output.
        """
        count, inputs, _ = self._divide(args, kwargs, ())
        if torch.is_grad_enabled():
            return call_with_autograd(self, count, inputs, args, kwargs)
        return self._recovery.protect(
            self, None, lambda: merge([one[0] for one in self._forward(count, inputs, False)[1]])
        )

    def _forward(self, count: int, inputs: list[Any], grad: bool) -> tuple[int, list[Packet]]:
        """Number of the call, and the last stage's packets."""
        rows = schedule.forward_only(self._worker_of, self._rows, count)
        number = self._crew.number
        results = self._run(("forward", count), rows, count, inputs, grad=grad, to_driver=True)
        return number, results[self._worker_of[-1]]["outputs"]

    def _backward(self, number: int, count: int, gradients: list[Any], input_gradients: bool) -> dict[int, Any]:
        rows = schedule.backward_only(self._worker_of, self._rows, count, last_first=True)
        results = self._run(
            ("backward", count),
            rows,
            count,
            None,
            call=number,
            output_gradients=gradients,
            input_gradients=input_gradients,
        )
        found: dict[int, Any] = {}
        for result in results:
            found.update(result.get("input_gradients", {}))
        return found

    def _divide(self, args: Any, kwargs: Any, target: tuple[Any, ...]) -> tuple[int, list[Any], list[Any]]:
        """How many micro-batches, their arguments, and the targets."""
        if self._partition.bind is not None:
            args, kwargs = self._partition.bind(args, kwargs)
        size = batch_size((args, kwargs, target))
        if size == 0:
            raise ValueError("the batch is empty: a step needs one sample at least")
        count = self.chunks if size is None else min(self.chunks, size)
        return count, split((args, kwargs), count), split(target, count)

    def _run(
        self,
        key: tuple[str, int],
        rows: Sequence[schedule.Row],
        count: int,
        inputs: list[Any] | None,
        *,
        targets: list[Any] | None = None,
        call: int | None = None,
        grad: bool = True,
        to_driver: bool = False,
        output_gradients: list[Any] | None = None,
        input_gradients: bool = False,
        scale: float | None = None,
        events: list[Any] | None = None,
    ) -> list[dict[str, Any]]:
        self._crew.check()
        packets: dict[int, list[Packet]] = {}
        if inputs is not None:
            # Gradients of a batch are for calls, which have someone to give them to.
            wants = to_driver and grad
            for spec in self._specs:
                if any(edge.source == INPUT for edge in spec.edges_in):
                    packets[spec.index] = [pack(self._input_of(spec, one))[0] for one in inputs]
                    if not wants:
                        packets[spec.index] = [
                            (map_tensors(torch.Tensor.detach, one), ()) for one, _ in packets[spec.index]
                        ]
        states = tuple(
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        )
        zero_grad, self._zero_grad = self._zero_grad, None
        requests = [
            Request(
                row_key=key,
                row=None if (row, key) in self._sent_rows else rows[row],
                call=self._crew.number if call is None else call,
                micro_batches=count,
                inputs={stage: packets[stage] for stage in self._crew.stages_of[row] if stage in packets},
                targets=targets if row == self._worker_of[-1] or targets is None else [],
                grad=grad,
                to_driver=to_driver,
                output_gradients=output_gradients if row == self._worker_of[-1] else None,
                input_gradients=input_gradients,
                autocast=states,
                scale=scale,
                record=events is not None,
                zero_grad=zero_grad,
            )
            for row in range(self._rows)
        ]
        results: list[dict[str, Any]] = self._crew.settle(self._crew.send("run", requests))
        self._sent_rows.update((row, key) for row in range(self._rows))
        if events is not None:
            events.extend(result["events"] for result in results)
        return results

    def _input_of(self, spec: Any, one: tuple[Any, Any]) -> Any:
        if spec.arguments is None:
            return one
        items = next(edge.items for edge in spec.edges_in if edge.source == INPUT)
        return tuple(one[0][item] for item in items)

    # ---------------------------------------------------------------------------------------------------- the model

    def optimizer(self, cls: type[torch.optim.Optimizer], params: Any = None, **options: Any) -> PipelineOptimizer:
        """An optimizer of class ``cls`` on each worker, for its own parameters, behind one that looks like torch's.

        ``params`` takes what torch's optimizers take, made of `parameters` or `named_parameters`; all by default.
        Learning-rate schedulers work on the result as on any.
        """
        made = PipelineOptimizer(self, cls, list(self._parameters.values()) if params is None else params, options)
        self._optimizers.append(made)
        return made

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names of the undivided model, and parameters with shape and dtype but without values (on the meta device)."""
        return iter(self._parameters.items())

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(self._parameters.values())

    def train(self, mode: bool = True) -> DistributedPipeline:
        """As ``nn.Module.train``: on all stages."""
        self._recovery.protect(self, ("train", mode), lambda: self._order("train", {"mode": mode}))
        self.training = mode
        return self

    def eval(self) -> DistributedPipeline:
        """As ``nn.Module.eval``: on all stages."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> DistributedPipeline:
        """As ``nn.Module.requires_grad_``: on all stages."""
        self._order("requires_grad", {"requires_grad": requires_grad})
        self._requires_grad = requires_grad
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``: on all stages. Travels with the next call."""
        self._zero_grad = set_to_none
        self._recovery.record(("zero_grad", set_to_none))

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As ``torch.nn.utils.clip_grad_norm_`` over the parameters of all stages. Returns the norm before."""

        def run() -> torch.Tensor:
            norms: dict[str, torch.Tensor] = {}
            for some in self._order("gradient_norms", {"norm_type": float(norm_type)}):
                norms.update(some)
            in_order = [norms[name] for name in self._parameters if name in norms]
            if not in_order:
                return torch.tensor(0.0)
            total: torch.Tensor = torch.linalg.vector_norm(torch.stack(in_order), norm_type)
            if error_if_nonfinite and not bool(total.isfinite()):
                raise RuntimeError(
                    f"the norm of order {norm_type} of the gradients is not finite: they cannot be clipped"
                )
            factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
            self._order("scale_gradients", {"factor": factor, "check": False})
            return total

        return self._recovery.protect(self, ("clip_grad_norm", max_norm, norm_type), run)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Copies of all gradients, by the names of the undivided model."""
        return self._gathered("gradients")

    def state_dict(self) -> dict[str, Any]:
        """The undivided model's state, copied to this process. For what does not fit into one there is `save`."""
        found = self._gathered("state_dict")
        order = {name: place for place, name in enumerate(self._parameters)}
        return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The reverse: ``state_dict`` may come from the undivided model. Raises KeyError naming what is missing."""
        missing = sorted(self._gathered("state_dict").keys() - state_dict.keys())
        if missing:
            raise KeyError(f"the state lacks {', '.join(missing[:5])}{' and more' if len(missing) > 5 else ''}")
        self._order("load_state_dict", {"state": dict(state_dict)})

    def _gathered(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for some in self._order(name, {}):
            found.update(some)
        return (
            {name: found[name] for name in sorted(found, key=list(self._parameters).index)}
            if name == "gradients"
            else found
        )

    def _order(self, name: str, payload: Any) -> list[Any]:
        """Have all workers do something, after all that they have been told before."""
        self._flush()
        return self._crew.do(name, payload)

    def _flush(self) -> None:
        if self._zero_grad is not None:
            set_to_none, self._zero_grad = self._zero_grad, None
            self._crew.send_later("zero_grad", {"set_to_none": set_to_none})

    def synchronize(self) -> None:
        """Return when the workers have done all that they have been told. Raises what went wrong meanwhile."""
        self._recovery.protect(self, None, lambda: self._order("synchronize", {}))

    # ------------------------------------------------------------------------------------------------- checkpoints

    def save(self, path: str | os.PathLike[str], *, asynchronous: bool = False) -> Any:
        """Write model, optimizers and random states to the folder ``path``; see `torch_ucx_rpc.checkpoint`.

        Returns None, or with ``asynchronous`` a future, as soon as everything has been copied.
        """
        return self._recovery.save(self, path, asynchronous)

    def load(self, path: str | os.PathLike[str] | None = None) -> None:
        """Read what `save` has written, by this pipeline or by one with other stages. Default: the last one saved."""
        self._recovery.load(self, path)

    def checkpoint_parts(self) -> list[Any]:
        """For `torch_ucx_rpc.checkpoint`: what each worker writes."""
        from torch_ucx_rpc.pipeline import state

        self.synchronize()
        return state.model_parts(self)

    # ---------------------------------------------------------------------------------------------------- replacement

    def replace(self, worker: str, by: str) -> None:
        """Let worker ``by`` run the stages of ``worker``, which may be lost. Follow it with `load`: ``by`` knows
        nothing yet."""
        recovery.replace(self, worker, _place(by))

    def close(self) -> None:
        """Let go of the stages on the workers. Without it they go with this object."""
        self._finalizer()

    # ------------------------------------------------------------------------------------------------------- looking

    def trace(self, path: str | os.PathLike[str], *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """`step` once, and write when which stage did which micro-batch: a picture (``.png``), or a Chrome trace
        (``.json``).

        Times are those of the workers' clocks: between hosts they are as good as these are set.
        """
        events: list[Any] = []
        writer = trace.writer_of(path)
        loss = self._step(args, kwargs, target, None, events)
        writer(path, events[-self._rows :], [str(place) for place in self._crew.places])
        return loss

    def __repr__(self) -> str:
        return table.table(self._partition.infos, [str(self._crew.places[row]) for row in self._worker_of], self)

    @property
    def workers(self) -> list[str]:
        """Names of the workers, in the order of the schedule's rows."""
        return [place.worker for place in self._crew.places]


def _place(worker: Any) -> tuple[str, str]:
    """Name and device of "name", "name/cuda:0" or a WorkerInfo."""
    name = getattr(worker, "name", worker)
    if not isinstance(name, str):
        raise TypeError(f"a worker is given by its name, 'name/cuda:0' or a WorkerInfo, and not by {worker!r}")
    name, _, device = name.partition("/")
    try:
        torch.device(device or "cpu")
    except RuntimeError as error:
        raise ValueError(
            f"{worker!r}: {device!r} is no device ({error}); write 'name/cuda:0', or only the name"
        ) from None
    try:
        host._worker_info(name)
    except Exception:
        names = [info.name for info in _get_current_rpc_agent().get_worker_infos()]
        raise ValueError(
            f"there is no worker {name!r}{partition.close_to(name, names)} The workers are: {', '.join(sorted(names))}."
        ) from None
    return name, device or "cpu"


def _count_stages(name: str, workers: int, per_worker: int | None) -> int:
    if schedule.is_text(name):
        rows = schedule.parse(name)
        stages = 1 + max(action.stage for row in rows for action in row)
        if per_worker is not None and per_worker * workers != stages:
            raise ScheduleError(f"the schedule has {stages} stages, and stages_per_worker={per_worker} asks for others")
        return stages
    if per_worker is None:
        per_worker = schedule.stages_per_worker(name)
    if not isinstance(per_worker, int) or per_worker < 1:
        raise ValueError(f"stages_per_worker must be a whole number, 1 at least, and not {per_worker!r}")
    return workers * per_worker

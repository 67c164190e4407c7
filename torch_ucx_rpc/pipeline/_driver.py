"""`DistributedPipeline`: the model as the training loop sees it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch._C._distributed_rpc import _get_current_rpc_agent

from torch_ucx_rpc._arguments import (
    check_callable,
    check_count,
    check_flag,
    check_number,
    check_type,
    wrong_type,
    wrong_value,
)
from torch_ucx_rpc.pipeline import _host, _show
from torch_ucx_rpc.pipeline._batches import Batches
from torch_ucx_rpc.pipeline._crew import Crew
from torch_ucx_rpc.pipeline._divide import divide
from torch_ucx_rpc.pipeline._errors import PipelineError
from torch_ucx_rpc.pipeline._function import call_with_autograd
from torch_ucx_rpc.pipeline._optimizer import PipelineOptimizer
from torch_ucx_rpc.pipeline._partition import close_to
from torch_ucx_rpc.pipeline._recovery import Recovery
from torch_ucx_rpc.pipeline._remote import RemoteModel
from torch_ucx_rpc.pipeline._schedule import Schedules
from torch_ucx_rpc.pipeline._values import merge

__all__ = ["DistributedPipeline"]


class DistributedPipeline:
    """A model whose stages live on workers and train micro-batches at the same time.

    Works on any backend of ``torch.distributed.rpc``. The process that makes it, the *driver*, may be one of the
    workers.

    Args:
        model (nn.Module or list): an ``nn.Sequential``; or any module that torch can trace; or a list of stages, each
            an ``nn.Module``, ``pipeline.Built(...)`` (made by its worker) or an RRef to a module. The workers train
            copies: the model itself stays as it is. But the module behind an RRef is trained itself.
        workers (list): where the stages run: names of workers, WorkerInfos, or ``"name/cuda:0"`` for a device.
        balance (list or str): the number of layers of each stage; or ``"parameters"`` (the default); or ``"profile"``,
            by the time that layers take for ``sample``, measured on the driver.
        sample (Tensor, tuple or dict): a batch, for profiling and tracing: a tensor, a tuple of arguments, or a dict of
            keyword arguments (default: None).
        split_spec (dict): torch's split points, ``{"layers.8": SplitPoint.BEGINNING}`` (default: None). With them torch
            traces the model.
        schedule (str): ``"gpipe"``, ``"1F1B"`` (the default), ``"interleaved"``, ``"zero-bubble"``; the name of a class
            of torch's schedules; or a text in torch's format.
        chunks (int): micro-batches of a step (default: 1). A smaller batch has as many micro-batches as samples. With a
            schedule as text, such a batch raises ScheduleError.
        stages_per_worker (int): number of stages on each worker (default: the number in a text; 2 for
            ``"interleaved"``, and for torch's classes that take several stages for each worker; else 1).
        rematerialize (bool): keep only the inputs of stages, and compute activations again in the backward (default:
            False).
        loss (callable): ``loss(output, target)``, which runs on the worker of the last stage (default: None). It
            returns a scalar, or ``(sum, count)``, such as the sum over all tokens and their number.
        n_microbatches (int): the name of ``chunks`` in ``torch.distributed.pipelining``.
        loss_fn (callable): the name of ``loss`` there.
        spares (list): workers that take the place of lost ones (default: none). They begin from a checkpoint: `save`
            one before the first step.
        step_timeout (float): seconds that the workers may take for a step, or for another order (default: None, no
            limit). A worker whose stage is still busy then counts as lost; if none is busy, so does each worker that
            has no result. A worker that answers no call for ``rpc_timeout`` counts as lost in any case.

    Raises ValueError, TypeError, ScheduleError or PipelineError, with the cure, for arguments that cannot work. Raises
    PipelineError also if a worker cannot be reached, or cannot make its stages.

    Methods that wait for the workers raise StageError, StageLostError or PipelineError as `step` does.
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
        chunks: int | None = None,
        stages_per_worker: int | None = None,
        rematerialize: bool = False,
        loss: Callable[..., Any] | None = None,
        n_microbatches: int | None = None,
        loss_fn: Callable[..., Any] | None = None,
        spares: Sequence[Any] = (),
        step_timeout: float | None = None,
    ) -> None:
        if not isinstance(model, (nn.Module, list, tuple)):
            raise wrong_type("model", "an nn.Module, or a list of stages", model)
        stages = [model] if isinstance(model, nn.Module) else model
        if not stages:
            raise wrong_value("model", "an nn.Module, or a list of at least one stage", model)
        if balance is not None:
            expected = 'a list with the number of layers of each stage, "profile" or "parameters"'
            check_type("balance", (str, list, tuple), expected, balance)
            if not balance:
                raise wrong_value("balance", expected, balance)
        if split_spec is not None:
            check_type("split_spec", Mapping, "a dict from the names of modules to split points", split_spec)
        argument, chunks = _one_of(chunks=chunks, n_microbatches=n_microbatches)
        chunks = 1 if chunks is None else chunks
        check_count(argument, 1, "a number of micro-batches", chunks)
        argument, loss = _one_of(loss=loss, loss_fn=loss_fn)
        if stages_per_worker is not None:
            check_count("stages_per_worker", 1, "a number of stages", stages_per_worker)
        check_flag("rematerialize", rematerialize)
        if step_timeout is not None:
            check_number("step_timeout", step_timeout)
            if step_timeout <= 0:
                raise wrong_value("step_timeout", "above 0", step_timeout)
        if loss is not None:
            check_callable(argument, "a function of the output and the target", loss)
        if isinstance(loss, nn.Module) and any(one.requires_grad for one in loss.parameters()):
            raise ValueError(
                f"the loss {type(loss).__name__} has parameters, which no optimizer of the pipeline would train: put "
                f"what has them into the model's last stage, or freeze them with loss.requires_grad_(False)"
            )
        check_type("schedule", str, 'a name, such as "1F1B", or a text', schedule)
        for argument, listed in (("workers", workers), ("spares", spares)):
            if isinstance(listed, str) or not isinstance(listed, Iterable):
                raise wrong_type(argument, "a list of names, such as ['stage0', 'stage1']", listed)
        places = [_place("each of workers", worker) for worker in workers]
        spare_places = [_place("each of spares", worker) for worker in spares]
        if not places:
            raise wrong_value("workers", "a list of at least one worker", workers)
        for one in places + spare_places:
            if (places + spare_places).count(one) > 1:
                raise ValueError(
                    f"{one[0]!r} is given twice: a worker (or a device of it, 'name/cuda:1') runs one row of the "
                    f"schedule. For several stages on each worker there is stages_per_worker=."
                )
        # The schedule finds a conflict before anything runs.
        schedules = Schedules(schedule, len(places), stages_per_worker, chunks)
        partition = divide(
            model, schedules.stages, balance=balance, sample=sample, split_spec=split_spec, chunks=chunks
        )
        for worker, _ in spare_places:
            rpc.rpc_sync(rpc.get_worker_info(worker), _host.prepare)
        self.schedule = schedule
        self.chunks = chunks
        self.loss = loss
        self.rematerialize = rematerialize
        self._crew = Crew(places, schedules.worker_of, step_timeout)
        self._model = RemoteModel(
            self._crew,
            partition,
            schedules,
            loss=loss,
            rematerialize=rematerialize,
            training=any(not isinstance(one, nn.Module) or one.training for one in stages),
        )
        self._recovery = Recovery(self._model, spare_places)
        self._batches = Batches(self._recovery, chunks)

    @property
    def training(self) -> bool:
        """Mode of the model as a whole, as ``nn.Module.training``."""
        return self._model.training

    # ------------------------------------------------------------------------------------------------------- training

    def step(
        self,
        *args: Any,
        target: Any = None,
        scaler: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward of a batch, and add its gradients to those on the workers.

        Args:
            *args: positional arguments of the model. `step` divides tensors into micro-batches along dimension 0,
                evenly or nearly so. Everything else goes to each micro-batch.
            **kwargs: keyword arguments of the model, divided in the same way.
            target: second argument of the loss, divided in the same way (default: None, the loss gets the output
                alone).
            scaler (GradScaler): its scale multiplies the loss before the backward (default: None).
            losses (list): a list that `step` fills with the result of the loss for each micro-batch, without gradient
                (default: None). Its earlier items are removed.
            return_outputs (bool): also return the model's output, as ``pipe(x)`` does, without gradient (default:
                False).

        Returns the mean of the micro-batches' losses, a scalar tensor on the CPU, without gradient. With
        ``return_outputs`` it returns a tuple of the loss and the output. If the loss returns ``(sum, count)``, the
        result is the sum over the whole batch, divided by the count of the whole batch. The workers divide the
        gradients in the same way.

        Raises StageError when a stage raises, and StageLostError when a worker is lost and no spare can replace it.
        Raises PipelineError without a loss, after `close`, and if two stages cannot exchange values. In all these
        cases the workers have undone the step: they have removed its gradients, and freed its memory. Statistics of
        batch norms stay as the step has left them. Raises ValueError for an empty batch, and for tensors with different
        sizes of dimension 0.
        """
        scale = None if scaler is None else scaler.scale_of_step()
        return self._run("step", args, kwargs, target, losses, return_outputs, scale=scale)

    def _run(
        self, name: str, args: Any, kwargs: Any, target: Any, losses: Any, return_outputs: bool, **how: Any
    ) -> Any:
        self._check_loss(name)
        if losses is not None:
            check_type("losses", list, "a list to fill", losses)
        check_flag("return_outputs", return_outputs)
        done = self._batches.step(args, kwargs, target, shows_output=return_outputs, **how)
        if losses is not None:
            losses[:] = done.losses
        return (done.loss, done.output) if return_outputs else done.loss

    def _check_loss(self, name: str) -> None:
        if self.loss is None:
            raise PipelineError(
                f"{name}() needs a loss: give DistributedPipeline(..., loss=...), or call pipe(x) instead"
            )

    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the loss of a batch as `step` does, without gradients. Call `eval` before and `train` after.

        Arguments (without ``scaler``), results and errors are those of `step`.
        """
        return self._run("evaluate", args, kwargs, target, losses, return_outputs, grad=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for a batch, on the CPU. In grad mode its backward works once, and runs on the
        stages. There are no second derivatives: with ``create_graph=True`` their backward raises RuntimeError.

        The result concatenates the outputs of the micro-batches along dimension 0. Outputs that do not fit become a
        list. Any number of calls may wait for their backward, so loops over the model work. Once the output of a call
        is gone, the workers free its memory with the next call.
        """
        if torch.is_grad_enabled():
            return call_with_autograd(self._batches, args, kwargs)
        _, _, outputs = self._batches.forward(args, kwargs, grad=False)
        return merge([value for value, _ in outputs])

    # ---------------------------------------------------------------------------------------------------- the model

    def optimizer(self, cls: type[torch.optim.Optimizer], params: Any = None, **options: Any) -> PipelineOptimizer:
        """Make an optimizer of class ``cls`` on each worker for its parameters, and return one that controls them all.

        Args:
            cls (type): class of the optimizer, such as ``torch.optim.AdamW``.
            params (iterable): as for torch's optimizers, made of `parameters` or `named_parameters` (default: all
                parameters).
            **options: arguments of ``cls``, such as ``lr=1e-3``.

        Learning-rate schedulers work on the result as on any optimizer.

        Raises TypeError for a class that is not an optimizer, or for LBFGS, and ValueError for parameters of another
        model. Options that ``cls`` refuses raise its own error.
        """
        params = self.parameters() if params is None else params
        return PipelineOptimizer(self._recovery, cls, params, options)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the undivided model's names, and parameters with shape and dtype but without values (on the meta
        device). Their ``grad`` raises PipelineError: see `gradients`, `clip_grad_norm_` and `zero_grad`."""
        return iter(self._model.parameters.items())

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield all parameters in the order of the undivided model, like `named_parameters`, with shapes but without
        values."""
        return iter(self._model.parameters.values())

    def train(self, mode: bool = True) -> DistributedPipeline:
        """Set the mode of all stages, as ``nn.Module.train``, and return the pipeline. Until then each module has the
        mode in which it was given."""
        self._recovery.do(self._crew.do, "train", mode)
        self._model.mode = mode
        return self

    def eval(self) -> DistributedPipeline:
        """Set all stages to evaluation, as ``nn.Module.eval``, and return the pipeline."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> DistributedPipeline:
        """Do ``nn.Module.requires_grad_`` on all stages, from the next call on. For single parameters call
        ``requires_grad_`` on those that `named_parameters` yields."""
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do ``nn.Module.zero_grad`` on all stages. The order travels with the next call."""
        self._recovery.do(self._crew.later, "zero_grad", set_to_none)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Do ``torch.nn.utils.clip_grad_norm_``, with its arguments, over the parameters of all stages.

        Returns the norm before clipping, a scalar tensor on the CPU. With ``error_if_nonfinite``, raises RuntimeError
        if it is not finite.
        """
        norms = self._recovery.gather("gradient_norms", float(norm_type))
        in_order = [norms[name] for name in self._model.parameters if name in norms]
        if not in_order:
            return torch.tensor(0.0)
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(in_order), norm_type)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(f"the norm of order {norm_type} of the gradients is not finite: they cannot be clipped")
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        self._recovery.do(self._crew.do, "scale_gradients", factor)
        return total

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return copies of all gradients on the CPU, by the names of the undivided model. None stands for no
        gradient."""
        found = self._recovery.gather("state", "gradients")
        return {name: found.get(name) for name in self._model.parameters}

    def state_dict(self) -> dict[str, Any]:
        """Return the undivided model's state, copied to the CPU of this process. Use `save` for a model that does not
        fit into one process."""
        found = self._recovery.gather("state", "model")
        order = {name: place for place, name in enumerate(self._model.parameters)}
        return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, of this pipeline or of the undivided model. Ignores names that the model
        does not have.

        Raises KeyError, which lists missing names, and StageError for a value of another shape.
        """
        missing = sorted(self._recovery.gather("state", "model").keys() - state_dict.keys())
        if missing:
            raise KeyError(f"the state lacks {', '.join(missing[:5])}{' and more' if len(missing) > 5 else ''}")
        self._recovery.do(self._crew.do, "set_state", dict(state_dict), "model")

    def synchronize(self) -> None:
        """Wait until the workers have carried out all orders. Raises the first error of any of them."""
        self._recovery.synchronize()

    # ------------------------------------------------------------------------------------------------- checkpoints

    def save(self, path: str | os.PathLike[str], *, asynchronous: bool = False) -> Any:
        """Write model, optimizers and random states to the folder ``path``; see `torch_ucx_rpc.checkpoint`. With spares
        it also writes the gradients.

        Returns None, or with ``asynchronous`` a `torch_ucx_rpc.checkpoint.SaveFuture` as soon as the workers have
        copied everything. Raises CheckpointError if the save fails.
        """
        return self._recovery.save(path, asynchronous)

    def load(self, path: str | os.PathLike[str] | None = None) -> None:
        """Read a checkpoint that `save` has written, by this pipeline or by one with other stages, and drop the
        gradients. The default is the last checkpoint that this pipeline has saved or loaded. Make the optimizers
        first: one that is made later begins with an empty state.

        Raises ValueError without a path if there is none, FileNotFoundError if the path has no checkpoint, and
        CheckpointError if the checkpoint does not fit.
        """
        self._recovery.load(path)

    def checkpoint_parts(self) -> list[Any]:
        """Return the parts that each worker writes, for `torch_ucx_rpc.checkpoint`."""
        self.synchronize()
        return self._model.checkpoint_parts()

    # ---------------------------------------------------------------------------------------------------- replacement

    def replace(self, worker: str, by: str) -> None:
        """Let worker ``by`` (a name, or ``"name/cuda:0"``) run the stages of the lost ``worker``. Call `load` next:
        ``by`` has no values yet.

        Raises PipelineError if ``worker`` is alive, or if a stage of it was given as an RRef, which died with it.
        Raises ValueError if no stage runs on ``worker``, or if there is no worker ``by``.
        """
        self._model.replace(worker, _place("by", by))

    def close(self) -> None:
        """Free the stages on the workers. Without this call, the end of this object frees them. Later calls raise
        PipelineError."""
        self._model.close()

    # ------------------------------------------------------------------------------------------------------- looking

    def trace(self, path: str | os.PathLike[str], *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Do one `step`, and write a Chrome trace (``.json``, for Perfetto) that shows when each stage ran each
        micro-batch.

        Times come from the workers' clocks, so times of two hosts can be compared only as far as their clocks agree.

        The arguments after ``path`` are those of `step`. Returns the loss. Raises ValueError unless ``path`` ends in
        ``.json``, FileNotFoundError without its folder, and the errors of `step`.
        """
        self._check_loss("trace")
        _show.check_path(path)
        done = self._batches.step(args, kwargs, target, record=True)
        _show.write_chrome(path, done.events, [str(place) for place in self._crew.places])
        return done.loss

    def __repr__(self) -> str:
        workers = [str(self._crew.places[row]) for row in self._crew.worker_of]
        infos = self._model.partition.infos
        return _show.table(infos, workers, self.schedule, self.chunks, self.rematerialize)

    @property
    def workers(self) -> list[str]:
        """Names of the workers, in the order of the schedule's rows."""
        return [place.worker for place in self._crew.places]


def _one_of(**names: Any) -> tuple[str, Any]:
    """``names`` are two names of one argument. Return the name that was given, and the value."""
    given = [(name, value) for name, value in names.items() if value is not None]
    if len(given) > 1:
        (ours, value), (torchs, other) = given
        raise ValueError(
            f"{torchs} is another name of {ours}: give one of them; got {ours}={value!r} and {torchs}={other!r}"
        )
    return given[0] if given else (next(iter(names)), None)


def _place(argument: str, worker: Any) -> tuple[str, str]:
    """Return name and device of "name", "name/cuda:0" or a WorkerInfo."""
    name = getattr(worker, "name", worker)
    if not isinstance(name, str):
        raise wrong_type(argument, "a name, 'name/cuda:0' or a WorkerInfo", worker)
    name, _, device = name.partition("/")
    try:
        torch.device(device or "cpu")
    except RuntimeError as error:
        raise ValueError(
            f"{worker!r}: {device!r} is no device ({error}); write 'name/cuda:0', or only the name"
        ) from None
    try:
        rpc.get_worker_info(name)
    except Exception:
        names = [info.name for info in _get_current_rpc_agent().get_worker_infos()]
        raise ValueError(
            f"there is no worker {name!r}{close_to(name, names) or '.'} The workers are: {', '.join(sorted(names))}."
        ) from None
    return name, device or "cpu"

"""The work of a host: it sums the gradients of its shards, and keeps the parameters of a server with an optimizer."""

# mypy: allow-untyped-calls

from __future__ import annotations

import itertools
import logging
import os
import pickle
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.futures import Future

from torch_ucx_rpc._threads import Thread
from torch_ucx_rpc._workers.futures import fail
from torch_ucx_rpc._workers.lost import was_lost
from torch_ucx_rpc._workers.members import Epoch, Group
from torch_ucx_rpc.channel import Channel
from torch_ucx_rpc.errors import EpochEnded, RpcError
from torch_ucx_rpc.reduction._messages import NEVER, Kept, Opening, Spec

_logger = logging.getLogger(__name__)

# Elements that are added at a time. They are few enough to stay in a core's cache until they are divided. And they are
# no more than torch adds on one thread (at::internal::GRAIN_SIZE).
_STEP = 32_768


class Fill(NamedTuple):
    """The shapes of a shard's parameters, the checkpoint that they come from, if any, and their present values.

    ``values`` is None if they are those that the caller has just given.
    """

    shapes: list[tuple[int, ...]]
    restored_from: str | None
    values: list[Tensor] | None


class Values(NamedTuple):
    """The parameters of a shard, and the last generation whose applied step has each trainer's gradients."""

    parameters: list[Tensor]
    counted: dict[str, int]


class Shard:
    """The parameters of one shard, with their optimizer. ``lock`` guards them."""

    def __init__(self, spec: Spec, path: Path | None, parameters: Sequence[Tensor]) -> None:
        assert spec.optimizer is not None
        self.lock = threading.Lock()
        self.step = 0
        self.committed = self.prepared = NEVER
        self.restored_from: str | None = None
        self.mean: list[Tensor] = []
        self.contributors: tuple[str, ...] = ()
        self.counted: dict[str, int] = {}
        # The reason why an update has failed. The parameters may be half updated, so the shard is of no use any more.
        self.failure: str | None = None
        self.parameters = [torch.nn.Parameter(tensor.detach().clone()) for tensor in parameters]
        self.optimizer: torch.optim.Optimizer = pickle.loads(spec.optimizer)(self.parameters)
        self._path = path
        self._every = spec.checkpoint_every
        # Guards the requests for the parameters, each with the step that it waits for. Threads hold it briefly, at most
        # while `tell` copies the parameters.
        self.asking = threading.Lock()
        self.requests: list[tuple[int, Future[Values]]] = []

    @classmethod
    def restored(cls, spec: Spec, path: Path) -> Shard:
        saved = torch.load(path, weights_only=True)
        shard = cls(spec, path, saved["parameters"])
        shard.optimizer.load_state_dict(saved["optimizer"])
        shard.step, shard.restored_from = saved["step"], str(path)
        return shard

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(parameter.shape) for parameter in self.parameters]

    def copies(self) -> list[Tensor]:
        """Return copies of the parameters. The caller holds the lock."""
        return [parameter.detach().clone() for parameter in self.parameters]

    def prepare(self, mean: list[Tensor], opening: Opening) -> None:
        """Keep the mean of the step, which is not closed yet, unless there is one of a later generation."""
        with self.lock:
            if self.prepared > opening.generation:
                return
            self.mean, self.contributors, self.prepared = mean, opening.contributors, opening.generation

    def apply(self) -> None:
        """Apply the mean of the step, which has been closed. The caller holds the lock."""
        for parameter, gradient in zip(self.parameters, self.mean, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.mean = []
        self.counted |= dict.fromkeys(self.contributors, self.prepared)
        self.go_to(self.step + 1, self.prepared)
        if self.step % self._every == 0:
            self._save()

    def go_to(self, step: int, committed: int) -> None:
        """Go to a step. If it does not follow the last update, the updates in between are lost."""
        self.step, self.committed, self.prepared = step, committed, NEVER

    def when(self, step: int) -> Future[Values]:
        """Return a future that `tell` completes with the parameters, once all steps before this one are applied."""
        future: Future[Values] = Future()
        with self.asking:
            self.requests.append((step, future))
        return future

    def tell(self) -> None:
        """Answer requests that wait for the present step, or for an earlier one."""
        with self.lock, self.asking:
            due = [future for step, future in self.requests if step <= self.step or self.failure]
            self.requests = [] if self.failure else [one for one in self.requests if one[0] > self.step]
            if not due:
                return
            values = Values(self.copies(), {**self.counted})
        for future in due:
            if self.failure is None:
                future.set_result(values)
            else:
                fail(future, self.failed())

    def failed(self) -> RuntimeError:
        return RuntimeError(f"the optimizer on a host cannot update the parameters: {self.failure}")

    def _save(self) -> None:
        if self._path is None:
            return
        # A process that is killed during this save leaves the earlier file whole.
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        state = {
            "parameters": [parameter.detach() for parameter in self.parameters],
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, part)
            part.replace(self._path)
        except (OSError, RuntimeError) as error:
            # Training goes on with the earlier checkpoint.
            _logger.warning("the parameters could not be saved to %s: %s", self._path, error)


class _Office(Protocol):
    """The part of an office that a host uses."""

    name: str
    changed: threading.Condition
    epoch: Epoch | None
    group: Group

    def opening(self, key: str) -> Opening | None: ...

    def is_over(self, opening: Opening) -> bool: ...

    def refuse(self, opening: Opening, name: str, reason: str) -> None: ...


class Host:
    """This worker as a host of servers. The lock of the office guards its shards."""

    def __init__(self, office: _Office) -> None:
        self._office = office
        self._shards: dict[tuple[str, int], Shard] = {}

    def report(self) -> dict[str, Kept]:
        """Return the steps of the parameters kept here. This waits for a running update."""
        found: dict[str, Kept] = {}
        for (key, number), shard in self._shards.items():
            with shard.lock:
                before = found[key].shards if key in found else ()
                found[key] = Kept(shard.step, shard.committed, (*before, number))
        return found

    def open(self, opening: Opening, channel: Channel | None) -> None:
        """Apply a step that was closed. In a new generation, whose channel is given, also start summing."""
        with self._office.changed:
            mine = [shard for (key, _), shard in self._shards.items() if key == opening.key]
        for shard in mine:
            with shard.lock:
                epoch = self._office.epoch
                # In a later epoch this host has already reported its step, so the step must stay.
                if epoch is None or epoch.number != opening.epoch:
                    return
                if shard.step + 1 == opening.step and NEVER != shard.prepared == opening.committed:
                    try:
                        shard.apply()
                    except Exception as error:  # the user's optimizer
                        shard.failure = f"{type(error).__name__}: {error}"
            shard.tell()
        if channel is not None and opening.contributors:
            for number in [number for number, name in enumerate(opening.hosts) if name == self._office.name]:
                Thread(self._work, (opening, channel, number), name="torch_ucx_rpc-sums").start()

    def fill(self, key: str, number: int, spec: Spec, tensors: list[Tensor]) -> Fill:
        """Take the parameters of a trainer, unless the host has some."""
        with self._office.changed:
            shard = self._find(key, number, spec)
            is_new = shard is None
            if shard is None:
                opening = self._office.opening(key)
                if opening is not None and opening.step:
                    raise RuntimeError(self._lost(key))
                shard = self._shards[key, number] = Shard(spec, _path(spec, key, number), tensors)
        with shard.lock:
            values = None if is_new else shard.copies()
        return Fill(shard.shapes, shard.restored_from, values)

    def values(self, key: str, number: int, spec: Spec, step: int) -> Future[Values]:
        """Return a future of the parameters at the beginning of a step, or later. Raises RuntimeError if they are
        lost."""
        with self._office.changed:
            shard = self._find(key, number, spec)
            if shard is None:
                raise RuntimeError(self._lost(key))
            # Hold the lock: another thread could drop the shard, and its requests with it.
            values = shard.when(step)
        shard.tell()
        return values

    def _lost(self, key: str) -> str:
        return (
            f"worker {self._office.name!r} has no parameters of {key!r}: they were with a host that has been lost. "
            f"reduction.serve(..., checkpoint='a folder that all hosts see') keeps a copy on disk"
        )

    def _find(self, key: str, number: int, spec: Spec) -> Shard | None:
        """Find the parameters of a shard, here or in the checkpoint. The caller holds the lock."""
        known = self._shards.get((key, number))
        path = _path(spec, key, number)
        if known is None and path is not None and path.exists():
            try:
                known = self._shards[key, number] = Shard.restored(spec, path)
            except Exception as error:
                raise RuntimeError(
                    f"worker {self._office.name!r} cannot restore {key!r} from the checkpoint {path}: "
                    f"{type(error).__name__}: {error}. It is damaged, or belongs to another optimizer: replace it "
                    f"with an intact checkpoint, or give another folder as checkpoint"
                ) from error
        return known

    # -- sums

    def _work(self, opening: Opening, channel: Channel, number: int) -> None:
        """Sum the gradients for one shard in one generation. This loop runs on a thread of its own."""
        try:
            shard = None if opening.spec.optimizer is None else self._prepare(opening, number)
            for index in itertools.count():
                self._sum(channel, opening, f"{number}/{index}", shard)
        except EpochEnded:
            pass
        except _Unfit as error:
            self._office.refuse(opening, error.name, str(error))
        except RpcError as error:
            if was_lost(error) and error.name is not None:
                self._office.group.suspect(error.name)
            else:
                _logger.info("%s has stopped its sums of %s: %s", self._office.name, opening.key, error)
        except Exception as error:
            self._office.refuse(opening, "", f"host {self._office.name!r} cannot sum: {type(error).__name__}: {error}")

    def _prepare(self, opening: Opening, number: int) -> Shard:
        key = opening.key
        with self._office.changed:
            if self._office.is_over(opening):
                raise EpochEnded(f"generation {opening.generation} of {key!r} is over")
            shard = self._shards.get((key, number))
            is_same = shard is not None and (shard.step, shard.committed) == (opening.step, opening.committed)
            requests = []
            if shard is not None and shard.failure is not None:
                raise shard.failed()
            is_used = shard is not None and (shard.committed != NEVER or shard.restored_from is not None)
            if shard is not None and is_used and not is_same and opening.step >= shard.step:
                # Other hosts may have gone on without this one, and saved a checkpoint. (An earlier step means that all
                # trainers have ended or left, and that others go on with these parameters.)
                del self._shards[key, number]
                with shard.asking:
                    requests, shard.requests = shard.requests, []
            shard = self._find(key, number, opening.spec)
        if shard is None:
            error = RuntimeError(self._lost(key))
            for _, future in requests:
                fail(future, error)
            raise error
        if not is_same:
            with shard.lock:
                shard.go_to(opening.step, opening.committed)
            with shard.asking:
                shard.requests += requests
            shard.tell()
        return shard

    @staticmethod
    def _sum(channel: Channel, opening: Opening, tag: str, shard: Shard | None) -> None:
        """Sum a part of a bucket. The tag consists of the number of the shard and the index of the part in the
        generation."""
        names = opening.contributors
        posted = [channel.post(name, tag) for name in names]
        mean = _mean(names, [list(one.wait(0)) for one in posted])
        if shard is not None:
            _check_shapes(names[0], mean, shard)
            shard.prepare(mean, opening)
            mean = [torch.empty(0)]
        for name in opening.recipients:
            channel.put(name, f"mean {tag}", mean, timeout=0)


class _Unfit(ValueError):
    """The gradients of a trainer do not fit."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


def _mean(names: Sequence[str], values: Sequence[list[Tensor]]) -> list[Tensor]:
    """Compute the mean over trainers in the memory of the first trainer's tensors, adding in the order of ranks."""
    expected = [(tuple(tensor.shape), tensor.dtype) for tensor in values[0]]
    for name, value in zip(names, values, strict=True):
        got = [(tuple(tensor.shape), tensor.dtype) for tensor in value]
        if got != expected:
            index = next((i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), 0)
            ours, theirs = (one[index] if index < len(one) else "nothing" for one in (got, expected))
            raise _Unfit(
                name,
                f"trainer {name!r} pushes gradients of {_shown(ours)} as tensor {index}, and trainer {names[0]!r} "
                f"has pushed {_shown(theirs)}: all trainers of a server must have the same model",
            )
    for total, *others in zip(*values, strict=True):
        _add(total, others, len(names))
    return values[0]


def _check_shapes(name: str, mean: list[Tensor], shard: Shard) -> None:
    got = [tuple(tensor.shape) for tensor in mean]
    if got != shard.shapes:
        raise _Unfit(
            name, f"trainer {name!r} pushes gradients of {got}, and the server's parameters have {shard.shapes}"
        )


def _shown(shape: Any) -> str:
    return f"{list(shape[0])} ({shape[1]})" if isinstance(shape, tuple) else str(shape)


def _add(total: Tensor, others: Sequence[Tensor], divisor: int) -> None:
    """Do ``total += other`` for each of ``others``, then ``/= divisor``, in one pass through memory."""
    is_flat = all(tensor.is_contiguous() for tensor in (total, *others))
    if is_flat and total.device.type == "cpu" and total.numel() > _STEP:
        parts = [total.view(-1).split(_STEP), *(other.view(-1).split(_STEP) for other in others)]
    else:
        parts = [(total,), *((other,) for other in others)]
    for own, *rest in zip(*parts, strict=True):
        for other in rest:
            own.add_(other)
        if divisor > 1:
            own.div_(divisor)


def _path(spec: Spec, key: str, shard: int) -> Path | None:
    if spec.checkpoint is None:
        return None
    return Path(spec.checkpoint) / f"{key.replace('/', '-')}-{shard}.pt"

"""`serve`, and the server that it returns: `Server`."""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import difflib
import inspect
import itertools
import os
import pickle
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch._C._distributed_rpc import WorkerInfo

from torch_ucx_rpc._arguments import (
    check_callable,
    check_count,
    check_path,
    check_str,
    check_type,
    wrong_type,
    wrong_value,
)
from torch_ucx_rpc._threads import Thread
from torch_ucx_rpc._workers.life import Life, PerLife
from torch_ucx_rpc._workers.lost import was_lost
from torch_ucx_rpc.reduction._host import Fill
from torch_ucx_rpc.reduction._messages import NEVER, OptimizerFactory, Spec, hosts_of
from torch_ucx_rpc.reduction._office import Office, TimedOut, fill, office
from torch_ucx_rpc.reduction._plan import difference, spread
from torch_ucx_rpc.reduction._steps import ASKING_S, Contributors, Steps, rpc_deadline

# Name of a server that is spread over its trainers.
_TRAINERS = "trainers"


class Server:
    """The result of `serve`: the server as one trainer sees it. As a context manager, it makes this trainer leave at
    the end.

    Attributes:
        name (str): name of the server.
        hosts (tuple[str, ...]): the workers that share the work; empty if the trainers share it.
        trainers (int): how many trainers the first step waits for; 1 if that is unknown.
    """

    def __init__(self, spec: Spec, models: tuple[int, ...]) -> None:
        self.office: Office = office()
        self.spec = spec
        self.has_left = False
        self.shapes: list[tuple[int, ...]] | None = None
        # The steps of `push_pull`, which do not end with a model.
        self.by_hand: Steps | None = None
        # Models have numbers in the order in which they are made. A trainer that comes later begins with the present
        # models.
        self._numbers: Iterator[int] = itertools.chain(models, itertools.count(max(models, default=-1) + 1))
        self._steps: list[weakref.ref[Steps]] = []

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.spec.hosts

    @property
    def trainers(self) -> int:
        return self.spec.expected if isinstance(self.spec.expected, int) else len(self.spec.expected)

    @property
    def positions(self) -> dict[str, int]:
        """Number of steps that each model of this trainer has done, by the model's name, such as ``"model0"``."""
        return {steps.name: steps.standing.step for steps in self._living() if steps.standing.step != NEVER}

    @property
    def contributors(self) -> Contributors | None:
        """The contributors to the mean of this trainer's last step; None before the first one.

        The value has their workers' names, the index of this trainer among them (None if it came late), and the
        divisor.
        """
        return max(
            (steps.contributors_at for steps in self._living() if steps.contributors_at is not None),
            default=(0.0, None),
        )[1]

    def lost_hosts(self) -> tuple[str, ...]:
        """The names of the hosts that are not in the present epoch: lost, or silent."""
        epoch = self.office.epoch
        members = {one.name for one in epoch.members} if epoch is not None else set()
        return tuple(name for name in self.hosts if name not in members)

    def __repr__(self) -> str:
        return f"<reduction.Server {self.name!r} on {', '.join(self.hosts) or 'its trainers'}>"

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        self.leave()

    def leave(self) -> None:
        """Leave: the other trainers go on without this one. To take part again, call `serve`."""
        if self.has_left:
            return
        self.has_left = True
        for steps in self._living():
            steps.end()
        with self.office.changed:
            self.office.servers.pop(self.name, None)
            self.office.left.add(self.name)
        with contextlib.suppress(RuntimeError, TimedOut):
            self.office.ask(time.monotonic() + ASKING_S, "leave", self.name)

    def begin(self, kind: str, user: object, *, are_equal: bool = False, **options: Any) -> Steps:
        """Begin the steps of a new model. When ``user`` is collected, the others go on without this trainer.

        `Steps.begin` explains ``are_equal``, and `Steps` the other options.
        """
        self.check()
        if self.spec.optimizer is not None:
            raise ValueError(
                f"the hosts of {self!r} update parameters themselves, so only push_pull trains with it: make a server "
                f"without parameters and optimizer"
            )
        number = next(self._numbers)
        steps = self.make_by_hand(f"{kind}{number}", **options)
        try:
            steps.begin(are_equal)
        except BaseException:
            # The other trainers may still begin this model, and this one may try again.
            self._numbers = itertools.chain([number], self._numbers)
            raise
        # The thread that collects garbage may hold any lock.
        leave = Thread(steps.leave, name="torch_ucx_rpc-leave")
        weakref.finalize(user, leave.start).atexit = False
        return steps

    def make_by_hand(self, name: str, **options: Any) -> Steps:
        """Return steps in which this process takes part. The caller must keep them alive. `Steps` explains the
        options."""
        options.setdefault("expected", self.spec.expected)
        steps = Steps(self.name, name, **options)
        self._steps = [one for one in self._steps if one() is not None]
        self._steps.append(weakref.ref(steps))
        return steps

    def _living(self) -> list[Steps]:
        return [steps for one in self._steps if (steps := one()) is not None]

    def check(self) -> None:
        """Raise RuntimeError if this trainer has left."""
        if self.has_left:
            raise RuntimeError(f"this trainer has left {self!r}: call reduction.serve again to take part")

    def check_quorum(self, quorum: int | None) -> None:
        """Raise ValueError for a quorum that is impossible."""
        if quorum is None:
            return
        check_count("quorum", 1, "a number of trainers", quorum)
        most = max(self.trainers, 1 if self.trainers > 1 else len(self.office.life.living()))
        if quorum > most:
            raise ValueError(
                f"quorum={quorum} can never be reached: there are {most} trainers. Give at most {most}, or "
                f"serve(..., trainers=N) if more will join"
            )

    def check_shapes(self, tensors: Sequence[Tensor]) -> None:
        """Raise ValueError for tensors of other shapes than the first ones."""
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if self.shapes is not None and shapes != self.shapes:
            raise ValueError(
                f"gradients of another shape than the server's: {difference(shapes, self.shapes)}. Push the gradients "
                f"of all parameters, in the same order, each time"
            )


class _Servers:
    """Servers that this worker uses, by name."""

    def __init__(self, life: Life) -> None:
        self.lock = threading.Lock()
        self.servers: dict[str, Server] = {}
        # A worker that waits in its shutdown has stopped training.
        life.before_leaving(self._leave)

    def _leave(self) -> None:
        for server in self.servers.values():
            if not server.has_left:
                server.leave()


_servers = PerLife(_Servers)


def serve(
    *hosts: str | WorkerInfo,
    trainers: int | Sequence[str] | None = None,
    parameters: Iterable[Tensor] | None = None,
    optimizer: OptimizerFactory | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 100,
    name: str | None = None,
) -> Server:
    """Return the server that sums the gradients of several trainers. Every trainer calls this with the same arguments.

    Args:
        hosts (str or WorkerInfo): the workers that share the work; they need not call anything. Without hosts, the
            trainers share it.
        trainers (int or list): how many trainers the first step waits for, or the names of their workers (default: in a
            group of fixed size, all workers but the hosts; otherwise 1). Later trainers take part as soon as they come.
        parameters (iterable of Tensors): tensors that the hosts keep and update, for `push_pull` (default: None). Give
            them with ``optimizer``. They begin with the values in ``checkpoint``, or else with those of the first
            trainer. This call copies the present values into the tensors. The hosts keep them as long as RPC runs, also
            for trainers that come when all others have ended or left.
        optimizer (callable): makes an optimizer of a list of parameters, such as ``functools.partial(torch.optim.SGD,
            lr=0.1)`` (default: None). It must be picklable, and its ``step()`` must need no closure.
        checkpoint (str or Path): folder in which the hosts save parameters and optimizer, for a host that takes over or
            restarts, and for a later job (default: None). All hosts must see it. Only with ``optimizer``.
        checkpoint_every (int): updates between two checkpoints (default: 100).
        name (str): distinguishes servers with the same hosts; without a slash (default: the hosts' names).

    Raises ValueError, which lists similar names, for a host that is not a living worker of the job, unless other
    trainers use the server. Raises ValueError also if the first trainer gave other arguments, or if the parameters have
    other shapes than the server's. Raises TypeError or ValueError for parameters or an optimizer that the hosts could
    not use.

    Raises NotRunning if RPC is not running. Raises RuntimeError if the group's decider, or with ``parameters`` a host,
    does not answer within ``rpc_timeout``, if all hosts are lost, or if a host cannot read the checkpoint.

    Example::

        >>> server = reduction.serve("ps0", "ps1")
    """
    _check_options(checkpoint, checkpoint_every, name)
    names = _check_hosts(hosts)
    _check_trainers(trainers)
    listed = None if parameters is None else _list_of(parameters)
    _check_state(optimizer, listed, checkpoint, names)
    known = _servers()
    life = office().life
    absent = _absent(names, life)
    spec = Spec(
        name or ",".join(names) or _TRAINERS,
        names,
        _expected(trainers, names, life),
        None if optimizer is None else pickle.dumps(optimizer),
        None if checkpoint is None else str(checkpoint),
        checkpoint_every,
    )
    with known.lock:
        models = _ask(spec, absent)
        server = known.servers.get(spec.name)
        if server is None or server.has_left:
            server = known.servers[spec.name] = Server(spec, models)
    if listed is not None:
        detached = [parameter.detach() for parameter in listed]
        _give_parameters(server, detached)
        server.shapes = [tuple(tensor.shape) for tensor in detached]
    return server


def _ask(spec: Spec, absent: str | None) -> tuple[int, ...]:
    """Register the server with the decider. Returns the numbers of the models in training.

    ``absent`` is the refusal for an absent host. It applies only if no other worker knows the server.
    """
    own = office()
    try:
        answer = own.ask(rpc_deadline(), "serve", spec, absent is None)
    except TimedOut:
        raise RuntimeError(
            f"{spec.name!r} could not be made within rpc_timeout: the decider of the group does not answer"
        ) from None
    if isinstance(answer, str):
        raise ValueError(answer or absent)
    with own.changed:
        own.servers[spec.name] = spec
        own.left.discard(spec.name)
    models: tuple[int, ...] = answer
    return models


def _give_parameters(server: Server, tensors: list[Tensor]) -> None:
    """Give the hosts the first trainer's parameters, and a later trainer the hosts' values. Raises ValueError if a
    later trainer's parameters have other shapes."""
    shards = len(server.hosts)
    later: list[tuple[Tensor, Tensor]] = []
    of = spread([tensor.numel() for tensor in tensors], shards)
    key = f"{server.name}/parameters"
    for shard in range(shards):
        mine = [tensor for tensor, its in zip(tensors, of, strict=True) if its == shard]
        kept = _fill(server, key, shard, mine)
        shapes = [tuple(tensor.shape) for tensor in mine]
        if kept.shapes != shapes:
            cure = (
                "all trainers must give the same model"
                if kept.restored_from is None
                else f"they are those of the checkpoint {kept.restored_from}. Give the model that was saved there, or "
                f"another folder as checkpoint"
            )
            raise ValueError(
                f"the parameters of this trainer have the shapes {shapes}, and the server's {kept.shapes}: {cure}"
            )
        if kept.values is not None:
            later += zip(mine, kept.values, strict=True)
    for tensor, value in later:
        tensor.copy_(value)


def _fill(server: Server, key: str, number: int, tensors: list[Tensor]) -> Fill:
    own, deadline, names = server.office, rpc_deadline(), ", ".join(server.hosts)
    tried = None
    while True:
        with own.changed:
            opening, epoch = own.opening(key), own.epoch
        assert epoch is not None
        living = {one.name for one in epoch.members}
        hosts = opening.hosts if opening is not None else hosts_of(server.spec, living, {})
        if not hosts and own.are_lost(server.spec):
            raise RuntimeError(f"all hosts of the server {server.name!r} are lost: {names}")
        if not hosts:
            own.call_back(server.spec)
        elif epoch is not tried:
            try:
                kept: Fill = rpc.rpc_sync(hosts[number], fill, args=(key, number, server.spec, tensors))
            except RuntimeError as error:
                if not was_lost(error):
                    raise
                own.group.suspect(hosts[number])
                tried = epoch
            else:
                return kept
        try:
            with own.changed:
                own.sleep(deadline)
        except TimedOut:
            raise RuntimeError(
                f"no host of the server {server.name!r} has taken the parameters within rpc_timeout: {names}"
            ) from None


def _check_hosts(hosts: tuple[Any, ...]) -> tuple[str, ...]:
    for host in hosts:
        check_type("each of hosts", (str, WorkerInfo), "the name of a worker, or its WorkerInfo", host)
    names = tuple(host.name if isinstance(host, WorkerInfo) else host for host in hosts)
    if len(set(names)) != len(names):
        raise ValueError(f"the hosts of a server must be different workers; they are {', '.join(names)}")
    return names


def _absent(names: tuple[str, ...], life: Life) -> str | None:
    """Return a refusal if one of these names belongs to no living worker.

    The refusal does not apply if others know the server: that host has died.
    """
    workers = [info.name for info in life.living()]
    for name in names:
        if name not in workers:
            close = difflib.get_close_matches(name, workers, n=3)
            hint = f"close to it: {', '.join(close)}" if close else f"the workers are {', '.join(workers)}"
            return f"{name!r} cannot be a host of a server: no living worker has that name; {hint}"
    return None


def _check_options(checkpoint: Any, checkpoint_every: Any, name: Any) -> None:
    if checkpoint is not None:
        check_path("checkpoint", checkpoint)
    if name is not None:
        check_str("name", name)
        if "/" in name:
            raise wrong_value("name", "without a slash", name)
    check_count("checkpoint_every", 1, "a number of updates", checkpoint_every)


def _list_of(parameters: Any) -> list[Any]:
    if isinstance(parameters, Tensor) or not isinstance(parameters, Iterable):
        raise wrong_type("parameters", "several tensors, such as model.parameters()", parameters)
    return list(parameters)


def _check_state(optimizer: Any, parameters: list[Any] | None, checkpoint: Any, names: tuple[str, ...]) -> None:
    if optimizer is not None:
        check_callable("optimizer", "a function that makes an optimizer of a list of parameters", optimizer)
    if (optimizer is None) != (parameters is None):
        raise ValueError(
            "a server that updates needs both, parameters=model.parameters() and "
            "optimizer=functools.partial(torch.optim.SGD, lr=...); a server that only averages gradients needs neither"
        )
    if optimizer is None or parameters is None:
        if checkpoint is not None:
            raise ValueError("checkpoint is for a server with an optimizer: without one it has nothing to keep")
        return
    if not names:
        raise ValueError(
            "a server that updates needs hosts, as in reduction.serve('ps0', parameters=..., optimizer=...)"
        )
    try:
        pickle.dumps(optimizer)
    except Exception as error:
        raise TypeError(
            f"the optimizer goes to the server by pickle, which cannot take {optimizer!r} ({error}): give a function "
            f"of a module, or functools.partial(torch.optim.SGD, lr=0.1)"
        ) from error
    _check_parameters(parameters, optimizer)
    if len({*spread([parameter.numel() for parameter in parameters], len(names))}) < len(names):
        raise ValueError(
            f"each host keeps at least one of the parameters, and there are {len(parameters)} for {len(names)} hosts: "
            f"give fewer hosts"
        )


def _check_parameters(parameters: Sequence[Any], optimizer: OptimizerFactory) -> None:
    """Raise for parameters or an optimizer that the hosts could not use."""
    if not parameters:
        raise ValueError("a server that updates needs parameters, and parameters is empty: give model.parameters()")
    for index, parameter in enumerate(parameters):
        if not isinstance(parameter, Tensor):
            raise TypeError(f"parameters are tensors, and number {index} is {parameter!r}: give model.parameters()")
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise TypeError(
                f"an optimizer cannot update parameter {index}, whose dtype is {parameter.dtype}: give it as floating "
                f"point, or leave it out"
            )
    try:
        made: Any = optimizer([torch.nn.Parameter(parameter.detach()) for parameter in parameters])
    except Exception as error:
        raise ValueError(
            f"{optimizer!r} makes no optimizer of these parameters: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"optimizer must make a torch.optim.Optimizer; {optimizer!r} makes {made!r}")
    closure = inspect.signature(type(made).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"a server cannot update by {type(made).__name__}: its step() takes a closure that computes the loss "
            f"again, and the server has only gradients. Use an optimizer whose step() needs no closure, such as "
            f"torch.optim.SGD or Adam"
        )


def _check_trainers(trainers: Any) -> None:
    if trainers is None:
        return
    if isinstance(trainers, bool) or not isinstance(trainers, (int, list, tuple)):
        raise wrong_type("trainers", "how many there are, or a list of names of workers", trainers)
    if isinstance(trainers, int):
        if trainers < 1:
            raise wrong_value("trainers", "at least 1", trainers)
        return
    for trainer in trainers:
        check_str("each of trainers", trainer)
    if not trainers or len(set(trainers)) != len(trainers):
        raise wrong_value("trainers", "one or more different workers", trainers)


def _expected(trainers: int | Sequence[str] | None, names: tuple[str, ...], life: Life) -> int | tuple[str, ...]:
    """Return the number or the names of the trainers that the first step waits for."""
    workers = [info.name for info in life.agent.get_worker_infos()]
    if trainers is None:
        return (tuple(name for name in workers if name not in names) or (life.info.name,)) if life.is_static else 1
    if isinstance(trainers, int):
        return trainers
    for trainer in trainers if life.is_static else ():
        if trainer not in workers:
            raise ValueError(
                f"{trainer!r} cannot be a trainer: no worker has that name; the workers are {', '.join(workers)}"
            )
    return tuple(trainers)

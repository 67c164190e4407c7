"""`serve`: the server that all trainers agree on, made or joined."""

# mypy: allow-untyped-calls

from __future__ import annotations

import difflib
import inspect
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_rpc import WorkerInfo

from torch_ucx_rpc._arguments import (
    check_callable,
    check_count,
    check_flag,
    check_path,
    check_str,
    check_type,
    wrong_type,
    wrong_value,
)
from torch_ucx_rpc._workers.life import Life
from torch_ucx_rpc._workers.lost import was_lost
from torch_ucx_rpc.reduction import _hosts
from torch_ucx_rpc.reduction._meeting import Found, Hosts, is_trained_by_others, trainers_as_hosts
from torch_ucx_rpc.reduction._messages import Kept, OptimizerFactory, Spec
from torch_ucx_rpc.reduction._server import Server
from torch_ucx_rpc.reduction._servers import servers

# The name of a server that is spread over its trainers.
_TRAINERS = "trainers"


def serve(
    *hosts: str | WorkerInfo,
    trainers: int | Sequence[str] | None = None,
    parameters: Iterable[Tensor] | None = None,
    optimizer: OptimizerFactory | None = None,
    asynchronous: bool = False,
    replica: bool = False,
    checkpoint: str | None = None,
    checkpoint_every: int = 100,
    name: str | None = None,
) -> Server:
    """The server that sums the gradients of several trainers; every trainer calls this alike.

    The first one makes the server on the hosts, the others join it.

    Args:
        hosts: names of the workers that share the work; they need not call anything. Without any, the trainers share
            it themselves.
        trainers: how many trainers the first step waits for, or the names of their workers (default: in a group of
            fixed size, all workers but the hosts; otherwise 1). Later ones are waited for as soon as they push.
        parameters: tensors that the server keeps and updates, for `push_pull`; the first trainer's are taken.
        optimizer: makes an optimizer of a list of parameters, such as ``functools.partial(torch.optim.SGD, lr=0.1)``.
            It must be picklable.
        asynchronous (bool): apply each trainer's gradients when they come, and wait for nobody. (default: False)
        replica (bool): keep a copy of parameters and optimizer on the next host, which goes on with it if one is lost.
        checkpoint (str): folder in which the hosts save parameters and optimizer, for one that takes over or is started
            anew; all hosts must see it.
        checkpoint_every (int): updates between two of these. (default: 100)
        name (str): tells apart servers with the same hosts.

    Raises ValueError for a host that is no worker of the job, naming those that come close, and for arguments other
    than the first trainer's; RuntimeError where RPC is not running or all hosts are lost.

    Example::

        >>> server = reduction.serve("ps0", "ps1")
    """
    _check_options(asynchronous, replica, checkpoint, checkpoint_every, name)
    _check_types(hosts, trainers, optimizer)
    parameters = None if parameters is None else _list_of(parameters)
    known = servers()
    life = known.life
    names = tuple(host.name if isinstance(host, WorkerInfo) else host for host in hosts)
    absent = _check_hosts(names, life)
    _check_state(optimizer, parameters, asynchronous, replica, checkpoint, names)
    expected, expected_names = _expected(trainers, names, life)
    server_name = name or ",".join(names) or _TRAINERS
    with known.serving(server_name):
        found = Found(Hosts(names, len(names), 0))
        if not names:
            found = trainers_as_hosts(server_name, expected, expected_names, life)
        spec = Spec(
            server_name,
            found.hosts.names,
            expected,
            expected_names,
            optimizer,
            asynchronous,
            replica,
            None if checkpoint is None else str(checkpoint),
            checkpoint_every,
            not names,
            found.hosts.shards,
            found.hosts.generation,
            trainers if trainers is None or isinstance(trainers, int) else tuple(trainers),
        )
        server = known.get(server_name)
        is_new = server is None or server.has_left
        if server is None or server.has_left:
            server = Server(spec, life, server, found.lost)
        if absent and not server.ring.is_known():
            raise ValueError(absent)
        server.ring.open_all(spec)
        if not server.ring.living():
            server.ring.find(0)
        known.keep(server)
        if is_new and trainers is None and expected_names and life.info.name in names:
            # A host that trains, too.
            server.ring.call_all(_hosts.expect, server.spec.key, 0, (life.info.name,))
        if is_new and (
            any(server.ring.call_all(_hosts.is_newcomer, server.spec.key, server.trainer))
            # The hosts may have been started anew, and know of no step.
            or (not life.is_static and is_trained_by_others(server_name, life))
        ):
            server.join()
        elif is_new:
            server.first_round = 0
        if parameters is not None:
            _give_parameters(server, [parameter.detach() for parameter in parameters])
        return server


def _check_hosts(names: tuple[Any, ...], life: Life) -> str | None:
    """A refusal where a name is no living worker's, unless another of the hosts knows the server: then it has died."""
    workers = [info.name for info in life.living()]
    refusal = None
    for name in names:
        if name not in workers:
            close = difflib.get_close_matches(name, workers, n=3)
            hint = f"close to it: {', '.join(close)}" if close else f"the workers are {', '.join(workers)}"
            refusal = f"{name!r} cannot be a host of a server: no living worker has that name; {hint}"
    if len(set(names)) != len(names):
        raise ValueError(f"the hosts of a server must be different workers; they are {', '.join(names)}")
    return refusal


def _check_options(asynchronous: Any, replica: Any, checkpoint: Any, checkpoint_every: Any, name: Any) -> None:
    check_flag("asynchronous", asynchronous)
    check_flag("replica", replica)
    if checkpoint is not None:
        check_path("checkpoint", checkpoint)
    if name is not None:
        check_str("name", name)
    check_count("checkpoint_every", 1, "a number of updates", checkpoint_every)


def _check_types(hosts: tuple[Any, ...], trainers: Any, optimizer: Any) -> None:
    for host in hosts:
        check_type("each of hosts", (str, WorkerInfo), "the name of a worker, or its WorkerInfo", host)
    if trainers is not None and (isinstance(trainers, bool) or not isinstance(trainers, (int, list, tuple))):
        raise wrong_type("trainers", "how many there are, or a list of names of workers", trainers)
    if trainers == []:
        raise wrong_value("trainers", "different workers, one at least", trainers)
    if optimizer is not None:
        check_callable("optimizer", "a function that makes an optimizer of a list of parameters", optimizer)


def _list_of(parameters: Any) -> list[Any]:
    if isinstance(parameters, Tensor) or not isinstance(parameters, Iterable):
        raise wrong_type("parameters", "several tensors, as model.parameters()", parameters)
    return list(parameters)


def _check_state(
    optimizer: Any,
    parameters: list[Any] | None,
    asynchronous: bool,
    replica: bool,
    checkpoint: Any,
    names: tuple[str, ...],
) -> None:
    if (optimizer is None) != (parameters is None):
        raise ValueError(
            "a server that updates needs both, parameters=model.parameters() and "
            "optimizer=functools.partial(torch.optim.SGD, lr=...); one that takes means of gradients needs neither"
        )
    if optimizer is None or parameters is None:
        for what, is_set in (("asynchronous", asynchronous), ("replica", replica), ("checkpoint", checkpoint)):
            if is_set:
                raise ValueError(
                    f"{what} is for a server with an optimizer: without one it has nothing to keep, and a step needs "
                    f"all trainers, or a quorum of them"
                )
        return
    try:
        pickle.dumps(optimizer)
    except Exception as error:
        raise TypeError(
            f"the optimizer goes to the server by pickle, which cannot take {optimizer!r} ({error}): give a function "
            f"of a module, or functools.partial(torch.optim.SGD, lr=0.1)"
        ) from error
    _check_parameters(parameters, optimizer)
    if replica and len(names) == 1:
        raise ValueError("replica=True needs a second host, as in reduction.serve('ps0', 'ps1', replica=True)")


def _check_parameters(parameters: Sequence[Any], optimizer: OptimizerFactory) -> None:
    """Refuse here what the hosts could not use."""
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
            f"a server cannot update by {type(made).__name__}: its step() takes a closure that computes the loss anew, "
            f"and the server has gradients alone. Optimizers whose step() needs nothing can be used, such as "
            f"torch.optim.SGD or Adam"
        )


def _expected(trainers: Any, names: tuple[str, ...], life: Life) -> tuple[int, tuple[str, ...]]:
    """How many trainers the first step waits for, and which, where that is known."""
    if trainers is None:
        if not life.is_static:
            return 1, ()
        others = tuple(info.name for info in life.agent.get_worker_infos() if info.name not in names)
        others = others or (life.info.name,)
        return len(others), others
    if isinstance(trainers, int) and not isinstance(trainers, bool):
        if trainers < 1:
            raise wrong_value("trainers", "1 at least", trainers)
        return trainers, ()
    for trainer in trainers:
        check_str("each of trainers", trainer)
    if not trainers or len(set(trainers)) != len(trainers):
        raise wrong_value("trainers", "different workers, one at least", trainers)
    if life.is_static:
        workers = [info.name for info in life.agent.get_worker_infos()]
        for trainer in trainers:
            if trainer not in workers:
                raise ValueError(
                    f"{trainer!r} cannot be a trainer: no worker has that name; the workers are {', '.join(workers)}"
                )
    return len(trainers), tuple(trainers)


def _give_parameters(server: Server, parameters: list[Tensor]) -> None:
    """Have the hosts keep parameters: the first trainer's. ValueError where the others have had other shapes."""
    shards = server.assign(parameters)
    for shard in range(server.spec.shards):
        mine = [tensor for tensor, of in zip(parameters, shards, strict=True) if of == shard]
        host = server.ring.host_of(shard) if mine else None
        while mine and not (host is not None and _give_to(server, host, f"parameters/{shard}", mine)):
            host = server.ring.find(shard)
    server.keep_shapes(parameters)


def _give_to(server: Server, host: str, piece: str, mine: list[Tensor]) -> bool:
    """Have one host keep parameters; False if it is lost before it has them."""
    key = server.spec.key
    try:
        if server.ring.call(host, _hosts.fill, key, piece, server.trainer) == "give":
            server.ring.call(host, _hosts.take_parameters, key, piece, mine)
        kept: Kept = server.ring.call(host, _hosts.kept, key, piece)
    except RuntimeError as error:
        if not was_lost(error):
            raise
        server.ring.lose(host)
        return False
    expected = [tuple(tensor.shape) for tensor in mine]
    if kept.shapes != expected:
        cure = (
            "all trainers must give the same model"
            if kept.restored_from is None
            else f"they are those of the checkpoint {kept.restored_from}. Give the model that was saved there, or "
            f"another folder as checkpoint"
        )
        raise ValueError(
            f"the parameters of this trainer have the shapes {expected}, and the server's {kept.shapes} (those on "
            f"{host!r}): {cure}"
        )
    server.origins[piece] = kept.origin
    return True

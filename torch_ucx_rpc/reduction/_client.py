"""The trainers' side of reduction: `serve`, the `Server` that it returns, and `push_pull`."""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import contextlib
import difflib
import itertools
import logging
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch._C._distributed_rpc import WorkerInfo, get_rpc_timeout
from torch.futures import Future

from torch_ucx_rpc._observe.lost import timed_out, was_lost
from torch_ucx_rpc.reduction import _host
from torch_ucx_rpc.reduction._host import UNKNOWN, Answer, OptimizerFactory, Push, Spec
from torch_ucx_rpc.reduction._site import Site, site

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# The key of a server that is spread over its trainers.
_TRAINERS = "trainers"
# Between two looks for a host that was started anew; and how long they go on where calls have no timeout.
_LOOK_AGAIN_S = 0.05
_PATIENCE_S = 60.0


class Server:
    """What `serve` returns: the server as one trainer sees it.

    Attributes:
        hosts (tuple[str, ...]): the workers that share it.
        trainers (int): how many trainers the first step waits for; 1 where that is not known.
    """

    def __init__(self, spec: Spec, known: Site) -> None:
        self.spec = spec
        self.trainer = known.trainer
        self._site = known
        self._lock = threading.Lock()
        self._lost: set[str] = set()
        # By piece: the round of the next push, and how many there have been. Without a round yet, that of the others.
        self.positions: dict[str, int] = {}
        self._numbers: dict[str, Any] = {}
        self.first_round: int | None = 0
        # By piece, the last result: for the others, where the host is lost that made it.
        self.kept: dict[str, tuple[int, list[Tensor]]] = {}
        self._names = itertools.count()
        self._shapes: list[tuple[int, ...]] | None = None
        self._assignment: list[int] = []
        self.has_left = False
        # Models that are trained by way of it; the hosts are told when there is none any more.
        self._users = 0
        self._using = threading.Lock()

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.spec.hosts

    @property
    def trainers(self) -> int:
        return self.spec.expected

    def __repr__(self) -> str:
        return f"<reduction.Server {self.spec.key!r} on {', '.join(self.hosts)}>"

    def leave(self) -> None:
        """Take part no more: the other trainers do not wait for this one from now on."""
        self.has_left = True
        for model in list(self._site.models.values()):
            model.on_leave(self)
        for name in self.hosts:
            try:
                self._call(name, _host._leave, self.spec.key, self.trainer)
            except RuntimeError as error:
                if not was_lost(error):
                    raise

    def name_for(self, kind: str, user: object) -> str:
        """A prefix for the pieces of a model; trainers that ask in the same order get the same.

        When the last user is gone, this trainer is not waited for any more, until it pushes again.
        """
        with self._using:
            self._users += 1
        # Whatever thread collects garbage may hold any lock.
        weakref.finalize(user, self._begin_to_let_go).atexit = False
        return f"{kind}{next(self._names)}"

    def _begin_to_let_go(self) -> None:
        threading.Thread(target=self._let_go, name="torch_ucx_rpc-leave", daemon=True).start()

    def _let_go(self) -> None:
        with self._using:
            self._users -= 1
            if self._users or self.has_left:
                return
            # After the shutdown of RPC nobody waits.
            with contextlib.suppress(RuntimeError):
                self.call_all(_host._leave, self.spec.key, self.trainer)

    def check_quorum(self, quorum: int | None) -> None:
        """ValueError for a quorum that there can never be."""
        if quorum is None:
            return
        if not isinstance(quorum, int) or isinstance(quorum, bool):
            raise TypeError(f"quorum must be an int; {quorum!r} is none")
        if quorum < 1:
            raise ValueError(f"quorum must be 1 at least; it cannot be {quorum}: without a quorum all trainers count")
        most = max(self.trainers, 1 if self.trainers > 1 else len(self._site.living()))
        if quorum > most:
            raise ValueError(
                f"quorum={quorum} can never be reached: there are {most} trainers, of which that many would have to "
                f"come for each step; give at most {most}, or serve(..., trainers=N) if more will join"
            )

    def on_gone(self, name: str) -> None:
        if name in self.hosts:
            with self._lock:
                self._lost.add(name)

    # -- pushing

    def push(self, piece: str, shard: int, tensors: list[Tensor], quorum: int | None) -> Future[Answer]:
        """Push a piece to the host of a shard: the answer, whose refusal is an exception of the future instead."""
        if self.has_left:
            raise RuntimeError(f"this trainer has left {self!r}: call reduction.serve again to take part")
        number = self._numbers.get(piece, 0)
        self._numbers[piece] = number + 1
        push = Push(
            self.spec.key,
            piece,
            self.trainer,
            self.positions.get(piece, self.first_round),
            quorum,
            number,
            False,
            tensors,
        )
        return _Pending(self, shard, push).future

    def host_of(self, shard: int) -> str | None:
        """The host of a shard: its own, or the next one that is not lost."""
        hosts = self.hosts
        with self._lock:
            for name in (*hosts[shard:], *hosts[:shard]):
                if name not in self._lost:
                    return name
        return None

    def lose(self, name: str) -> None:
        with self._lock:
            self._lost.add(name)

    def find_host(self, shard: int) -> str:
        """A host for a shard whose own is lost, ready for pushes; waits for one to come back where none is left."""
        patience = get_rpc_timeout() or _PATIENCE_S
        deadline = time.monotonic() + patience
        while True:
            name = self.host_of(shard)
            if name is None and not self._site.is_static:
                living = {info.name for info in self._site.living()}
                with self._lock:
                    # Others of the same names, by now.
                    self._lost.difference_update(living)
                name = self.host_of(shard)
            if name is not None:
                try:
                    if refusal := self._call(name, _host._open, self.spec):
                        raise ValueError(refusal)
                    return name
                except RuntimeError as error:
                    if not was_lost(error):
                        raise
                    self.lose(name)
                    continue
            if self._site.is_static or time.monotonic() > deadline:
                raise RuntimeError(
                    f"all hosts of the server {self.spec.key!r} are lost: {', '.join(self.hosts)}. More hosts, as in "
                    f"reduction.serve('ps0', 'ps1'), take over from each other"
                )
            time.sleep(_LOOK_AGAIN_S)

    def accept(self, push: Push, answer: Answer) -> None:
        """Note what an answer says of the rounds to come."""
        self.positions[push.piece] = answer.next_round
        if len(self.hosts) > 1 and self.spec.optimizer is None and answer.rounds == 1 and answer.tensors:
            self.kept[push.piece] = (answer.next_round - 1, answer.tensors)

    def _call(self, name: str, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function of the host, here or there."""
        if name == self.trainer.name:
            answer: Any = function(*arguments)
            return answer.wait() if isinstance(answer, torch.futures.Future) else answer  # type: ignore[no-any-return]
        result: _T = rpc.rpc_sync(name, function, args=arguments)
        return result

    def call_all(self, function: Callable[..., _T], *arguments: Any) -> None:
        """Call a function of every host, but those that are lost."""
        for name in self.hosts:
            if name not in self._lost:
                try:
                    self._call(name, function, *arguments)
                except RuntimeError as error:
                    if not was_lost(error):
                        raise
                    self.lose(name)

    # -- tensors as they are, for push_pull

    def assign(self, tensors: Sequence[Tensor]) -> list[int]:
        """The shard of each tensor: the largest first, each to the shard with the least so far."""
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if self._shapes is None:
            self._shapes = shapes
            self._assignment = spread([tensor.numel() for tensor in tensors], len(self.hosts))
        elif shapes != self._shapes:
            index = next(
                (index for index, pair in enumerate(zip(shapes, self._shapes, strict=False)) if pair[0] != pair[1]),
                min(len(shapes), len(self._shapes)),
            )
            raise ValueError(
                f"gradients of another shape than the server's: there are {len(shapes)} tensors, of which number "
                f"{index} is {list(shapes[index]) if index < len(shapes) else 'missing'}; the server has "
                f"{len(self._shapes)}, and that one "
                f"{'is ' + str(list(self._shapes[index])) if index < len(self._shapes) else 'not'}. "
                f"Push the gradients of all parameters, in the same order, each time"
            )
        return self._assignment


class _Pending:
    """A push until its answer is here, through the ends of hosts."""

    def __init__(self, server: Server, shard: int, push: Push) -> None:
        self._server = server
        self._shard = shard
        self._push = push
        self.future: Future[Any] = Future(devices=server._site.devices)
        name = server.host_of(shard)
        if name is None:
            self._recover()
        else:
            self._send(name)

    def _send(self, name: str) -> None:
        try:
            if name == self._server.trainer.name:
                host = self._server._site.hosts[self._push.key]
                call = host.push(self._push, False)
            else:
                call = rpc.rpc_async(name, _host._push, args=(self._push,))
        except RuntimeError as error:
            self._fail(name, error)
            return
        call.add_done_callback(lambda done: self._on_done(name, done))

    def _on_done(self, name: str, done: Future[Answer]) -> None:
        try:
            answer = done.value()
        except RuntimeError as error:
            self._fail(name, error)
            return
        if answer.refusal == UNKNOWN:
            self._recover()
        elif answer.refusal is not None:
            self.future.set_exception(ValueError(answer.refusal))
        else:
            self._server.accept(self._push, answer)
            self.future.set_result(answer)

    def _fail(self, name: str, error: RuntimeError) -> None:
        if was_lost(error):
            _logger.info("%s: %s was lost with a push of %s", self._server.trainer, name, self._push.piece)
            self._server.lose(name)
            self._recover()
        elif timed_out(error):
            threading.Thread(target=self._explain, args=(name, error), daemon=True).start()
        else:
            self.future.set_exception(error)

    def _recover(self) -> None:
        # Not here: this may be a thread of the agent, and it may take a while.
        threading.Thread(target=self._push_again, daemon=True).start()

    def _push_again(self) -> None:
        try:
            name = self._server.find_host(self._shard)
        except Exception as error:
            self.future.set_exception(error)
            return
        self._push = self._push._replace(is_repeated=True)
        self._send(name)

    def _explain(self, name: str, error: RuntimeError) -> None:
        try:
            missing = self._server._call(name, _host._missing, self._push.key, self._push.piece)
        except RuntimeError:
            missing = []
        waited = (
            f"it waited for {', '.join(missing)}. Where some need not come, serve(..., trainers=N) says how many do, "
            f"and quorum=N lets a step go on without the slow"
            if missing
            else "no trainer is missing"
        )
        self.future.set_exception(RuntimeError(f"a step of {self._server!r} was not completed: {waited} ({error})"))


def tensors_of(push: Future[Answer]) -> list[Tensor]:
    """The result of a push that is done."""
    tensors = push.value().tensors
    assert tensors is not None
    return tensors


def spread(sizes: Sequence[int], shards: int) -> list[int]:
    """The shard of each of these, so that all shards get about as much; the same in every process."""
    loads = [0] * shards
    assignment = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        shard = loads.index(min(loads))
        assignment[index] = shard
        loads[shard] += sizes[index]
    return assignment


# ------------------------------------------------------------------------------------------------------------- serve


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
    known = site()
    names = tuple(host.name if isinstance(host, WorkerInfo) else host for host in hosts)
    _check_hosts(names, known)
    _check_state(optimizer, parameters, asynchronous, replica, checkpoint, checkpoint_every, names)
    expected, expected_names = _expected(trainers, names, known)
    hosts_given = names
    key = name or ",".join(names) or _TRAINERS
    if not names:
        names = _trainers_as_hosts(key, expected, expected_names, known)
    spec = Spec(
        key,
        names,
        expected,
        expected_names,
        optimizer,
        asynchronous,
        replica,
        None if checkpoint is None else str(checkpoint),
        checkpoint_every,
    )
    with known.lock:
        server = known.servers.get(key)
        is_new = server is None or server.has_left
        if is_new:
            server = Server(spec, known)
    assert server is not None
    for host in names:
        try:
            refusal = server._call(host, _host._open, spec)
        except RuntimeError as error:
            if not was_lost(error):
                raise
            server.lose(host)
            if server.host_of(0) is None:
                raise RuntimeError(f"all hosts of the server {key!r} are lost: {', '.join(names)} ({error})") from error
            continue
        if refusal:
            raise ValueError(refusal)
    known.servers[key] = server
    if is_new and trainers is None and expected_names and known.trainer.name in hosts_given:
        # A host that trains, too.
        server.call_all(_host._expect, key, 0, (known.trainer.name,))
    if is_new and any(_has_begun(server, host) for host in names if host not in server._lost):
        # It takes part from the rounds on that are open then.
        server.first_round = None
    if parameters is not None:
        _give_parameters(server, [parameter.detach() for parameter in parameters])
    return server


def _has_begun(server: Server, host: str) -> bool:
    return server._call(host, _begun, server.spec.key)


def _begun(key: str) -> bool:
    return _host._host(key).has_begun


def _check_hosts(names: tuple[Any, ...], known: Site) -> None:
    workers = [info.name for info in known.living()]
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"a host is given by its worker's name; {name!r} is none")
        if name not in workers:
            close = difflib.get_close_matches(name, workers, n=3)
            hint = f"close to it: {', '.join(close)}" if close else f"the workers are {', '.join(workers)}"
            raise ValueError(f"{name!r} cannot be a host of a server: no living worker has that name; {hint}")
    if len(set(names)) != len(names):
        raise ValueError(f"the hosts of a server must be different workers; they are {', '.join(names)}")


def _check_state(
    optimizer: Any,
    parameters: Any,
    asynchronous: bool,
    replica: bool,
    checkpoint: Any,
    checkpoint_every: Any,
    names: tuple[str, ...],
) -> None:
    if (optimizer is None) != (parameters is None):
        raise ValueError(
            "a server that updates needs both, parameters=model.parameters() and "
            "optimizer=functools.partial(torch.optim.SGD, lr=...); one that takes means of gradients needs neither"
        )
    if optimizer is None:
        for what, is_set in (("asynchronous", asynchronous), ("replica", replica), ("checkpoint", checkpoint)):
            if is_set:
                raise ValueError(
                    f"{what} is for a server with an optimizer: without one it has nothing to keep, and a step needs "
                    f"all trainers, or a quorum of them"
                )
        return
    if not callable(optimizer):
        raise TypeError(f"optimizer must make an optimizer of a list of parameters; {optimizer!r} cannot be called")
    try:
        pickle.dumps(optimizer)
    except Exception as error:
        raise TypeError(
            f"the optimizer goes to the server by pickle, which cannot take {optimizer!r} ({error}): give a function "
            f"of a module, or functools.partial(torch.optim.SGD, lr=0.1)"
        ) from error
    if replica and len(names) == 1:
        raise ValueError("replica=True needs a second host, as in reduction.serve('ps0', 'ps1', replica=True)")
    if not isinstance(checkpoint_every, int) or checkpoint_every < 1:
        raise ValueError(f"checkpoint_every must be a number of updates, 1 at least; it cannot be {checkpoint_every!r}")


def _expected(trainers: Any, names: tuple[str, ...], known: Site) -> tuple[int, tuple[str, ...]]:
    if trainers is None:
        if not known.is_static:
            return 1, ()
        others = tuple(info.name for info in known.agent.get_worker_infos() if info.name not in names)
        others = others or (known.trainer.name,)
        return len(others), others
    if isinstance(trainers, int) and not isinstance(trainers, bool):
        if trainers < 1:
            raise ValueError(f"trainers must be 1 at least; it cannot be {trainers}")
        return trainers, ()
    if isinstance(trainers, str) or not all(isinstance(trainer, str) for trainer in trainers):
        raise TypeError(f"trainers is how many there are, or a list of names of workers; {trainers!r} is neither")
    return len(trainers), tuple(trainers)


def _trainers_as_hosts(key: str, expected: int, expected_names: tuple[str, ...], known: Site) -> tuple[str, ...]:
    if (server := known.servers.get(key)) is not None:
        return server.hosts
    # One that trains already knows.
    others = [info for info in known.living() if info.name != known.trainer.name]
    for answer in [rpc.rpc_async(info, _hosts_of, args=(key,)) for info in others]:
        try:
            if hosts := answer.wait():
                return tuple(hosts)
        except RuntimeError as error:
            if not was_lost(error):
                raise
    while True:
        leader = known.living()[0]
        try:
            if leader.name == known.trainer.name:
                return known.meet(key, known.trainer, expected, expected_names).wait()
            return tuple(rpc.rpc_sync(leader, _meet, args=(key, known.trainer, expected, expected_names)))
        except RuntimeError as error:
            if timed_out(error):
                raise RuntimeError(
                    f"not all trainers have called reduction.serve(): it waits for {expected}"
                    f"{' (' + ', '.join(expected_names) + ')' if expected_names else ''}. Where fewer train, "
                    f"serve(trainers=N) says how many ({error})"
                ) from error
            if not was_lost(error):
                raise


def _hosts_of(key: str) -> tuple[str, ...] | None:
    server = site().servers.get(key)
    return None if server is None else server.hosts


@rpc.functions.async_execution
def _meet(key: str, trainer: Any, expected: int, names: tuple[str, ...]) -> Future[tuple[str, ...]]:
    return site().meet(key, trainer, expected, names)


def _give_parameters(server: Server, parameters: list[Tensor]) -> None:
    shards = server.assign(parameters)
    for shard in range(len(server.hosts)):
        mine = [tensor for tensor, of in zip(parameters, shards, strict=True) if of == shard]
        host = server.host_of(shard)
        if not mine or host is None:
            continue
        piece = f"parameters/{shard}"
        if server._call(host, _host._fill, server.spec.key, piece, server.trainer) == "give":
            server._call(host, _host._take_parameters, server.spec.key, piece, mine)
        shapes = server._call(host, _host._describe, server.spec.key, piece)
        expected = [tuple(tensor.shape) for tensor in mine]
        if shapes != expected:
            raise ValueError(
                f"the parameters of this trainer have the shapes {expected}, and the server's {shapes} (those on "
                f"{host!r}): all trainers must give the same model"
            )


# --------------------------------------------------------------------------------------------------------- push_pull


@overload
def push_pull(server: Server, gradients: Tensor, *, quorum: int | None = None) -> Tensor: ...
@overload
def push_pull(server: Server, gradients: Iterable[Tensor], *, quorum: int | None = None) -> list[Tensor]: ...
def push_pull(server: Server, gradients: Any, *, quorum: int | None = None) -> Any:
    """Push gradients and get back what the server makes of them, as tensors of their own.

    Without an optimizer on the server that is the mean of all trainers' gradients, with one it is the new parameters.
    An asynchronous server answers at once, a synchronous one when all trainers have pushed.

    Args:
        gradients: of all parameters, in the same order each time; or one tensor.
        quorum (int): a step is complete with that many trainers, and the mean is theirs; the gradients of those that
            come later are dropped. (default: all that are there)

    Raises ValueError for gradients of another shape than the server's, and for a quorum above the number of trainers;
    RuntimeError if a step is not completed within ``rpc_timeout``, saying who was missing, or all hosts are lost.

    Example::

        >>> means = reduction.push_pull(server, [p.grad for p in model.parameters()])
    """
    return push_pull_async(server, gradients, quorum=quorum).wait()


def push_pull_async(server: Server, gradients: Any, *, quorum: int | None = None) -> Future[Any]:
    """The same without waiting: a future. The gradients must not be written to before it is done."""
    if not isinstance(server, Server):
        raise TypeError(f"push_pull takes what reduction.serve returns; {server!r} is something else")
    is_one = isinstance(gradients, Tensor)
    tensors = [gradients] if is_one else list(gradients)
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"gradients are tensors, and number {index} is {tensor!r}; give zeros where a parameter has none"
            )
    server.check_quorum(quorum)
    shards = server.assign(tensors)
    pushes = []
    for shard in sorted(set(shards)):
        mine = [tensor.detach() for tensor, of in zip(tensors, shards, strict=True) if of == shard]
        piece = f"{'tensors' if server.spec.optimizer is None else 'parameters'}/{shard}"
        pushes.append((shard, server.push(piece, shard, mine, quorum)))

    def join() -> Any:
        results: list[Tensor | None] = [None] * len(tensors)
        for shard, push in pushes:
            indices = [index for index, of in enumerate(shards) if of == shard]
            for index, tensor in zip(indices, tensors_of(push), strict=True):
                # Others may be sent it still, or keep it.
                results[index] = tensor.clone()
        return results[0] if is_one else results

    return _when_all_are_done([push for _, push in pushes], join, server._site.devices)


def _when_all_are_done(futures: list[Future[Answer]], result: Callable[[], Any], devices: Any) -> Future[Any]:
    """A future of what ``result`` returns or raises. (Of what is raised in `then`, torch makes a RuntimeError.)"""
    joined: Future[Any] = Future(devices=devices)
    lock = threading.Lock()
    open_ = len(futures)

    def count(_: Any) -> None:
        nonlocal open_
        with lock:
            open_ -= 1
            if open_:
                return
        try:
            value = result()
        except Exception as error:
            joined.set_exception(error)
        else:
            joined.set_result(value)

    for future in futures:
        future.add_done_callback(count)
    return joined

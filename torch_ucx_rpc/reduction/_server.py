"""A server as one trainer sees it: `Server`, which `serve` returns."""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import itertools
import string
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from torch_ucx_rpc._arguments import got, wrong_type
from torch_ucx_rpc._workers.life import Life
from torch_ucx_rpc._workers.lost import was_lost
from torch_ucx_rpc.reduction import _hosts
from torch_ucx_rpc.reduction._messages import Admission, Answer, Push, Spec, Trainer
from torch_ucx_rpc.reduction._plan import difference, spread
from torch_ucx_rpc.reduction._results import results
from torch_ucx_rpc.reduction._ring import HostRing


class User(Protocol):
    """A model that is trained by way of a server."""

    @property
    def has_joined(self) -> bool:
        """Whether this trainer has the model's state."""

    def on_leave(self) -> None:
        """This trainer takes part no more."""

    def on_other_host(self, host: str) -> None:
        """A host takes over from one that was lost."""


class Server:
    """What `serve` returns: the server as one trainer sees it.

    The open pieces and the users have a lock each; the positions are written by the pushes, one piece at a time.

    Attributes:
        name (str): tells it from others.
        hosts (tuple[str, ...]): the workers that share it.
        trainers (int): how many trainers the first step waits for; 1 where that is not known.
    """

    def __init__(self, spec: Spec, life: Life, former: Server | None = None, lost: Iterable[str] = ()) -> None:
        """``former``: by which this worker has left the server before. ``lost``: hosts that others do not use."""
        self.life = life
        self.trainer = Trainer.of(life)
        self.ring = HostRing(spec, life, self.trainer, lost, self._on_other_host)
        self._lock = threading.Lock()
        # By piece: the round of the next push, and how many there have been. Without a round yet, that of the others.
        self.positions: dict[str, int] = {}
        # A host takes a number only once.
        self._numbers: dict[str, Iterator[int]] = {} if former is None else former._numbers
        # Pieces with a push that is not answered; a round takes one of each trainer.
        self._open_pieces: set[str] = set()
        # None for one that comes later, and until serve has found out whether it does.
        self.first_round: int | None = None
        # Models have numbers, in the order in which they are made.
        self._numbers_of_models: Iterator[int] = itertools.count()
        # Of the parameters, by piece.
        self.origins: dict[str, int] = {}
        self._shapes: list[tuple[int, ...]] | None = None
        self.has_left = False
        # Some shards have completed the last step of `push_pull`, and others have not.
        self.is_pushed_in_part = False
        # Models that are trained by way of it; the hosts are told when there is none any more.
        self._users: weakref.WeakSet[User] = weakref.WeakSet()
        self._open_users = 0
        self._let_go_last: str | None = None
        self._using = threading.Lock()
        # Other trainers do not wait for this one until its next push.
        self._is_idle = False

    @property
    def spec(self) -> Spec:
        """What `serve` was told, and the hosts that it has now."""
        return self.ring.spec

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def takes_part(self) -> bool:
        """Whether this trainer has neither left nor let go of its models."""
        return not (self.has_left or self._is_idle)

    @property
    def has_begun(self) -> bool:
        """Whether this trainer has done a step."""
        return bool(self.positions)

    @property
    def has_joined(self) -> bool:
        """Whether steps wait for this trainer: it does not come later than others, and wait for their state."""
        is_in_rounds = self.has_begun or self.first_round is not None
        return is_in_rounds and all(user.has_joined for user in list(self._users))

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.spec.hosts

    @property
    def trainers(self) -> int:
        return self.spec.expected

    def __repr__(self) -> str:
        return f"<reduction.Server {self.name!r} on {', '.join(self.hosts)}>"

    # -- its users on this worker

    def take_part(self) -> None:
        """Have the hosts wait for this trainer from now on, before its first push."""
        self._is_idle = False
        self.ring.call_all(_hosts.admit, self.spec.key, Admission(self.trainer, self.trainer))

    def leave(self) -> None:
        """Take part no more: the other trainers do not wait for this one from now on."""
        self.before_leaving()
        failure: RuntimeError | None = None
        for name in self.hosts:
            try:
                self.ring.call(name, _hosts.leave, self.spec.key, self.trainer)
            except RuntimeError as error:
                if not was_lost(error):
                    failure = error
        if failure is not None:
            raise failure

    def before_leaving(self) -> None:
        """Take part no more; the hosts hear of it, or see the end of this worker."""
        self.has_left = True
        for user in list(self._users):
            user.on_leave()

    def name_for(self, kind: str, user: User, on_let_go: Callable[[], None] | None = None) -> str:
        """A prefix for the pieces of a model; trainers that ask in the same order get the same.

        When the model is gone, this trainer is not waited for in its rounds any more; and when all are, in none until
        it pushes again. ``on_let_go`` is called when this one is gone; it must not refer to it.
        """
        with self._using:
            self._open_users += 1
        self._users.add(user)
        # Whatever thread collects garbage may hold any lock.
        name = f"{kind}{next(self._numbers_of_models)}"
        weakref.finalize(user, self._begin_to_let_go, name, on_let_go).atexit = False
        return name

    def join(self) -> None:
        """Take part from the rounds on that are open then, in the models that others have."""
        held = {name for names in self.ring.call_all(_hosts.models, self.spec.key) for name in names}
        numbers = sorted(int(name.lstrip(string.ascii_letters)) for name in held)
        self._numbers_of_models = itertools.chain(numbers, itertools.count(max(numbers, default=-1) + 1))

    def _begin_to_let_go(self, *arguments: Any) -> None:
        threading.Thread(target=self._let_go, args=arguments, name="torch_ucx_rpc-leave", daemon=True).start()

    def _let_go(self, name: str, on_let_go: Callable[[], None] | None) -> None:
        if on_let_go is not None:
            on_let_go()
        with self._using:
            self._open_users -= 1
            former, self._let_go_last = self._let_go_last, name
            # After the shutdown of RPC nobody waits.
            with contextlib.suppress(RuntimeError):
                if former is not None:
                    # If a host is lost, others may ask for the last results of this model still, and of no former one.
                    results().drop(self.name, former)
                if self.has_left:
                    return
                self.ring.call_all(_hosts.let_go, self.spec.key, name, self.trainer)
                if not self._open_users:
                    self._is_idle = True
                    self.ring.call_all(_hosts.leave, self.spec.key, self.trainer)

    def check_quorum(self, quorum: int | None) -> None:
        """ValueError for a quorum that there can never be."""
        if quorum is None:
            return
        if not isinstance(quorum, int) or isinstance(quorum, bool):
            raise wrong_type("quorum", "an int", quorum)
        if quorum < 1:
            raise ValueError(f"quorum must be 1 at least; {got(quorum)}: without a quorum all trainers count")
        most = max(self.trainers, 1 if self.trainers > 1 else len(self.life.living()))
        if quorum > most:
            raise ValueError(
                f"quorum={quorum} can never be reached: there are {most} trainers, of which that many would have to "
                f"come for each step; give at most {most}, or serve(..., trainers=N) if more will join"
            )

    # -- its hosts

    def on_gone(self, name: str) -> None:
        """A worker has ended."""
        if name in self.hosts:
            self.ring.lose(name)

    def lost_hosts(self) -> tuple[str, ...]:
        """Those of the hosts that this worker does not use any more."""
        return self.ring.lost()

    def expect(self, trainers: int) -> None:
        """The first step waits for that many trainers, whatever `serve` has been told."""
        self.ring.call_all(_hosts.expect, self.spec.key, trainers, ())
        self.ring.spec = self.spec._replace(expected=trainers, expected_names=())

    def _on_other_host(self, name: str) -> None:
        if self.takes_part:
            for user in list(self._users):
                user.on_other_host(name)

    # -- pushes

    def next_push(self, piece: str, shard: int, tensors: list[Tensor], quorum: int | None) -> Push:
        """The push of a piece that is to be sent now; `end_push` goes with it.

        RuntimeError if this trainer has left, or the former push of the piece has not been answered.
        """
        if self.has_left:
            raise RuntimeError(f"this trainer has left {self!r}: call reduction.serve again to take part")
        with self._lock:
            if piece in self._open_pieces and not self.spec.asynchronous:
                raise RuntimeError(
                    f"the former push to {self!r} has not been answered: wait for it before the next one, or give the "
                    f"two servers of their own by reduction.serve(..., name=...)"
                )
            self._open_pieces.add(piece)
            number = next(self._numbers.setdefault(piece, itertools.count()))
        self._is_idle = False
        at = self.positions.get(piece, self.first_round)
        return Push(
            self.spec.key, piece, shard, self.trainer, at, quorum, number, False, tensors, self.origins.get(piece)
        )

    def end_push(self, push: Push) -> None:
        """A push is answered, or has failed."""
        with self._lock:
            self._open_pieces.discard(push.piece)

    def accept(self, push: Push, answer: Answer) -> None:
        """Note what an answer says of the rounds to come."""
        self.positions[push.piece] = answer.next_round
        if self.ring.may_change and self.spec.optimizer is None and answer.rounds == 1 and answer.tensors:
            results().keep(self.name, push.piece, answer.next_round - 1, answer.tensors)

    def assign(self, tensors: Sequence[Tensor]) -> list[int]:
        """The shard of each tensor: the largest first, each to the shard with the least so far.

        Raises ValueError for tensors of other shapes than those that `keep_shapes` was called for.
        """
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if self._shapes is not None and shapes != self._shapes:
            raise ValueError(
                f"gradients of another shape than the server's: {difference(shapes, self._shapes)}. Push the gradients "
                f"of all parameters, in the same order, each time"
            )
        return spread([tensor.numel() for tensor in tensors], self.spec.shards)

    def keep_shapes(self, tensors: Sequence[Tensor]) -> None:
        """The hosts have accepted tensors of these shapes: others are refused from now on."""
        self._shapes = [tuple(tensor.shape) for tensor in tensors]

"""What runs on a worker: its stages, a mailbox in front of them, and whoever works through it.

Everything that arrives, orders of the driver and values of other stages alike, is put into the mailbox by RPC's
threads. The thread that brings a mail goes on with the work as far as it goes, unless another is at it: one at a time
holds the baton. Orders are numbered and carried out in that order, each on all workers of the pipeline. A value that
is not wanted yet waits in its slot, so a slot may be filled before the order that reads it has come. An order that
waits is a suspended generator, which goes on with whatever arrives: a value, or the word that the call is off.

An order never raises towards the driver: it ends in an outcome, ``("ok", result)``, ``("error", ...)``, ``("lost",
worker)`` or ``("aborted",)``. A call that raises all the same has not reached its worker.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
import queue
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch._C._distributed_rpc import _get_current_rpc_agent
from torch.futures import Future

from torch_ucx_rpc.pipeline import build
from torch_ucx_rpc.pipeline.schedule import Action, Row
from torch_ucx_rpc.pipeline.stage import Autocast, Stage
from torch_ucx_rpc.pipeline.values import Packet, to_device
from torch_ucx_rpc.pipeline.wiring import DRIVER, INPUT, StageSpec

__all__ = ["Host", "HostConfig", "Request", "abort", "close", "create", "deliver", "order", "prepare"]

# How many values may be on their way to another worker without an answer.
_CREDITS = 64
_CPU = torch.device("cpu")

# A slot: kind ("F", "B", "T" for tied gradients, "V" for tied values), the stage it is for, micro-batch, the stage it
# is of.
Slot = tuple[str, int, int, int]


@dataclasses.dataclass
class HostConfig:
    """What a worker is told when it gets its stages."""

    pipeline: str
    """Name of this host: of the pipeline, and of its place in there."""
    specs: list[StageSpec]
    device: str
    routes: list[tuple[str, str]]
    """Worker and host of each stage."""
    loss: Callable[..., Any] | None
    rematerialize: bool
    first_order: int
    """Number of the first order that it will get."""
    training: bool


@dataclasses.dataclass
class Request:
    """One call as one worker needs it."""

    row_key: tuple[Any, ...]
    row: Row | None
    """None: the one that came with this key before."""
    call: int
    """Under which the graphs of forward are kept: the number of the order in which it ran."""
    micro_batches: int
    inputs: dict[int, list[Packet]]
    """Of the batch, by stage, for each micro-batch."""
    targets: list[tuple[Any, ...]] | None
    grad: bool
    to_driver: bool = False
    output_gradients: list[list[torch.Tensor | None]] | None = None
    input_gradients: bool = False
    autocast: Autocast = ()
    scale: float | None = None
    record: bool = False
    zero_grad: bool | None = None
    """First let go of the gradients; True: by setting them to None."""


class _AbortedError(Exception):
    """The driver has called the present call off."""


class _LostPeerError(Exception):
    """A worker that a value was sent to does not answer."""


_hosts: dict[str, Host] = {}
_hosts_lock = threading.Lock()


class Host:
    """The stages of one pipeline on this worker."""

    def __init__(self, config: HostConfig) -> None:
        self.config = config
        self.pipeline = config.pipeline
        self.device = torch.device(config.device)
        self.stages = {
            spec.index: Stage(
                spec,
                build.on_worker(spec, self.device),
                self.device,
                rematerialize=config.rematerialize,
                loss=config.loss,
                evaluation_module=build.evaluation_module(spec, self.device),
            )
            for spec in config.specs
        }
        build.share_evaluation_state(self.stages.values())
        for stage in self.stages.values():
            stage.train(config.training)
        self.mailbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self._routes = self._resolve(config.routes)
        self._rows: dict[tuple[Any, ...], Row] = {}
        self._orders: dict[int, tuple[str, Any, Future[Any]]] = {}
        self._next = config.first_order
        self._running: int | None = None
        self._called_off = -1
        self._slots: dict[tuple[int, Slot], Any] = {}
        self._unanswered: dict[str, collections.deque[Future[Any]]] = collections.defaultdict(collections.deque)
        self._failure: tuple[Any, ...] | None = None
        # Gradients that a failed step has added to: no optimizer is to use them.
        self._spoilt = False
        # The last step: its number, and the parameters that had no gradient before.
        self._finished: tuple[int, list[nn.Parameter]] = (-1, [])
        self._events: list[tuple[str, float, float]] | None = None
        self._closed = False
        # The order that is being carried out: its number, name, payload, future, what is left of it, and the slot it
        # waits for.
        self._current: tuple[int, str, Any, Future[Any]] | None = None
        self._rest: Generator[Any, None, Any] | None = None
        self._wanted: tuple[int, Slot] | None = None
        self._baton = threading.Lock()
        self._kicks: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Whoever brings a mail goes on with the work, unless someone is at it: that spares a wake-up for each value.
        # Not in the driver's own thread, which has orders to give to others, and not on a device, where each thread
        # has its stream.
        self._by_itself = self.device.type != "cpu"
        threading.Thread(target=self._attend_kicks, name=f"pipeline {self.pipeline}", daemon=True).start()

    def _resolve(self, routes: list[tuple[str, str]]) -> list[tuple[Any, str] | None]:
        """WorkerInfo and host of each stage; None for those that are here."""
        return [None if name == self.pipeline else (_worker_info(worker), name) for worker, name in routes]

    # ------------------------------------------------------------------------------------------------- the thread

    def put(self, mail: tuple[Any, ...], *, here: bool = False) -> None:
        """Into the mailbox; with ``here``, from a thread that has other things to do."""
        self.mailbox.put(mail)
        if here or self._by_itself:
            self._kicks.put(None)
        else:
            self._attend()

    def _attend_kicks(self) -> None:
        while not self._closed:
            self._kicks.get()
            self._attend()

    def _attend(self) -> None:
        """Go on with the work until nothing can be done before another mail. Returns at once where another thread is
        at it."""
        # Mail that comes while the baton is held is seen by its holder, who looks again after letting go of it.
        while not self.mailbox.empty() and self._baton.acquire(blocking=False):
            try:
                self._advance()
            finally:
                self._baton.release()

    def _advance(self) -> None:
        while not self._closed:
            self._drain()
            if self._current is None and not self._begin():
                return
            if self._wanted is not None and self._wanted not in self._slots and not self._is_called_off():
                return
            self._go_on()
        self._drain()
        self._end()

    def _drain(self) -> None:
        while not self.mailbox.empty():
            self._take(self.mailbox.get())

    def _begin(self) -> bool:
        if self._next not in self._orders:
            return False
        name, payload, future = self._orders.pop(self._next)
        number, self._next = self._next, self._next + 1
        self._current = number, name, payload, future
        self._running = number
        self._at: Action | None = None
        self._rest = self._carry_out(number, name, payload)
        return True

    def _go_on(self) -> None:
        assert self._current is not None
        assert self._rest is not None
        self._wanted = None
        try:
            if self._is_called_off() and inspect.getgeneratorstate(self._rest) == inspect.GEN_SUSPENDED:
                self._wanted = self._rest.throw(_AbortedError())
            else:
                self._wanted = next(self._rest)
            return
        except StopIteration as end:
            outcome: tuple[Any, ...] = end.value
        except _AbortedError:
            outcome = ("aborted",)
        except _LostPeerError as lost:
            outcome = ("lost", str(lost))
        except BaseException as error:
            outcome = ("error", self._failure_of(error))
            if self._current[1] not in {"run", "reset"}:
                self._failure = outcome
        number, name, payload, future = self._current
        self._current = self._rest = self._running = None
        self._drop(number)
        if name == "run" and outcome[0] != "ok":
            for stage in self.stages.values():
                stage.forget(payload.call)
        # What the order held is gone before its answer leaves: that may be the last thing this does for long.
        del payload
        future.set_result(outcome)

    def _end(self) -> None:
        self._slots.clear()
        self.stages.clear()
        self.optimizers.clear()
        self._rest = None
        open_orders = [future for _, _, future in self._orders.values()]
        if self._current is not None:
            open_orders.append(self._current[3])
        self._orders.clear()
        self._current = None
        for future in open_orders:
            future.set_result(("aborted",))

    def _take(self, mail: tuple[Any, ...]) -> None:
        kind = mail[0]
        if kind == "value":
            _, call, slot, value = mail
            # A message for a call that is over, or called off, is of no use any more.
            if call >= self._next or call == self._running:
                self._slots[call, slot] = value
        elif kind == "order":
            _, number, name, payload, future = mail
            if number < self._next:
                future.set_result(("aborted",))
            else:
                self._orders[number] = (name, payload, future)
        elif kind == "abort":
            self._called_off = max(self._called_off, mail[1])
        elif kind == "close":
            self._closed = True

    def _wait(self, slot: Slot) -> Generator[Any, None, Any]:
        """The value of a slot of the running order, by ``yield from``."""
        assert self._running is not None
        key = (self._running, slot)
        while key not in self._slots:
            yield key
        return self._slots.pop(key)

    def _is_called_off(self) -> bool:
        return self._running is not None and self._called_off >= self._running

    def _check_called_off(self) -> None:
        if self._closed or self._is_called_off():
            raise _AbortedError

    def _carry_out(self, number: int, name: str, payload: Any) -> Generator[Any, None, tuple[Any, ...]]:
        if self._called_off >= number and name == "run":
            return ("aborted",)
        if self._failure is not None and name in {"run", "optimizer_step"}:
            # An order that nobody waited for has failed: the next one that counts on it tells.
            return self._failure
        result = getattr(self, f"_order_{name}")(payload)
        if inspect.isgenerator(result):
            result = yield from result
        return ("ok", result)

    def _failure_of(self, error: BaseException) -> dict[str, Any]:
        at = self._at
        # From the stage's own code on: the frames above are ours.
        frames = traceback.extract_tb(error.__traceback__)
        ours = [place for place, frame in enumerate(frames) if __package__.replace(".", "/") in frame.filename]
        kept = frames[ours[-1] + 1 :] if ours and ours[-1] + 1 < len(frames) else frames
        text = "Traceback of the stage (most recent call last):\n" + "".join(traceback.format_list(kept))
        text += "".join(traceback.format_exception_only(error))
        return {
            "stage": None if at is None else at.stage,
            "micro_batch": None if at is None else at.micro_batch,
            "doing": None if at is None else _DOING[at.kind],
            "error": f"{type(error).__name__}: {error}",
            "traceback": text,
        }

    def _drop(self, call: int) -> None:
        for key in [key for key in self._slots if key[0] <= call]:
            del self._slots[key]

    # ------------------------------------------------------------------------------------------------- a schedule

    def _order_run(self, request: Request) -> Generator[Any, None, dict[str, Any]]:
        if request.row is not None:
            self._rows[request.row_key] = request.row
        row = self._rows[request.row_key]
        result: dict[str, Any] = {}
        self._events = [] if request.record else None
        if request.zero_grad is not None:
            self._order_zero_grad({"set_to_none": request.zero_grad})
        fresh = self._without_gradients() if request.grad and request.targets is not None else []
        try:
            for action in row:
                self._at = action
                while not self.mailbox.empty():
                    self._take(self.mailbox.get())
                self._check_called_off()
                yield from self._act(action, request, result)
        except BaseException:
            # Gradients of a part of the step are of no use: those that were not there before go again.
            if request.grad and request.targets is not None:
                self._undo(fresh)
            raise
        finally:
            events, self._events = self._events, None
        if request.targets is not None:
            self._finished = request.call, fresh
        if "losses" in result:
            losses = result.pop("losses")
            result["loss"] = (sum(losses[1:], losses[0]) / len(losses)).cpu()
        if events is not None:
            result["events"] = events
        return result

    def _undo(self, fresh: list[nn.Parameter]) -> None:
        """Let go of the gradients of a step that had none of these before; others are spoilt by it."""
        for parameter in fresh:
            parameter.grad = None
        self._spoilt = any(
            parameter.grad is not None for stage in self.stages.values() for parameter in stage.module.parameters()
        )

    def _without_gradients(self) -> list[nn.Parameter]:
        return [
            parameter
            for stage in self.stages.values()
            for parameter in stage.module.parameters()
            if parameter.grad is None
        ]

    def _act(self, action: Action, request: Request, result: dict[str, Any]) -> Generator[Any, None, None]:
        stage = self.stages[action.stage]
        if action.kind == "F":
            yield from self._forward(stage, action.micro_batch, request, result)
        else:
            yield from self._backward(stage, action, request, result)

    def _forward(
        self, stage: Stage, number: int, request: Request, result: dict[str, Any]
    ) -> Generator[Any, None, None]:
        packets: dict[int, Packet] = {}
        for edge in stage.spec.edges_in:
            if edge.source == INPUT:
                packets[INPUT] = request.inputs[stage.index][number]
            else:
                packets[edge.source] = yield from self._wait(("F", stage.index, number, edge.source))
        if INPUT in packets:
            # Once used it may go: on the way back only what autograd has saved of it is needed.
            request.inputs[stage.index][number] = None  # type: ignore[call-overload]
        is_last = stage.index == len(self._routes) - 1
        with self._recorded(stage.index, "F", number):
            sent = stage.forward(
                (request.call, number),
                packets,
                grad=request.grad,
                autocast=request.autocast,
                target=request.targets[number] if is_last and request.targets is not None else None,
                micro_batches=request.micro_batches,
                scale=request.scale,
                to_driver=request.to_driver and is_last,
            )
        for target, packet in sent.items():
            if target != DRIVER:
                self._send(target, ("F", target, number, stage.index), packet)
            elif request.to_driver:
                result.setdefault("outputs", []).append(to_device(packet, _CPU))
            else:
                result.setdefault("losses", []).append(packet[0])

    def _backward(
        self, stage: Stage, action: Action, request: Request, result: dict[str, Any]
    ) -> Generator[Any, None, None]:
        number, kind = action.micro_batch, action.kind
        if stage.rematerialize and kind in "IW":
            # Each half would compute the activations anew: what that costs is more than what idle time there is to
            # fill.
            if kind == "W":
                return
            kind = "B"
        gradients: dict[int, Any] = {}
        if kind != "W":
            for target in stage.targets:
                gradients[target] = yield from self._wait(("B", stage.index, number, target))
            if request.output_gradients is not None and stage.index == len(self._routes) - 1:
                gradients[DRIVER] = request.output_gradients[number]
        tied: dict[int, list[torch.Tensor | None]] = {}
        for tie, _ in stage.ties if kind != "I" else ():
            if tie.owner == stage.index:
                tied[tie.number] = []
                for user in tie.users:
                    tied[tie.number].append((yield from self._wait(("T", tie.number, number, user))))
        with self._recorded(stage.index, kind, number):
            found, owed = stage.backward((request.call, number), kind, gradients, tied)
        for source, some in found.items():
            if source != INPUT:
                self._send(source, ("B", source, number, stage.index), some)
            elif request.input_gradients:
                result.setdefault("input_gradients", {}).setdefault(stage.index, {})[number] = to_device(some, _CPU)
        for tie, _ in stage.ties:
            if tie.number in owed:
                self._send(tie.owner, ("T", tie.number, number, stage.index), owed[tie.number])

    @contextlib.contextmanager
    def _recorded(self, stage: int, kind: str, number: int) -> Iterator[None]:
        if self._events is None:
            yield
            return
        begin = time.time()
        yield
        self._events.append((str(Action(stage, kind, number)), begin, time.time()))

    def _send(self, stage: int, slot: Slot, value: Any) -> None:
        """To the worker of a stage: one request, whose answer says that the value lies in its slot."""
        assert self._running is not None
        route = self._routes[stage]
        if route is None:
            self._slots[self._running, slot] = value
            return
        worker, its_host = route
        if self.device.type != "cpu" and not _has_device_map(worker):
            value = to_device(value, _CPU)
        waiting = self._unanswered[worker.name]
        try:
            while waiting and waiting[0].done():
                waiting.popleft().wait()
            while len(waiting) >= _CREDITS:
                # Not for the oldest: its answer may wait until the peer, who is at work for it, has to wait for us.
                waiting[1].wait()
                del waiting[1]
            call = rpc.rpc_async(worker, deliver, (its_host, self._running, slot, value), timeout=0)
        except RuntimeError as error:
            waiting.clear()
            raise _LostPeerError(f"{worker.name}: {error}") from None
        waiting.append(call)

    # --------------------------------------------------------------------------------------------- other orders

    def _order_reset(self, payload: dict[str, Any]) -> None:
        """After a failure, and when workers have changed: forget what has been left behind."""
        self._failure = None
        self._unanswered.clear()
        # A step that failed elsewhere when it was done here.
        if self._finished[0] == payload.get("undo"):
            self._undo(self._finished[1])
        if routes := payload.get("routes"):
            self._routes = self._resolve(routes)
        if payload.get("gradients"):
            self._order_zero_grad({"set_to_none": True})

    def _order_forget(self, payload: dict[str, Any]) -> None:
        for stage in self.stages.values():
            stage.forget(payload["call"])

    def _order_train(self, payload: dict[str, Any]) -> None:
        for stage in self.stages.values():
            stage.train(payload["mode"])

    def _order_requires_grad(self, payload: dict[str, Any]) -> None:
        for stage in self.stages.values():
            for parameter in stage.module.parameters():
                parameter.requires_grad_(payload["requires_grad"])

    def _order_zero_grad(self, payload: dict[str, Any]) -> None:
        self._spoilt = False
        for stage in self.stages.values():
            stage.module.zero_grad(set_to_none=payload["set_to_none"])

    def _order_optimizer(self, payload: dict[str, Any] | None) -> None:
        if payload is None:
            return
        parameters = dict(self._owned_parameters())
        groups = []
        for group in payload["groups"]:
            here = [(name, parameters[name]) for name in group["names"] if name in parameters]
            groups.append({**{key: value for key, value in group.items() if key != "names"}, "params": here})
        if any(group["params"] for group in groups):
            self.optimizers[payload["optimizer"]] = payload["class"](
                [{**group, "params": [parameter for _, parameter in group["params"]]} for group in groups],
                **payload["options"],
            )

    def _order_optimizer_step(self, payload: dict[str, Any]) -> Generator[Any, None, None]:
        optimizer = self.optimizers.get(payload["optimizer"])
        if self._spoilt:
            raise RuntimeError(
                "the last step failed and has left a part of its gradients beside those of earlier steps: call "
                "optimizer.zero_grad() before the next step"
            )
        if optimizer is not None:
            for group, values in zip(optimizer.param_groups, payload["groups"], strict=True):
                group.update(values)
            optimizer.step()
        yield from self._share_tied_values()

    def _order_set_values(self, payload: dict[str, Any]) -> Generator[Any, None, None]:
        """After a load: the owners' values are everybody's."""
        yield from self._share_tied_values()

    def _share_tied_values(self) -> Generator[Any, None, None]:
        for stage in self.stages.values():
            for tie, parameter in stage.ties:
                if tie.owner == stage.index:
                    for user in tie.users:
                        self._send(user, ("V", tie.number, 0, user), parameter.detach())
        for stage in self.stages.values():
            for tie, parameter in stage.ties:
                if tie.owner != stage.index:
                    value = yield from self._wait(("V", tie.number, 0, stage.index))
                    with torch.no_grad():
                        parameter.copy_(value)

    def _order_gradient_norms(self, payload: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Of each parameter that has a gradient, by name."""
        named = [(name, one.grad) for name, one in self._owned_parameters() if one.grad is not None]
        if not named:
            return {}
        norms = torch._foreach_norm([gradient for _, gradient in named], payload["norm_type"])
        return {name: norm.cpu() for (name, _), norm in zip(named, norms, strict=True)}

    def _order_scale_gradients(self, payload: dict[str, Any]) -> bool:
        """Multiply all gradients; says whether all are finite."""
        finite = True
        for stage in self.stages.values():
            for _, parameter in stage.owned_parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(payload["factor"].to(parameter.grad.device))
                    finite = finite and (not payload["check"] or bool(parameter.grad.isfinite().all()))
        return finite

    def _order_gradients(self, payload: dict[str, Any]) -> dict[str, torch.Tensor | None]:
        return {name: _copy(one.grad) for name, one in self._owned_parameters()}

    def _order_state_dict(self, payload: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for stage in self.stages.values():
            for name, value in stage.state_dict().items():
                found[name] = _copy(value)
        return found

    def _order_load_state_dict(self, payload: dict[str, Any]) -> None:
        for stage in self.stages.values():
            prefix = stage.spec.prefix
            own = stage.module.state_dict()
            stage.module.load_state_dict({name: payload["state"][prefix + name] for name in own})

    def _order_synchronize(self, payload: dict[str, Any]) -> None:
        """Nothing: that it is answered says that all before it has been done."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def _order_call(self, payload: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
        function, args = payload
        return function(self, *args)

    def _owned_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for _, stage in sorted(self.stages.items()):
            yield from stage.owned_parameters()


def _copy(value: Any) -> Any:
    """A tensor's value now, on the CPU; the answer with it may leave when the next order has begun."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


_DOING = {
    "F": "the forward",
    "B": "the backward",
    "I": "the backward to the inputs",
    "W": "the backward to the weights",
}


# ------------------------------------------------------------------------------------------ what other workers call


def _worker_info(name: str) -> Any:
    from torch.distributed.rpc.api import _to_worker_info

    return _to_worker_info(name)  # type: ignore[no-untyped-call]


def _has_device_map(worker: Any) -> bool:
    """Whether tensors may go to that worker from devices; without, they go by the CPU."""
    return bool(_get_current_rpc_agent()._get_device_map(worker))


def prepare() -> None:
    """Import what stages and checkpoints need, so that a spare need not when it is wanted in a hurry."""
    import torch.distributed.checkpoint  # noqa: F401

    import torch_ucx_rpc.checkpoint  # noqa: F401


def create(config: HostConfig) -> tuple[Any, ...]:
    """Make the stages of a pipeline on this worker. Its outcome is what the driver wants to know of them, or the
    failure."""
    try:
        host = Host(config)
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    with _hosts_lock:
        before = _hosts.get(config.pipeline)
        _hosts[config.pipeline] = host
    if before is not None:
        before.put(("close",), here=True)
    known = {
        index: [(name, tuple(one.shape), one.dtype, one.requires_grad) for name, one in stage.named_parameters()]
        for index, stage in host.stages.items()
    }
    return "ok", known


def deliver(pipeline: str, call: int, slot: Slot, value: Any) -> None:
    host = _hosts.get(pipeline)
    if host is not None:
        host.put(("value", call, slot, value))


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def order(pipeline: str, number: int, name: str, payload: Any) -> Future[Any]:
    """Have an order carried out when all with lower numbers have been; the future is its outcome."""
    future: Future[Any] = Future()
    put_order(pipeline, number, name, payload, future)
    return future


def put_order(pipeline: str, number: int, name: str, payload: Any, future: Future[Any], *, here: bool = False) -> None:
    host = _hosts.get(pipeline)
    if host is None:
        future.set_result(("aborted",))
    else:
        host.put(("order", number, name, payload, future), here=here)


def abort(pipeline: str, number: int) -> None:
    """Call off the order with this number, and all before it."""
    host = _hosts.get(pipeline)
    if host is not None:
        host.put(("abort", number))


def close(pipeline: str) -> None:
    """Let go of a pipeline's stages."""
    with _hosts_lock:
        host = _hosts.pop(pipeline, None)
    if host is not None:
        host.put(("close",), here=True)


def find(pipeline: str) -> Host:
    """The stages of a pipeline that live here; for checkpoints."""
    return _hosts[pipeline]

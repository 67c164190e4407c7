"""One stage on its worker: it runs micro-batches forward and back, and keeps the state that a backward needs.

It does not know RPC or schedules: packets go in, packets come out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_ucx_rpc.pipeline import _backward
from torch_ucx_rpc.pipeline._build import restored
from torch_ucx_rpc.pipeline._partition import DRIVER, INPUT, Edge, StageSpec, fill
from torch_ucx_rpc.pipeline._values import Packet, map_tensors, pack, tensors_of, to_device, unpack

__all__ = ["Autocast", "Loss", "Request", "Stage"]

# Device type and dtype of each autocast that was on where the call was made.
Autocast = tuple[tuple[str, torch.dtype], ...]


class Request(NamedTuple):
    """One call as one worker needs it: the argument of the order ``run``."""

    kind: str
    """"step", "forward" or "backward": see `Schedules.rows`."""
    call: int
    """The number under which the stages keep the graphs of a forward."""
    micro_batches: int
    inputs: Mapping[int, list[Packet]] = {}
    """Values of the batch, by stage, for each micro-batch."""
    targets: list[tuple[Any, ...]] | None = None
    grad: bool = True
    to_driver: bool = False
    output_gradients: list[list[torch.Tensor | None]] | None = None
    input_gradients: bool = False
    autocast: Autocast = ()
    scale: float | None = None
    record: bool = False
    shows_output: bool = False
    """Whether the driver wants the output, though its backward runs without the driver."""
    is_apart: bool = False
    """Whether this call's gradients stay apart from those of earlier calls until the call's factor is known."""

    @property
    def adds_gradients(self) -> bool:
        """Whether this call has a backward, after its own forward or that of an earlier call."""
        return self.grad and not self.to_driver


class Loss(NamedTuple):
    """The loss of a micro-batch."""

    value: torch.Tensor
    """A scalar: a mean, or a sum if there is a count."""
    counted: float | None
    has_gradient: bool = False
    wants_gradient: bool = False
    """Whether the output has a gradient: the model may be frozen as a whole."""

    @property
    def given(self) -> Any:
        """The loss function's result, on the CPU."""
        return self.value.cpu() if self.counted is None else (self.value.cpu(), self.counted)


@dataclasses.dataclass
class _Graph:
    """State for the backward of one micro-batch."""

    arrived: dict[int, list[torch.Tensor]]
    sent: dict[int, list[torch.Tensor]]
    loss: torch.Tensor | None = None
    seed: torch.Tensor | None = None
    half: _backward.HalfDone | None = None


class Stage:
    """A stage with its module on its device."""

    def __init__(
        self,
        spec: StageSpec,
        module: nn.Module,
        device: torch.device,
        *,
        rematerialize: bool,
        loss: Callable[..., Any] | None,
    ) -> None:
        self.spec = spec
        self.index = spec.index
        self.module = module
        self.device = device
        self.loss = loss
        self.rematerialize = rematerialize
        # Modes in which the modules were given: one may differ from the whole model, such as a frozen batch norm.
        self._modes = [(part, part.training) for part in module.modules()]
        self.graphs: dict[tuple[int, int], _Graph] = {}
        self._last_seed: tuple[Any, torch.Tensor] | None = None
        # Last consumer first: autograd sums the gradients of a value in the order in which it reaches its users.
        self.targets = tuple(sorted((edge.target for edge in spec.edges_out), reverse=True))
        # Parameters that other stages use too, each with its tie.
        named = dict(module.named_parameters(remove_duplicate=False))
        self.ties = [(tie, named[tie.name]) for tie in spec.ties]
        # Whether the two halves of a backward are apart. With rematerialization each would recompute the activations,
        # which costs more than the idle time that it fills. The owner of a tied parameter waits in its own W for the
        # gradients of the other users. So the users send these in an I: a user's W may come after an action that waits
        # for the owner.
        self.has_halves = not rematerialize and all(tie.owner == spec.index for tie in spec.ties)
        self._chain = _chain_source(spec)
        # Layers must not write in place into values that arrived. Such a value is a leaf for autograd, the input of a
        # second forward, and in the same process the output of another stage.
        self._writes_in_place = any(getattr(part, "inplace", False) for part in module.modules())

    # ------------------------------------------------------------------------------------------------------ state

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by the names of the undivided model."""
        for name, parameter in self.module.named_parameters():
            yield self.spec.prefix + name, parameter

    def owned_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters without those that an earlier stage owns."""
        lent = {id(parameter) for tie, parameter in self.ties if tie.owner != self.index}
        return ((name, parameter) for name, parameter in self.named_parameters() if id(parameter) not in lent)

    def state_dict(self) -> dict[str, Any]:
        """Return the part of the undivided model's ``state_dict()`` that lives here, with the stage's own tensors."""
        state = {self.spec.prefix + name: value for name, value in self.module.state_dict().items()}
        state.update({other: state[name] for name, other in self.spec.aliases if name in state})
        return state

    def train(self, mode: bool | None) -> None:
        """Do ``nn.Module.train``. None restores the modes in which the modules were given."""
        if mode is None:
            for part, training in self._modes:
                part.training = training
        else:
            self.module.train(mode)

    # ---------------------------------------------------------------------------------------------------- forward

    def forward(
        self,
        request: Request,
        number: int,
        packets: dict[int, Packet],
        *,
        is_last: bool,
        goes_back_next: bool,
    ) -> tuple[dict[int, Packet], Loss | None]:
        """Run the forward of a call's micro-batch. Returns packets and the loss. There is a packet for each stage that
        uses the output, and for `DRIVER` if it wants the output. The packet for the driver has a backward only with
        ``to_driver``.

        ``goes_back_next``: this stage's next action is the backward of this micro-batch, so its activations are kept
        even with rematerialization.
        """
        grad = request.grad
        target = request.targets[number] if is_last and request.targets is not None else None
        rematerialize = self.rematerialize and grad and not goes_back_next
        arrived, collected = {}, {}
        for source, packet in packets.items():
            arrived[source], collected[source] = unpack(packet, self.device, grad)
        graph = _Graph(collected, {})
        if request.autocast or torch.is_grad_enabled() != grad:
            # Grad mode belongs to the thread, so another stage may have left it in any state.
            with torch.set_grad_enabled(grad), _autocast(request.autocast):
                output, result, loss = self._output(arrived, rematerialize, target)
        else:
            output, result, loss = self._output(arrived, rematerialize, target)
        sent: dict[int, Packet] = {}
        for edge in self.spec.edges_out:
            sent[edge.target], graph.sent[edge.target] = pack(_part(output, edge))
        if is_last and request.to_driver:
            sent[DRIVER], graph.sent[DRIVER] = pack(result)
        elif is_last and request.shows_output:
            sent[DRIVER], _ = pack(result)
        if grad:
            if loss is not None:
                graph.loss = loss.value
                graph.seed = self._seed(loss, request)
            self.graphs[request.call, number] = graph
        if loss is not None:
            wants = grad and any(one.requires_grad for one in tensors_of(result))
            loss = Loss(loss.value.detach(), loss.counted, loss.value.requires_grad, wants)
        return sent, loss

    def _output(
        self, arrived: dict[int, Any], rematerialize: bool, target: tuple[Any, ...] | None
    ) -> tuple[Any, Any, Loss | None]:
        """Return the output of the stage (in the last stage, of the model), and the loss if there is a target."""
        output = self._call(arrived, rematerialize)
        result = output
        if self.spec.output is not None:
            result = fill(self.spec.output, self.spec.edges_in, {**arrived, self.index: output})
        if target is None:
            return output, result, None
        assert self.loss is not None
        return output, result, _loss_of(self.loss(result, *to_device(target, self.device)), self.loss)

    def check_differentiable(self, losses: Sequence[Loss]) -> None:
        """Raise ValueError if the losses of all micro-batches lost the graph. Some may be constants, such as those of
        micro-batches without valid targets."""
        if any(loss.wants_gradient for loss in losses) and not any(loss.has_gradient for loss in losses):
            raise ValueError(
                f"the loss {_name_of(self.loss)} returned values that have no gradient, so the step would train "
                f"nothing: compute them from the output without item(), detach() or no_grad()"
            )

    def _seed(self, loss: Loss, request: Request) -> torch.Tensor:
        """Return the gradient with which the backward begins: the same for all micro-batches, and for most steps."""
        # The count of the whole batch is not known yet: the driver sends a factor that corrects the gradients.
        divisor = request.micro_batches
        key = loss.value.dtype, divisor, request.scale
        if self._last_seed is None or self._last_seed[0] != key:
            # Autograd divides in the same way if backward() is called on the mean over the micro-batches.
            seed = torch.ones_like(loss.value) / divisor
            self._last_seed = key, seed if request.scale is None else seed * request.scale
        return self._last_seed[1]

    def _call(self, arrived: dict[int, Any], rematerialize: bool) -> Any:
        if self._chain is not None:
            args, kwargs = (arrived[self._chain],), {}
        elif self.spec.arguments is None:
            args, kwargs = arrived[INPUT]
        else:
            args, kwargs = fill(self.spec.arguments, self.spec.edges_in, arrived)
        run = _with_copies(self.module) if self._writes_in_place else self.module
        if not rematerialize:
            return run(*args, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, context_fn=self._rematerialization, **kwargs)

    def _rematerialization(self) -> tuple[Any, Any]:
        """Return contexts for the first forward, and for the second, which must not count a micro-batch twice."""
        return contextlib.nullcontext(), restored(self.module)

    # --------------------------------------------------------------------------------------------------- backward

    def backward(
        self,
        key: tuple[int, int],
        kind: str,
        gradients: dict[int, Sequence[torch.Tensor | None]],
        tied: dict[int, list[torch.Tensor | None]],
    ) -> tuple[dict[int, list[torch.Tensor | None]], dict[int, torch.Tensor | None]]:
        """Run a backward of a micro-batch, or a half of it: ``kind`` is "B", "I" or "W".

        Args:
            gradients: gradients of the outputs, by the stage that they were sent to; not for "W".
            tied: gradients that other stages have found for parameters owned here, by number of the tie, in order.

        Returns the gradients of the inputs, by source (none for "W"), and those of parameters that other stages own, by
        number of the tie (none for "I").
        """
        graph = self.graphs[key]
        if kind == "W":
            del self.graphs[key]
            assert graph.half is not None
            half = graph.half
            return {}, self._with_ties(tied, lambda: _backward.weights_half(half, list(self.module.parameters())))
        roots, seeds = self._roots(graph, gradients)
        inputs = [leaf for leaves in graph.arrived.values() for leaf in leaves]
        owed: dict[int, torch.Tensor | None] = {}
        if kind == "B":
            del self.graphs[key]
            for tie, parameter in self.ties:
                # The parameter becomes a root of its own, so that autograd sums the gradients from later stages first.
                for gradient in tied.get(tie.number, []):
                    if gradient is not None and parameter.requires_grad:
                        roots.append(parameter)
                        seeds.append(to_device(gradient, self.device))
            owed = self._with_ties({}, lambda: _backward.whole(roots, seeds))
        else:
            graph.half = _backward.inputs_half(roots, seeds, inputs, list(self.module.parameters()))
            graph.sent, graph.loss, graph.seed = {}, None, None
        found = {source: [leaf.grad for leaf in leaves] for source, leaves in graph.arrived.items()}
        for leaf in inputs:
            leaf.grad = None
        graph.arrived = {}
        return found, owed

    def _roots(
        self, graph: _Graph, gradients: dict[int, Sequence[torch.Tensor | None]]
    ) -> tuple[list[torch.Tensor], list[Any]]:
        tensors: list[torch.Tensor] = []
        found: list[torch.Tensor | None] = []
        for target in (DRIVER, *self.targets):
            if target in gradients:
                tensors += graph.sent[target]
                found += [to_device(gradient, self.device) for gradient in gradients[target]]
        if graph.loss is not None and graph.loss.requires_grad:
            tensors.insert(0, graph.loss)
            found.insert(0, graph.seed)
        return _backward.sum_by_tensor(tensors, found)

    def _with_ties(
        self, remote: dict[int, list[torch.Tensor | None]], run: Callable[[], None]
    ) -> dict[int, torch.Tensor | None]:
        """Run with the ``grad`` of tied parameters set apart, so that each micro-batch adds one sum, as in one
        process."""
        if not self.ties:
            run()
            return {}
        before = [(tie, parameter, parameter.grad) for tie, parameter in self.ties]
        for tie, parameter, _ in before:
            parameter.grad = None
            for gradient in remote.get(tie.number, []):
                if gradient is not None and parameter.requires_grad:
                    here = to_device(gradient, self.device)
                    parameter.grad = here.clone() if parameter.grad is None else parameter.grad.add_(here)
        run()
        owed: dict[int, torch.Tensor | None] = {}
        for tie, parameter, old in before:
            if tie.owner != self.index:
                owed[tie.number], parameter.grad = parameter.grad, None
            elif old is not None:
                parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)
        return owed

    def forget(self, call: int) -> None:
        """Free all state of a call."""
        for key in [key for key in self.graphs if key[0] == call]:
            del self.graphs[key]


def _chain_source(spec: StageSpec) -> int | None:
    """Return the one stage whose whole output is the one argument, as in an nn.Sequential. Then there is no structure
    to fill."""
    if spec.arguments is None or spec.arguments[1] or len(spec.arguments[0]) != 1 or len(spec.edges_in) != 1:
        return None
    source = getattr(spec.arguments[0][0], "source", INPUT)
    return source if source >= 0 and spec.arguments[0][0].item is None else None


def _part(output: Any, edge: Edge) -> Any:
    return output if edge.items is None else tuple(output[item] for item in edge.items)


def _loss_of(found: Any, function: Callable[..., Any]) -> Loss:
    value, count = found, None
    if isinstance(found, tuple) and len(found) == 2 and all(_is_number(one) for one in found):
        if isinstance(found[1], torch.Tensor) and found[1].requires_grad:
            raise ValueError(
                f"the loss {_name_of(function)} returned two values with a gradient, and the second of two values must "
                f"be a count: return the sum of both, or (sum, count)"
            )
        value, count = found[0], float(found[1])
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return Loss(value if value.dim() == 0 else value.reshape(()), count)
    text = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
    raise ValueError(
        f"the loss {_name_of(function)} must return a scalar for each micro-batch, but returned {text}. Let it take "
        f'the mean (reduction="mean"), return (sum, count), or return the one of its values that is to be minimized.'
    )


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float))


def _with_copies(module: nn.Module) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors(torch.Tensor.clone, (args, kwargs))
        return module(*args, **kwargs)

    return run


@contextlib.contextmanager
def _autocast(states: Autocast) -> Iterator[None]:
    if not states:
        yield
        return
    with contextlib.ExitStack() as stack:
        for device, dtype in states:
            stack.enter_context(torch.autocast(device, dtype=dtype))
        yield

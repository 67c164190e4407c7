"""Wrong arguments of public functions: the error names the argument and the value."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_ucx_rpc
from torch_ucx_rpc import channel, checkpoint, pipeline, reduction, services, testing
from torch_ucx_rpc._arguments import got


class Wrong:
    """No argument takes this type."""

    def __repr__(self) -> str:
        return "<wrong>"


WRONG = (None, Wrong(), [])


def function(*_: Any) -> None:
    pass


CHANNEL = object.__new__(channel.Channel)
SERVER = object.__new__(reduction.Server)
LATENCIES = torch_ucx_rpc.Latencies((1,), 1.0)

# Valid required arguments of each public function and class that takes arguments.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "UcxRpcBackendOptions": (torch_ucx_rpc.UcxRpcBackendOptions, {}),
    "UcxRpcBackendOptions.set_device_map": (
        torch_ucx_rpc.UcxRpcBackendOptions().set_device_map,
        {"to": "ps", "device_map": {}},
    ),
    "UcxRpcBackendOptions.set_devices": (torch_ucx_rpc.UcxRpcBackendOptions().set_devices, {"devices": []}),
    "init_rpc": (torch_ucx_rpc.init_rpc, {"name": "w0", "rank": 0, "world_size": 1}),
    "native_op": (torch_ucx_rpc.native_op, {"schema": "ns::arguments(Tensor self) -> ()"}),
    "native_op()": (torch_ucx_rpc.native_op("ns::arguments(Tensor self) -> ()"), {"function": function}),
    "on_lost": (torch_ucx_rpc.on_lost, {"callback": function}),
    "wait": (torch_ucx_rpc.wait, {"future": torch.futures.Future()}),
    "Latencies.percentile_us": (LATENCIES.percentile_us, {"percent": 99}),
    "Latencies.at_most_us": (LATENCIES.at_most_us, {"limit_us": 1}),
    "testing.FaultyUcxRpcBackendOptions": (testing.FaultyUcxRpcBackendOptions, {}),
    "channel.Channel": (channel.Channel, {"group": "ring"}),
    "channel.Channel.put": (CHANNEL.put, {"to": "w1", "tag": "x", "value": torch.ones(1)}),
    "channel.Channel.take": (CHANNEL.take, {"source": "w1", "tag": "x"}),
    "channel.Channel.take_into": (CHANNEL.take_into, {"source": "w1", "tag": "x", "into": torch.ones(1)}),
    "channel.Channel.post": (CHANNEL.post, {"source": "w1", "tag": "x"}),
    "channel.Channel.advance": (CHANNEL.advance, {"epoch": 1}),
    "channel.Posted.wait": (channel.Posted(None).wait, {"timeout": 1}),
    "services.call": (services.call, {"name": "score"}),
    "services.call_async": (services.call_async, {"name": "score"}),
    "services.call_role": (services.call_role, {"role": "trainer", "function": function}),
    "services.get": (services.get, {"name": "weights"}),
    "services.members": (services.members, {}),
    "services.pair": (services.pair, {"name": "weights", "value": 1}),
    "services.register": (services.register, {"name": "score", "function": function}),
    "services.register_all": (services.register_all, {"functions": {"score": function}}),
    "services.unregister": (services.unregister, {"name": "score"}),
    "services.wait_for": (services.wait_for, {"name": "score"}),
    "services.watch": (services.watch, {"name": "score", "on_change": function}),
    "reduction.DataParallel": (reduction.DataParallel, {"module": nn.Linear(1, 1), "server": SERVER}),
    "reduction.push_pull": (reduction.push_pull, {"server": SERVER, "gradients": torch.ones(1)}),
    "reduction.push_pull_async": (reduction.push_pull_async, {"server": SERVER, "gradients": torch.ones(1)}),
    "reduction.state": (reduction.state, {"server": SERVER}),
    "reduction.hook": (reduction.hook, {"state": object.__new__(reduction.State), "bucket": None}),
    "reduction.serve": (reduction.serve, {"hosts": "ps0"}),
    "checkpoint.save": (checkpoint.save, {"state": {}, "path": "/nowhere"}),
    "checkpoint.async_save": (checkpoint.async_save, {"state": {}, "path": "/nowhere"}),
    "checkpoint.load": (checkpoint.load, {"state": {}, "path": "/nowhere"}),
    "pipeline.Built": (pipeline.Built, {"what": "package:name"}),
    "pipeline.DistributedPipeline": (
        pipeline.DistributedPipeline,
        {"model": nn.Sequential(nn.Linear(1, 1)), "workers": ["w0"]},
    ),
    "pipeline.GradScaler": (pipeline.GradScaler, {}),
    "pipeline.GradScaler.unscale_": (pipeline.GradScaler().unscale_, {"optimizer": None}),
    "pipeline.GradScaler.load_state_dict": (pipeline.GradScaler().load_state_dict, {"state_dict": {}}),
}
# Arguments for which None, an empty list, or any value is valid.
TAKES_NONE = {
    "UcxRpcBackendOptions": {
        "init_timeout",
        "device_maps",
        "reply_device_maps",
        "devices",
        "device_pool_bytes",
        "prometheus_port",
        "secret_file",
    },
    "UcxRpcBackendOptions.set_devices": {"devices"},
    "init_rpc": {"name", "rank", "world_size", "rpc_backend_options"},
    "testing.FaultyUcxRpcBackendOptions": {"messages_to_delay"},
    "channel.Channel.put": {"timeout"},
    "channel.Channel.take": {"timeout"},
    "channel.Channel.take_into": {"timeout"},
    "channel.Channel.post": {"into"},
    "channel.Posted.wait": {"timeout"},
    "services.call_role": {"kwargs"},
    "services.members": {"role"},
    "reduction.DataParallel": {"optimizer", "quorum"},
    "reduction.push_pull": {"quorum"},
    "reduction.push_pull_async": {"quorum"},
    "reduction.state": {"quorum", "process_group", "model", "optimizer"},
    "reduction.serve": {"trainers", "parameters", "optimizer", "checkpoint", "name"},
    "checkpoint.save": {"storage_writer", "planner", "timeout"},
    "checkpoint.load": {"storage_reader", "planner", "timeout"},
    "pipeline.DistributedPipeline": {
        "balance",
        "split_spec",
        "chunks",
        "n_microbatches",
        "stages_per_worker",
        "loss",
        "loss_fn",
        "step_timeout",
    },
}
TAKES_AN_EMPTY_LIST = {
    "UcxRpcBackendOptions": {"devices"},
    "UcxRpcBackendOptions.set_devices": {"devices"},
    "testing.FaultyUcxRpcBackendOptions": {"messages_to_fail"},
    "channel.Channel.put": {"value"},
    "channel.Channel.take_into": {"into"},
    "channel.Channel.post": {"into"},
    "services.call_role": {"args"},
    "reduction.serve": {"parameters"},
    "pipeline.DistributedPipeline": {"spares"},
}
TAKES_ANYTHING = {
    "services.call": {"args"},
    "services.call_async": {"args"},
    "services.pair": {"value"},
    "pipeline.Built": {"args"},
    "pipeline.DistributedPipeline": {"sample"},
}
# The package makes the objects of these classes. Users pass no arguments.
MADE_BY_THE_PACKAGE = {
    "Latencies",
    "PeerStatistics",
    "ServiceStatistics",
    "Statistics",
    "channel.Posted",
    "channel.Sent",
    "checkpoint.Part",
    "checkpoint.SaveFuture",
    "pipeline.PipelineOptimizer",
    "pipeline.SplitPoint",
    "reduction.Contributors",
    "reduction.Server",
    "reduction.State",
    "services.Member",
    "services.Service",
    "services.ServiceStatistics",
}


def attempts() -> Iterator[tuple[str, str, Any]]:
    for name, (door, _) in CALLS.items():
        for parameter in inspect.signature(door).parameters.values():
            argument = parameter.name
            if parameter.kind is parameter.VAR_KEYWORD or argument in TAKES_ANYTHING.get(name, ()):
                continue
            for value in WRONG:
                takes = TAKES_NONE if value is None else TAKES_AN_EMPTY_LIST if value == [] else {}
                if argument not in takes.get(name, ()):
                    yield name, argument, value


def call(door: Callable[..., Any], arguments: dict[str, Any]) -> None:
    positional, named = [], {}
    for parameter in inspect.signature(door).parameters.values():
        if parameter.name in arguments:
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                positional.append(arguments[parameter.name])
            else:
                named[parameter.name] = arguments[parameter.name]
    door(*positional, **named)


@pytest.mark.parametrize(("name", "argument", "value"), list(attempts()))
def test_wrong_argument_is_named(name: str, argument: str, value: Any) -> None:
    door, right = CALLS[name]
    with pytest.raises((TypeError, ValueError)) as refused:
        call(door, {**right, argument: value})
    said = str(refused.value)
    assert re.search(rf"\b{argument}\b", said), said
    assert f"got {value!r} ({type(value).__name__})" in said


@pytest.mark.parametrize("door", ["channel.Channel.take", "channel.Channel.put", "services.call", "services.wait_for"])
def test_a_timeout_is_not_nan(door: str) -> None:
    function, right = CALLS[door]
    with pytest.raises(ValueError, match=r"timeout must be a number of seconds.* got nan \(float\)"):
        call(function, {**right, "timeout": math.nan})


def test_every_public_function_is_tried() -> None:
    public = {
        f"{prefix}{name}": getattr(module, name)
        for prefix, module in {
            "": torch_ucx_rpc,
            "channel.": channel,
            "checkpoint.": checkpoint,
            "pipeline.": pipeline,
            "reduction.": reduction,
            "services.": services,
            "testing.": testing,
        }.items()
        for name in module.__all__
    }
    doors = {
        name
        for name, found in public.items()
        if callable(found)
        and not (isinstance(found, type) and issubclass(found, BaseException))
        and name not in MADE_BY_THE_PACKAGE
        and inspect.signature(found).parameters
    }
    assert doors - CALLS.keys() == set()
    assert public.keys() >= MADE_BY_THE_PACKAGE


def test_long_values_are_cut() -> None:
    assert len(got("x" * 1000)) < 250

"""The options in `torch_ucx_rpc.testing`. ``e2e/test_testing.py`` tests that they choose the agent. PyTorch's suites
test the faults themselves."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch.distributed.rpc as rpc

from torch_ucx_rpc.testing import FaultyUcxRpcBackendOptions

FAULTS: dict[str, Any] = {
    "messages_to_fail": ["PYTHON_CALL"],
    "messages_to_delay": {"SCRIPT_CALL": 0.2},
    "num_fail_sends": 2,
}


def test_options_are_those_of_ucx_and_the_faults() -> None:
    options = FaultyUcxRpcBackendOptions(num_worker_threads=3, **FAULTS)
    assert options.num_worker_threads == 3
    assert {name: getattr(options, name) for name in FAULTS} == FAULTS
    assert pickle.loads(pickle.dumps(options)) == options
    assert eval(repr(options)) == options
    assert options != FaultyUcxRpcBackendOptions(num_worker_threads=3)


def test_without_options_no_fault_happens() -> None:
    options = FaultyUcxRpcBackendOptions()
    assert (options.messages_to_fail, options.messages_to_delay, options.num_fail_sends) == ([], {}, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"messages_to_fail": ["PYTHON_CAL"]},
            ValueError,
            "messages_to_fail must be .* PYTHON_CALL, .*got 'PYTHON_CAL'",
        ),
        ({"messages_to_fail": ["PYTHON_RET"]}, ValueError, "messages_to_fail must be of .*; got 'PYTHON_RET'"),
        ({"messages_to_fail": "PYTHON_CALL"}, TypeError, "must be a list of request types"),
        ({"messages_to_delay": {"NO": 1.0}}, ValueError, "messages_to_delay must be of .*; got 'NO'"),
        ({"messages_to_delay": {"PYTHON_CALL": "1"}}, TypeError, "must be a number of seconds"),
        ({"messages_to_delay": ["PYTHON_CALL"]}, TypeError, "must be a dict"),
        ({"messages_to_fail": [1]}, TypeError, r"messages_to_fail must be a list of request types .*; got 1 \(int\)"),
        ({"messages_to_delay": {1: 1.0}}, TypeError, r"messages_to_delay must be a dict from .*; got 1 \(int\)"),
        ({"num_fail_sends": -1}, ValueError, r"num_fail_sends must be at least 0.*; got -1 \(int\)"),
        ({"num_fail_sends": "1"}, TypeError, r"num_fail_sends must be an int.*; got '1' \(str\)"),
        ({"num_fail_sends": True}, TypeError, r"num_fail_sends must be an int.*; got True \(bool\)"),
        ({"num_fail_send": 1}, TypeError, "did you mean num_fail_sends"),
    ],
)
def test_errors_name_the_mistake(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        FaultyUcxRpcBackendOptions(**arguments)


def test_the_backend_can_be_constructed_by_name() -> None:
    backend = rpc.backend_registry.BackendType["FAULTY_UCX"]
    options = rpc.backend_registry.construct_rpc_backend_options(backend, **FAULTS)
    assert options == FaultyUcxRpcBackendOptions(**FAULTS)

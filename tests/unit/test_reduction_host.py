"""A host takes over parameters that another host has saved."""

from __future__ import annotations

import functools
import pickle
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch

from torch_ucx_rpc.reduction._host import Host, Shard
from torch_ucx_rpc.reduction._messages import Opening, Spec

KEY = "server/model"


def test_a_host_takes_over_the_latest_checkpoint(tmp_path: Path) -> None:
    optimizer = pickle.dumps(functools.partial(torch.optim.SGD, lr=1.0))
    spec = Spec("server", ("host0", "host1"), 1, optimizer, str(tmp_path), 1)
    opening = Opening(KEY, 77, 2, 66, ("t0",), ("t0",), ("t0",), ("host0", "host0"), spec)
    other = Shard(spec, tmp_path / "server-model-1.pt", [torch.zeros(2)])

    def update() -> None:
        other.prepare([torch.ones(2)], opening)
        other.apply()

    update()
    host = Host(mock.Mock(changed=threading.RLock(), **{"opening.return_value": None, "is_over.return_value": False}))
    # While host1 is away, a trainer asks this host, which reads the checkpoint. Then host1 returns and continues.
    assert host.fill(KEY, 1, spec, [torch.zeros(2)]).restored_from
    update()
    early = host.values(KEY, 1, spec, 2)
    assert host._prepare(opening, 1).step == 2
    assert early.wait().parameters[0].tolist() == [-2.0, -2.0]
    assert host.values(KEY, 1, spec, 2).wait().parameters[0].tolist() == [-2.0, -2.0]


def test_requests_for_parameters_that_are_lost_fail() -> None:
    optimizer = pickle.dumps(functools.partial(torch.optim.SGD, lr=1.0))
    spec = Spec("server", ("host0", "host1"), 1, optimizer, None, 1)
    host = Host(mock.Mock(changed=threading.RLock(), **{"opening.return_value": None, "is_over.return_value": False}))
    host.fill(KEY, 1, spec, [torch.zeros(2)])
    opening = Opening(KEY, 77, 2, 66, ("t0",), ("t0",), ("t0",), ("host0", "host0"), spec)
    host._prepare(opening, 1)
    early = host.values(KEY, 1, spec, 9)
    # Other hosts have continued without this one, and none has saved.
    with pytest.raises(RuntimeError, match="has no parameters of 'server/model'"):
        host._prepare(opening._replace(generation=99, step=9, committed=88), 1)
    with pytest.raises(RuntimeError, match="has no parameters of 'server/model'"):
        early.wait()

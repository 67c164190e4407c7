"""``init_rpc`` in processes with limits or settings of the machine."""

from __future__ import annotations

import logging
import os
import resource

import pytest
import torch.distributed.rpc as rpc

from tests.support import workers
from torch_ucx_rpc.errors import JoinFailed

KEEPS_LIMIT = {"TORCH_UCX_RPC_KEEP_NOFILE": "1"}

# ---- In a job --------------------------------------------------------------------------------------------------------


def refused(rank: int, files: int | None) -> str:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    try:
        with pytest.raises(JoinFailed) as error:
            workers.init_rpc(rank)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    return str(error.value)


def test_init_rpc_refuses_transports_without_a_network() -> None:
    said = workers.run_workers(2, refused, None, init=False, env={"UCX_TLS": "self"})
    assert [text.endswith("tcp or rc for those of several, or unset it") for text in said] == [True, True]


def test_init_rpc_refuses_too_few_files_before_ucx_aborts() -> None:
    [text] = workers.run_workers(1, refused, 30, init=False, env=KEEPS_LIMIT)
    assert text.startswith("this process may open 30 files")
    assert "ulimit -n 65536" in text


def limits_beside_rpc(rank: int, soft: int) -> tuple[int, int]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
    workers.init_rpc(rank)
    rpc.shutdown()
    with os.fdopen((ends := os.pipe())[0]) as of_child:
        if os.fork() == 0:
            os.write(ends[1], str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]).encode())
            os._exit(0)
        os.close(ends[1])
        return most - resource.getrlimit(resource.RLIMIT_NOFILE)[0], int(of_child.read())


def test_init_rpc_raises_the_limit_of_files_not_for_children() -> None:
    assert workers.run_workers(1, limits_beside_rpc, 500, init=False) == [(0, 500)]


def test_init_rpc_keeps_the_limit_of_files_on_request() -> None:
    [(lack, of_child)] = workers.run_workers(1, limits_beside_rpc, 500, init=False, env=KEEPS_LIMIT)
    assert (lack > 0, of_child) == (True, 500)


def init_twice(rank: int) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch_ucx_rpc")
    logger.addHandler(handler)
    logger.propagate = False
    for _ in range(2):
        workers.init_rpc(rank)
        rpc.shutdown()
    return said


def test_a_warning_is_given_once() -> None:
    said = workers.run_workers(2, init_twice, init=False, env={"UCX_MM_ERROR_HANDLING": "n"})
    expected = "with UCX_MM_ERROR_HANDLING=n workers of one host cannot use shared memory and take TCP: unset it"
    assert said == [[expected], [expected]]

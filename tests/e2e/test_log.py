"""Warnings of the C++ agent reach Python's logging, or stderr if the program has set up none."""

from __future__ import annotations

import logging
import threading

import pytest
import torch.distributed.rpc as rpc

from tests.support.workers import run_program, run_workers

pytestmark = pytest.mark.ucx_only

started, ends = threading.Event(), threading.Event()


def hold() -> None:
    started.set()
    ends.wait()


def end_with_a_handler_that_runs(rank: int) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("torch_ucx_rpc").addHandler(handler)
    rpc.rpc_async("worker0", hold)
    started.wait()
    rpc.shutdown(graceful=False)
    ends.set()
    [record] = records
    assert (record.name, record.levelno) == ("torch_ucx_rpc", logging.WARNING)
    assert record.getMessage().startswith("1 thread(s) of worker 'worker0' are still running user code at shutdown")


def test_agent_warnings_are_records_of_the_packages_logger() -> None:
    # torch may write to stderr that the handler returned after the shutdown.
    run_workers(1, end_with_a_handler_that_runs, shutdown=False, silent=False)


PROGRAM = """
import logging, os, threading
import torch.distributed.rpc as rpc
import torch_ucx_rpc

started, ends = threading.Event(), threading.Event()

def hold():
    started.set()
    ends.wait()

SETTING
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
rpc.init_rpc("worker0", backend="UCX", rank=0, world_size=1)
rpc.rpc_async("worker0", hold)
started.wait()
rpc.shutdown(graceful=False)
ends.set()
"""


@pytest.mark.parametrize(
    ("setting", "lines"),
    [
        ("", 1),
        ("logging.basicConfig(format='%(name)s %(levelname)s %(message)s')", 1),
        ("logging.getLogger('torch_ucx_rpc').setLevel(logging.ERROR)", 0),
    ],
    ids=["no logging", "basicConfig", "a level above"],
)
def test_the_programs_logging_decides_what_stderr_shows(setting: str, lines: int) -> None:
    [ended] = run_program(PROGRAM.replace("SETTING", setting))
    told = [line for line in ended.stderr.splitlines() if "still running user code" in line]
    assert len(told) == lines
    if setting and lines:
        assert told[0].startswith("torch_ucx_rpc WARNING 1 thread(s)")

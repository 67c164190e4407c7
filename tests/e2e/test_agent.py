"""The agent's Python side, forked children, and the end of the program."""

from __future__ import annotations

from tests.support import workers

ONE_WORKER = """
import os, sys
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
import torch, torch.distributed.rpc as rpc, torch_ucx_rpc

def call():
    assert rpc.rpc_sync("w0", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]

rpc.init_rpc("w0", backend="UCX", rank=0, world_size=1)
call()
"""


def test_a_forked_child_ends_without_touching_its_parents_agent() -> None:
    [ended] = workers.run_program(
        ONE_WORKER
        + """
import warnings
# From Python 3.12 on, Python warns of a fork beside other threads. This test needs such a fork.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
child = os.fork()
if child == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
call()
"""
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_program_may_end_with_rrefs_and_without_shutdown() -> None:
    [ended] = workers.run_program(ONE_WORKER + 'rref = rpc.remote("w0", torch.ones, args=((2,),))\nrref.to_here()')
    assert ended.returncode == 0


def test_an_exit_handler_of_the_program_may_still_call() -> None:
    [ended] = workers.run_program(ONE_WORKER + "import atexit\natexit.register(call)")
    assert (ended.returncode, ended.stderr) == (0, "")

"""Workers that start before rank 0, addresses of other hosts, and waiting processes that end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch.distributed import FileStore

from tests.support import workers
from tests.support.labs import VirtualHosts, needs_virtual_hosts
from tests.support.workers import reserved_port, run_workers
from torch_ucx_rpc._bootstrap.rendezvous import create_store


def come_before_rank_0(rank: int, file: Path) -> bytes:
    meeting = FileStore(str(file))
    if rank == 0:
        meeting.wait(["come/1", "come/2"])
    else:
        meeting.set(f"come/{rank}", "")
    store = create_store("env://", rank, 3, 30)
    if rank == 0:
        store.set("key", "value")
    value = store.get("key")
    # The Store ends with rank 0.
    meeting.set(f"read/{rank}", "")
    meeting.wait(["read/0", "read/1", "read/2"])
    return value


def test_workers_that_start_early_wait_for_rank_0(tmp_path: Path) -> None:
    assert run_workers(3, come_before_rank_0, tmp_path / "meeting", init=False) == [b"value"] * 3


def test_bindable_address_need_not_be_of_this_host() -> None:
    # keepalived and haproxy bind to such addresses.
    needs_virtual_hosts()
    with VirtualHosts(["a", "b"]) as (a, b):
        b.run(["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind"], check=True)
        command = [sys.executable, "-c", ARE_OF_THIS_HOST, a.address, b.address, "a", "b"]
        done = b.run(command, env=environ_of_workers(), capture_output=True, text=True, check=True)
        assert done.stdout == "[False, True, False, True]\n"


ARE_OF_THIS_HOST = """
import sys
from torch_ucx_rpc._bootstrap.listener import is_this_host
print([is_this_host(host) for host in sys.argv[1:]])
"""


def environ_of_workers() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


# If a thread returns from C++ while the interpreter is finalized, the process aborts.
LEFT_BEHIND = """
from datetime import timedelta
from torch.distributed import TCPStore
from torch_ucx_rpc._bootstrap import rendezvous

store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=1), wait_for_workers=False)

def wait_for_what_does_not_come():
    try:
        store.get("nothing")
    finally:
        print("came back")

try:
    rendezvous._interruptible(wait_for_what_does_not_come, 0.1)
except TimeoutError:
    print("gave up")
"""


def test_process_end_waits_for_a_thread_in_the_store() -> None:
    [ended] = workers.run_program(LEFT_BEHIND)
    assert (ended.returncode, ended.stdout.split("\n")) == (0, ["gave up", "came back", ""])


# The program sends itself the signal once its main thread waits, so that the signal does not come too early.
WAITING = """
import os, signal, sys, threading, time, traceback
from torch_ucx_rpc._bootstrap import rendezvous

def interrupt():
    frame = ""
    while "await_listener" not in frame:
        frame = "".join(traceback.format_stack(sys._current_frames()[main]))
    os.kill(os.getpid(), signal.SIGINT)

main = threading.get_ident()
threading.Thread(target=interrupt).start()
rendezvous.create_store("env://", 1, 2, 0)
"""


def test_ctrl_c_ends_the_wait_for_rank_0() -> None:
    with reserved_port() as port:
        [ended] = workers.run_program(WAITING, env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    assert ended.stderr.endswith("KeyboardInterrupt\n")

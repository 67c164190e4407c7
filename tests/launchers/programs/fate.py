"""worker1 ends or stops while worker0 and worker2 are in ``rpc.shutdown()``. These two note the outcome."""

import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed.rpc as rpc

import torch_ucx_rpc

fate, folder = sys.argv[1], Path(sys.argv[2])
torch_ucx_rpc.init_rpc()
me = rpc.get_worker_info().name
(folder / f"{me}.pid").write_text(str(os.getpid()))

if me == "worker1":
    time.sleep(0.5)
    if fate == "killed":
        while not (folder / "launcher is stopped").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    elif fate == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fate == "never calls shutdown":
        time.sleep(1000)
    elif fate == "exception":
        raise ValueError("enough")
    elif fate == "sys.exit(3)":
        sys.exit(3)
    elif fate == "sys.exit()":
        sys.exit()
    elif fate == "Ctrl-C":
        while not all((folder / f"{other}.in").exists() for other in ("worker0", "worker2")):
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGINT)  # as the terminal does
        time.sleep(1000)
try:
    (folder / f"{me}.in").touch()
    rpc.shutdown(timeout=4 if fate in ("stopped", "never calls shutdown") else 60)
    what = "returned"
except BaseException as error:
    what = f"{type(error).__name__}: {error}"
(folder / f"{me}.writing").write_text(what)
(folder / f"{me}.writing").rename(folder / f"{me}.shutdown")

"""A worker of ``run`` that writes facts about its own process to FOLDER/<name>.json.

facts.py FOLDER
"""

import ctypes
import faulthandler
import gc
import json
import multiprocessing
import os
import random
import resource
import signal
import stat
import sys
import tempfile
import threading
import uuid
from pathlib import Path

import numpy as np
import torch

_PR_GET_PDEATHSIG = 2


def stream(file) -> dict:
    facts = os.fstat(file.fileno())
    return {
        "fd": file.fileno(),
        "is_pipe": stat.S_ISFIFO(facts.st_mode),
        "line_buffering": file.line_buffering,
        "write_through": file.write_through,
        "encoding": file.encoding,
        "errors": file.errors,
        "seekable": file.seekable(),
    }


def signals() -> dict:
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    handlers = {number.name: str(signal.getsignal(number)) for number in signal.Signals}
    return {
        "SIGINT": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "other handlers": {n: h for n, h in handlers.items() if n != "SIGINT" and "SIG_DFL" not in h and h != "0"},
        "ignored": status["SigIgn"],
        "blocked": status["SigBlk"],
        "wakeup": signal.set_wakeup_fd(-1),
    }


def death_signal() -> int:
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value


def same_for_all() -> dict:
    main = sys.modules["__main__"].__dict__
    return {
        "__main__": sorted(
            set(main) & {f"__{name}__" for name in ("name", "file", "spec", "loader", "doc", "package")}
        ),
        "__file__": main.get("__file__"),
        "__spec__": getattr(main["__spec__"], "name", None),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "sys.path": sys.path,
        "command line": Path("/proc/self/cmdline").read_bytes().decode().split("\0"),
        "executable": str(Path("/proc/self/exe").readlink()),
        "name of the process": Path("/proc/self/comm").read_text(),
        "caller of the main module": repr(sys._getframe(2).f_back),
        "customized": [name for name in ("sitecustomize", "usercustomize") if name in sys.modules],
        "cwd": str(Path.cwd()),
        "umask": os.umask(0o22),
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "files": sorted(entry.name for entry in Path("/proc/self/fd").iterdir())[:-1],
        "stdin": str(Path("/proc/self/fd/0").readlink()),
        "stdout": stream(sys.stdout),
        "stderr": stream(sys.stderr),
        "leads a session": os.getsid(0) == os.getpgrp() == os.getpid(),
        "signals": signals(),
        "threads": [len(list(Path("/proc/self/task").iterdir())), threading.active_count()],
        "main thread": threading.main_thread().ident == threading.get_ident(),
        "native id": threading.main_thread().native_id == os.getpid(),
        "flags": str(sys.flags),
        "-X": sys._xoptions,
        "-W": sys.warnoptions,
        "faulthandler": faulthandler.is_enabled(),
        "traced": [sys.gettrace(), sys.getprofile()],
        "collector": [gc.isenabled(), gc.get_threshold()],
        "cores": sorted(os.sched_getaffinity(0)),
        "threads of torch": [torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]],
        "CUDA": [torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork(), torch.cuda.is_available()],
        "start method": multiprocessing.get_start_method(allow_none=True),
        "process": [multiprocessing.current_process().name, multiprocessing.parent_process()],
        "hash": hash("a text"),
    }


def own() -> dict:
    shown = Path("/proc/self/environ").read_bytes().decode().split("\0")[:-1]
    return {
        "environ": dict(os.environ),
        "environ is shown": sorted(shown) == sorted(f"{name}={value}" for name, value in os.environ.items()),
        "random": random.random(),
        "numpy": np.random.random(),
        "torch": torch.rand(1, dtype=torch.double).item(),
        "torch's seed": torch.initial_seed(),
        "authkey": multiprocessing.current_process().authkey.hex(),
        "uuid": uuid.uuid4().hex,
        "name of a temporary file": next(tempfile._get_candidate_names()),
        "pid": os.getpid(),
    }


def parent() -> dict:
    return {"parent": os.getppid(), "ends with its parent": death_signal() == signal.SIGKILL}


def main() -> None:
    file = Path(sys.argv[1]) / f"{os.environ['RANK']}.json"
    file.write_text(json.dumps({"same": same_for_all(), "own": own(), **parent()}))


main()

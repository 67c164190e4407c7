"""Starts the programs of a machine as forks of a process that has imported torch: the import takes half a minute there.

python nursery.py FOLDER runs each NUMBER.program there, and writes NUMBER.pid, NUMBER.out and NUMBER.rc
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path

# UCX is not imported here: it reads the environment of each program when it is loaded.
import torch.distributed.autograd
import torch.distributed.optim
import torch.distributed.rpc  # noqa: F401


def write(file: Path, text: str) -> None:
    """Write a file so that it appears at once and whole."""
    unfinished = file.with_suffix(file.suffix + ".new")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.rename(file)


def serve(folder: Path) -> str:
    """Return in the process of each program, with its file, and never in the first process."""
    running: dict[int, Path] = {}
    write(folder / "nursery", "up\n")
    while True:
        for order in folder.glob("*.program"):
            wanted = json.loads(order.read_text(encoding="utf-8"))
            order.unlink()
            child = os.fork()
            if child == 0:
                os.setsid()
                output = os.open(order.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                for descriptor in (1, 2):
                    os.dup2(output, descriptor)
                os.environ.update(wanted["environment"])
                return str(Path(__file__).with_name(wanted["program"]))
            running[child] = order
            write(order.with_suffix(".pid"), str(child))
        while running:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                break
            code = os.waitstatus_to_exitcode(status)
            write(running.pop(child).with_suffix(".rc"), str(code if code >= 0 else 128 - code))
        time.sleep(0.1)


if __name__ == "__main__":
    program = serve(Path(sys.argv[1]))
    sys.argv = [program]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")

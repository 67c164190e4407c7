"""``python -m benchmarks.peers NAME``: measures one library, and prints a JSON object of microseconds.

NAME is a key of ``PROGRAMS``. "lanes" in the object names the transports that carried the bytes, if the library reports
them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

from benchmarks.peers.measuring import PROGRAMS


def main() -> None:
    name = sys.argv[1]
    program = importlib.import_module(f"benchmarks.peers.{PROGRAMS[name]}")
    if "--serve" in sys.argv:
        program.serve(name)
    elif (figures := program.measure(name)) is not None:
        print(json.dumps(figures), flush=True)
    if program.LEAVES_THREADS:  # the library's threads would outlive the interpreter
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()

"""In workers that are forked or started by exec, a program sees the same facts about its process as under plain
Python."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .test_starts import COMMAND, both

PROGRAMS = Path(__file__).parent / "programs"
# `run` itself sets PYTHONUNBUFFERED.
VARIABLES = {
    **os.environ,
    "PYTHONHASHSEED": "7",
    "PYTHONPATH": "/nowhere",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "2",
    # OpenBLAS starts threads at its import, but in a forked worker at its first use.
    "OPENBLAS_NUM_THREADS": "1",
}
CORE = min(os.sched_getaffinity(0))

SAME = (
    *("__main__", "__file__", "__spec__", "argv", "orig_argv", "sys.path", "command line", "executable"),
    *("name of the process", "caller of the main module", "customized", "cwd", "umask", "limits", "files"),
    *("stdin", "stdout", "stderr", "leads a session", "signals", "threads", "main thread", "native id", "flags"),
    *("-X", "-W", "faulthandler", "traced", "collector", "cores", "threads of torch", "CUDA", "start method"),
    *("process", "hash"),
)
OWN = ("random", "numpy", "torch", "torch's seed", "authkey", "uuid", "name of a temporary file", "pid")


class Facts:
    """The output of `facts.py`, run as ``python facts.py``, as two forked workers of ``run``, and as two by exec."""

    def __init__(self, folder: Path) -> None:
        self.launchers: dict[str, int] = {}
        self.told: dict[str, list[dict[str, Any]]] = {}
        for way in ("python", "fork", "exec"):
            launcher = [*COMMAND, "-n", "2", "--start", way] if way != "python" else [sys.executable]
            process = subprocess.Popen(
                [*launcher, str(PROGRAMS / "facts.py"), str(folder)],
                env={**VARIABLES, "RANK": "0"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, {CORE}),
            )
            _, errors = process.communicate(timeout=90)
            assert (process.returncode, errors) == (0, ""), way
            self.launchers[way] = process.pid
            self.told[way] = [json.loads(file.read_text()) for file in sorted(folder.iterdir())]

    @property
    def python(self) -> dict[str, Any]:
        return self.told["python"][0]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return Facts(tmp_path_factory.mktemp("facts"))


@both
@pytest.mark.parametrize("fact", SAME)
def test_worker_finds_the_same_as_a_plain_program(fact: str, start: str, facts: Facts) -> None:
    for told in facts.told[start]:
        assert told["same"][fact] == facts.python["same"][fact]


@both
@pytest.mark.parametrize("fact", OWN)
def test_no_two_workers_share_a_fact(fact: str, start: str, facts: Facts) -> None:
    one, other = facts.told[start]
    assert len({one["own"][fact], other["own"][fact], facts.python["own"][fact]}) == 3


@both
def test_launcher_is_the_parent_of_its_workers(start: str, facts: Facts) -> None:
    for told in facts.told[start]:
        assert (told["parent"], told["ends with its parent"]) == (facts.launchers[start], True)


@both
def test_workers_have_the_environment_of_the_launcher(start: str, facts: Facts) -> None:
    expected = facts.python["own"]["environ"]
    for rank, told in enumerate(facts.told[start]):
        environ = told["own"]["environ"]
        assert told["own"]["environ is shown"]
        assert environ["RANK"] == str(rank)
        assert {**environ, "RANK": "0"} | expected == {**environ, "RANK": "0"}
        assert all(re.match("[A-Z]", name) for name in environ.keys() - expected.keys()), environ.keys()

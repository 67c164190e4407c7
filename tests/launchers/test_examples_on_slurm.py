"""The examples run by the commands that their pages have for Slurm, each with little work."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.labs import SlurmCluster

from .test_recipes import follow, install

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


RUNS = [
    ("actors", "--rounds 1 --steps 8", r"2 actors sent \d+ MiB of frames", ()),
    ("digits", "--backend ucx", r"test accuracy", ("sklearn", "tqdm")),
    ("elastic", "", r"120 tasks are done: ", ()),
    ("inference", "--requests 20", r"40 requests in \d+ batches", ()),
    ("native_server", "--updates 20", r"40 of 40 updates were applied", ("numba",)),
    ("parameter_server", "--steps 2", r"trainer3: loss ", ()),
    ("pipeline", "", r"test accuracy: ", ("sklearn", "tqdm")),
    ("reduction", "", r"with trainer2 killed +loss ", ("matplotlib", "sklearn", "tqdm")),
    ("services", "", r"caller1: 400 calls answered", ()),
]


# CI runs the shortest example.
@pytest.mark.parametrize(
    ("name", "options", "line", "modules"),
    [pytest.param(*run, marks=() if run[0] == "inference" else pytest.mark.field) for run in RUNS],
    ids=[name for name, *_ in RUNS],
)
def test_an_example_runs_by_the_command_of_its_page(
    slurm: SlurmCluster, tmp_path: Path, name: str, options: str, line: str, modules: tuple[str, ...]
) -> None:
    if missing := [module for module in modules if find_spec(module) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    (tmp_path / "examples").symlink_to(EXAMPLES)
    (tmp_path / "bin").mkdir()
    install(tmp_path, "python", sys.executable)
    [command] = re.findall(r"^## Under Slurm\n.*?^```sh\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL)
    program = f"examples/{name}.py"
    command = command.replace(program, f"{program} {options}").replace("file:///shared", tmp_path.as_uri())
    environment = {"SLURM_CONF": slurm.environment["SLURM_CONF"], "OMP_NUM_THREADS": "1"}
    done = follow(command, tmp_path, environment, run=slurm.head.run, limit_s=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(line, done.stdout), done.stdout + done.stderr


def page(name: str) -> str:
    return (EXAMPLES / f"{name}.md").read_text(encoding="utf-8")


def test_every_example_is_run() -> None:
    assert [name for name, *_ in RUNS] == sorted(file.stem for file in EXAMPLES.glob("*.py"))

"""The commands on the examples' pages run, and print the expected output."""

from __future__ import annotations

import functools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import workers

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(file.stem for file in EXAMPLES.glob("*.py"))

# The command line that stands for a program's name on a page.
PROGRAMS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}

README = (EXAMPLES / "README.md").read_text(encoding="utf-8")


def commands(name: str, section: str) -> list[str]:
    """The commands of a section of an example's page."""
    page = (EXAMPLES / f"{name}.md").read_text(encoding="utf-8")
    [text] = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return [line for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL) for line in [block]]


def printed_by(folder: Path, command: str) -> str:
    """The output of a page's command, run in a new folder with the examples."""
    program, *words = shlex.split(command)
    (folder / "examples").symlink_to(EXAMPLES)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(
        [*PROGRAMS[program], *words],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def run(name: str, folder: Path) -> str:
    [command] = commands(name, "On a laptop")
    return printed_by(folder, command)


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [module for module in modules if find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def losses(printed: str) -> list[tuple[float, float]]:
    return [(float(first), float(last)) for first, last in re.findall(r"loss ([\d.]+) -> ([\d.]+)", printed)]


# ---- What each shows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["UCX", "TensorPipe"])
def test_a_parameter_server_runs_unedited_on_both_backends(tmp_path: Path, backend: str) -> None:
    on_ucx, on_tensorpipe = commands("parameter_server", "On a laptop")
    printed = printed_by(tmp_path, on_ucx if backend == "UCX" else on_tensorpipe)
    assert len(losses(printed)) == 2
    # A trainer may begin after the other one has trained the model.
    assert max(first for first, _ in losses(printed)) > 0.1, printed
    assert all(last <= first / 100 for first, last in losses(printed)), printed


def test_the_parameter_server_names_no_backend() -> None:
    program = (EXAMPLES / "parameter_server.py").read_text(encoding="utf-8").lower()
    assert "ucx" not in program
    assert "tensorpipe" not in program


def test_actors_send_frames_and_the_reward_rises(tmp_path: Path) -> None:
    printed = run("actors", tmp_path)
    rewards = [float(reward) for reward in re.findall(r"uint8 frames \(512, 32, 32\), reward ([\d.]+)", printed)]
    assert rewards[0] < 0.5 < 0.65 < rewards[-1], printed
    assert "2 actors sent 40 MiB of frames" in printed


@needs("sklearn", "tqdm")
def test_a_pipeline_trains_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    printed = run("pipeline", tmp_path)
    assert "stage0" in printed
    [accuracy] = re.findall(r"test accuracy: ([\d.]+)%", printed)
    assert float(accuracy) > 95


def test_workers_join_and_leave_while_one_is_killed(tmp_path: Path) -> None:
    printed = run("elastic", tmp_path)
    for number in (1, 2, 3, 4):
        assert f"worker{number} has joined" in printed
    assert "worker1 leaves after 10 tasks" in printed
    assert re.search(r"worker2 is lost: .*its process has ended", printed)
    assert re.search(r"task \d+ was with worker2, and goes to another worker", printed)
    [shares] = re.findall(r"120 tasks are done: (.*)", printed)
    assert sum(int(count) for count in re.findall(r"(\d+) by", shares)) == 120
    assert "10 by worker1" in shares


@needs("numba")
def test_a_native_server_answers_while_python_keeps_the_gil(tmp_path: Path) -> None:
    assert "1000 of 1000 updates were applied while Python kept the GIL" in run("native_server", tmp_path)


def test_a_service_answers_single_requests_in_batches(tmp_path: Path) -> None:
    printed = run("inference", tmp_path)
    assert printed.count("500 of 500 answers are those of the model by itself") == 2
    [(requests, batches, largest)] = re.findall(r"(\d+) requests in (\d+) batches, the largest of (\d+)", printed)
    assert int(requests) == 1000
    assert int(batches) < 1000
    assert 1 < int(largest) <= 32


@pytest.mark.parametrize("backend", ["UCX", "TensorPipe"])
def test_callers_do_not_notice_the_death_of_a_replica(tmp_path: Path, backend: str) -> None:
    on_ucx, on_tensorpipe = commands("services", "On a laptop")
    printed = printed_by(tmp_path, on_ucx if backend == "UCX" else on_tensorpipe)
    assert printed.count("400 calls answered") == 2
    offered = "caller1: score is offered by evaluator"
    assert re.search(rf"{offered}0, evaluator1.*{offered}1", printed, re.DOTALL), printed
    assert "living are caller0 (caller), caller1 (caller), evaluator1 (evaluator)" in printed


@needs("matplotlib", "sklearn", "tqdm")
def test_three_trainers_go_on_when_the_fourth_is_killed(tmp_path: Path) -> None:
    on_ucx, _ = commands("reduction", "On a laptop")
    accuracies = accuracies_of(printed_by(tmp_path, on_ucx))
    assert list(accuracies) == ["undisturbed", "with trainer2 killed"]
    assert all(accuracy > 90 for accuracy in accuracies.values())
    assert (tmp_path / "reduction.png").read_bytes().startswith(b"\x89PNG")


@needs("matplotlib", "sklearn", "tqdm")
def test_four_trainers_train_on_tensorpipe(tmp_path: Path) -> None:
    _, on_tensorpipe = commands("reduction", "On a laptop")
    accuracies = accuracies_of(printed_by(tmp_path, on_tensorpipe))
    assert list(accuracies) == ["undisturbed"]
    assert accuracies["undisturbed"] > 90


def accuracies_of(printed: str) -> dict[str, float]:
    found = re.findall(r"^(undisturbed|with trainer2 killed) +loss .*test accuracy ([\d.]+)%", printed, re.MULTILINE)
    return {what: float(accuracy) for what, accuracy in found}


@pytest.mark.parametrize("name", ["services", pytest.param("reduction", marks=needs("matplotlib", "sklearn", "tqdm"))])
def test_after_ctrl_c_no_process_of_an_example_is_left(tmp_path: Path, name: str) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    # A shell without job control lets its background programs ignore Ctrl-C.
    heed_ctrl_c = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    program = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=heed_ctrl_c,
    )
    assert program.stdout is not None
    # Each process of the example holds the write end of this pipe.
    begun = rb"offered by evaluator0, evaluator1" if name == "services" else rb" [1-9]\d*/150 "
    printed = b""
    while not re.search(begun, printed):
        part = os.read(program.stdout.fileno(), 65536)
        assert part, printed.decode()
        printed += part
    program.send_signal(signal.SIGINT)
    began = time.monotonic()
    with workers.Stalls() as stalls:
        program.stdout.read()
        assert program.wait() == -signal.SIGINT
    # The workers end within a second. A wait for the dead worker would take 30 s.
    assert time.monotonic() - began < 10 + stalls.seconds()
    program.stdout.close()


@needs("sklearn", "tqdm")
def test_a_network_split_by_hand_learns(tmp_path: Path) -> None:
    [accuracy] = re.findall(r"test accuracy.*?([\d.]+) ?%", run("digits", tmp_path))
    assert float(accuracy) > 95


# ---- Their pages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_each_example_has_a_page_that_the_table_lists(name: str) -> None:
    assert re.search(rf"^\| \[[\w ]+\]\({name}\.md\) \|", README, re.MULTILINE)
    for section in ("On a laptop", "Under Slurm"):
        assert all(f"examples/{name}.py" in command for command in commands(name, section))
        assert commands(name, section)


def test_each_page_has_an_example() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.md")} - {"README"} == set(NAMES)

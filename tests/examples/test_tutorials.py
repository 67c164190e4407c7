"""Programs written for TensorPipe run unchanged on UCX. There is one program for each pattern of PyTorch's RPC
tutorials.

The scripts, in ``examples/tutorials``, do not use this package; only the environment variable is added. Each script
checks its own results, and scripts without races print the same on TensorPipe.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.support import workers

TUTORIALS = sorted((Path(__file__).resolve().parents[2] / "examples" / "tutorials").glob("*.py"))
DETERMINISTIC = ["batched_parameter_server", "pipeline_parallel", "rnn_model_parallel"]

VARIABLE = "TORCH_UCX_RPC_REPLACE_TENSORPIPE"


@functools.cache
def printed_by(tutorial: Path, on: str) -> str:
    """Return the output on "UCX" or "TENSORPIPE"; check that the program ran on that backend."""
    with workers.reserved_port() as port, workers.reserved_port() as rpc_port:
        env = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RPC_PORT": str(rpc_port),
            VARIABLE: "1" if on == "UCX" else "0",
        }
        [ended] = workers.run_program(tutorial, env=env, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert (f"{VARIABLE}: torch.distributed.rpc uses UCX" in ended.stderr) == (on == "UCX"), ended.stderr
    return ended.stdout


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda tutorial: tutorial.stem)
def test_tutorials_do_not_mention_ucx(tutorial: Path) -> None:
    assert "ucx" not in tutorial.read_text(encoding="utf-8").lower()


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda tutorial: tutorial.stem)
def test_tutorials_run_on_ucx(tutorial: Path) -> None:
    assert printed_by(tutorial, "UCX")


@pytest.mark.timeout(270)  # two runs, each of a minute on a busy machine
@pytest.mark.parametrize("tutorial", DETERMINISTIC)
def test_tutorials_print_the_same_on_tensorpipe(tutorial: str) -> None:
    file = TUTORIALS[0].with_name(f"{tutorial}.py")
    assert printed_by(file, "UCX") == printed_by(file, "TENSORPIPE")

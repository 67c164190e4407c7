"""The recipes of docs/deployment.md run as written there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from tests.support.labs import SlurmCluster, VirtualHosts, needs
from tests.support.workers import eventually, reserved_port

from ._reports import ENVIRON, MEET, assert_all_called

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "deployment.md").read_text(encoding="utf-8")

THREE = ["worker0", "worker1", "worker2"]
FOUR = [*THREE, "worker3"]
ON_THREE = ["n1", "n2", "n3"]


def recipes(heading: str, language: str = "sh") -> list[str]:
    """Return the code blocks of this language under this heading."""
    _, found, rest = PAGE.partition(f"\n## {heading}\n")
    assert found, heading
    return re.findall(rf"^```{language}\n(.*?)^```$", rest.partition("\n## ")[0], re.MULTILINE | re.DOTALL)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the program of the recipes, and the ``python`` of the tests."""
    shutil.copy(MEET, tmp_path / "train.py")
    (tmp_path / "bin").mkdir()
    install(tmp_path, "python", sys.executable)
    install(tmp_path, "torchrun", f"{sys.executable} -m torch.distributed.run")
    return tmp_path


def install(place: Path, program: str, command: str) -> None:
    """Let the recipes' shell find ``command`` under the name ``program``."""
    file = place / "bin" / program
    file.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    file.chmod(0o755)


Run = Callable[..., subprocess.CompletedProcess]


def follow(
    recipe: str, place: Path, env: Mapping[str, str] | None = None, run: Run = subprocess.run, limit_s: int = 150
) -> subprocess.CompletedProcess[str]:
    """Run the recipe in a shell in that folder, and return how it ended."""
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    return run(
        ["timeout", "--kill-after=5", str(limit_s), "bash", "-ec", recipe],
        cwd=place,
        env={**ENVIRON, "PATH": path, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )


def mpi(place: Path, implementation: str, hosts: VirtualHosts) -> dict[str, str]:
    """Return the variables with which both mpiruns work on this machine as on a cluster."""
    mpirun = f"mpirun.{implementation}"
    needs(mpirun)
    install(place, "mpirun", mpirun)
    return {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_plm_rsh_agent": str(hosts.remote_shell),
        "HYDRA_LAUNCHER_EXEC": str(hosts.remote_shell),
        "HYDRA_LAUNCHER": "ssh",
    }


@pytest.mark.parametrize(
    ("number", "names"), [(0, FOUR), (1, ["ps0", "trainer0", "trainer1"])], ids=["workers", "roles"]
)
def test_recipe_for_one_machine_runs(place: Path, number: int, names: list[str]) -> None:
    done = follow(recipes("One machine")[number], place)
    assert done.returncode == 0, done.stderr
    assert_all_called(done.stdout, names)


def test_recipe_for_several_machines_runs(place: Path, hosts: VirtualHosts) -> None:
    first, second = recipes("Several machines")
    background = hosts[1].popen(
        ["bash", "-ec", second], cwd=place, env={**ENVIRON, "PATH": f"{place / 'bin'}:{os.environ['PATH']}"}, stdout=-1
    )
    done = follow(first, place, run=hosts[0].run)
    output = background.communicate(timeout=60)[0].decode()
    assert (done.returncode, background.returncode) == (0, 0), done.stderr
    assert_all_called(done.stdout + output, FOUR, on=["n1", "n1", "n2", "n2"])


def test_recipe_for_torchrun_runs(place: Path) -> None:
    [recipe] = recipes("torchrun")
    done = follow(recipe, place)
    assert done.returncode == 0, done.stderr
    assert_all_called(done.stdout, FOUR)


def test_recipe_for_slurm_runs(place: Path, slurm: SlurmCluster) -> None:
    srun, batch, by_node = recipes("Slurm")
    configuration = {"SLURM_CONF": slurm.environment["SLURM_CONF"]}
    done = follow(srun, place, configuration, run=slurm.head.run)
    assert done.returncode == 0, done.stderr
    assert_all_called(done.stdout, FOUR, on=["n1", "n1", "n2", "n2"])

    (place / "job.sh").write_text(batch)
    assert follow("sbatch job.sh", place, configuration, run=slurm.head.run).returncode == 0
    log = place / "job.log"
    eventually(lambda: log.exists() and log.read_text().count("}\n") == 3, "the output of job.sh", timeout=100)
    assert_all_called(log.read_text(), THREE, on=["n1", "n1", "n2"])

    done = follow(by_node, place, configuration, run=slurm.head.run)
    assert done.returncode == 0, done.stderr
    assert_all_called(done.stdout, ["ps0", "trainer0", "trainer1", "trainer2"])


@pytest.mark.parametrize(
    "number",
    [0, pytest.param(1, marks=pytest.mark.field), 2, pytest.param(3, marks=pytest.mark.field)],
    ids=["one host", "variable", "mpi4py", "file"],
)
def test_recipe_for_open_mpi_runs(place: Path, hosts: VirtualHosts, number: int) -> None:
    done = follow(recipes("Open MPI")[number], place, mpi(place, "openmpi", hosts), run=hosts.head.run)
    assert done.returncode == 0, done.stderr
    assert_all_called(done.stdout, THREE, on=None if number == 0 else ON_THREE)


@pytest.mark.parametrize(
    "number", [0, pytest.param(1, marks=pytest.mark.field), 2], ids=["one host", "variables", "mpi4py"]
)
def test_recipe_for_mpich_runs(place: Path, hosts: VirtualHosts, number: int) -> None:
    done = follow(recipes("MPICH")[number], place, mpi(place, "mpich", hosts), run=hosts.head.run)
    assert done.returncode == 0, done.stderr
    assert_all_called(done.stdout, THREE, on=None if number == 0 else ON_THREE)


def test_recipe_by_hand_runs(place: Path) -> None:
    [recipe] = recipes("By hand")
    with reserved_port() as port:
        done = follow(f"{recipe.replace('29512', str(port))}\nwait", place)
    assert done.returncode == 0, done.stderr
    assert_all_called(done.stdout, THREE[:2])


def test_recipe_for_kubernetes_runs(place: Path) -> None:
    [manifest] = recipes("Kubernetes", "yaml")
    service, job = yaml.safe_load_all(manifest)
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    size = job["spec"]["completions"]
    assert (size, str(size)) == (job["spec"]["parallelism"], variables["WORLD_SIZE"])
    # Run the command of each pod, with this host instead of the service.
    shell, option, command = container["command"]
    assert (shell, option) == ("sh", "-c")
    with reserved_port() as port:
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        pods = " ".join(f"JOB_COMPLETION_INDEX={index} sh -c '{command}' &" for index in range(size))
        done = follow(f"{pods} wait", place, variables)
    assert_all_called(done.stdout, FOUR)

"""The variables of each launcher, and the launch that they describe. The variables are copies of real ones."""

from __future__ import annotations

import itertools

import pytest

from torch_ucx_rpc._launch.environment import Launch, find_launch, first_host, nothing_found, ports_of

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "ROLE_NAME": "default",
    "ROLE_RANK": "3",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_UNIVERSE_SIZE": "3",
    "OMPI_MCA_ess_base_jobid": "362479617",
    "OMPI_MCA_orte_hnp_uri": "362479616.0;tcp://192.0.2.2:42609",
    "PMIX_NAMESPACE": "362479617",
    "PMIX_RANK": "1",
}
MPICH = {
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
    "PMI_FD": "6",
    "MPI_LOCALRANKID": "2",
    "MPI_LOCALNRANKS": "4",
    "HYDI_CONTROL_FD": "7",
}
SRUN = {
    "SLURM_CLUSTER_NAME": "lab",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_STEP_NODELIST": "n[3-4]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.78.0.254",
}
SBATCH_SCRIPT = {
    "SLURM_JOB_ID": "12",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_NODELIST": "n[1-4]",
}


def test_plain_variables_describe_a_launch() -> None:
    launch = find_launch({"RANK": "1", "WORLD_SIZE": "2"})
    assert launch == Launch("RANK and WORLD_SIZE", 1, 2, "worker1")


def test_variables_of_torchrun_describe_a_launch() -> None:
    assert find_launch(TORCHRUN) == Launch("torchrun", 3, 4, "worker3")


def test_a_role_gives_the_name() -> None:
    assert find_launch({**TORCHRUN, "ROLE_NAME": "trainer", "ROLE_RANK": "1"}).name == "trainer1"


def test_open_mpi_gives_the_host_only_of_a_job_on_one_host() -> None:
    launch = find_launch(OPEN_MPI_4)
    assert (launch.rank, launch.world_size, launch.hosts) == (1, 3, ())
    assert find_launch({**OPEN_MPI_4, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}).hosts == ("127.0.0.1",)


def test_variables_of_mpich_describe_a_launch() -> None:
    assert find_launch(MPICH) == Launch("MPICH", 2, 4, "worker2", ("127.0.0.1",), speaks_mpi=True)
    assert find_launch({**MPICH, "MPI_LOCALNRANKS": "2"}).hosts == ()


def test_srun_has_rank_0_on_the_first_node_of_the_step() -> None:
    launch = find_launch(SRUN)
    assert (launch.rank, launch.world_size, launch.name, launch.hosts) == (2, 3, "worker2", ("n3",))


def test_size_is_that_of_the_step_not_of_the_job() -> None:
    assert find_launch({**SRUN, "SLURM_NTASKS": "16"}).world_size == 3


@pytest.mark.parametrize("group", ["HET_GROUP", "PACK_GROUP"])
def test_heterogeneous_step_may_have_rank_0_on_any_first_node(group: str) -> None:
    groups = {f"SLURM_JOB_NODELIST_{group}_0": "n4", f"SLURM_JOB_NODELIST_{group}_1": "n[1-2]"}
    assert find_launch({**SRUN, "SLURM_STEP_NODELIST": "n[1-2,4]", **groups}).hosts == ("n1", "n4")


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967290"}, {"SLURM_STEP_ID": "4294967291"}])
def test_a_batch_script_is_refused_naming_srun(step: dict[str, str]) -> None:
    environ = {**SBATCH_SCRIPT, **step}
    assert find_launch(environ) is None
    assert "within job 12 of Slurm but no task of it: start it with srun" in nothing_found(environ)


@pytest.mark.parametrize(
    ("inner", "outer", "launcher"),
    [
        (TORCHRUN, SRUN, "torchrun"),
        (TORCHRUN, OPEN_MPI_4, "torchrun"),
        (OPEN_MPI_4, SRUN, "Open MPI"),
        (MPICH, SRUN, "MPICH"),
        # srun --mpi=pmi2 itself sets these variables.
        (SRUN, {"PMI_RANK": "2", "PMI_SIZE": "3"}, "Slurm"),
    ],
)
def test_the_innermost_launcher_counts(inner: dict, outer: dict, launcher: str) -> None:
    assert find_launch({**outer, **inner}).launcher == launcher


def test_without_variables_no_launcher_is_found() -> None:
    assert find_launch({"HOME": "/root", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}) is None
    for variable in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        assert variable in nothing_found({})


@pytest.mark.parametrize(
    ("environ", "error"),
    [
        ({"RANK": "1"}, "RANK=1 is set and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set and RANK is not"),
        ({"RANK": "one", "WORLD_SIZE": "4"}, "RANK=one is not a number"),
        ({"PMI_RANK": "1", "MPI_LOCALNRANKS": "1"}, "PMI_SIZE= is not a number"),
        (
            {**SRUN, "WORLD_SIZE": "8"},
            "WORLD_SIZE=8 contradicts Slurm, by which it is 3: unset WORLD_SIZE",
        ),
    ],
)
def test_impossible_variables_are_named(environ: dict[str, str], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        find_launch(environ)


def test_plain_world_size_may_repeat_the_launchers() -> None:
    assert find_launch({**SRUN, "WORLD_SIZE": "3"}).launcher == "Slurm"


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-4]", "n1"),
        ("n[3,7-9],m1", "n3"),
        ("rack[07-09]node[01,03]-ib,x", "rack07node01-ib"),
        ("a.example.org,b.example.org", "a.example.org"),
    ],
)
def test_first_host_of_a_compressed_list_is_found(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


def test_each_job_has_fixed_ports_of_its_own() -> None:
    numbers = itertools.product("12", "01")
    steps = [find_launch({**SRUN, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}) for job, step in numbers]
    ports = [ports_of(launch.job) for launch in steps]
    assert ports == [ports_of(launch.job) for launch in steps]
    assert len(set(ports)) == 4
    assert all(16_384 <= port < 32_768 for candidates in ports for port in candidates)


def test_a_job_requeued_by_slurm_counts_as_another_job() -> None:
    assert find_launch(SRUN).job != find_launch({**SRUN, "SLURM_RESTART_COUNT": "1"}).job

"""What the README and docs/failure_model.md promise, and the tests that hold them to it.

docs/failure_model.md names its tests itself, in tables; `PROMISES` has the rest. test_promises.py checks that each test
exists, and that each statement of the README's list stands here.

A promise is found by a few words of it, which the page must contain. A test is the name of a Python test, a suite of
C++ tests ("TurnsTest") or one of them ("CancelFreesTheSendersMemory"), a file ("tests/conformance"), or a benchmark
("benchmarks small_calls").
"""

from __future__ import annotations

PROMISES: dict[str, dict[str, tuple[str, ...]]] = {
    "README.md": {
        # Unchanged programs
        "rpc_sync, rpc_async, remote, RRefs": ("tests/conformance", "test_its_results_are_those_of_tensorpipe"),
        "PyTorch's own RPC suites": ("tests/conformance", "test_the_page_is_what_the_results_give"),
        "TensorPipe keeps working beside it": ("test_tensorpipe_goes_on_working_in_the_same_process",),
        "TORCH_UCX_RPC_REPLACE_TENSORPIPE=1": ("test_a_tensorpipe_program_runs_on_ucx_unedited",),
        # Fast
        "A small call takes": ("benchmarks small_calls", "test_the_claims_of_the_readme_are_what_was_measured"),
        "more than half of the speed of a memcpy": (
            "benchmarks large_tensors",
            "test_the_claims_of_the_readme_are_what_was_measured",
        ),
        "64 workers on two cores": ("benchmarks life", "test_the_claims_of_the_readme_are_what_was_measured"),
        "in the better of two": ("test_ratio_is_to_tensorpipes_better_configuration",),
        "see [the figures]": ("test_the_tables_of_the_docs_are_what_was_measured",),
        # Dependable
        "A receive window bounds memory": (
            "test_a_flood_is_answered_exactly_in_bounded_memory",
            "test_calls_that_time_out_leave_nothing_behind",
        ),
        "A killed worker is noticed": ("test_calls_to_a_killed_process_fail_within_a_second",),
        "The others go on serving": ("test_survivors_serve_in_shutdown_until_all_living_have_come",),
        "A cut of the network": ("test_a_cut_longer_than_heartbeat_limit_loses_no_call",),
        "Calls may be nested deeper": ("test_a_chain_of_calls_may_be_longer_than_there_are_threads",),
        "join and leave": (
            "test_workers_join_and_leave_one_after_the_other",
            "test_worker_joins_by_a_file_without_rank_0",
        ),
        "lists the promises": ("test_every_promise_of_the_failure_model_names_a_test",),
        "from strangers reaches the unpickler": (
            "test_a_stranger_that_asks_all_the_same_is_not_heard",
            "SealedAgentTest",
            "StrangerTest",
        ),
        # Arrays and compiled handlers
        "Large NumPy arrays travel like tensors": ("test_arrays_arrive_as_they_were_sent", "benchmarks arrays"),
        "numba makes operators that run": ("benchmarks native_updates", "tests/unit/test_native_op.py"),
        # Launched and observed
        "starts a job": ("tests/launchers", "tests/unit/test_run.py"),
        "needs no arguments under it": ("test_torchrun_on_two_hosts_with_a_role", "test_slurm", "test_open_mpi"),
        "show the installation, slow pairs": ("tests/unit/test_check.py", "tests/unit/test_info.py"),
        "`torch_ucx_rpc.statistics()` and Prometheus": ("test_prometheus_reads_the_statistics",),
    },
    "docs/failure_model.md": {
        # How an end is noticed
        "a pidfd": ("ProcessWatchTest",),
        "the error of its UCX connection": ("test_calls_to_a_process_killed_elsewhere_fail_in_a_second",),
        "after `heartbeat_limit` and": ("HeartbeatTest", "test_a_silent_host_is_lost_after_the_limit"),
        "its goodbye": (
            "GoodbyeOfAPeerIsItsEndInGoodOrder",
            "test_a_worker_leaves_although_others_go_on_calling_it",
        ),
        "**A lost worker stays lost.**": (
            "test_workers_that_lost_each_other_survive_the_cuts_end",
            "PeerMonitorTest",
        ),
        "**Every error names the worker**": ("test_calls_to_a_killed_process_fail_within_a_second",),
    },
    "docs/development/failure_model.md": {
        "An unmarked slot may also belong to a slow sender": ("QueueRepairTest",),
        "a connection over a network is closed only when": ("test_workers_that_lost_each_other_survive_the_cuts_end",),
    },
}

# Tests that no mutant is tried against, and why. Benchmarks and `make verbs` are none: they are run and read.
UNTRIED: dict[str, str] = {
    "tests/conformance": "PyTorch's suites; each takes minutes",
    "tests/launchers": "four of its tests are tried",
    "test_the_page_is_what_the_results_give": "compares a page with results",
    "test_the_claims_of_the_readme_are_what_was_measured": "compares a page with results",
    "test_the_tables_of_the_docs_are_what_was_measured": "compares pages with results",
    "test_every_promise_of_the_failure_model_names_a_test": "reads pages and tests, where no mutant is put",
}

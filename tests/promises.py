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
        "TensorPipe keeps working beside it": (
            "test_tensorpipe_goes_on_working_in_the_same_process",
            "tests/conformance",
        ),
        "PyTorch's own RPC suites": ("tests/conformance", "test_the_page_is_what_the_results_give"),
        # Fast
        "A small call takes": ("benchmarks small_calls", "benchmarks large_tensors", "benchmarks life"),
        "See [one honest figure]": ("test_the_tables_of_the_docs_are_what_was_measured",),
        # Dependable
        "Memory is bounded by a receive window": ("test_a_flood_is_answered_exactly_in_bounded_memory",),
        "a timed-out call gives its buffers back": ("test_calls_that_time_out_leave_nothing_behind",),
        "a worker that is killed is noticed": (
            "test_calls_to_a_killed_process_fail_within_a_second",
            "test_a_silent_host_is_lost_after_the_limit",
        ),
        "calls may be nested deeper": ("test_a_chain_of_calls_may_be_longer_than_there_are_threads",),
        "join and leave": (
            "test_workers_join_and_leave_one_after_the_other",
            "test_a_worker_joins_after_rank_0_has_ended_by_way_of_a_file",
        ),
        "What is promised stands in": ("test_every_promise_of_the_failure_model_names_a_test",),
        "strangers get nothing to the unpickler": (
            "test_a_stranger_that_asks_all_the_same_is_not_heard",
            "SealedAgentTest",
            "StrangerTest",
        ),
        # Arrays and compiled handlers
        "Large NumPy arrays travel like tensors": ("test_arrays_arrive_as_they_were_sent", "benchmarks arrays"),
        # Launched and looked into
        "starts a job, and": ("tests/launchers", "test_torchrun_on_two_hosts_with_a_role"),
        "tell what is there, what is slow": ("test_prometheus_reads_the_statistics", "tests/e2e/test_statistics.py"),
        "`torch_ucx_rpc.statistics()` and Prometheus": ("test_prometheus_reads_the_statistics",),
    },
    "docs/failure_model.md": {
        # How an end is noticed
        "a pidfd (": ("ProcessWatchTest",),
        "the error of its UCX connection": ("test_calls_to_a_killed_process_of_another_host_fail_within_a_second",),
        "after `heartbeat_limit`": ("HeartbeatTest", "test_a_silent_host_is_lost_after_the_limit"),
        "its goodbye": ("test_a_worker_leaves_although_others_go_on_calling_it",),
        "nothing revives it": ("test_workers_that_have_lost_each_other_live_on_when_the_cut_ends",),
        "Every error names the worker": ("test_calls_to_a_killed_process_fail_within_a_second",),
        "A slot that is not marked": ("QueueRepairTest",),
        "a connection over a network is closed only when": (
            "test_workers_that_have_lost_each_other_live_on_when_the_cut_ends",
        ),
    },
}

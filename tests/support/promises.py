"""The promises of the README and of the two pages on failures, and their tests.

test_promises.py checks that each test exists, and that this file has each statement of the README's list and each
sentence of the lists under "Promises" in docs/failure_model.md.

An entry has a few words of its promise: the page must contain them. A test is the name of a Python test, a suite of C++
tests ("HeartbeatTest") or one of them ("CancelFreesTheSendersMemory"), a file ("tests/conformance"), a benchmark
("benchmarks small_calls") or a trial of Soft-RoCE ("verbs killed").
"""

from __future__ import annotations

PROMISES: dict[str, dict[str, tuple[str, ...]]] = {
    "README.md": {
        # Unchanged programs
        "rpc_sync, RRefs, distributed autograd": ("tests/conformance", "test_tutorials_print_the_same_on_tensorpipe"),
        "PyTorch's own RPC suites": ("tests/conformance", "test_the_page_matches_the_results"),
        "TensorPipe keeps working beside it": ("test_tensorpipe_goes_on_working_in_the_same_process",),
        "programs written for it run on UCX": ("test_a_tensorpipe_program_runs_on_ucx_unedited",),
        # Fast
        "A small call takes": ("benchmarks small_calls", "test_the_claims_of_the_readme_match_the_results"),
        "more than half of the speed of a memcpy": (
            "benchmarks large_tensors",
            "test_the_claims_of_the_readme_match_the_results",
        ),
        "64 workers on two cores": ("benchmarks life", "test_the_claims_of_the_readme_match_the_results"),
        "the better of TensorPipe's two configurations": ("test_ratio_is_to_tensorpipes_better_configuration",),
        "see [the figures]": ("test_the_tables_of_the_docs_match_the_results",),
        # Dependable
        "A receive window bounds the memory": (
            "test_a_flood_is_answered_exactly_in_bounded_memory",
            "test_calls_that_time_out_leave_nothing_behind",
        ),
        "The other workers notice a killed worker": ("test_calls_to_a_killed_process_fail_within_a_second",),
        "They go on serving": ("test_survivors_serve_in_shutdown_until_all_living_have_come",),
        "A cut of the network": ("test_a_cut_longer_than_heartbeat_limit_loses_no_call",),
        "Calls may be nested deeper": ("test_a_chain_of_calls_may_be_longer_than_there_are_threads",),
        "join and leave": (
            "test_workers_join_and_leave_one_after_the_other",
            "test_worker_joins_by_a_file_without_rank_0",
        ),
        "lists the promises": ("test_every_sentence_that_promises_has_a_test",),
        "from strangers reaches the unpickler": (
            "test_a_stranger_that_asks_to_join_is_ignored",
            "SealedAgentTest",
            "StrangerTest",
        ),
        # Arrays and compiled handlers
        "Large NumPy arrays travel like tensors": ("test_arrays_arrive_as_they_were_sent", "benchmarks arrays"),
        "Operators that numba compiles": ("benchmarks native_updates", "tests/unit/test_native_op.py"),
        # Launched and observed
        "starts a job": ("tests/launchers", "tests/e2e/test_run.py"),
        "`torch_ucx_rpc.init_rpc()` needs no arguments": (
            "test_workers_of_torchrun_meet_across_two_hosts",
            "test_recipe_for_slurm_runs",
            "test_recipe_for_open_mpi_runs",
        ),
        "show the installation, slow pairs": ("tests/unit/test_check.py", "tests/e2e/test_info.py"),
        "`torch_ucx_rpc.statistics()` and Prometheus": ("test_prometheus_reads_the_statistics",),
    },
    "docs/failure_model.md": {
        # How an end is noticed
        "a pidfd": ("ProcessWatchTest",),
        "the error of its UCX connection": ("test_calls_across_hosts_fail_within_a_second_of_a_kill",),
        "after `heartbeat_limit` and": ("HeartbeatTest", "test_a_silent_host_is_lost_after_the_limit"),
        "its goodbye": (
            "GoodbyeEndsAPeerInGoodOrder",
            "test_a_worker_leaves_although_others_go_on_calling_it",
        ),
        "**A lost worker stays lost.**": (
            "test_workers_that_lost_each_other_survive_the_cuts_end",
            "PeerMonitorTest",
        ),
        "**Every error names the worker**": ("test_calls_to_a_killed_process_fail_within_a_second",),
        # Deaths
        "Calls to a killed process fail within a second, or within 2 s over InfiniBand and RoCE": (
            "test_calls_to_a_killed_process_fail_within_a_second",
            "test_calls_across_hosts_fail_within_a_second_of_a_kill",
            "verbs killed",
            "EndOfALifelineLosesASilentPeerLongBeforeTheLimit",
            "ConnectionThatACardBreaksCountsAsThePeersFailure",
            "test_workers_with_shared_memory_notice_a_death",
            "UcxLogOfTheDeadTest",
        ),
        "Later calls fail at once": ("test_calls_to_a_killed_process_fail_within_a_second",),
        "Calls among the other workers go on": (
            "test_calls_to_a_killed_process_fail_within_a_second",
            "test_a_silent_host_is_lost_after_the_limit",
        ),
        "Answers and barriers that arrived before a death count": (
            "DispatchOrderTest",
            "FailureTakesItsTurnAfterEverythingThatHasArrived",
            "tests/conformance",
        ),
        "Killing a process while it writes to a worker": (
            "test_writer_killed_while_writing_blocks_no_other_writer",
            "QueueRepairTest",
        ),
        "If a writer is stopped (SIGSTOP) within a message": (
            "NetworkReachesADeafWorkerAndARepairDeliversTheRest",
            "DeafWorkerTellsItsNeighboursOverTheNetwork",
            "test_worker_blocked_by_a_stopped_writer_is_still_reached",
        ),
        # Silence and cuts
        "Calls to a silent host, or to a stopped process there": (
            "test_a_silent_host_is_lost_after_the_limit",
            "test_a_cut_beyond_reconnect_limit_loses_the_worker",
        ),
        "The first call to a host that is down": ("test_graceful_shutdown_notices_a_dead_host_it_never_called",),
        "A cut shorter than both limits together": (
            "test_a_cut_longer_than_heartbeat_limit_loses_no_call",
            "test_a_cut_of_30_s_loses_no_call_with_default_options",
            "verbs cut_that_ends_in_time",
        ),
        "a cut of half of `heartbeat_limit` loses nothing": (
            "test_a_cut_of_half_the_limit_loses_nothing",
            "verbs cut_below_the_limit",
            "verbs paused_below_the_limit",
        ),
        "or a reset of connections under load": (
            "test_resets_of_connections_lose_no_call",
            "ResumptionTest",
            "HardshipTest",
        ),
        "Workers that have lost each other live on": ("test_workers_that_lost_each_other_survive_the_cuts_end",),
        "Workers that were cut off can join again": ("test_a_cut_removes_no_member_from_the_list",),
        "A join waits for members beyond a cut": (
            "test_a_join_outlasts_a_cut",
            "test_a_join_ends_when_a_silent_member_is_lost",
            "test_newcomer_waits_for_a_silent_member_that_others_have",
        ),
        "A tensor that takes longer than the limit": ("test_tensor_slower_than_the_limit_delays_no_small_call",),
        "A worker that holds the GIL, or whose handlers all block": (
            "test_worker_holding_the_gil_beyond_the_limit_is_not_lost",
            "PeerWhoseHandlersAllBlockGivesSignsOfLife",
        ),
        "A stopped process is not lost to workers of its own": ("test_a_stopped_worker_of_the_same_host_is_not_lost",),
        "A worker that was stopped for longer than the limit": (
            "test_worker_stopped_beyond_the_limit_loses_no_peer",
            "TimeInWhichThisProcessDidNotRunDoesNotCount",
        ),
        # RRefs
        "A worker survives the death of the owner": ("test_worker_survives_deaths_of_owners_of_unfinished_rrefs",),
        "Using that RRef raises an error": ("test_worker_survives_deaths_of_owners_of_unfinished_rrefs",),
        "An RRef whose `rpc.remote` timed out raises `RRefLost`": (
            "test_each_rref_whose_creation_timed_out_says_so",
            "test_rref_that_timed_out_before_torch_recorded_it_is_lost",
            "test_a_wait_for_ones_own_rref_ends_with_its_timeout",
        ),
        "Its owner frees the value": ("test_an_rref_whose_creation_timed_out_is_freed_by_its_owner",),
        "If an owner cannot read the request for an RRef": (
            "test_every_use_raises_the_owners_error",
            "FailedCreationTest",
        ),
        "If it refuses the request, each use raises `RRefLost`": (
            "test_an_rref_is_lost_if_its_owner_had_no_thread_for_it",
        ),
        # State of a dead worker
        "A dead worker's queued calls do not start": ("test_queued_calls_of_a_dead_worker_are_not_begun",),
        "Its running calls finish, and their answers": ("test_queued_calls_of_a_dead_worker_are_not_begun",),
        "The worker's share of the receive window": (
            "test_property_of_a_dead_worker_is_released",
            "MessagesOfAPeerThatIsGoneGiveTheirShareBackAtOnce",
            "DropSessionHandsOutEverythingOfIt",
            "PartsOfACanceledMessageAreHandedOutAtOnce",
        ),
        "Contexts of distributed autograd that the worker opened are closed": (
            "test_contexts_of_a_dead_worker_are_closed_on_all_workers",
            "test_a_worker_that_joins_again_has_no_contexts_from_before",
        ),
        "References that the worker got by `rpc.remote` or from a third worker": (
            "test_property_of_a_dead_worker_is_released",
            "test_references_the_dead_had_from_a_third_worker_are_dropped",
        ),
        "References that its running calls create afterwards": ("LaterStateOfRunningHandlersIsReleasedOnceASecond",),
        "Waiting for an RRef that the worker was to create here raises an error": (
            "test_waiting_for_a_value_from_a_dead_worker_fails",
            "test_a_worker_takes_the_place_of_one_that_was_killed",
        ),
        "Using an RRef that the worker owned": ("test_a_worker_takes_the_place_of_one_that_was_killed",),
        # Nested calls
        "A chain of 200 calls": ("test_a_chain_of_calls_may_be_longer_than_there_are_threads",),
        "A chain that exceeds `max_worker_threads`": ("test_a_chain_that_exceeds_the_limit_fails_saying_so",),
        # Shutdown
        "A graceful shutdown serves until every living worker": (
            "test_survivors_serve_in_shutdown_until_all_living_have_come",
            "test_calls_among_survivors_are_answered_before_shutdown_ends",
        ),
        "The error names all dead workers": (
            "test_survivors_serve_in_shutdown_until_all_living_have_come",
            "test_graceful_shutdown_with_a_dead_worker_raises",
            "test_a_death_ends_the_shutdown_for_all_and_is_named",
            "test_graceful_shutdown_notices_a_dead_host_it_never_called",
            "BarrierTest",
        ),
        "The shutdown does not wait for dead workers or their RRefs": (
            "test_shutdown_does_not_wait_for_rrefs_of_the_dead",
            "test_shutdown_does_not_wait_for_rrefs_sent_to_the_gone",
            "ShutdownEndsWaitsForNewsThatNoWorkerWillSend",
        ),
        "If a worker hangs, the shutdown fails": ("test_graceful_shutdown_with_a_hung_worker_keeps_its_timeout",),
        "An ungraceful shutdown waits only for its own handlers": (
            "test_an_ungraceful_shutdown_waits_for_no_worker",
            "PeerThatShutsDownSaysGoodbye",
            "test_prompt_answers_leave_before_an_ungraceful_shutdown",
        ),
        "A worker that crashes, is killed or leaves early": (
            "test_crash_leaves_no_hang_and_no_shared_memory",
            "test_early_leave_causes_no_hang_and_leaves_no_shared_memory",
        ),
        "A worker leaves within seconds even if": ("test_no_worker_waits_for_a_deleted_file_of_the_store",),
        # Time
        "An unanswered call fails at its deadline": (
            "test_calls_fail_at_their_deadlines_also_under_load",
            "benchmarks deadlines",
        ),
        "A call that times out leaves nothing behind": (
            "test_calls_that_time_out_leave_nothing_behind",
            "test_a_late_answer_is_dropped_and_its_buffers_are_recycled",
            "LateResponseIsDroppedAndItsMemoryGoesBack",
            "CancelFreesTheSendersMemory",
            "benchmarks deadlines",
        ),
        "A request whose caller has given up is dropped before it runs": (
            "RequestWhoseCallerHasGivenUpIsNotRun",
            "test_rref_in_an_abandoned_call_is_freed",
            "RequestsThatOthersNeedMustExecute",
        ),
        # Overload
        "Calls beyond the receive window": (
            "test_a_flood_is_answered_exactly_in_bounded_memory",
            "benchmarks overload",
        ),
        "Memory grows by at most": ("test_a_flood_is_answered_exactly_in_bounded_memory", "benchmarks overload"),
        "Handlers that keep their tensors": (
            "test_handlers_may_keep_their_tensors",
            "test_calling_handler_returns_its_share_of_the_window",
            "test_handlers_may_call_back_with_their_tensors",
            "test_handlers_may_wait_for_each_other",
        ),
        "Messages larger than the window arrive": ("test_messages_larger_than_the_window_pass",),
        # Shortages
        "Without memory for a message, only its call fails": ("test_out_of_memory_fails_one_call_and_names_the_place",),
        "If a tensor of a message cannot be sent": ("MessageWithATensorThatCannotBeSentEndsOnBothSides",),
        "its call ends at its timeout": ("MessageWithoutMemoryForItIsDroppedAndTheNextArrives",),
        "Without a file descriptor for a connection, the call": (
            "test_out_of_files_only_the_call_that_connects_fails",
        ),
        "A later call connects": ("test_out_of_files_only_the_call_that_connects_fails",),
        "A worker that runs out of file descriptors loses": (
            "ConnectionThatFindsNoFilesIsNotBlamedOnThePeer",
            "LivingProcessIsNotTakenForEndedIfNoFileIsLeft",
            "test_a_worker_with_all_files_open_keeps_its_neighbours",
            "test_out_of_files_while_connecting_no_peer_is_lost",
            "test_out_of_files_on_one_core_no_peer_is_lost",
            "FilesForUcxTest",
            "test_init_rpc_refuses_too_few_files_before_ucx_aborts",
        ),
        "A worker without free file descriptors accepts": (
            "test_a_worker_with_all_files_open_can_be_called_by_new_peers",
        ),
        "If /dev/shm is full": ("test_with_dev_shm_full_workers_still_share_memory",),
        "Without that too, `init_rpc` says what to check": ("test_without_shared_memory_init_rpc_names_the_cure",),
        # Neighbours in the process
        "MPI and RPC work at the same time": (
            "test_mpi_that_is_started_after_rpc_works_beside_it",
            "test_older_ucx_loaded_by_mpi_is_refused_with_a_working_cure",
        ),
        "Signal handlers stay in place": (
            "test_signal_handlers_from_before_ucx_stay",
            "test_process_with_ucx_still_ends_with_its_terminal",
        ),
        "`init_rpc` refuses UCX settings": ("tests/unit/test_site_settings.py",),
        "RPC in a process forked from a worker": ("test_rpc_in_a_forked_child_is_refused_and_the_parent_goes_on",),
        "The forked process may end in any way": ("test_a_forked_child_may_end_in_any_way",),
        "`DataLoader(num_workers=2)` works": ("test_data_loader_processes_work_in_workers_and_handlers",),
    },
    "docs/development/failure_model.md": {
        "An unmarked slot may also belong to a slow sender": ("QueueRepairTest",),
        "closes a connection over a network only when": ("test_workers_that_lost_each_other_survive_the_cuts_end",),
    },
}

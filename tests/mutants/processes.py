"""Bugs in starts, forks, signals, MPI, and settings of the site."""

from __future__ import annotations

from tests.mutants._mutant import Mutant

MUTANTS = (
    Mutant(
        "ucx-never-waits",
        "    return all(\n        address is not None and",
        "    return all(\n        True or address is not None and",
        ("test_ucx_waits_for_threads_in_code_it_overwrites",),
    ),
    Mutant(
        "children-inherit-the-wait",
        "os.environ.pop(_PATCHING_WAIT, None)",
        "pass",
        ("test_one_thread_shortens_ucxs_wait_but_not_its_childrens",),
    ),
    Mutant(
        "threads-of-python-overlooked",
        "    if len(sys._current_frames()) != 1:\n        return False\n",
        "",
        ("test_more_python_threads_leave_ucxs_wait_alone",),
    ),
    Mutant(
        "two-workers-of-one-rank",
        "        if earlier.rank == later.rank:\n",
        "        if False:\n",
        ("test_a_rank_used_twice_is_refused_everywhere_naming_both",),
    ),
    Mutant(
        "handlers-of-signals-lost",
        "        for number, action in before.items():\n            sigaction(number, action, None)\n",
        "        pass\n",
        ("test_handlers_that_were_there_before_ucx_stay",),
    ),
    Mutant(
        "older-ucx-taken",
        '    if found.version[:2] >= tuple(int(number) for number in built_for.split(".")):\n        return\n',
        "    if found:\n        return\n",
        ("test_an_older_ucx_than_at_the_build_is_refused_with_the_cure",),
    ),
    Mutant(
        "pauses-without-bound",
        "    longest = min(_LONGEST_PAUSE_S, max(0.01, workers / _QUESTIONS_PER_S))\n",
        "    longest = 60.0\n",
        ("test_pauses_between_questions_stay_short",),
    ),
    Mutant(
        "another-secret-is-fine",
        "    if not secret.has_made(tag, sealed):\n",
        "    if False:\n",
        ("test_entry_of_another_secret_is_doubted_and_names_its_worker",),
    ),
    Mutant(
        "warned-of-again",
        "            _told.add(conflict)\n",
        "",
        ("test_a_warning_is_given_once",),
    ),
    Mutant(
        "workers-left-behind",
        "            _children.end_children()\n",
        "",
        ("test_failed_start_ends_the_started_workers_and_says_why",),
    ),
    Mutant(
        "joining-tries-once",
        "            if pause.passed() and not patience.passed():\n",
        "            if False:\n",
        ("test_a_worker_that_cannot_be_reached_at_once_is_tried_again",),
    ),
    Mutant(
        "site-settings-that-cannot-work-are-taken",
        "        if conflict.is_fatal:\n",
        "        if False:\n",
        (
            "tests/unit/test_site_settings.py",
            "test_init_rpc_refuses_too_few_files_before_ucx_aborts",
        ),
    ),
    # Debian's, say, which is older than that of the build.
    Mutant(
        "the-ucx-of-mpi-is-taken-first",
        'return (choice,) if choice else ("wheel", "system")',
        'return (choice,) if choice else ("system", "wheel")',
        ("test_mpi_that_is_started_after_rpc_works_beside_it",),
    ),
    Mutant(
        "the-cure-beside-mpi-names-another-folder",
        'str(Path(spec.origin).parent / "lib")',
        "str(Path(spec.origin).parent)",
        ("test_older_ucx_loaded_by_mpi_is_refused_with_a_working_cure",),
    ),
    Mutant(
        "ucx-takes-the-signal-of-a-terminal-that-ends",
        '"UCX_DEBUG_SIGNO": [signal.SIGHUP],',
        '"UCX_DEBUG_SIGNO": [],',
        (
            "test_process_with_ucx_still_ends_with_its_terminal",
            "test_handlers_that_were_there_before_ucx_stay",
        ),
    ),
    Mutant(
        "tensorpipe-is-replaced-unasked",
        "    if not _replacing:\n        return False\n",
        "",
        ("test_tensorpipe_goes_on_working_in_the_same_process",),
    ),
    Mutant(
        "the-variable-replaces-nothing",
        "    if _is_asked_for():\n",
        "    if False:\n",
        ("test_a_tensorpipe_program_runs_on_ucx_unedited",),
    ),
    Mutant(
        "workers-that-join-do-not-learn-who-is-there",
        "            agent.add_records([self._own, *earlier.values()], self._members.values())\n",
        "            agent.add_records([self._own], self._members.values())\n",
        (
            "test_workers_join_and_leave_one_after_the_other",
            "test_worker_joins_by_a_file_without_rank_0",
        ),
    ),
    Mutant(
        "workers-do-not-learn-their-roles",
        "                environ.update(ROLE_NAME=role, ROLE_RANK=str(index), ROLE_WORLD_SIZE=str(count))\n",
        "",
        ("tests/unit/test_run.py", "test_our_launcher_on_two_hosts_with_roles_over_both"),
    ),
    Mutant(
        "no-launcher-is-recognized",
        "    for read in (_read_plain, _read_open_mpi, _read_hydra, _read_slurm, _read_pmi):\n",
        "    for read in ():\n",
        ("test_torchrun_on_two_hosts_with_a_role", "test_slurm", "test_open_mpi"),
    ),
    Mutant(
        "slow-pairs-are-not-told",
        "            warnings += _outliers(kind, members)\n",
        "            pass\n",
        ("tests/unit/test_check.py",),
    ),
    Mutant(
        "info-without-ucx",
        "    add_ucx(report)\n",
        "",
        ("tests/unit/test_info.py",),
    ),
    Mutant(
        "prometheus-gets-nothing",
        "    registry.register(_Collector(snapshot))\n",
        "",
        ("test_prometheus_reads_the_statistics",),
    ),
    # It says so on stderr, that it cannot.
    Mutant(
        "forked-processes-shut-the-agent-down",
        "    if agent is not None and agent.is_of_this_process():\n",
        "    if agent is not None:\n",
        ("test_a_forked_child_may_end_in_any_way",),
    ),
    Mutant(
        "cpp-calls-leave-before-admission",
        "connection.state() == Connection::State::kJoining && message->header.kind != wire::Kind::kGoodbye",
        "false && connection.state() == Connection::State::kJoining",
        ("CallsOfAWorkerThatIsNotAdmittedYetWait",),
    ),
    Mutant(
        "cpp-forked-processes-use-the-agent",
        "  if (forkCount_ != forkCount()) {\n",
        "  if (false && forkCount_ != forkCount()) {\n",
        ("test_rpc_in_a_forked_child_is_refused_and_the_parent_goes_on",),
    ),
    Mutant(
        "cpp-a-worker-can-fork-once",
        "[] { kept().mutex.unlock(); }",
        "[] {}",
        ("test_data_loader_processes_work_in_workers_and_handlers",),
    ),
    Mutant(
        "cpp-strangers-may-join",
        "  if (joinOpener_.has_value() && !joinOpener_->isGenuine(header, record.size(), record)) {\n",
        "  if (false && !joinOpener_->isGenuine(header, record.size(), record)) {\n",
        ("test_a_stranger_that_asks_all_the_same_is_not_heard",),
    ),
    Mutant(
        "cpp-forged-frames-are-taken",
        "    if (!opener->isGenuine(header, dataBytes, data)) {\n",
        "    if (false && !opener->isGenuine(header, dataBytes, data)) {\n",
        ("WhateverIsForgedIsRefused",),
    ),
    Mutant(
        "cpp-recorded-frames-are-taken-again",
        "    if (!opener->isNew(header)) {\n",
        "    if (false && !opener->isNew(header)) {\n",
        ("SealedAgentTest", "StrangerTest"),
    ),
    Mutant(
        "cpp-forked-children-delete-rrefs",
        "      stopRRefDeletions();\n",
        "",
        ("test_a_forked_child_may_end_in_any_way",),
    ),
)

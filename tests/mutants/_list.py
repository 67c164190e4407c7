"""The bugs: one for each class, in the most dangerous place.

A new mutant needs a class that the list lacks. A class has two mutants only if they lie in different layers, or in
different languages.
"""

from __future__ import annotations

import re

from ._mutant import Mutant

MUTANTS = (
    # ---- A worker ends, and others do not notice --------------------------------------------------------------------
    Mutant(
        "cpp-processes-of-the-same-host-are-not-watched",
        "  if (member.bootId != self.bootId || member.pidNamespace != self.pidNamespace) {\n"
        "    return Outcome::kNotPossible;",
        "  if (true || member.bootId != self.bootId || member.pidNamespace != self.pidNamespace) {\n"
        "    return Outcome::kNotPossible;",
        ("test_calls_to_a_killed_process_fail_within_a_second", "ProcessWatchTest"),
    ),
    Mutant(
        "cpp-broken-connections-end-nobody",
        "  if (status == UCS_ERR_IO_ERROR || status == UCS_ERR_ENDPOINT_TIMEOUT) {\n    if (Error files",
        "  if (status != UCS_OK) {\n    return {ErrorCode::kOutOfResources, textOf(status)};\n  }\n"
        "  if (status == UCS_ERR_IO_ERROR || status == UCS_ERR_ENDPOINT_TIMEOUT) {\n    if (Error files",
        (
            "test_calls_across_hosts_fail_within_a_second_of_a_kill",
            "ConnectionThatACardBreaksCountsAsThePeersFailure",
        ),
    ),
    Mutant(
        "cpp-silent-workers-are-never-lost",
        "      findings.lost.push_back(peer);\n",
        "      static_cast<void>(peer);\n",
        ("test_a_silent_host_is_lost_after_the_limit", "HeartbeatTest"),
    ),
    # ---- A living worker is taken for dead --------------------------------------------------------------------------
    Mutant(
        "cpp-suspects-are-lost-at-once",
        ": limit + reconnectLimit_;",
        ": limit;",
        (
            "test_a_cut_longer_than_heartbeat_limit_loses_no_call",
            "test_a_cut_of_30_s_loses_no_call_with_default_options",
        ),
    ),
    Mutant(
        "cpp-what-a-reset-has-lost-stays-lost",
        "  sendAgain(connection);\n  acknowledge(connection);",
        "  acknowledge(connection);",
        ("test_resets_of_connections_lose_no_call", "ResumptionTest", "HardshipTest"),
    ),
    Mutant(
        "cpp-own-stop-counts-as-silence",
        "std::min(std::chrono::duration_cast<Milliseconds>(now - std::exchange(lastCheck_, now)), 2 * period());",
        "std::chrono::duration_cast<Milliseconds>(now - std::exchange(lastCheck_, now));",
        ("TimeInWhichThisProcessDidNotRunDoesNotCount",),
    ),
    Mutant(
        "cpp-pings-are-not-answered",
        "      outbox_.sendControl(connection.peer(), answer.kind, answer.callId);\n",
        "",
        (
            "test_worker_holding_the_gil_beyond_the_limit_is_not_lost",
            "PeerWhoseHandlersAllBlockGivesSignsOfLife",
        ),
    ),
    # ---- An end reaches too far, or is undone -----------------------------------------------------------------------
    Mutant(
        "cpp-one-death-ends-all",
        "  end(peer, Peer::State::kFailed, peer.lost(why));\n",
        "  for (Peer* other : directory_.all()) {\n"
        "    if (other->member().session != self_.session) {\n"
        "      end(*other, Peer::State::kFailed, peer.lost(why));\n"
        "    }\n"
        "  }\n",
        ("test_calls_to_a_killed_process_fail_within_a_second", "test_a_silent_host_is_lost_after_the_limit"),
    ),
    Mutant(
        "cpp-lost-workers-come-back",
        "  if (now >= State::kLeft || now >= state) {\n",
        "  if (now >= state) {\n",
        ("PeerMonitorTest",),
    ),
    Mutant(
        "cpp-failures-overtake-what-has-arrived",
        "      for (std::variant<IncomingMessage, Control>& event : inOrder) {\n",
        "      for (Failure& failure : std::exchange(failures, {})) {\n"
        "        handlers->peers->onFailure(*failure.peer, std::move(failure.why));\n"
        "      }\n"
        "      for (std::variant<IncomingMessage, Control>& event : inOrder) {\n",
        ("FailureTakesItsTurnAfterEverythingThatHasArrived",),
    ),
    # ---- What a dead worker held stays ------------------------------------------------------------------------------
    Mutant(
        "cpp-calls-to-the-dead-stay-open",
        "    if (to == nullptr || entry->second.call.to == to) {\n      calls.push_back(removeLocked(entry));\n",
        "    if (to == nullptr) {\n      calls.push_back(removeLocked(entry));\n",
        ("CallTableTest",),
    ),
    Mutant(
        "cpp-contexts-of-the-dead-stay",
        re.compile(r"contexts = orphanedContexts\(.*?\}\);", re.DOTALL),
        "",
        ("test_contexts_of_a_dead_worker_are_closed_on_all_workers",),
    ),
    Mutant(
        "cpp-a-death-releases-a-barrier",
        "  if (isCoordinator && isComplete) {\n",
        "  if (isCoordinator && (isComplete || link_.lost())) {\n",
        ("BarrierTest", "test_survivors_serve_in_shutdown_until_all_living_have_come"),
    ),
    Mutant(
        "cpp-slots-of-the-dead-stay",
        "  if (finding == Finding::kNobodyWrites) {\n",
        "  if (false && finding == Finding::kNobodyWrites) {\n",
        ("test_writer_killed_while_writing_blocks_no_other_writer",),
    ),
    # ---- Time -------------------------------------------------------------------------------------------------------
    Mutant(
        "cpp-deadlines-late",
        "while (!deadlines_.empty() && deadlines_.begin()->first <= now)",
        "while (!deadlines_.empty() && deadlines_.begin()->first + std::chrono::milliseconds(400) <= now)",
        ("CallTableTest", "test_calls_fail_at_their_deadlines_also_under_load"),
    ),
    Mutant(
        "cpp-expired-requests-run",
        "  return deadline.count() != 0 && Clock::now() - arrivedAt >= deadline;\n",
        "  return false && Clock::now() - arrivedAt >= deadline;\n",
        ("RequestServerTest", "RequestWhoseCallerHasGivenUpIsNotRun"),
    ),
    Mutant(
        "cpp-late-answers-stay-with-their-sender",
        "      receiver_.release(first.assembled);\n",
        "",
        (
            "test_a_late_answer_is_dropped_and_its_buffers_are_recycled",
            "LateResponseIsDroppedAndItsMemoryGoesBack",
            "test_calls_that_time_out_leave_nothing_behind",
        ),
    ),
    # ---- Bytes and tensors ------------------------------------------------------------------------------------------
    Mutant(
        "cpp-offset-of-32-bits",
        "  uint64_t offset = 0; // in its span\n",
        "  uint32_t offset = 0; // in its span\n",
        ("PiecesBeyond4GiBKeepTheirPlaces",),
    ),
    Mutant(
        "strided-tensors-are-taken-for-contiguous",
        '            layout = "C" if is_contiguous else "A"\n',
        '            layout = "C"\n',
        ("tests/unit/test_native_op.py",),
    ),
    Mutant(
        "device-maps-swapped",
        "self._set_device_maps(own.device_maps, replies, devices)",
        "self._set_device_maps(replies, own.device_maps, devices)",
        ("test_agent_keeps_maps_for_calls_and_for_replies_apart",),
    ),
    # ---- Bounds -----------------------------------------------------------------------------------------------------
    Mutant(
        "cpp-window-without-bound",
        "  return used == 0 || bytes == 0 || (used < limit && bytes <= limit - used);\n",
        "  return used == 0 || bytes == 0 || limit != 0;\n",
        ("ReceiveWindowTest",),
    ),
    Mutant(
        "cpp-shares-of-the-window-never-come-back",
        "  used_[admission.isResponse_ ? 1 : 0].fetch_sub(admission.bytes_);\n",
        "",
        ("test_handlers_may_call_back_with_their_tensors",),
    ),
    Mutant(
        "cpp-no-threads-for-calls-that-wait",
        "  if (begun.openCalls++ == 0) {\n    ++nestingRequests_;\n",
        "  if (begun.openCalls++ == 0) {\n",
        ("ExecutorTest",),
    ),
    Mutant(
        "cpp-a-lack-of-files-is-the-fault-of-the-peer",
        "  if (status == UCS_ERR_IO_ERROR || status == UCS_ERR_ENDPOINT_TIMEOUT) {\n",
        "  if (false && (status == UCS_ERR_IO_ERROR || status == UCS_ERR_ENDPOINT_TIMEOUT)) {\n",
        ("ConnectionThatFindsNoFilesIsNotBlamedOnThePeer",),
    ),
    # ---- Strangers --------------------------------------------------------------------------------------------------
    Mutant(
        "cpp-anybody-may-answer",
        "  if (entry == entries_.end() || entry->second.call.to != &peer) {\n",
        "  if (entry == entries_.end()) {\n",
        ("CallTableTest",),
    ),
    Mutant(
        "cpp-forged-frames-are-taken",
        "    if (!opener->isGenuine(header, dataBytes, data)) {\n",
        "    if (false && !opener->isGenuine(header, dataBytes, data)) {\n",
        ("ForgedFramesAreRefused",),
    ),
    Mutant(
        "cpp-recorded-frames-are-taken-again",
        ": !received.accept(header.sequence)) {\n",
        ": (!received.accept(header.sequence) && false)) {\n",
        ("SealedAgentTest", "StrangerTest", "HardshipTest"),
    ),
    Mutant(
        "cpp-late-announcements-are-used",
        "  if (isRendezvous && from.incoming.isOutdated(header.endpoint)) {\n",
        "  if (false && isRendezvous && from.incoming.isOutdated(header.endpoint)) {\n",
        ("LateAnnouncementOverAnEarlierEndpointIsVoid",),
    ),
    # ---- Errors and starts ------------------------------------------------------------------------------------------
    Mutant(
        "cpp-errors-do-not-say-who-is-lost",
        '"lost " + describe() + ": it has died or cannot',
        'std::string("lost a worker") + ": it has died or cannot',
        ("test_calls_to_a_killed_process_fail_within_a_second",),
    ),
    Mutant(
        "two-workers-of-one-rank",
        "        if earlier.rank == later.rank:\n",
        "        if False:\n",
        ("test_a_rank_used_twice_is_refused_everywhere_naming_both",),
    ),
    Mutant(
        "workers-left-behind",
        "            _children.end(self._starter.workers)\n",
        "",
        ("test_failed_start_ends_the_started_workers_and_says_why",),
    ),
    Mutant(
        "cpp-forked-processes-use-the-agent",
        "  if (forks_ != forkCount()) {\n",
        "  if (false && forks_ != forkCount()) {\n",
        ("test_rpc_in_a_forked_child_is_refused_and_the_parent_goes_on",),
    ),
    Mutant(
        "folders-without-turns",
        "        _lock(number, path, fcntl.LOCK_EX if to_save else fcntl.LOCK_SH)\n",
        "",
        ("test_processes_take_turns_in_a_folder",),
    ),
    # ---- Judges -----------------------------------------------------------------------------------------------------
    Mutant(
        "bounds-always-hold",
        "        return ratio >= limit if self.more_is_better else ratio <= limit\n",
        "        return True\n",
        ("test_the_table_says_which_bounds_are_missed",),
    ),
    Mutant(
        "skipped-file-counts",
        '            if case.find("skipped") is None:\n',
        "            if True:\n",
        ("test_file_without_a_test_that_ran_is_missing",),
    ),
    # ---- A transaction is committed by one side alone ---------------------------------------------------------------
    Mutant(
        "trainers-in-one-step-have-one-state",
        "if (opening.step, opening.committed) != (self.step, self.committed):",
        "if opening.step != self.step:",
        ("test_copies_are_equal_in_every_schedule",),
    ),
)

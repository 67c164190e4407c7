"""Bugs in calls: deadlines, threads, tensors, the receive window, references."""

from __future__ import annotations

from tests.mutants._mutant import Mutant

MUTANTS = (
    Mutant(
        "device-maps-swapped",
        "self._set_device_maps(own.device_maps, replies, devices)",
        "self._set_device_maps(replies, own.device_maps, devices)",
        ("test_agent_keeps_maps_for_calls_and_for_replies_apart",),
    ),
    Mutant(
        "replies-to-any-device",
        "            sources = [local for local in sources if local.type == remote.type] or [CPU]\n",
        "            pass\n",
        ("test_maps_with_the_cpu_and_several_devices_to_one_fit",),
    ),
    Mutant(
        "arrays-become-writable",
        "    array.flags.writeable = is_writable\n",
        "",
        ("test_arrays_arrive_as_they_were_sent",),
    ),
    # The gradients of results end where these have come from.
    Mutant(
        "tensors-travel-without-their-history",
        "    return _torchs_tensor_reducer(tensor)\n",
        "    return _torchs_tensor_reducer(tensor.detach())\n",
        ("test_its_results_are_those_of_tensorpipe",),
    ),
    Mutant(
        "strided-tensors-are-taken-for-contiguous",
        '            layout = "C" if is_contiguous else "A"\n',
        '            layout = "C"\n',
        ("tests/unit/test_native_op.py",),
    ),
    Mutant(
        "cpp-deadlines-late",
        "while (!deadlines_.empty() && deadlines_.begin()->first <= now)",
        "while (!deadlines_.empty() && deadlines_.begin()->first + std::chrono::milliseconds(400) <= now)",
        ("CallTableTest", "test_calls_fail_at_their_deadlines_also_under_load"),
    ),
    Mutant(
        "cpp-offset-of-32-bits",
        "  uint64_t offset = 0; // in its span\n",
        "  uint32_t offset = 0; // in its span\n",
        ("PiecesBeyond4GiBKeepTheirPlaces",),
    ),
    Mutant(
        "cpp-requests-reversed",
        "      for (std::variant<IncomingMessage, Control>& event : inOrder) {\n",
        "      std::ranges::reverse(inOrder);\n      for (std::variant<IncomingMessage, Control>& event : inOrder) {\n",
        ("RequestsAndControlFramesKeepTheOrderOfArrival",),
    ),
    Mutant(
        "cpp-pieces-out-of-order",
        "    return one.offset < other.offset;\n",
        "    return one.offset > other.offset;\n",
        ("AssemblerTest",),
    ),
    Mutant(
        "cpp-replies-by-the-map-for-calls",
        "return find(answers_, worker);",
        "return find(requests_, worker);",
        ("DeviceTest",),
    ),
    Mutant(
        "cpp-expired-requests-run",
        "  return deadline.count() != 0 && Clock::now() - arrivedAt >= deadline;\n",
        "  return false && Clock::now() - arrivedAt >= deadline;\n",
        ("RequestServerTest", "RequestWhoseCallerHasGivenUpIsNotRun"),
    ),
    Mutant(
        "cpp-window-without-bound",
        "  return used == 0 || bytes == 0 || (used < limit && bytes <= limit - used);\n",
        "  return used == 0 || bytes == 0 || limit != 0;\n",
        ("ReceiveWindowTest",),
    ),
    Mutant(
        "cpp-messages-beyond-the-window-wait-forever",
        "  return used == 0 || bytes == 0 || (used < limit",
        "  return bytes == 0 || (used < limit",
        ("ReceiveWindowTest",),
    ),
    Mutant(
        "cpp-anybody-may-answer",
        "  if (entry == entries_.end() || entry->second.call.to != &peer) {\n",
        "  if (entry == entries_.end()) {\n",
        ("CallTableTest",),
    ),
    Mutant(
        "cpp-deletions-come-before-the-rref",
        "if (type == rpc::MessageType::RREF_USER_DELETE) {",
        "if (false) {",
        ("RRefCreationTest",),
    ),
    Mutant(
        "cpp-no-threads-for-calls-that-wait",
        "  if (begun.openCalls++ == 0) {\n    ++nestingRequests_;\n",
        "  if (begun.openCalls++ == 0) {\n",
        ("ExecutorTest",),
    ),
    Mutant(
        "cpp-tensors-travel-in-one-piece",
        "    while (piece.bytes.size() > most) {\n",
        "    while (false && piece.bytes.size() > most) {\n",
        ("test_tensor_slower_than_the_limit_delays_no_small_call",),
    ),
    # max_worker_threads has no effect: requests that wait for calls keep their places among num_worker_threads.
    Mutant(
        "cpp-calls-that-wait-get-no-more-threads",
        "nestingLimit_(std::max(maxRequests, nestingLimit)),",
        "nestingLimit_(std::min(maxRequests, nestingLimit)),",
        (
            "test_a_chain_of_calls_may_be_longer_than_there_are_threads",
            "test_threads_are_added_only_for_calls_that_wait",
        ),
    ),
    Mutant(
        "cpp-threads-are-made-before-any-call-waits",
        "  leader_ = &leader;\n  if (!spawnLocked()) {\n",
        "  leader_ = &leader;\n  while (threads_ < 64 && spawnLocked()) {\n  }\n  if (!spawnLocked()) {\n",
        ("test_threads_are_added_only_for_calls_that_wait",),
    ),
    Mutant(
        "cpp-chains-without-room-hang",
        "  if (now - fullSince_ >= kFullPatience) {\n",
        "  if (false && now - fullSince_ >= kFullPatience) {\n",
        ("test_a_chain_that_exceeds_the_limit_fails_saying_so",),
    ),
    # The other half of the promise that "cpp-deadlines-late" has.
    Mutant(
        "cpp-deadlines-early",
        "while (!deadlines_.empty() && deadlines_.begin()->first <= now)",
        "while (!deadlines_.empty() && deadlines_.begin()->first <= now + std::chrono::milliseconds(50))",
        ("test_calls_fail_at_their_deadlines_also_under_load",),
    ),
    # They are not received, but their sender is not told.
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
    Mutant(
        "cpp-calls-that-time-out-keep-their-tensors",
        "  if (!abandoned.empty()) {\n",
        "  if (false && !abandoned.empty()) {\n",
        ("test_calls_that_time_out_leave_nothing_behind", "CancelFreesTheSendersMemory"),
    ),
    Mutant(
        "cpp-requests-with-rrefs-are-dropped-too",
        "  return makesRRef(request) || syntheticAck(request.type()) != nullptr || hasRRef(request.payload());\n",
        "  return false && (makesRRef(request) || syntheticAck(request.type()) != nullptr || "
        "hasRRef(request.payload()));\n",
        (
            "test_rref_in_an_abandoned_call_is_freed",
            "RequestsThatOthersCountOnAreRunThoughTheirCallerHasGivenUp",
        ),
    ),
    # Each message has fresh memory, and what it leaves is kept: 256 MiB of it.
    Mutant(
        "cpp-receive-buffers-are-not-used-again",
        "    if (block->bytes == bytes) {\n      unlinkLocked(block);\n",
        "    if (false && block->bytes == bytes) {\n      unlinkLocked(block);\n",
        (
            "test_a_flood_is_answered_exactly_in_bounded_memory",
            "test_large_tensors_that_come_in_turn_share_few_buffers",
        ),
    ),
    # As if the share of the window were the tensors', and these were kept.
    Mutant(
        "cpp-handlers-that-return-keep-the-window",
        "  admission.release();\n  if (response->completed()) {\n",
        "  static_cast<void>(new Admission(std::move(admission)));\n  if (response->completed()) {\n",
        ("test_handlers_may_keep_their_tensors",),
    ),
    Mutant(
        "cpp-shares-of-the-window-never-come-back",
        "  used_[admission.isResponse_ ? 1 : 0].fetch_sub(admission.bytes_);\n",
        "",
        ("test_handlers_may_call_back_with_their_tensors",),
    ),
    Mutant(
        "cpp-stalled-windows-stay-stalled",
        "  stalledSince_ = now;\n  return true;\n",
        "  stalledSince_ = now;\n  return false;\n",
        ("test_handlers_may_wait_for_each_other",),
    ),
    # Requests pass all the same when the window has stalled; their answers do not.
    Mutant(
        "cpp-messages-larger-than-the-window-never-fit",
        "  if (!fits(used_[budget].load(), bytes, limitBytes_) ||\n",
        "  if (bytes > limitBytes_ || !fits(used_[budget].load(), bytes, limitBytes_) ||\n",
        ("test_messages_larger_than_the_window_pass",),
    ),
    Mutant(
        "cpp-what-does-not-fit-the-window-is-admitted",
        "    return false;\n  }\n  admit(isResponse, bytes, admission, deviceBytes);\n",
        "    static_cast<void>(budget);\n  }\n  admit(isResponse, bytes, admission, deviceBytes);\n",
        ("test_a_flood_is_answered_exactly_in_bounded_memory",),
    ),
    # Compiling takes the GIL.
    Mutant(
        "cpp-native-code-is-compiled-for-each-call",
        "        if (of == types) {\n",
        "        if (false && of == types) {\n",
        ("test_another_worker_runs_it_while_its_python_is_busy",),
    ),
    Mutant(
        "cpp-late-rrefs-are-not-marked",
        "  ((*created->rref).*reach(HasTimedOut())).store(true);\n",
        "",
        ("test_each_rref_whose_creation_timed_out_says_so",),
    ),
    Mutant(
        "cpp-owners-are-not-told-of-failed-rrefs",
        "    if (call.makesRRef && !call.failure) {\n",
        "    if (false) {\n",
        ("FailedCreationTest",),
    ),
    Mutant(
        "cpp-owners-are-not-told-of-refused-rrefs",
        "  if (call.makesRRef && isOfMessage(why.kind()) && hold != nullptr) {\n",
        "  if (false) {\n",
        ("test_an_rref_that_its_owner_had_no_thread_for_is_lost",),
    ),
    Mutant(
        "unreadable-arguments-lose-the-type-of-their-error",
        "        if not _is_call(pickled):\n            raise\n",
        "        raise\n",
        ("test_every_use_raises_the_owners_error",),
    ),
    Mutant(
        "cpp-deletions-of-late-rrefs-are-not-repeated",
        "    (void)send(peer, deletion, std::chrono::milliseconds(0), {});\n",
        "",
        ("test_an_rref_whose_creation_timed_out_is_freed_by_its_owner",),
    ),
    Mutant(
        "cpp-rrefs-that-torch-does-not-know-yet-are-not-waited-for",
        "      } else if (now < one.call.end() + kRRefPatience) {\n",
        "      } else if (false && now < one.call.end() + kRRefPatience) {\n",
        ("test_rref_timed_out_before_torch_knew_it_is_lost",),
    ),
    Mutant(
        "cpp-handlers-that-call-keep-the-window",
        "  HandlingScope::releaseInnermost();\n  const rpc::MessageType",
        "  const rpc::MessageType",
        ("test_calling_handler_returns_its_share_of_the_window",),
    ),
)

"""Bugs where memory, files or shared memory run out."""

from __future__ import annotations

from tests.mutants._mutant import Mutant

MUTANTS = (
    Mutant(
        "cpp-nobody-hears-of-a-lack-of-memory",
        "    reject(receiving, outOfMemoryFor(receiving->bytes + receiving->deviceBytes));\n",
        "",
        ("test_out_of_memory_fails_one_call_and_names_the_place",),
    ),
    Mutant(
        "cpp-cut-answers-are-not-told",
        "    events_.addCutAnswer(connection.peer(), message.header.callId, message.error);\n",
        "",
        ("MessageOfWhichOneTensorCannotLeaveEndsOnBothSides",),
    ),
    Mutant(
        "cpp-a-lack-of-memory-goes-through-ucx",
        "  } catch (...) {\n    transport->noteLoss();\n",
        "  } catch (const std::bad_exception&) {\n    transport->noteLoss();\n",
        ("MessageWithoutMemoryForItIsDroppedAndTheNextArrives",),
    ),
    Mutant(
        "cpp-there-are-always-files-for-a-connection",
        "  const bool isEnough = files.back() >= 0;\n",
        "  const bool isEnough = files.back() >= -1;\n",
        ("test_out_of_files_only_the_call_that_connects_fails",),
    ),
    # As UCX does it by itself.
    Mutant(
        "cpp-ucx-has-no-reserve-of-files",
        "    (void)dl_iterate_phdr(&replaceImports, &imports);\n",
        "    if (false) {\n      (void)dl_iterate_phdr(&replaceImports, &imports);\n    }\n",
        ("test_out_of_files_while_connecting_no_peer_is_lost", "FilesForUcxTest"),
    ),
    Mutant(
        "cpp-ucx-pauses-with-the-lock-of-the-worker",
        "    isConnectionWaiting = isLackOfFiles(errno);\n",
        "    sched_yield();\n",
        ("test_out_of_files_on_one_core_no_peer_is_lost", "FilesForUcxTest"),
    ),
    Mutant(
        "cpp-sockets-for-ucx-come-from-no-reserve",
        "  if (socket < 0 && isLackOfFiles(errno)) {\n",
        "  if (false && isLackOfFiles(errno)) {\n",
        ("FilesForUcxTest",),
    ),
    Mutant(
        "cpp-ucx-closes-its-port-for-want-of-files",
        "    errno = EAGAIN;\n",
        "",
        ("test_a_worker_with_all_files_open_can_be_called_by_new_peers", "FilesForUcxTest"),
    ),
    Mutant(
        "cpp-threads-are-made-while-others-begin",
        "    return beginning_ + pendingWakes_ != 0;\n",
        "    return pendingWakes_ != 0;\n",
        ("NoThreadsAreMadeWhileOthersAreAboutToBegin",),
    ),
    # Every 20 s would do too, and take the test 20 to 40 s.
    Mutant(
        "cpp-ucx-looks-after-neighbours-itself",
        '{"KEEPALIVE_INTERVAL", "36000000s", {}},',
        '{"KEEPALIVE_INTERVAL", "1s", {}},',
        ("test_a_worker_with_all_files_open_keeps_its_neighbours",),
    ),
    Mutant(
        "cpp-a-lack-of-files-is-the-fault-of-the-peer",
        "  if (status == UCS_ERR_IO_ERROR || status == UCS_ERR_ENDPOINT_TIMEOUT) {\n",
        "  if (false && (status == UCS_ERR_IO_ERROR || status == UCS_ERR_ENDPOINT_TIMEOUT)) {\n",
        ("ConnectionThatFindsNoFilesIsNotBlamedOnThePeer",),
    ),
    Mutant(
        "cpp-a-process-that-cannot-be-read-has-ended",
        "  if (process < 0 || (stat && stat->startTicks != member.processStartTime)) {\n",
        "  if (process < 0 || !stat || stat->startTicks != member.processStartTime) {\n",
        ("AProcessThatLivesIsNotTakenForEndedForWantOfFiles",),
    ),
    Mutant(
        "cpp-no-shared-memory-where-ends-are-to-be-told",
        '{"MM_ERROR_HANDLING", "y", {"posix", "sysv", "xpmem"}},',
        '{"MM_ERROR_HANDLING", "n", {"posix", "sysv", "xpmem"}},',
        (
            "test_with_dev_shm_full_workers_share_memory_all_the_same",
            "test_workers_with_shared_memory_notice_a_death",
        ),
    ),
    Mutant(
        "cpp-shared-memory-that-is-used-up-has-no-cure",
        "  switch (status) {\n    case UCS_ERR_NO_MEMORY:\n    case UCS_ERR_NO_RESOURCE:\n",
        "  switch (false ? status : UCS_OK) {\n    case UCS_ERR_NO_MEMORY:\n    case UCS_ERR_NO_RESOURCE:\n",
        ("test_without_shared_memory_init_rpc_names_the_cure",),
    ),
)

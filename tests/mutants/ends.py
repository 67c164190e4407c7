"""Bugs in shutdowns."""

from __future__ import annotations

from tests.mutants._mutant import Mutant

MUTANTS = (
    Mutant(
        "the-store-is-waited-for-as-long-as-ever",
        "self._store.set_timeout(min(usual, _PATIENCE))",
        "pass",
        ("test_nobody_waits_for_a_file_of_the_store_that_is_gone",),
    ),
    Mutant(
        "torchs-barrier-waits-for-the-dead",
        "        if gone.failed and not is_lost.is_set():\n",
        "        if False and gone.failed:\n",
        ("test_death_within_shutdown_ends_it_for_all_and_is_named",),
    ),
    Mutant(
        "an-ungraceful-shutdown-waits-for-calls",
        "            last.callback(self._forget)\n",
        "            with contextlib.suppress(RuntimeError):\n"
        "                super().join(False, 6)\n"
        "            last.callback(self._forget)\n",
        ("test_an_ungraceful_shutdown_waits_for_nobody",),
    ),
    Mutant(
        "cpp-a-death-releases-a-barrier",
        "    if (arrived == entry->second.end()) {\n      return;\n",
        "    if (arrived == entry->second.end()) {\n      if (!lostLocked()) return;\n      continue;\n",
        ("BarrierTest", "test_survivors_serve_in_shutdown_until_all_living_have_come"),
    ),
    Mutant(
        "cpp-a-new-coordinator-is-not-told-the-result",
        "  if (isNew && !results_.empty()) {\n",
        "  if (false && isNew) {\n",
        ("BarrierTest",),
    ),
    Mutant(
        "references-of-the-dead-are-not-released",
        "    with _repeated_after_a_loss(agent._release_references, _DELETING_S):\n",
        "    with contextlib.nullcontext():\n",
        ("test_shutdown_does_not_wait_for_rrefs_of_the_dead",),
    ),
    Mutant(
        "cpp-shutdowns-do-not-wait-for-calls",
        "  for (int quietRounds = 0; quietRounds < 2;) {\n",
        "  for (int quietRounds = 0; quietRounds < 0;) {\n",
        ("test_calls_among_survivors_are_answered_before_shutdown_ends",),
    ),
    Mutant(
        "cpp-shutdowns-do-not-name-the-dead",
        "  if (lost) {\n    throw RpcFailure(\n",
        "  if (false && lost) {\n    throw RpcFailure(\n",
        ("test_graceful_shutdown_with_a_dead_worker_raises",),
    ),
    Mutant(
        "cpp-missing-hosts-are-not-asked",
        "      if (peer->needsHeartbeat.load() && !peer->isMet.load()) {\n",
        "      if (false && !peer->isMet.load()) {\n",
        ("test_graceful_shutdown_notices_a_dead_host_never_called",),
    ),
    Mutant(
        "cpp-shutdowns-outlast-their-timeout",
        "    if (Clock::now() >= deadline) {\n      std::string missing;\n",
        "    if (false && Clock::now() >= deadline) {\n      std::string missing;\n",
        ("test_graceful_shutdown_with_a_hung_worker_keeps_its_timeout",),
    ),
    Mutant(
        "cpp-ungraceful-shutdowns-do-not-wait-for-handlers",
        "constexpr auto kHandlerGrace = std::chrono::milliseconds(500);",
        "constexpr auto kHandlerGrace = std::chrono::milliseconds(0);",
        ("test_prompt_answers_leave_before_an_ungraceful_shutdown",),
    ),
    Mutant(
        "cpp-ends-are-seen-and-nobody-is-told",
        "    observer->onPeerGone(peer);\n",
        "    static_cast<void>(observer);\n",
        (
            "test_crash_leaves_no_hang_and_no_shared_memory",
            "test_early_leave_causes_no_hang_and_leaves_no_shared_memory",
        ),
    ),
    Mutant(
        "cpp-ungraceful-shutdowns-wait-for-long",
        "constexpr auto kHandlerGrace = std::chrono::milliseconds(500);",
        "constexpr auto kHandlerGrace = std::chrono::milliseconds(60000);",
        ("PeerThatShutsDownSaysGoodbye",),
    ),
)

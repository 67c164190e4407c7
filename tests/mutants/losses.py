"""Bugs in how the end of a worker is noticed, and in what outlives it."""

from __future__ import annotations

import re

from tests.mutants._mutant import Mutant

MUTANTS = (
    Mutant(
        "cuts-strike-members-off-the-list",
        "self._replace(place, None if has_ended else record._replace(in_doubt=True))",
        "self._replace(place, None)",
        ("test_a_cut_strikes_nobody_off_the_list",),
    ),
    Mutant(
        "cpp-lines-of-ucx-are-printed",
        "  return UCS_LOG_FUNC_RC_STOP;\n",
        "  return UCS_LOG_FUNC_RC_CONTINUE;\n",
        ("UcxLogOfTheDeadTest",),
    ),
    Mutant(
        "values-that-never-come-are-no-rref-lost",
        "    if never := re.match(_NO_VALUE, text):\n",
        "    if False and (never := re.match(_NO_VALUE, text)):\n",
        ("test_nobody_waits_for_a_value_that_a_dead_worker_was_to_make",),
    ),
    Mutant(
        "rrefs-of-a-former-owner-are-no-rref-lost",
        "    if text.startswith(_NO_OBJECT):\n",
        "    if False:\n",
        ("test_a_worker_takes_the_place_of_one_that_was_killed",),
    ),
    Mutant(
        "cpp-contexts-of-the-dead-stay",
        re.compile(r"contexts = orphanedContexts\(.*?\}\);", re.DOTALL),
        "",
        ("test_contexts_of_a_dead_worker_are_closed_all_along_the_way",),
    ),
    Mutant(
        "cpp-contexts-of-others-outlive-the-agent",
        "    orphans_.closeContextsOfOthers();\n",
        "",
        ("test_a_worker_that_joins_again_has_no_contexts_from_before",),
    ),
    Mutant(
        "cpp-what-the-dead-leave-late-is-released-late",
        "constexpr auto kReleasePeriod = std::chrono::seconds(1);",
        "constexpr auto kReleasePeriod = std::chrono::seconds(5);",
        ("WhatHandlersMakeAfterwardsIsReleasedOnceASecond",),
    ),
    Mutant(
        "cpp-references-of-the-dead-stay",
        re.compile(r"std::ranges::move\(\w+\.takeHeldBy\(\w+\), .*?;|forks = \w+\.takeHeldBy\(\w+\);"),
        "",
        ("test_references_the_dead_had_from_a_third_worker_are_dropped",),
    ),
    Mutant(
        "cpp-own-stop-counts-as-silence",
        "std::min(std::chrono::duration_cast<Milliseconds>(now - std::exchange(lastCheck_, now)), 2 * period());",
        "std::chrono::duration_cast<Milliseconds>(now - std::exchange(lastCheck_, now));",
        ("TimeInWhichThisProcessDidNotRunDoesNotCount",),
    ),
    Mutant(
        "cpp-queued-calls-of-the-dead-begin",
        "  if (from.state() == Peer::State::kFailed) {\n    return; // it died while",
        "  if (false) {\n    return; // it died while",
        ("test_calls_of_a_dead_worker_that_queue_here_are_not_begun",),
    ),
    Mutant(
        "cpp-lost-workers-come-back",
        "  if (now >= State::kLeft || now >= state) {\n",
        "  if (now >= state) {\n",
        ("PeerMonitorTest",),
    ),
    Mutant(
        "cpp-calls-to-the-dead-stay-open",
        "    if (entry->second.call.to == &peer) {\n      calls.push_back(removeLocked(entry));\n",
        "    if (false) {\n      calls.push_back(removeLocked(entry));\n",
        ("CallTableTest",),
    ),
    Mutant(
        "cpp-silence-without-a-question",
        "    if (!isWatched && !std::exchange(silence.isAsked, true)) {\n",
        "    if (false) {\n",
        ("HeartbeatTest",),
    ),
    Mutant(
        "cpp-stopped-neighbours-are-lost",
        "    const bool isWatched = !peer->needsHeartbeat.load();\n",
        "    const bool isWatched = false;\n",
        ("HeartbeatTest",),
    ),
    Mutant(
        "cpp-another-process-of-that-id-is-watched",
        "  if (process < 0 || (stat && stat->startTicks != member.processStartTime)) {\n",
        "  if (process < 0) {\n",
        ("ProcessWatchTest",),
    ),
    Mutant(
        "cpp-own-errors-end-peers",
        "  if (isLocal(why.code())) {\n    return; // a peer ends",
        "  if (false) {\n    return; // a peer ends",
        ("PeerMonitorTest",),
    ),
    Mutant(
        "cpp-peers-outlive-broken-connections",
        "  if (status == UCS_ERR_CANCELED) {\n    return {ErrorCode::kPeerFailed",
        "  if (false) {\n    return {ErrorCode::kPeerFailed",
        ("UcxStatusTest",),
    ),
    Mutant(
        "cpp-connecting-over-tcp-blocks",
        '{"TCP_CONN_NB", "y", {"tcp"}},',
        '{"TCP_CONN_NB", "n", {"tcp"}},',
        ("test_graceful_shutdown_notices_a_dead_host_never_called",),
    ),
    Mutant(
        "cpp-lost-after-a-quarter-of-the-limit",
        "isWatched ? limit_ : limit_ + period() + kRetransmission;",
        "(limit_ + period() + kRetransmission) / 4;",
        ("test_a_cut_of_half_the_limit_loses_nothing",),
    ),
    Mutant(
        "cpp-connections-of-the-lost-stay-open",
        "    if (!isClosed_ && path.endpoint.has_value()) {\n",
        "    if (false && path.endpoint.has_value()) {\n",
        ("test_workers_that_lost_each_other_survive_the_cuts_end",),
    ),
    Mutant(
        "cpp-pings-are-not-answered",
        "      outbox_.sendControl(connection.peer(), wire::Kind::kPong);\n",
        "",
        (
            "test_worker_holding_the_gil_beyond_the_limit_is_not_lost",
            "PeerWhoseHandlersAllBlockGivesSignsOfLife",
        ),
    ),
    Mutant(
        "cpp-neighbours-have-heartbeats",
        "peer->needsHeartbeat.store(outcome == ProcessWatch::Outcome::kNotPossible);",
        "peer->needsHeartbeat.store(true || outcome == ProcessWatch::Outcome::kNotPossible);",
        ("test_a_stopped_worker_of_the_same_host_is_not_lost",),
    ),
    # That of cpp-own-stop-counts-as-silence, and what came during the stop counts for nothing: half of the time a sign
    # of life was under way when the process stopped, and its test of two hosts would pass.
    Mutant(
        "cpp-own-stop-counts-whatever-came-in-it",
        "      std::min(std::chrono::duration_cast<Milliseconds>(now - std::exchange(lastCheck_, now)), "
        "2 * period());\n"
        "  for (Peer* peer : directory_.all()) {\n",
        "      std::chrono::duration_cast<Milliseconds>(now - std::exchange(lastCheck_, now));\n"
        "  for (Peer* peer : directory_.all()) {\n"
        "    if (Connection* one = peer->connection; one != nullptr && one->isHeard && passed >= limit_) {\n"
        "      one->silence.heardSinceCheck = false;\n"
        "    }\n",
        ("test_worker_stopped_beyond_the_limit_loses_no_peer",),
    ),
    Mutant(
        "cpp-parts-of-canceled-messages-are-kept",
        "  if (partial.isGivenUp) {\n    rejected.push_back(std::move(piece));\n",
        "  if (false) {\n    rejected.push_back(std::move(piece));\n",
        ("WhatComesOfAMessageThatWasCanceledIsHandedOutAtOnce",),
    ),
    Mutant(
        "cpp-shares-of-the-dead-wait-for-the-transport",
        "    events_.addRejection(*message.from, message.header, gone, std::move(message.admission));\n",
        "    events_.addRejection(*message.from, message.header, gone);\n",
        ("MessagesOfAPeerThatIsGoneGiveTheirShareBackAtOnce",),
    ),
    Mutant(
        "cpp-parts-of-the-dead-stay",
        "    if (entry->first.session == session) {\n      take(entry->second, dropped);\n",
        "    if (false && entry->first.session == session) {\n      take(entry->second, dropped);\n",
        ("DropSessionHandsOutEverythingOfIt",),
    ),
    Mutant(
        "cpp-references-of-dead-creators-stay",
        "if (gone.contains(reported != reported_.end() ? reported->second : any.fork.createdOn_)) {",
        "if (reported != reported_.end() && gone.contains(reported->second)) {",
        ("test_what_a_dead_worker_held_is_released",),
    ),
    # A hang, which the test ends after 50 s.
    Mutant(
        "cpp-waits-for-values-of-the-dead-go-on",
        "      holders_.takeHopelessWaits([this](const RRefId& id) { return !mayStillGetValue(id); });\n",
        "      holders_.takeHopelessWaits([this](const RRefId& id) { return false && !mayStillGetValue(id); });\n",
        ("test_nobody_waits_for_a_value_that_a_dead_worker_was_to_make",),
    ),
    Mutant(
        "cpp-values-in-the-making-are-given-up",
        "return isOfLostWorker(id) && inMaking_->ids.find(id) == inMaking_->ids.end(); });",
        "return isOfLostWorker(id); });",
        ("test_nobody_waits_for_a_value_that_a_dead_worker_was_to_make",),
    ),
    # Hangs of 50 s.
    Mutant(
        "cpp-later-waits-for-values-of-the-dead-go-on",
        "  releaseTask_.dueIn(kReleasePeriod);\n",
        "  if (passesLeft_.load() < 0) {\n    releaseTask_.dueIn(kReleasePeriod);\n  }\n",
        (
            "test_nobody_waits_for_a_value_that_a_dead_worker_was_to_make",
            "test_a_worker_takes_the_place_of_one_that_was_killed",
        ),
    ),
    # A hang of 50 s.
    Mutant(
        "cpp-rrefs-of-a-former-owner-stay-good",
        "    if (isTorchsAgent(agent_) && directory_.findSession(member.session) == nullptr) {\n",
        "    if (false && isTorchsAgent(agent_) && directory_.findSession(member.session) == nullptr) {\n",
        ("test_a_worker_takes_the_place_of_one_that_was_killed",),
    ),
    Mutant(
        "cpp-references-made-after-a-death-stay",
        "release(mayHoldMore ? gone : Ranks{});",
        "release(false && mayHoldMore ? gone : Ranks{});",
        ("test_nobody_waits_for_a_value_that_a_dead_worker_was_to_make",),
    ),
    # Their silence still ends them, after 10 s.
    Mutant(
        "cpp-processes-of-the-same-host-are-not-watched",
        "  if (member.bootId != self.bootId || member.pidNamespace != self.pidNamespace) {\n"
        "    return Outcome::kNotPossible;",
        "  if (true || member.bootId != self.bootId || member.pidNamespace != self.pidNamespace) {\n"
        "    return Outcome::kNotPossible;",
        ("test_calls_to_a_killed_process_fail_within_a_second", "ProcessWatchTest"),
    ),
    # Again silence ends them.
    Mutant(
        "cpp-broken-connections-end-nobody",
        "  if (status == UCS_ERR_IO_ERROR || status == UCS_ERR_ENDPOINT_TIMEOUT) {\n    if (Error files",
        "  if (status != UCS_OK) {\n    return {ErrorCode::kOutOfResources, textOf(status)};\n  }\n"
        "  if (status == UCS_ERR_IO_ERROR || status == UCS_ERR_ENDPOINT_TIMEOUT) {\n    if (Error files",
        (
            "test_calls_to_a_process_killed_elsewhere_fail_in_a_second",
            "AConnectionThatACardBreaksIsThePeers",
        ),
    ),
    Mutant(
        "cpp-errors-do-not-say-who-is-lost",
        '"lost " + describe() + ": it has died or cannot',
        'std::string("lost a worker") + ": it has died or cannot',
        ("test_calls_to_a_killed_process_fail_within_a_second",),
    ),
    Mutant(
        "cpp-exceptions-of-torchs-callbacks-end-the-worker",
        "    complete();\n  } catch (const std::exception&) {\n  }\n",
        "    complete();\n  } catch (const std::exception&) {\n    throw;\n  }\n",
        ("test_worker_outlives_owners_of_rrefs_in_the_making",),
    ),
    Mutant(
        "cpp-ended-lifelines-change-nothing",
        "= silence.isDoubted ? std::min(kDoubt, limit) : limit + reconnectLimit_;",
        "= limit + reconnectLimit_;",
        ("EndOfALifelineLosesASilentPeerLongBeforeTheLimit",),
    ),
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
        "cpp-suspects-are-never-lost",
        ": limit + reconnectLimit_;",
        ": 100 * (limit + reconnectLimit_);",
        ("test_a_cut_beyond_reconnect_limit_loses_the_worker",),
    ),
    Mutant(
        "cpp-tcp-resends-ever-less-often",
        "  if (isTcp && setsockopt(socket, IPPROTO_TCP, TCP_RTO_MAX_MS,",
        "  if (false && setsockopt(socket, IPPROTO_TCP, TCP_RTO_MAX_MS,",
        ("test_a_cut_of_30_s_loses_no_call_with_default_options",),
    ),
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
    # The test waits for its end, 50 s.
    Mutant(
        "cpp-slots-of-the-dead-stay",
        "  if (finding == Finding::kNobodyWrites) {\n",
        "  if (false && finding == Finding::kNobodyWrites) {\n",
        ("test_writer_killed_while_writing_blocks_no_other_writer",),
    ),
    Mutant(
        "cpp-slow-senders-are-not-waited-for",
        "  if (!repair.suspects->remain()) {\n",
        "  if (true || !repair.suspects->remain()) {\n",
        ("QueueRepairTest",),
    ),
    # The test waits half a minute for each kind of shared memory.
    Mutant(
        "cpp-the-network-is-shared-memory-again",
        "endpoints_.connect(unwrapAddress(address).network, endpoint)",
        "endpoints_.connect(unwrapAddress(address).full, endpoint)",
        ("DeafWorkerHearsOverTheNetworkAndTheRestLater",),
    ),
    Mutant(
        "cpp-the-deaf-tell-nobody",
        "  if (!error && isDeaf_) {\n",
        "  if (false && !error && isDeaf_) {\n",
        (
            "test_worker_made_deaf_by_a_stopped_writer_is_still_reached",
            "DeafWorkerTellsItsNeighboursOverTheNetwork",
        ),
    ),
    Mutant(
        "cpp-turns-do-not-wait",
        "(open_.empty() || waiting_.begin()->first < open_.front())",
        "(true || open_.empty() || waiting_.begin()->first < open_.front())",
        ("DispatchOrderTest",),
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
    Mutant(
        "cpp-silent-workers-are-never-lost",
        "      findings.lost.push_back(peer);\n",
        "      static_cast<void>(peer);\n",
        ("test_a_silent_host_is_lost_after_the_limit", "HeartbeatTest"),
    ),
    Mutant(
        "cpp-goodbyes-are-not-heard",
        '  end(from, Peer::State::kLeft, {ErrorCode::kShutDown, from.describe() + " has shut down its RPC agent"});\n',
        "  static_cast<void>(from);\n",
        (
            "GoodbyeOfAPeerIsItsEndInGoodOrder",
            "test_early_leave_causes_no_hang_and_leaves_no_shared_memory",
        ),
    ),
    Mutant(
        "cpp-the-leaving-are-taken-for-dead",
        "from.moveTo(Peer::State::kLeaving, {ErrorCode::kShutDown, ",
        "from.moveTo(Peer::State::kLeaving, {ErrorCode::kPeerFailed, ",
        ("test_a_worker_leaves_although_others_go_on_calling_it",),
    ),
    Mutant(
        "cpp-connections-are-closed-at-once",
        "  if (mayBeForced(endpoint)) {\n    closeHandle(endpoint);\n",
        "  if (true || mayBeForced(endpoint)) {\n    closeHandle(endpoint);\n",
        ("test_workers_that_lost_each_other_survive_the_cuts_end",),
    ),
)

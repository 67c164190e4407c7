"""Bugs in the libraries: services, reduction, checkpoints."""

from __future__ import annotations

from tests.mutants._mutant import Mutant

_ASK_FOR_ROUTE = "    route = _calls.route_to(function) if isinstance(function, str) else None\n"
_LIST_MEMBERS = "    chosen = members(role=role)\n"

MUTANTS = (
    Mutant(
        "gradients-summed-after-a-timeout",
        "            self.tensors = [tensor.clone() for tensor in self.tensors]\n",
        "",
        ("test_gradients_may_be_written_to_after_a_timeout",),
    ),
    Mutant(
        "gradients-given-back-while-added",
        "if not any(round_.is_adding for round_ in rounds):",
        "if True:",
        ("test_tensors_in_an_addition_are_returned_after_it",),
    ),
    Mutant(
        "hook-writes-to-what-others-get",
        "self._pushed.value()._replace(is_shared=True)",
        "self._pushed.value()",
        ("test_a_hook_that_writes_to_its_result_changes_no_others",),
    ),
    Mutant(
        "push-made-after-its-time",
        "            if not self._is_over:\n                self._pushed =",
        "            if True:\n                self._pushed =",
        ("test_a_push_that_comes_after_its_time_is_not_made",),
    ),
    Mutant(
        "late-trainers-ask-each-other",
        "        self._can_give = False\n        self._hold_no_more()",
        "        self._hold_no_more()",
        ("test_two_late_trainers_do_not_wait_for_each_other",),
    ),
    Mutant(
        "late-trainers-are-waited-for-as-they-catch-up",
        "        self._given_up[trainer.life] = request\n        self.pause(trainer.life)\n",
        "        self._given_up[trainer.life] = request\n",
        ("test_trainer_waiting_for_the_last_ones_state_blocks_no_step",),
    ),
    Mutant(
        "trainers-whose-donors-have-died-are-waited-for",
        "            self._donors[trainer.life] = donor.life\n",
        "            pass\n",
        ("test_trainer_with_a_dead_donor_blocks_no_step_until_heard",),
    ),
    Mutant(
        "whoever-joins-between-two-hosts-stays-a-step-behind",
        "            if not failed and (behind := self._behind()):\n",
        "            if False and (behind := self._behind()):\n",
        ("test_trainer_joining_between_two_hosts_has_one_step_at_both",),
    ),
    Mutant(
        "means-before-the-last-are-forgotten",
        "                for shard in behind if self._adds_up else ():\n",
        "                for shard in ():\n",
        ("test_what_a_late_trainer_missed_at_one_host_adds_up",),
    ),
    Mutant(
        "newcomers-do-the-first-step",
        "is_newcomer=push.at is None)",
        "is_newcomer=False)",
        ("test_trainer_joining_between_two_hosts_has_one_step_at_both",),
    ),
    Mutant(
        "results-of-one-host-are-not-kept",
        "self.may_move or not self._life.is_static\n",
        "self.may_move\n",
        ("test_step_answered_in_part_before_a_restart_is_that_of_all",),
    ),
    Mutant(
        "states-come-without-results",
        '        results().adopt(self._server.name, state["results"])\n',
        "",
        ("test_step_answered_to_one_host_and_given_on_is_that_of_all",),
    ),
    Mutant(
        "states-under-way-are-not-waited-for",
        "            if asked is not None and asked.donor not in living:\n",
        "            if False:\n",
        ("test_step_answered_to_one_host_and_given_on_is_that_of_all",),
    ),
    Mutant(
        "donors-that-live-are-waited-for",
        "            if asked is not None and asked.donor not in living:\n",
        "            if asked is not None:\n",
        ("test_a_result_that_may_come_with_a_state_is_waited_for",),
    ),
    Mutant(
        "trainers-that-have-given-up-are-given-the-state",
        "return request is not None and request <= self._given_up.get(trainer.life, -1)",
        "return False",
        (
            "test_timed_out_trainer_blocks_no_step",
            "test_timed_out_state_request_does_not_block_step",
        ),
    ),
    Mutant(
        "trainers-that-cannot-begin-are-waited-for",
        "        except BaseException as error:\n            # A traceback",
        "        except RuntimeError as error:\n            # A traceback",
        ("test_a_trainer_with_another_model_is_not_waited_for",),
    ),
    Mutant(
        "trainers-that-have-given-up-begin",
        "model.entered.pop(trainer.life, None)) is not None:\n                self",
        "None) is not None:\n                self",
        ("test_trainer_that_stopped_waiting_for_the_first_blocks_none",),
    ),
    Mutant(
        "admissions-by-the-dead-count",
        "        if donor.life in self._gone:\n            self.pause(trainer.life)\n",
        "        if False:\n            self.pause(trainer.life)\n",
        ("test_trainer_with_a_dead_donor_blocks_no_step_until_heard",),
    ),
    Mutant(
        "what-was-missed-is-given-twice",
        "            self._missed.share(donor.life, trainer.life)\n",
        "            pass\n",
        ("test_late_trainer_misses_what_its_donor_missed",),
    ),
    Mutant(
        "sums-of-other-rounds-are-given",
        "return missed.tensors if missed.start == at else None",
        "return missed.tensors",
        ("test_late_trainer_gets_the_sum_it_missed_or_none",),
    ),
    Mutant(
        "those-that-are-further-are-waited-for",
        "            passed, over = self._pass(push.trainer.life, at)\n",
        "            passed, over = [], []\n",
        (
            "test_trainer_blocks_no_round_that_is_over_for_it",
            "test_trainer_a_round_ahead_is_asked_for_the_result",
        ),
    ),
    Mutant(
        "successors-are-taken-for-dead",
        "is_expected = name in names and not has_successor if names",
        "is_expected = name in names if names",
        ("test_next_hosts_expect_a_restarted_trainer",),
    ),
    Mutant(
        "next-hosts-wait-for-all",
        "    return tuple(worker for worker, use in known.items() if use.has_joined)\n",
        "    return tuple(known)\n",
        ("test_trainer_waiting_for_state_does_not_block_the_next_hosts",),
    ),
    Mutant(
        "next-hosts-know-of-no-state-that-was-given",
        "                for admission in self._given:\n",
        "                for admission in ():\n",
        ("test_next_hosts_expect_a_trainer_that_just_got_the_state",),
    ),
    Mutant(
        "push-goes-on-after-one-in-part",
        "    if server.is_pushed_in_part:\n",
        "    if False:\n",
        ("test_trainer_begins_again_after_a_partly_answered_push",),
    ),
    Mutant(
        "names-taken-back-before-they-are-given",
        "if service is None or name not in offered:",
        "if service is None:",
        ("test_name_being_registered_by_a_thread_is_not_unregistered",),
    ),
    Mutant(
        "roles-looked-up-before-the-decider-is-asked",
        f"{_ASK_FOR_ROUTE}{_LIST_MEMBERS}",
        f"{_LIST_MEMBERS}{_ASK_FOR_ROUTE}",
        ("test_a_role_is_called_that_has_just_registered_the_service",),
    ),
    Mutant(
        "folders-without-turns",
        "        _lock(number, path, fcntl.LOCK_EX if to_save else fcntl.LOCK_SH)\n",
        "",
        ("test_processes_take_turns_in_a_folder",),
    ),
)

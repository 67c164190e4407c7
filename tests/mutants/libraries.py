"""Bugs in the libraries: services, reduction, checkpoints."""

from __future__ import annotations

from mutants._mutant import Mutant

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
        ("test_tensors_that_are_being_added_are_given_back_when_that_is_over",),
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
        "folders-without-turns",
        "        _lock(number, path, fcntl.LOCK_EX if to_save else fcntl.LOCK_SH)\n",
        "",
        ("test_processes_take_turns_in_a_folder",),
    ),
)

"""Bugs in the programs that judge: benchmarks, soak, verbs, checks of reports."""

from __future__ import annotations

from tests.mutants._mutant import Mutant

MUTANTS = (
    Mutant(
        "soak-without-calls",
        "if count < fewest]",
        "if count < 0]",
        ("test_a_run_in_which_little_happens_proves_nothing",),
    ),
    Mutant(
        "verbs-however-late",
        "    expect(seconds < limit_s, ",
        "    expect(seconds < limit_s or bool(what), ",
        ("test_a_lost_worker_that_is_not_told_as_wanted_fails",),
    ),
    Mutant(
        "bounds-always-hold",
        "        return ratio >= limit if self.more_is_better else ratio <= limit\n",
        "        return True\n",
        ("test_the_table_says_which_bounds_are_missed",),
    ),
    Mutant(
        "worse-configuration-of-tensorpipe",
        "            best = max if figure.more_is_better else min\n",
        "            best = min if figure.more_is_better else max\n",
        ("test_ratio_is_to_tensorpipes_better_configuration",),
    ),
    Mutant(
        "skipped-file-counts",
        '            if case.find("skipped") is None:\n',
        "            if True:\n",
        ("test_file_without_a_test_that_ran_is_missing",),
    ),
)

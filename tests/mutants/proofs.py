"""Bugs in the programs that judge: benchmarks, soak, verbs, checks of reports."""

from __future__ import annotations

from mutants._mutant import Mutant

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
        ("test_a_time_beyond_its_limit_fails",),
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
        ("test_a_ratio_is_taken_to_the_better_configuration_of_tensorpipe",),
    ),
    Mutant(
        "any-skip-is-fine",
        "            if not any(re.fullmatch(reasons, reason) for reasons in allowed):\n",
        "            if not allowed:\n",
        ("test_what_is_missing_or_skipped_is_told",),
    ),
    Mutant(
        "dead-worker0-not-noticed",
        "        except (EOFError, ConnectionError) as error:\n            raise self._failure(",
        "        except ConnectionError as error:\n            raise self._failure(",
        ("test_a_job_whose_worker0_dies_is_a_failure",),
    ),
)

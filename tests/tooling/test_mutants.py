"""The mutants of ``tools/mutants.sh`` fit the sources. Only a run shows whether tests catch them."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutants._list import MUTANTS
from tests.mutants._mutant import Mutant, Useless
from tests.mutants._tests import executables_of, file_of

from ._tools import ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_has_its_place_and_its_tests(mutant: Mutant) -> None:
    place = mutant.place(ROOT)
    assert mutant.is_cpp == (place.suffix != ".py")
    mutated = mutant.pattern.sub(lambda _: mutant.instead, place.read_text(encoding="utf-8"))
    if not mutant.is_cpp:
        compile(mutated, str(place), "exec")
    missing = [test for test in mutant.tests if file_of(test, ROOT) is None and not executables_of(test, ROOT)]
    assert mutant.tests
    assert not missing


def test_mutants_have_names_of_their_own() -> None:
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1


def test_a_text_found_twice_or_nowhere_is_refused() -> None:
    with pytest.raises(Useless, match="stands nowhere"):
        Mutant("a", "a text that " + "stands in no source", "", ()).place(ROOT)
    with pytest.raises(Useless, match=r"stands torch_ucx_rpc/.*, torch_ucx_rpc/"):
        Mutant("b", "from __future__ import annotations", "", ()).place(ROOT)
    assert file_of("test_that_nobody_has_written", ROOT) is None
    assert file_of("tests/nobody.py", ROOT) is None
    assert not executables_of("NobodysTest", ROOT)

"""Plans between the two rounds of a save or a load."""

from __future__ import annotations

from torch_ucx_rpc.checkpoint.parts import Planned


def test_a_plan_of_a_session_that_was_given_up_is_not_kept() -> None:
    planned = Planned[int]()
    assert planned.add("early", 1)
    assert planned.drop("early") == 1
    assert planned.drop("late") is None
    assert not planned.add("late", 2)
    assert planned.add("whole", 3)
    assert planned.take("whole") == 3
    assert planned.drop("whole") is None

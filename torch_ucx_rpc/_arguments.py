"""Checks of arguments: an error names the argument, the expected value and the given value.

Each check takes the value last, and the argument's name first; `check_timeout` needs no name.
"""

from __future__ import annotations

import math
import numbers
import os
from typing import Any

_LONGEST = 200


def got(value: object) -> str:
    """The given value, for the end of an error's sentence: ``got None (NoneType)``."""
    text = repr(value)
    return f"got {text if len(text) <= _LONGEST else text[:_LONGEST] + '...'} ({type(value).__name__})"


def wrong_type(argument: str, expected: str, value: object) -> TypeError:
    return TypeError(f"{argument} must be {expected}; {got(value)}")


def wrong_value(argument: str, expected: str, value: object) -> ValueError:
    return ValueError(f"{argument} must be {expected}; {got(value)}")


def check_type(argument: str, kind: type | tuple[type, ...], expected: str, value: object) -> None:
    if not isinstance(value, kind):
        raise wrong_type(argument, expected, value)


def check_callable(argument: str, expected: str, value: object) -> None:
    if not callable(value):
        raise wrong_type(argument, expected, value)


def check_flag(argument: str, value: object) -> None:
    check_type(argument, bool, "True or False", value)


def check_str(argument: str, value: object) -> None:
    check_type(argument, str, "a str", value)
    if not value:
        raise wrong_value(argument, "a str that is not empty", value)


def check_int(argument: str, expected: str, value: Any) -> int:
    # Python treats True as an int.
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(argument, expected, value)
    return value


def check_count(argument: str, least: int, expected: str, value: object) -> None:
    if check_int(argument, f"an int, {expected}", value) < least:
        raise wrong_value(argument, f"at least {least}, {expected}", value)


def check_timeout(value: object) -> None:
    # Accept all that torch accepts, NumPy's numbers too.
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise wrong_type("timeout", "a number of seconds, 0 for no limit", value)
    # A wait until then would never end.
    if math.isnan(value):
        raise wrong_value("timeout", "a number of seconds, 0 for no limit", value)


def check_path(argument: str, value: Any) -> None:
    check_type(argument, (str, os.PathLike), "a path, a str or Path", value)
    if not os.fspath(value):
        raise wrong_value(argument, "a path that is not empty", value)


def check_number(argument: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise wrong_type(argument, "a number", value)

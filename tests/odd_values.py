"""What people and programs hand over where an option is wanted: wrong types, edges of a range, and things that break printing."""

import ast
import math
import re
from typing import Any

from hypothesis import strategies as st

from vismoe.ranges import Rule

ODD = (
    None, True, False, "", " ", "0", "1", "0.5", "-1", "auto", "none", "NaN", "inf", "1e999", "9" * 5000, "x" * 5000, "\0",
    "\ud800", "a\udcff", "~no-such-user/x", "8GiB", "25%", "4/2", b"1", (), [], {}, [1], (1, 2), ["a"], {"a": 1}, [10**5000],
    object(), int, len, math.nan, math.inf, -math.inf, 1e308, 5e-324, -0.0, 0, 1, -1, 2, 0.5, 1.5, 2**31, 2**40, 2**63, 2**64,
    10**30, 10**5000, 1j,
)  # fmt: skip


ANYTHING = st.integers(0, len(ODD) - 1).map(ODD.__getitem__)  # a list of them cannot be printed, which hypothesis does


def odd_values(rule: Rule) -> st.SearchStrategy[Any]:
    """Any of these, or what lies at, beside and between the ends of the option's range."""
    ends = [end for end in (rule.range.low, rule.range.high) if math.isfinite(end)]
    near = [value for end in ends for value in (end, end - 1, end + 1, math.nextafter(end, -9e99), math.nextafter(end, 9e99))]
    within = [st.integers(int(ends[0]), int(ends[1])), st.floats(*map(float, ends))] if ends else []
    return st.one_of(ANYTHING, st.sampled_from([*near, *rule.choices, rule.default]), *within)


def advised(message: str) -> dict[str, Any]:
    """The option that a message says to give, with its value; nothing where it says to leave it out."""
    _, fix, advice = message.rpartition("Fix: ")
    assert fix, message
    found = re.fullmatch(r"(\w+)=(.*)", advice, re.S)
    assert found or advice == "leave it out", message
    return {found[1]: ast.literal_eval(found[2])} if found else {}


def said_well(error: Exception, name: str) -> str:
    """What an error says, after a look at it: it names the option, is short, and can be printed and sent."""
    message = str(error)
    assert name in message and len(message) < 600 and "\n" not in message, message[:2000]
    message.encode()
    return message

"""Lists of policies, as the command sluice writes them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sluice.errors import InvalidArgument


FLOOR = "full"
"""What differs from dense attention by the order of its sums alone: no policy can be told from dense attention that is
as near to it."""


def with_floor(policies: Sequence[str]) -> list[str]:
    return list(policies) if FLOOR in policies else [FLOOR, *policies]


def split_policies(text: str) -> list[str]:
    """A comma that key=value follows goes on with the policy before it; a semicolon always ends it.
    @throws InvalidArgument if there is none"""
    policies: list[str] = []
    for part in text.split(";"):
        names: list[str] = []
        for item in filter(str.strip, _at_commas(part)):
            if names and re.match(r"[^:|+(=]*=", item):
                names[-1] += "," + item
            else:
                names.append(item)
        policies += names
    made = list(dict.fromkeys(policy.strip() for policy in policies))
    if not made:
        raise InvalidArgument('--policies: the list is empty; name at least one, such as "full;sluice"')
    return made


def _at_commas(text: str) -> list[str]:
    """Its parts between commas that are not in parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts

"""Equal shares of the tests, which `scripts/test.sh --long --share 2/8` runs one at a time."""

import re
from collections.abc import Sequence
from typing import Any

import pytest


def share_of(items: Sequence[Any], share: str) -> list[Any]:
    """Every N-th item, for the share `I/N`.

    Raises:
        UsageError: there is no such share.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", share)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise pytest.UsageError(f"--share is I/N with I from 1 to N, such as 2/8, not {share}")
    return list(items[int(match[1]) - 1 :: int(match[2])])

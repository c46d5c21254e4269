"""Figures for people are rounded to what they can use, at every size."""

import pytest

from torchtitan.utils.retry import retry
from torchtitan.utils.wording import (
    flat,
    show_date,
    show_duration,
    show_gib,
    show_loss,
    show_percent,
    show_rate,
    show_size,
    show_tokens,
)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (show_tokens(0), "0"),
        (show_tokens(999), "999"),
        (show_tokens(65_536), "65.5K"),
        (show_tokens(999_499), "999K"),
        (show_tokens(999_500), "1.00M"),
        (show_tokens(1.2e9), "1.20B"),
        (show_tokens(15e12), "15.0T"),
        (show_tokens(2.5e16), "25,000T"),
        (show_loss(2.34567), "2.3457"),
        (show_percent(41.23), "41.2%"),
        (show_gib(71.234), "71.2 GiB"),
        (show_gib(0.357), "0.36 GiB"),
        (show_gib(1536), "1,536.0 GiB"),
        (show_size(999), "999 bytes"),
        (show_size(4_520_000), "4.5 MB"),
        (show_size(999_960_000), "1.0 GB"),
        (show_size(2.5e15), "2,500.0 TB"),
        (show_rate(7822.3), "7,822"),
        (show_rate(12.34), "12.3"),
        (show_duration(0.0234), "0.023 s"),
        (show_duration(5.21), "5.2 s"),
        (show_duration(59.4), "59 s"),
        (show_duration(59.6), "1 min 00 s"),
        (show_duration(125), "2 min 05 s"),
        (show_duration(3599.8), "1 h 00 min"),
        (show_duration(3725), "1 h 02 min"),
        (show_duration(86_399), "1 d 00 h"),
        (show_duration(284_000), "3 d 07 h"),
        (show_duration(float("inf")), "unknown"),
    ],
)
def test_figures(shown, expected):
    assert shown == expected


def test_nested_tables_become_one():
    assert flat({"a": {"b": 1, "c": {}}, "d": [2]}) == {"a.b": 1, "d": [2]}
    assert flat({"b": {"c": 1}}, "a.") == {"a.b.c": 1}


def test_another_attempt_follows_only_errors_that_may_pass(monkeypatch):
    pauses = []
    monkeypatch.setattr("time.sleep", pauses.append)
    errors = [OSError("first"), OSError("second"), KeyError("lasting")]
    failures = []

    def fail():
        raise errors[len(failures)]

    with pytest.raises(KeyError, match="lasting"):
        retry(
            fail,
            attempts=5,
            pause=0.5,
            may_pass=lambda error: isinstance(error, OSError),
            failed=lambda *failure: failures.append(failure),
        )
    assert [failure[:2] for failure in failures] == [(errors[0], 1), (errors[1], 2)]
    assert pauses == [seconds for _, _, seconds in failures]
    assert 0.25 <= pauses[0] <= 0.75
    assert 0.5 <= pauses[1] <= 1.5


def test_dates_are_local(monkeypatch):
    import time

    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert show_date(1_795_406_706.9) == "2026-11-23 13:05:06"
    finally:
        monkeypatch.undo()
        time.tzset()

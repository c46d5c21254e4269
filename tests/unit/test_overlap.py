"""Two computations of a rank that take turns."""

import pytest

from torchtitan.parallel.overlap import alternate, hand_over


def part(events, name, steps, error=None):
    def run():
        for step in range(steps):
            events.append(f"{name}{step}")
            hand_over()
        if error is not None:
            raise error
        events.append(f"{name} ends")

    return run


def test_they_take_turns_and_the_longer_one_goes_on_alone():
    events = []
    alternate(part(events, "a", 1), part(events, "b", 3))
    assert events == ["a0", "b0", "a ends", "b1", "b2", "b ends"]
    events.clear()
    alternate(part(events, "a", 2), part(events, "b", 0))
    assert events == ["a0", "b ends", "a1", "a ends"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_ends_both(failing):
    events = []
    steps = [3, 3]
    steps[failing] = 1
    errors = [ValueError("broken") if i == failing else None for i in range(2)]
    with pytest.raises(ValueError, match="broken"):
        alternate(part(events, "a", steps[0], errors[0]), part(events, "b", steps[1], errors[1]))
    assert not any("ends" in event for event in events)
    hand_over()  # nothing runs beside this
    alternate(part(events, "c", 0), part(events, "d", 0))
    assert events[-2:] == ["c ends", "d ends"]

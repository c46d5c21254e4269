"""When the time limit of collectives is that of a compilation."""

from types import SimpleNamespace
from unittest import mock

import pytest

from torchtitan.config import resolve
from torchtitan.train import built_in


def limits(monkeypatch, *flags, steps, stages=None):
    """The limits that are set after each step, where validation runs at steps 2, 4, ..., and the
    data changes its shape with step 6.
    """
    config = resolve(["--training.steps=9", "--comm.init_timeout_seconds=300", *flags], 1).config
    set_timeout = mock.Mock()
    monkeypatch.setattr(built_in, "set_timeout", set_timeout)
    run = SimpleNamespace(config=config, progress=SimpleNamespace(step=0))
    monkeypatch.setattr(built_in, "_next_stage", lambda _: int(run.progress.step >= 5))
    validate = SimpleNamespace(due=lambda run, *_: run.progress.step % 2 == 0)
    engine = SimpleNamespace(config=config, stage=0, setup=SimpleNamespace(stages=stages))
    callback = built_in.LimitCollectives(engine, None, [validate])
    seen = []
    for step in range(1, steps + 1):
        engine.stage = int(step >= 6)
        run.progress.step = step
        callback.after_step(run, None)
        seen.append([call.args[0] for call in set_timeout.mock_calls])
        set_timeout.reset_mock()
    return seen


def test_first_evaluations_and_new_shapes_have_the_limit_of_the_first_step(monkeypatch):
    seen = limits(monkeypatch, "--compile.enable", steps=6)
    assert seen == [[100], [300], [100], [], [300], [100]]


def test_without_compilation_nothing_rises_again(monkeypatch):
    assert limits(monkeypatch, steps=6) == [[100], [], [], [], [], []]


@pytest.mark.parametrize(("flags", "limit"), [(["--compile.enable"], 1200), ([], 300)])
def test_stages_compile_one_after_another(flags, limit):
    config = resolve(["--comm.init_timeout_seconds=300", *flags], 1).config
    setup = SimpleNamespace(stages=SimpleNamespace(ranks=(0, 1, 0, 1)))
    assert built_in.first_limit(config, setup) == limit

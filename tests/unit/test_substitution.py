"""Substitutions of a simulated rank end with it, whatever they replaced."""

from types import SimpleNamespace

import pytest

from torchtitan.tools.rehearsal.substitution import Substitution, substituted


class Base:
    @staticmethod
    def inherited():
        return "inherited"

    @staticmethod
    def own():
        return "own"


class Derived(Base): ...


def stop_inside(substitutions, module):
    with substituted(*substitutions):
        assert (module.value, module.new) == (3, 4)
        assert (Derived.inherited(), Base.inherited()) == ("replaced", "inherited")
        assert Base().own() == "replaced"
        raise ValueError("stop")


def test_everything_is_as_before_after_an_error():
    module = SimpleNamespace(value=1)
    before = dict(vars(Base))
    substitutions = (
        Substitution(module, "value", 2),
        Substitution(module, "value", 3),
        Substitution(module, "new", 4),
        Substitution(Derived, "inherited", lambda: "replaced"),
        Substitution(Base, "own", staticmethod(lambda: "replaced")),
    )
    with pytest.raises(ValueError, match="stop"):
        stop_inside(substitutions, module)
    assert vars(module) == {"value": 1}
    assert "inherited" not in vars(Derived)
    assert dict(vars(Base)) == before

"""Every kernel of a training step compiles for an H100, on a machine without one."""

import pytest

from tests.cuda.configurations import CONFIGURATIONS, Configuration, is_fast
from tests.cuda.measured import NEWEST, Measured, measure, on_page, tables
from tests.cuda.shim import obstacle

_OBSTACLE = obstacle()

pytestmark = [
    pytest.mark.cuda_compile,
    pytest.mark.skipif(_OBSTACLE is not None, reason=f"can't compile for a GPU: {_OBSTACLE}"),
]


def _marks(configuration: Configuration) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] + [pytest.mark.corner] * configuration.quick


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "configuration", [pytest.param(c, id=c.name, marks=_marks(c)) for c in CONFIGURATIONS]
)
def test_a_training_step_compiles(configuration: Configuration) -> None:
    measured = measure(configuration)
    first, *later = measured.passes
    assert first["graphs"] == configuration.graphs
    compiling = {each["name"]: each["graphs"] for each in later if each["graphs"]}
    assert compiling == configuration.later_graphs
    for each in later:
        assert each["waits"] == configuration.waits_of(each["name"]), each["name"]
    assert measured.graphs_of_a_function <= measured.graph_limit
    assert_right_kernels(configuration, measured)
    if measured.torch.split("+")[0] == NEWEST:
        assert tables(configuration, measured) == on_page(configuration)


def assert_right_kernels(configuration: Configuration, measured: Measured) -> None:
    assert measured.kernels
    assert {kernel["sm"] for kernel in measured.kernels} == {configuration.sm}
    assert min(kernel["bytes"] for kernel in measured.kernels) > 0
    assert max(kernel["shared"] for kernel in measured.kernels) <= measured.shared_memory
    for region in measured.regions:
        assert not region["on_cpu"], f"{region['name']} has kernels for the CPU"
        calls = region["extern"].keys() - configuration.other_calls
        slow = [call for call in calls if not is_fast(call)]
        assert not slow, f"{region['name']} calls {slow}"

"""Plans of runs whose rows become longer: each stage of the data is a workload of its own."""

import dataclasses
from collections.abc import Iterator

from torchtitan.config.derive import stages_of
from torchtitan.config.sections.schema import Config
from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.predict import Plan, predict
from torchtitan.tools.planner.workload import Workload
from torchtitan.train.preflight import Setup
from torchtitan.utils.wording import plural, show_gib, show_rate


def plan_of_stages(config: Config, setup: Setup, hardware: Hardware) -> Plan:
    """The plan of a run by the closed forms: speed of the first stage of the data, memory of the
    one that needs most, time of all.
    """
    staged = stages_of(config)
    shapes = [(one.training.seq_len, one.training.local_batch_size) for one in staged]
    if len(set(shapes)) == 1:
        return _plan(config, setup, hardware, 0)
    plans = [_plan(one, setup, hardware, index) for index, one in enumerate(staged)]
    first = plans[0]
    tightest = max(plans, key=lambda plan: plan.peak_gib)
    steps = [1, *(stage.from_step for stage in config.training.stages)]
    return dataclasses.replace(
        first,
        memory=tightest.memory,
        tightest=None if tightest is first else tightest,
        stages=tuple(zip(steps, plans, strict=True)),
        notes=(*first.notes, *_notes(steps, plans, tightest)),
    )


def _plan(config: Config, setup: Setup, hardware: Hardware, stage: int) -> Plan:
    return predict(Workload(config, setup.args_of(stage), setup.stages), setup.spec, hardware)


def _notes(steps: list[int], plans: list[Plan], tightest: Plan) -> Iterator[str]:
    for step, plan in zip(steps, plans, strict=True):
        t = plan.config.training
        which = "; the memory above is this stage's" if plan is tightest else ""
        yield (
            f"from step {step:,}: {t.global_batch_size} x {t.seq_len} tokens per step, "
            f"{plural(t.local_batch_size, 'row')} per rank: {show_gib(plan.peak_gib)}, "
            f"{show_rate(plan.tokens_per_second)} tokens/s per GPU{which}"
        )

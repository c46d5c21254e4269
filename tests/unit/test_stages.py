"""Pipeline stages: how a model is cut, and what is refused before anything runs."""

import itertools
import re
from typing import get_args

import pytest

from torchtitan.config import resolve
from torchtitan.config.pipeline_schedules import NAMED_SCHEDULES, SCHEDULES
from torchtitan.config.sections.parallelism import Parallelism
from torchtitan.models import get_spec
from torchtitan.parallel.pipeline.split import balance_stages, pipeline_stages
from torchtitan.utils.errors import ConfigError

SPEC = get_spec("llama3")
ALL = ["tok_embeddings", *(f"layers.{i}" for i in range(6)), "norm", "output"]


def plan(*extra, degree=2, flavor="debugmodel", world=None):
    argv = [f"--parallelism.pipeline_parallel_degree={degree}", f"--model.flavor={flavor}", *extra]
    config = resolve(argv, world or degree).config
    args = SPEC.args(flavor, config.model.overrides, max_seq_len=config.training.seq_len)
    flops = SPEC.module_flops(args, config.training.seq_len)
    return pipeline_stages(config, flops, SPEC.tied_modules(args))


def problems(*extra, **options):
    with pytest.raises(ConfigError) as error:
        plan(*extra, **options)
    return error.value.problems


def layers(stages):
    return [[int(m.split(".")[1]) for m in stage if m.startswith("layers.")] for stage in stages]


# ---- cutting


def best_balance(costs, count):
    """The least maximum, and the least sum of squares that goes with it, by trying every way to
    cut.
    """
    cuts = itertools.combinations(range(1, len(costs)), count - 1)
    return min(
        balance_of([sum(costs[a:b]) for a, b in itertools.pairwise([0, *c, len(costs)])])
        for c in cuts
    )


def balance_of(stages):
    return round(max(stages), 6), round(sum(cost**2 for cost in stages), 6)


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("head", [0.3, 1.0, 2.4, 5.5])
def test_balance_is_the_best_there_is(count, head):
    flops = {
        "tok_embeddings": 0.0,
        **{f"layers.{i}": 1.0 for i in range(6)},
        "norm": 0.0,
        "output": head,
    }
    stages = balance_stages(flops, count)
    assert [name for stage in stages for name in stage] == list(flops)
    assert len(stages) == count
    assert balance_of([sum(flops[m] for m in stage) for stage in stages]) == best_balance(
        [1.0] * 6 + [head], count
    )


def test_balance_counts_the_output_projection():
    """8B: the projection to 128,256 words costs as much as 2.4 layers at short context."""
    stages = layers(balance_stages(SPEC.module_flops(SPEC.flavors["8B"], 2048), 4))
    assert [len(s) for s in stages] == [8, 9, 9, 6]
    # 70B: as even as whole layers can be. A first stage of one layer would be no slower.
    stages = layers(balance_stages(SPEC.module_flops(SPEC.flavors["70B"], 8192), 16))
    assert sorted(len(s) for s in stages) == [4] + [5] * 14 + [6]


def test_defaults():
    one = plan("--training.local_batch_size=4")
    assert one.modules == (tuple(ALL[:4]), tuple(ALL[4:]))
    assert one.ranks == (0, 1)
    assert one.schedule == "1F1B"
    looped = plan("--parallelism.pipeline_parallel_schedule=Interleaved1F1B")
    assert looped.ranks == (0, 1, 0, 1)
    v = plan("--parallelism.pipeline_parallel_schedule=DualPipeV", degree=3)
    assert v.ranks == (0, 1, 2, 2, 1, 0)
    assert v.stages_of(0) == [0, 5]
    assert plan(degree=1) is None


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (
            [
                "--parallelism.pipeline_parallel_first_stage_less_layers=0",
                "--parallelism.pipeline_parallel_last_stage_less_layers=0",
            ],
            [[0, 1, 2], [3, 4, 5]],
        ),
        (["--parallelism.pipeline_parallel_last_stage_less_layers=3"], [[0, 1, 2, 3], [4, 5]]),
        (
            [
                "--parallelism.pipeline_parallel_layers_per_stage=2",
                "--parallelism.pipeline_parallel_schedule=Interleaved1F1B",
            ],
            [[0], [1, 2], [3, 4], [5]],
        ),
        (["--parallelism.module_fqns_per_model_part=layers.1"], [[0], [1, 2, 3, 4, 5]]),
        (
            [f"--parallelism.module_fqns_per_model_part={[ALL[:6], ALL[6:]]}"],
            [[0, 1, 2, 3, 4], [5]],
        ),
    ],
)
def test_other_ways_to_cut(extra, expected):
    stages = plan(*extra).modules
    assert layers(stages) == expected
    assert [name for stage in stages for name in stage] == ALL


@pytest.mark.parametrize(
    ("degree", "extra", "expected"),
    [
        (2, ["--parallelism.pipeline_parallel_last_stage_less_layers=7"], [[0, 1, 2, 3, 4, 5], []]),
        (
            2,
            [
                "--parallelism.pipeline_parallel_first_stage_less_layers=6",
                "--parallelism.pipeline_parallel_last_stage_less_layers=0",
            ],
            [[], [0, 1, 2, 3, 4, 5]],
        ),
        (
            4,
            [
                "--parallelism.pipeline_parallel_layers_per_stage=1",
                "--parallelism.pipeline_parallel_schedule=LoopedBFS",
            ],
            [[], [0], [1], [2], [3], [4], [5], []],
        ),
        (7, [], [[0], [1], [2], [3], [4], [5], []]),
        (
            3,
            ["--parallelism.module_fqns_per_model_part=layers.0,norm"],
            [[], [0, 1, 2, 3, 4, 5], []],
        ),
    ],
)
def test_the_ends_alone_on_their_stages(degree, extra, expected):
    stages = plan(*extra, degree=degree).modules
    assert layers(stages) == expected
    assert [name for stage in stages for name in stage] == ALL


# ---- refusals: (arguments, options, text of the one problem, arguments that fix it)

REFUSED = [
    (
        ["--parallelism.pipeline_parallel_microbatch_size=3"],
        {},
        "3 does not divide training.local_batch_size 8; set it to one of 1, 2, 4, 8",
        ["--parallelism.pipeline_parallel_microbatch_size=2"],
    ),
    (
        [
            "--validation.enable",
            "--validation.local_batch_size=3",
            "--parallelism.pipeline_parallel_microbatch_size=2",
        ],
        {},
        "2 does not divide validation.local_batch_size 3; set it to one of 1, 3",
        ["--validation.local_batch_size=4"],
    ),
    (
        ["--parallelism.pipeline_parallel_microbatch_size=4"],
        {"degree": 4},
        "1F1B needs at least as many microbatches as its 4 stages, got 2; set "
        "parallelism.pipeline_parallel_microbatch_size "
        "to 1 or 2",
        ["--parallelism.pipeline_parallel_microbatch_size=2"],
    ),
    (
        ["--training.local_batch_size=2"],
        {"degree": 4},
        "raise training.local_batch_size to 4",
        ["--training.local_batch_size=4"],
    ),
    (
        [
            "--parallelism.pipeline_parallel_schedule=Interleaved1F1B",
            "--training.local_batch_size=5",
        ],
        {},
        "can't run 5 microbatches on 2 ranks in 2 equal rounds",
        ["--training.local_batch_size=6"],
    ),
    (
        ["--parallelism.pipeline_parallel_schedule=LoopedBFS"],
        {"degree": 5},
        "10 stages for 6 layers; at most 8",
        ["--model.overrides.n_layers=8"],
    ),
    (
        ["--parallelism.pipeline_parallel_layers_per_stage=2"],
        {},
        "gives 4 stages on 2 ranks, but schedule 1F1B takes 1 stage per rank (2 stages)",
        ["--parallelism.pipeline_parallel_layers_per_stage=4"],
    ),
    (
        ["--parallelism.pipeline_parallel_last_stage_less_layers=9"],
        {},
        "leave a stage empty (7, -1); lower them",
        ["--parallelism.pipeline_parallel_last_stage_less_layers=2"],
    ),
    (
        [
            "--parallelism.pipeline_parallel_schedule=LoopedBFS",
            "--parallelism.pipeline_parallel_first_stage_less_layers=0",
            "--parallelism.pipeline_parallel_last_stage_less_layers=0",
        ],
        {"degree": 4},
        "leave a stage empty (1, 1, 1, 1, 1, 1, 0, 0); raise them, or use fewer stages",
        [
            "--parallelism.pipeline_parallel_first_stage_less_layers=1",
            "--parallelism.pipeline_parallel_last_stage_less_layers=1",
        ],
    ),
    (
        ["--parallelism.module_fqns_per_model_part=layers.9"],
        {},
        "no module 'layers.9'; the model has tok_embeddings",
        ["--parallelism.module_fqns_per_model_part=layers.3"],
    ),
    (
        ["--parallelism.module_fqns_per_model_part=layers.1,layers.2"],
        {},
        "gives 3 stages on 2 ranks",
        ["--parallelism.module_fqns_per_model_part=layers.2"],
    ),
    (
        [f"--parallelism.module_fqns_per_model_part={[ALL[:4], ALL[5:]]}"],
        {},
        "layers.3 is on no stage",
        [f"--parallelism.module_fqns_per_model_part={[ALL[:4], ALL[4:]]}"],
    ),
    (
        [f"--parallelism.module_fqns_per_model_part={[ALL[:4], ALL[3:]]}"],
        {},
        "layers.2 is on 2 stages",
        [f"--parallelism.module_fqns_per_model_part={[ALL[:4], ALL[4:]]}"],
    ),
    (
        [f"--parallelism.module_fqns_per_model_part={[ALL[4:], ALL[:4]]}"],
        {},
        "layers.3 is out of order",
        [f"--parallelism.module_fqns_per_model_part={[ALL[:4], ALL[4:]]}"],
    ),
    (
        [],
        {"flavor": "1B"},
        "shares one weight between tok_embeddings and output",
        ["--model.overrides.tie_embeddings=false"],
    ),
]


@pytest.mark.parametrize(("extra", "options", "text", "fix"), REFUSED)
def test_refusals(extra, options, text, fix):
    found = problems(*extra, **options)
    assert len(found) == 1, found
    assert text in found[0]
    plan(*extra, *fix, **options)


def test_microbatch_advice_is_legal():
    """Whatever a refusal proposes is accepted."""
    for name in NAMED_SCHEDULES:
        for rows, degree in itertools.product(range(1, 12), (2, 3)):
            argv = [
                f"--parallelism.pipeline_parallel_schedule={name}",
                f"--training.local_batch_size={rows}",
            ]
            try:
                plan(*argv, degree=degree)
            except ConfigError as error:
                (text,) = error.problems
                if sizes := re.search(r"microbatch_size to ([\d or]+)", text):
                    for size in sizes[1].split(" or "):
                        plan(
                            *argv,
                            f"--parallelism.pipeline_parallel_microbatch_size={size}",
                            degree=degree,
                        )
                else:
                    more = re.search(r"raise training.local_batch_size to (\d+)", text)[1]
                    plan(argv[0], f"--training.local_batch_size={more}", degree=degree)


def test_every_schedule_that_the_configuration_names_is_in_the_table():
    names = Parallelism.model_fields["pipeline_parallel_schedule"].annotation
    assert get_args(names) == tuple(SCHEDULES)


# ---- schedules from a file


def csv(tmp_path, text, rows=2, *extra, degree=2):
    file = tmp_path / "schedule.csv"
    file.write_text(text)
    arguments = [
        f"--parallelism.pipeline_parallel_schedule_csv={file}",
        f"--training.local_batch_size={rows}",
    ]
    return plan(*arguments, *extra, degree=degree)


GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_a_schedule_from_a_file(tmp_path):
    result = csv(tmp_path, GOOD)
    assert (result.schedule, result.ranks) == (None, (0, 1))
    v = "0F0,0F1,3F0,3I0,0B0,3W0,3F1,3B1,0B1\n1F0,2F0,,(1F1;2B0)OVERLAP_F_B,1B0,2F1,2B1,1B1\n"
    result = csv(tmp_path, v)
    assert result.ranks == (0, 1, 1, 0)


@pytest.mark.parametrize(
    ("text", "rows", "sentence"),
    [
        ("0F0,0B0\n", 1, "has 1 row; write one per rank"),
        ("0F0,1F0,1B0,0B0\n\n", 1, ":2: rank 1 computes nothing"),
        ("0F0,0X0\n1F0,1B0\n", 1, ":1: '0X0' is not a computation"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0\n", 1, "leave out communication"),
        (GOOD, 4, "the schedule has 2 microbatches, but training.local_batch_size 4"),
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", 2, "stage 0, microbatch 1 has F; it needs F and B"),
        ("0F0,0F0,0B0\n1F0,1B0\n", 1, "stage 0, microbatch 0 has FFB"),
        ("0F0,0B0,1B0\n1F0\n", 1, "stage 1 is on ranks 0 and 1"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", 2, "in the order 0, 1, 2"),
        ("0B0,0F0\n1F0,1B0\n", 1, "can never run 0B0 of rank 0"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", 2, "can never run 0B0 of rank 0"),
    ],
)
def test_schedules_that_cannot_work(tmp_path, text, rows, sentence):
    with pytest.raises(ConfigError) as error:
        csv(tmp_path, text, rows)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("0F0,0B0,0F1,0B1\n1F0,(1B0;1F1)OVERLAP_F_B,1B1\n", 2),
        ("0F0,3F0,3B0,0B0\n1F0,2F0,(2I0;1B0)OVERLAP_F_B,2W0\n", 1),
    ],
)
def test_parts_of_a_pair_begin_together(tmp_path, text, rows):
    with pytest.raises(ConfigError, match=r"schedule_csv: .*one can only follow the other"):
        csv(tmp_path, text, rows)


def test_a_missing_file():
    (problem,) = problems("--parallelism.pipeline_parallel_schedule_csv=/no/such.csv")
    assert "can't read '/no/such.csv': No such file" in problem

"""Every cross-field rule refuses what it should, names the keys, and offers something that is then
accepted.
"""

import pytest

from tests.config_answers import answer
from tests.unit.rule_cases_layout import ELASTIC, FLOAT8, LAYOUT_CASES
from tests.unit.rule_cases_runs import RUN_CASES
from torchtitan.config import gradient_accumulation_steps, resolve, rules
from torchtitan.config.derive import axis_degrees, derive, ranks_of
from torchtitan.config.load.decode import load_config
from torchtitan.config.load.keys import FIELDS, prefixes
from torchtitan.config.rules import RULES, Facts
from torchtitan.utils.errors import ConfigError

CASES = LAYOUT_CASES | RUN_CASES


@pytest.fixture(scope="module")
def broken():
    """For each case, the messages of each rule that it breaks, by the rule's place in the table."""
    out = []
    for world, argv, *_ in (case for cases in CASES.values() for case in cases):
        config, _ = derive(load_config(argv).config, world)
        layout = axis_degrees(config.parallelism)
        facts = Facts(world=world)
        if ranks_of(config) == world:
            facts = Facts(world=world, layout=layout)
        asked = [(place, rule) for place, rule in enumerate(RULES) if rule.applies(facts)]
        out.append({place: rule.ask(config, facts) for place, rule in asked})
    return out


def test_every_rule_that_needs_no_model_has_a_case(broken):
    hit = {place for problems in broken for place, found in problems.items() if found}
    known = Facts(world=1, layout={})
    missing = [r for place, r in enumerate(RULES) if r.applies(known) and place not in hit]
    assert not missing


def test_rules_name_their_keys(broken):
    tables = {table for key in FIELDS for table in prefixes(key)}
    for rule in RULES:
        assert set(rule.keys) <= tables, rule
    for problems in broken:
        for place, found in problems.items():
            for problem in found:
                assert any(key in problem for key in RULES[place].keys), (problem, RULES[place])


@pytest.mark.parametrize(
    ("world", "bad", "text", "fix"), [case for cases in CASES.values() for case in cases]
)
def test_rule(world, bad, text, fix):
    with pytest.raises(ConfigError) as error:
        resolve(bad, world)
    assert len(error.value.problems) == 1
    assert text in str(error.value)
    resolve([*bad, *fix], world)


@pytest.mark.parametrize("extra", [["--compile.enable"], ["--training.loss_chunks=2"], FLOAT8])
def test_old_torch_can_not_split_every_backward(monkeypatch, extra):
    argv = [
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.pipeline_parallel_schedule=DualPipeV",
        *extra,
    ]
    monkeypatch.setattr(rules, "torch_is_before_2_13", lambda: False)
    resolve(argv, 2)
    monkeypatch.setattr(rules, "torch_is_before_2_13", lambda: True)
    with pytest.raises(ConfigError, match=r"torch before 2\.13"):
        resolve(argv, 2)
    resolve([*argv, "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"], 2)


def test_several_broken_rules_are_reported_together(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[checkpoint]\nkeep_latest_k = 1\n[training]\nglobal_batch_size = 7\n")
    with pytest.raises(ConfigError) as error:
        resolve(["--config", str(file)], 1)
    places = [problem.split(" ")[0] for problem in error.value.problems]
    assert places == [f"{file}:4:", f"{file}:2:"]


def test_derived_values_and_their_formulas():
    argv = [
        "--parallelism.data_parallel_replicate_degree=2",
        "--training.local_batch_size=3",
        "--training.steps=50",
    ]
    resolved = resolve(argv, 8)
    config = resolved.config
    assert config.parallelism.data_parallel_shard_degree == 4
    assert config.training.global_batch_size == 24
    assert config.lr_scheduler.total_steps == 50
    assert config.lr_scheduler.warmup_steps == 50
    assert set(resolved.formulas) == {
        "parallelism.data_parallel_shard_degree",
        "validation.seq_len",
        "validation.local_batch_size",
        "validation.global_batch_size",
        "training.global_batch_size",
        "lr_scheduler.total_steps",
        "lr_scheduler.warmup_steps",
        "lr_scheduler.decay_type",
    }
    assert (
        gradient_accumulation_steps(resolve([*argv, "--training.global_batch_size=96"], 8).config)
        == 4
    )


@pytest.mark.parametrize(
    ("copies", "shards", "others", "world", "expected"),
    [
        (1, -1, 1, 3, (1, 3)),
        (2, -1, 1, 8, (2, 4)),
        (2, -1, 1, 3, (1, 3)),
        (2, 8, 1, 16, (2, 8)),
        (2, 8, 1, 8, (1, 8)),
        (2, 8, 1, 12, (1, 12)),
        (2, 8, 1, 4, (1, 4)),
        (2, 8, 1, 32, (2, 16)),
        (4, 1, 1, 3, (3, 1)),
        (4, 1, 1, 6, (3, 2)),
        (2, 2, 2, 4, (1, 2)),
    ],
)
def test_elastic_degrees_follow_the_ranks(copies, shards, others, world, expected):
    """Replicas are given up first; sharding stays at its target while enough ranks remain."""
    config = resolve(
        [
            *ELASTIC,
            "--checkpoint.enable",
            "--training.global_batch_size=64",
            f"--parallelism.data_parallel_replicate_degree={copies}",
            f"--parallelism.data_parallel_shard_degree={shards}",
            f"--parallelism.context_parallel_degree={others}",
        ],
        world,
    ).config.parallelism
    assert (config.data_parallel_replicate_degree, config.data_parallel_shard_degree) == expected


@pytest.mark.parametrize(("world", "expected"), [(16, 4), (8, 4), (6, 2), (4, 4), (2, 2)])
def test_elastic_runs_share_experts_among_fewer_ranks(world, expected):
    """By a divisor of the degree, which divides the number of experts like it."""
    argv = [
        *ELASTIC,
        "--checkpoint.enable",
        "--training.global_batch_size=48",
        "--model.name=qwen3_moe",
    ]
    degrees = ["--parallelism.expert_parallel_degree=4", "--parallelism.tensor_parallel_degree=2"]
    config = resolve([*argv, *degrees, "--parallelism.data_parallel_shard_degree=8"], world).config
    assert config.parallelism.expert_parallel_degree == expected


def test_elastic_other_degrees_stay():
    argv = [
        *ELASTIC,
        "--checkpoint.enable",
        "--training.global_batch_size=64",
        "--parallelism.tensor_parallel_degree=2",
    ]
    with pytest.raises(ConfigError, match="tensor_parallel_degree must divide 3"):
        resolve(argv, 3)


MISTAKES = {
    "degrees": (["--parallelism.data_parallel_replicate_degree=5"], "data_parallel_replicate"),
    "heads": (["--parallelism.tensor_parallel_degree=3"], "tensor_parallel_degree: 3 does not"),
    "rows": (["--training.global_batch_size=7"], "training.global_batch_size: 7"),
    "chunks": (["--training.loss_chunks=7"], "training.loss_chunks"),
    "flavor": (["--model.flavor=9B"], "no flavor '9B'"),
    "tokenizer": (["--model.hf_assets_path=nowhere"], "model.hf_assets_path"),
    "data": (["--training.dataset_path=nowhere.txt"], "training.dataset_path"),
    "set": (["--training.dataset=corpus"], "no dataset 'corpus'"),
    "schedule": (["--lr_scheduler.name=constant", "--lr_scheduler.decay_ratio=0.5"], "decay_ratio"),
    "retention": (["--checkpoint.keep_latest_k=1", "--checkpoint.enable"], "keep_latest_k"),
    "folder": (["--eval.include_path=nowhere", "--eval.enable", "--eval.tasks=a"], "include_path"),
}


DEPENDENT = [
    {"flavor", "heads"},  # nobody knows the heads of no model,
    {"degrees", "rows"},  # which ranks share the rows,
    {"heads", "rows"},
    {"chunks", "heads"},  # or the positions of a rank that has no whole number of them;
    {"data", "set"},  # of local files, `dataset` is only the name
]
"""Pairs of which one mistake hides what the other would be."""


@pytest.mark.parametrize("first", MISTAKES)
def test_two_mistakes_are_reported_together(first):
    """Whatever facts they need: the ranks, the model, the tokenizer, files."""
    flags, text = MISTAKES[first]
    assert any(text in problem for problem in answer(flags, 4)), answer(flags, 4)
    for second, (more, other) in MISTAKES.items():
        if {first, second} in DEPENDENT:
            continue
        if second > first:
            problems = answer([*flags, *more], 4)
            assert any(text in problem for problem in problems), (second, problems)
            assert any(other in problem for problem in problems), (second, problems)


def test_a_remedy_that_cannot_help_is_not_given():
    """Rows can be split by a degree that the model can't be."""
    flags = ["--parallelism.tensor_parallel_degree=3", "--training.seq_len=256"]
    row, heads = answer(flags, 3)
    assert "set it to" not in row
    assert "choose it once that degree divides the model" in row
    assert "does not divide n_heads 16" in heads

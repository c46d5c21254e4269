"""What a module of the user registers: its keys are checked where they stand, and its promises when
it is made.
"""

import sys

import pytest
import torch
from torch import nn

from torchtitan.config import registry, resolve
from torchtitan.config.load.command_line import show_help
from torchtitan.config.load.decode import load_config
from torchtitan.config.load.extend import recorded_tokenizer
from torchtitan.config.registry import Custom, Functions, Section, losses, optimizers, schedules
from torchtitan.optim.loss import build_loss
from torchtitan.optim.lr_schedule import LRSchedule
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.utils.errors import ConfigError, UserError

pytestmark = pytest.mark.usefixtures("registered")

MODULE = """
from torchtitan.config.registry import Section, losses, metric_sinks, schedules

class Keys(Section):
    start: float
    \"""Needed.\"""
    steps: int = 3
    names: list[str] = ["a"]

@schedules.register("slope", Keys)
def slope(lr_scheduler, keys):
    return lambda step: keys.start

@losses.register("plain")
def plain(): ...
"""


@pytest.fixture
def toml(tmp_path, monkeypatch):
    """Writes a configuration that imports `MODULE`; returns its path."""
    (tmp_path / "slopes.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda text: write(
        tmp_path / "run.toml", f'experimental.custom_import = "slopes"\n{text}'
    )
    sys.modules.pop("slopes", None)


def write(path, text):
    path.write_text(text)
    return str(path)


def problems(*argv):
    with pytest.raises(ConfigError) as error:
        resolve(list(argv), 1)
    return error.value.problems


def test_keys_come_from_file_and_flags_and_are_written_back(toml, tmp_path):
    file = toml('lr_scheduler.name = "slope"\n[custom.slope]\nstart = 0.5\nnames = ["x", "y"]\n')
    resolved = resolve(["--config", file, "--custom.slope.steps=7"], 1)
    keys = resolved.config.custom.tables["slope"]
    assert (keys.start, keys.steps, keys.names) == (0.5, 7, ["x", "y"])
    assert resolved.sources["custom.slope.start"] == f"{file}:4"
    from torchtitan.commands.config import explain
    from torchtitan.config.load.render import to_toml

    lines = [line.split() for line in explain(resolved).splitlines()]
    assert ["custom.slope.steps", "7", "--custom.slope.steps"] in lines
    assert ["custom.slope.start", "0.5", f"{file}:4"] in lines
    again = write(tmp_path / "again.toml", to_toml(resolved.config))
    assert resolve(["--config", again], 1).config.custom == resolved.config.custom


def test_mistakes_in_tables_are_named_with_their_place(toml):
    file = toml(
        '[custom.slope]\nstpes = 3\nstart = "high"\n[custom.slpe]\nstart = 1\n[custom]\nplain = 4\n'
    )
    assert problems("--config", file) == [
        f"{file}:4: custom.slope.start: got 'high', must be a number",
        f"{file}:3: custom.slope.stpes: unknown key; did you mean 'steps'?",
        f"{file}:6: custom.slpe: slopes registers nothing with keys as 'slpe'; with keys "
        "it registers slope; did you "
        "mean 'slope'?",
        f"{file}:8: custom.plain: slopes registers nothing with keys as 'plain'; with "
        "keys it registers slope",
    ]
    (problem,) = problems("--config", toml('lr_scheduler.name = "slope"\n'))
    assert problem == "custom.slope.start: must be set"
    (problem,) = problems("--custom.unheard.start=1")
    assert problem == (
        "--custom.unheard.start: custom.unheard: nothing is registered as 'unheard'; "
        "name the module that does as "
        "experimental.custom_import"
    )


def test_names_are_checked_with_all_other_mistakes_and_before_a_module_is_imported(toml):
    with pytest.raises(ConfigError) as error:
        load_config(
            [
                "--optimizer.name=adamw",
                "--lr_scheduler.name=cosin",
                "--metrics.sinks=csv",
                "--job.folder=1",
            ]
        )
    for text in (
        "--optimizer.name: no optimizer 'adamw'; known: Adam, AdamW, Muon; register "
        "others from a module named by "
        "experimental.custom_import; did you mean 'AdamW'?",
        "did you mean 'cosine'?",
        "--metrics.sinks: no metric sink 'csv'; known: jsonl, tensorboard, wandb;",
        "--job.folder: unknown key",
    ):
        assert any(text in problem for problem in error.value.problems), text
    file = toml('training.loss = "plane"\n')
    load_config(["--config", file])
    assert "slopes" not in sys.modules
    (problem,) = problems("--config", file)
    assert problem.startswith(
        f"{file}:2: training.loss: no loss 'plane'; known: cross_entropy, plain"
    )
    assert problem.endswith("did you mean 'plain'?")


def make(*arguments, keys=None):
    return None


def other(*arguments, keys=None):
    return None


@pytest.mark.parametrize(
    ("register", "text"),
    [
        (lambda: optimizers.register("two words")(make), "must be named by letters, digits and _"),
        (lambda: optimizers.register("AdamW")(make), "is built in"),
        (lambda: registry.data_sources.register("demo")(make), "data source 'demo' is built in"),
        (
            lambda: optimizers.register("local")(lambda: None),
            "define it at the top level of its module",
        ),
        (
            lambda: (optimizers.register("same")(make), losses.register("same")(other)),
            "is registered twice",
        ),
    ],
)
def test_names_that_cannot_be_registered(register, text):
    with pytest.raises(ConfigError, match=text):
        register()
    optimizers.register("again")(make)
    optimizers.register("again")(make)  # a reloaded module


# ---- what is made


def with_name(kind: Functions, made) -> str:
    """Register something that makes `made`."""
    kind.add("mine", lambda *arguments: made)
    return "mine"


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (
            lambda logits, labels: logits.float().mean(),
            r"float32 \[\]; it must return the sum of each row's losses",
        ),
        (lambda logits, labels: logits.double().sum((1, 2)), r"float64 \[2\]"),
        (lambda logits, labels: logits.sum((1, 2)), "gives a loss to tokens whose label is -100"),
        (lambda logits, labels: (logits.sum(2) * (labels >= 0)).mean(1), "return sums, not means"),
        (
            lambda logits, labels: (logits.sum(2) * (labels >= 0)).sum(1) / len(labels),
            "return sums, not means",
        ),
    ],
)
def test_a_loss_that_depends_on_the_layout_is_refused(loss, text):
    with pytest.raises(UserError, match=f'training.loss: "mine" .*{text}'):
        build_loss(with_name(losses, loss), Custom())


class Stateful(torch.optim.Optimizer):
    """Keeps `state` of each parameter."""

    def __init__(self, groups, optimizer, state=None):
        super().__init__(groups, {})
        self.make = state

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["slot"] = self.make(param)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (lambda p: 3, "'slot' of weight is a int, which is not saved; keep it in a tensor"),
        (lambda p: torch.zeros(5), r"'slot' of weight is \[5\]; make it like the parameter"),
        (torch.zeros_like, None),
        (lambda p: torch.zeros(()), None),
    ],
)
def test_optimizer_state_that_a_checkpoint_cannot_hold_is_named(state, text):
    optimizers.add("mine", lambda groups, optimizer: Stateful(groups, optimizer, state))
    config = resolve([], 1).config.optimizer.model_copy(update={"name": "mine"})
    optimizer = build_optimizer([nn.Linear(2, 3, bias=False)], config, Custom())
    assert optimizer.param_groups[0].keys() >= {"lr", "weight_decay", "lr_scale"}
    if text is None:
        steps = []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        optimizer.step()
        assert steps == [1], "hooks of others are called, too"
        return
    with pytest.raises(UserError, match=text):
        optimizer.step()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda groups, optimizer: object(), "made a object; it must make a torch.optim.Optimizer"),
        (
            lambda groups, optimizer: torch.optim.SGD(groups[0]["params"][:1]),
            "doesn't hold the parameters",
        ),
        (
            lambda groups, optimizer: torch.optim.SGD([p for g in groups for p in g["params"]]),
            "dropped lr_scale",
        ),
    ],
)
def test_optimizers_that_leave_out_parameters_or_groups_are_refused(wrong, text):
    optimizers.add("mine", wrong)
    config = resolve([], 1).config.optimizer.model_copy(update={"name": "mine"})
    with pytest.raises(UserError, match=text):
        build_optimizer([nn.Linear(2, 3)], config, Custom())


@pytest.mark.parametrize("factor", [-0.1, float("nan"), float("inf"), None])
def test_a_schedule_without_a_number_is_refused_at_its_step(factor):
    name = with_name(schedules, lambda step: factor)
    config = resolve(["--lr_scheduler.warmup_steps=0"], 1).config.lr_scheduler.model_copy(
        update={"name": name}
    )
    optimizer = torch.optim.SGD(
        [{"params": [nn.Parameter(torch.zeros(1))], "lr_scale": 1.0}], lr=1.0
    )
    with pytest.raises(UserError, match=r'lr_scheduler.name: "mine" gives .* at step 0 of 10000'):
        LRSchedule(optimizer, 1.0, config).apply()


def test_a_checkpoint_names_a_tokenizer_but_not_code_to_run():
    settings = {"model": {"tokenizer": "mine"}, "experimental": {"custom_import": "evil"}}
    with pytest.raises(UserError, match="add --custom-import 'evil'"):
        recorded_tokenizer(settings, "step-3")
    registry.tokenizers.add("mine", make, Letter)
    with pytest.raises(ConfigError, match=r"step-3: custom.mine.size: got 'x', must be an integer"):
        recorded_tokenizer(settings | {"custom": {"mine": {"size": "x"}}}, "step-3")
    found = recorded_tokenizer(settings | {"custom": {"mine": {"size": 4}}}, "step-3")
    assert found.keywords == {"keys": Letter(size=4)}
    assert recorded_tokenizer({}, "step-3") is None


class Letter(Section):
    size: int = 1


def test_help_exists_for_the_keys_that_choose(capsys):
    with pytest.raises(SystemExit):
        show_help(["--help", "training"])
    assert "--training.loss" in capsys.readouterr().out

"""What a module of the user registers: its keys are checked where they stand, and its promises when
it is made.
"""

import itertools
import json
import sys

import pytest
import torch
from torch import nn

from tests.positions import saved
from torchtitan.config import registry, resolve
from torchtitan.config.load.command_line import show_help
from torchtitan.config.load.decode import load_config
from torchtitan.config.load.extend import recorded_tokenizer
from torchtitan.config.registry import Custom, Functions, Section, losses, optimizers, schedules
from torchtitan.config.sections.data import DataLoader, Source
from torchtitan.data.loader import build_loader
from torchtitan.data.sources import DataSpec, open_custom
from torchtitan.data.text.tokenizer import Tokenizer, build_tokenizer
from torchtitan.optim.loss import build_loss
from torchtitan.optim.lr_schedule import LRSchedule
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.utils.errors import ConfigError, UserError

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


@pytest.fixture(autouse=True)
def registered():
    """Nothing is registered before a test, and what it registers is gone after it."""
    before = [one._entries for one in registry.REGISTRIES]
    for one in registry.REGISTRIES:
        one._entries = {}
    yield
    for one, entries in zip(registry.REGISTRIES, before, strict=True):
        one._entries = entries


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
        "--metrics.sinks: no metric sink 'csv'; known: jsonl, mlflow, prometheus, "
        "tensorboard, trackio, wandb;",
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
        optimizer.step()
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


class Texts(list):
    fingerprint = "texts"


def test_a_data_source_without_its_methods_or_text_is_refused():
    for made, text in {
        object(): r"made a object without __len__, __getitem__, fingerprint",
        ("a",): "made a tuple without fingerprint",
    }.items():
        with pytest.raises(UserError, match=text):
            open_custom(lambda path, made=made: made, "mine", None, "training")
    for made, text in {
        (): r'training\.dataset: "mine" is empty',
        ("", ""): "no text in its first 2 documents",
        (3,): "has a int as document 0; it must be a string",
    }.items():
        with pytest.raises(UserError, match=text):
            open_custom(lambda path, made=made: Texts(made), "mine", None, "training")
    assert open_custom(lambda path: Texts([path]), "mine", "a", "training")[0] == "a"


def texts(shards):
    for shard in shards:
        for i in range(9):
            yield {"text": f"{shard}: " + " ".join(str(i * k) for k in range(20))}


def stream(dataset_path):
    return datasets().IterableDataset.from_generator(
        texts, gen_kwargs={"shards": ["a", "b", "c", "d"]}
    )


def documents(dataset_path):
    return Texts(row["text"] for row in texts("abcd"))


def datasets():
    return pytest.importorskip("datasets")


def rows(*names, path=None, rank=0, degree=1, after=(), steps=4):
    """Tokens of the steps that follow the positions `after`, and the position after them."""
    sources = [
        Source(name=name, dataset=name, dataset_path=path if name == "file" else None)
        for name in names
    ]
    spec = DataSpec(
        sources=sources,
        tokenizer=build_tokenizer("./tests/assets/tokenizer"),
        seq_len=16,
        rows_per_step=4,
        seed=1,
        infinite=True,
        options=DataLoader(),
        custom={"stream": stream, "documents": documents},
    )
    loader = build_loader(spec, dp_rank=rank, dp_degree=degree)
    if after:
        loader.seek(saved(loader, *after))
    batches = list(itertools.islice(iter(loader), steps))
    loader.close()
    return torch.cat([batch.tokens for batch in batches]).view(steps, -1, 16), batches[-1].position


@pytest.mark.parametrize("names", [["stream"], ["documents"], ["documents", "stream"]])
def test_registered_sources_keep_the_global_order_and_resume(names):
    whole, _ = rows(*names)
    parts, positions = zip(
        *(rows(*names, rank=rank, degree=2, steps=2) for rank in (0, 1)), strict=True
    )
    assert torch.equal(torch.cat(parts, dim=1), whole[:2])
    assert torch.equal(rows(*names, after=positions, steps=2)[0], whole[2:])


def test_registered_documents_are_read_as_those_of_a_file(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in texts("abcd")))
    assert torch.equal(rows("documents")[0], rows("file", path=str(file))[0])


class Letters(Tokenizer):
    fingerprint = "letters"
    vocab_size = 3
    bos_id = None
    eos_id = 3

    def __init__(self, path): ...

    def _ids(self, text):
        return [0]

    def decode(self, ids):
        return ""


def test_a_tokenizer_that_lacks_something_is_refused(monkeypatch):
    with pytest.raises(UserError, match=r"model\.tokenizer: PosixPath must be a subclass"):
        build_tokenizer("x", lambda path: path)
    with pytest.raises(
        UserError, match=r"Letters has the special ids \[3\], which must be below its vocab_size 3"
    ):
        build_tokenizer("x", Letters)
    monkeypatch.setattr(Letters, "eos_id", 2)
    assert build_tokenizer("x", Letters).encode("abc", eos=True) == [0, 2]
    monkeypatch.delattr(Letters, "fingerprint")
    with pytest.raises(UserError, match="Letters must set fingerprint, str; got 'nothing'"):
        build_tokenizer("x", Letters)


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

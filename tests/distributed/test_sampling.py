"""Texts written during training: against plain forwards of the trained weights, in every layout,
without a trace.
"""

import json

import pytest
import torch

from tests.runs import EXPERTS, arguments, losses, train
from torchtitan.config import resolve
from torchtitan.models.attention.backend import attention_backend
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError

PROMPTS = ["a model reads", "7: every rank", "", "own part one"]
ASKED = [
    f"--sampling.prompts={json.dumps(PROMPTS)}",
    "--sampling.freq=3",
    "--sampling.max_new_tokens=5",
]


def samples(folder):
    lines = (folder / "samples.jsonl").read_text().splitlines()
    return [(r["step"], r["prompt"], r["text"], r["end"]) for r in map(json.loads, lines)]


def continuation(model, ids, tokenizer):
    start = len(ids)
    with torch.no_grad():
        for _ in range(5):
            token = int(model(torch.tensor([ids]))[0, -1, : tokenizer.vocab_size].argmax())
            if token == tokenizer.eos_id:
                break
            ids = [*ids, token]
    return tokenizer.decode(ids[start:])


CP, TP, PP = (
    f"--parallelism.{axis}_parallel_degree=2" for axis in ("context", "tensor", "pipeline")
)
LAYOUTS = [
    (1, ["--training.loss_chunks=2", "--training.document_mask"]),
    pytest.param(2, ["--training.local_batch_size=1"], marks=pytest.mark.slow),
    (2, [TP, "--training.loss_chunks=2"]),
    pytest.param(2, [CP], marks=pytest.mark.slow),
    pytest.param(2, [PP], marks=pytest.mark.slow),
    pytest.param(4, [CP, TP, "--training.loss_chunks=2"], marks=pytest.mark.slow),
    pytest.param(8, [CP, TP, PP], marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_greedy_texts_are_those_of_plain_forwards(ranks, tmp_path, world, layout):
    """On one rank, of what a chat template makes of the prompts."""
    prompts = PROMPTS
    if world == 1:
        (tmp_path / "chat").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
        layout = [*layout, "--sampling.chat", f"--model.chat_template={tmp_path / 'chat'}"]
        prompts = [f"<{prompt}>" for prompt in PROMPTS]
    run = ranks(world, train, arguments(tmp_path, *ASKED, *layout), timeout=240)[0]
    found = samples(tmp_path / "out")
    assert [(step, prompt) for step, prompt, *_ in found] == [
        (s, p) for s in (3, 4) for p in prompts
    ]
    setup = preflight(resolve(arguments(tmp_path), 1).config)
    model = setup.spec.build(setup.args, attention_backend("cpu"))
    model.load_state_dict(run["weights"])
    for _, prompt, text, _ in found[-len(PROMPTS) :]:
        assert text == continuation(
            model, setup.tokenizer.encode(prompt, bos=True), setup.tokenizer
        )


COMPILED = pytest.param(["--compile.enable", "--compile.backend=aot_eager"], marks=pytest.mark.slow)


@pytest.mark.parametrize("extra", [["--sampling.temperature=1.5"], COMPILED])
def test_training_is_the_same_bit_for_bit(ranks, tmp_path, extra):
    expected = losses(
        ranks(2, train, arguments(tmp_path, *extra, f"--job.dump_folder={tmp_path / 'plain'}"))[0]
    )
    texts = []
    for name in ("one", "two"):
        run = ranks(
            2, train, arguments(tmp_path, *ASKED, *extra, f"--job.dump_folder={tmp_path / name}")
        )[0]
        assert losses(run) == expected
        texts.append(samples(tmp_path / name))
    assert texts[0] == texts[1]


def test_a_prompt_that_leaves_no_room_is_refused(tmp_path):
    argv = arguments(tmp_path, f"--sampling.prompts={json.dumps(['word ' * 40])}")
    with pytest.raises(ConfigError, match=r"sampling\.prompts: .* tokens; the model reads 32"):
        preflight(resolve(argv, 1).config)
    with pytest.raises(ConfigError, match=r"sampling\.chat: .* no chat template; name a file"):
        preflight(resolve([*argv, "--sampling.chat"], 1).config)


def test_texts_reach_tensorboard(ranks, tmp_path):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    asked = [*ASKED, "--metrics.enable_tensorboard", "--metrics.save_tb_folder=tb"]
    ranks(1, train, arguments(tmp_path, *asked, steps=1))
    (events,) = (tmp_path / "out/tb").rglob("events.*")
    found = event_accumulator.EventAccumulator(str(events))
    found.Reload()
    (event,) = found.Tensors("samples/2")
    _, prompt, text, _ = samples(tmp_path / "out")[1]
    shown = event.tensor_proto.string_val[0].decode()
    assert shown == "\n".join(f"    {line}" for line in f"{prompt}{text}".splitlines())


@pytest.mark.slow
def test_a_mixture_of_experts_writes_the_same(ranks, tmp_path):
    texts = []
    for world, layout in ((1, []), (2, ["--parallelism.expert_parallel_degree=2"])):
        folder = tmp_path / str(world)
        ranks(
            world,
            train,
            arguments(tmp_path, *EXPERTS, *ASKED, *layout, f"--job.dump_folder={folder}"),
        )
        texts.append(samples(folder))
    assert texts[0] == texts[1]

"""Generated text against plain forwards, transformers, other batches and ranks; and the command."""

import contextlib
import io
import json

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests import families
from tests.chats import write_tokenizer
from tests.runs import arguments, train
from torchtitan.commands import generate as command
from torchtitan.inference import load as sources
from torchtitan.inference.generator import SamplingSettings, TextGenerator, sample
from torchtitan.models import get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.parallel.tensor.styles import apply_tensor_parallel
from torchtitan.utils.process import run_main

SPEC = get_spec("llama3")
TINY = {
    "vocab_size": 160,
    "dim": 64,
    "n_layers": 3,
    "n_heads": 8,
    "n_kv_heads": 2,
    "ffn_dim": 96,
    "max_seq_len": 96,
}
GREEDY = SamplingSettings(temperature=0)
PROMPTS = [[5, 9, 3], [7], list(range(20, 61)), [1, 2, 3, 4, 5, 6]]
CPU = torch.device("cpu")


def build(**overrides):
    torch.manual_seed(3)
    model = SPEC.build(SPEC.args("8B", TINY | overrides), attention_backend("cpu"))
    for param in model.parameters():  # far from uniform, so that every token matters
        torch.nn.init.normal_(param, std=0.3) if param.dim() > 1 else torch.nn.init.uniform_(
            param, 0.5, 1.5
        )
    return model


def generator(model, rows=4, *, max_seq_len=64, stop=(), mesh=None, vocab_size=160):
    return TextGenerator(
        model, CPU, rows=rows, max_seq_len=max_seq_len, vocab_size=vocab_size, stop=stop, mesh=mesh
    )


def without_cache(model, prompt, count):
    """The likeliest tokens, each from a forward over the whole text so far."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("tied", [False, True])
def test_greedy_is_the_argmax_of_the_whole_forward(tied):
    model = build(tie_embeddings=tied)
    expected = [without_cache(model, prompt, 20) for prompt in PROMPTS]
    assert len({token for row in expected for token in row}) > 8, (
        "a model that repeats itself proves nothing"
    )
    generate = generator(model)
    assert [row.tokens for row in generate(PROMPTS, GREEDY, 20)] == expected
    assert [row.tokens for row in generate(PROMPTS[1:3], GREEDY, 20)] == expected[1:3], (
        "the cache is reused"
    )


@pytest.mark.parametrize(
    "sampling",
    [SamplingSettings(1.0), SamplingSettings(1.5, top_k=20, top_p=0.9, seed=4)],
    ids=["all", "few"],
)
def test_a_prompt_gets_the_same_text_in_any_batch(sampling):
    generate = generator(build())
    together = [row.tokens for row in generate(PROMPTS, sampling, 20)]
    assert [generate([prompt], sampling, 20)[0].tokens for prompt in PROMPTS] == together
    assert [row.tokens for row in generate(PROMPTS[::-1], sampling, 20)] == together[::-1]
    assert generate(PROMPTS[:1], SamplingSettings(1.0, seed=9), 20)[0].tokens != together[0]


def test_prompts_of_the_same_length_have_noise_of_their_own():
    """Where all tokens are equally likely, noise alone makes a text."""
    model = build()
    torch.nn.init.zeros_(model.output.weight)
    first, second = (
        row.tokens for row in generator(model)([[5, 9, 3], [3, 9, 5]], SamplingSettings(1.0), 20)
    )
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 4, (
        "of 20, each equal in one of 160 cases"
    )


def test_reasons_for_the_end_of_a_text():
    model = build()
    free = [row.tokens for row in generator(model)(PROMPTS, GREEDY, 12)]
    stop = next(token for token in free[0] if token not in free[2])
    rows = generator(model, stop=[stop], max_seq_len=45)(PROMPTS, GREEDY, 12)
    for row, tokens in zip(rows, free, strict=True):
        tokens = tokens[: tokens.index(stop)] if stop in tokens else tokens
        assert row.tokens == tokens[: 45 - len(row.prompt)]
    assert rows[0].end == "eos"
    assert rows[2].end == "context", "41 tokens of prompt and 4 new ones"
    assert {row.end for row in rows[1::2]} <= {"length", "eos"}
    assert (
        max(
            t
            for row in generator(model, vocab_size=50)(PROMPTS, SamplingSettings(3.0), 12)
            for t in row.tokens
        )
        < 50
    )


def test_draws_follow_the_distribution():
    """Frequencies of 20,000 draws against probabilities computed here from the definitions."""
    count = 20_000
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    generators = [torch.Generator().manual_seed(i) for i in range(count)]

    def draw(**how):
        return (
            sample(logits.expand(count, -1), SamplingSettings(**how), generators).bincount(
                minlength=6
            )
            / count
        )

    p = (logits / 0.7).softmax(0)
    torch.testing.assert_close(draw(temperature=0.7), p, atol=0.012, rtol=0)
    first = torch.where(torch.arange(6) < 3, p, 0)
    torch.testing.assert_close(
        draw(temperature=0.7, top_k=3), first / first.sum(), atol=0.012, rtol=0
    )
    assert p[:2].sum() < 0.9 < p[:3].sum()
    torch.testing.assert_close(
        draw(temperature=0.7, top_p=0.9), first / first.sum(), atol=0.012, rtol=0
    )
    assert draw(temperature=0).tolist() == [1, 0, 0, 0, 0, 0]
    assert draw(temperature=1.0, top_p=1e-6).tolist() == [1, 0, 0, 0, 0, 0], (
        "one token always stays"
    )


FAMILIES = {"llama3": {"tie_embeddings": True}, "qwen2_5": {}, "qwen3_moe": {}}


def build_family(family):
    torch.manual_seed(3)
    model = families.build(family, **FAMILIES[family])
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3) if param.dim() > 1 else torch.nn.init.uniform_(
            param, 0.5, 1.5
        )
    return model


def on_two_ranks(family, sampling):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = build_family(family)
    styles = get_spec(family).tensor_parallel_styles
    apply_tensor_parallel(model, mesh, styles, sharded_loss=False, float8=False)
    return [row.tokens for row in generator(model, mesh=mesh)(PROMPTS, sampling, 12)]


@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallel_ranks_generate_the_same_as_one_process(ranks, family):
    for sampling in (GREEDY, SamplingSettings(1.0)):
        expected = [row.tokens for row in generator(build_family(family))(PROMPTS, sampling, 12)]
        assert ranks(2, on_two_ranks, family, sampling) == [expected, expected]


# ---- the command


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """A run's folder with checkpoints of steps 2 and 4, and the last one in Hugging Face's
    format.
    """
    folder = tmp_path_factory.mktemp("run")
    save = [
        "--checkpoint.enable",
        "--checkpoint.interval=2",
        "--checkpoint.last_save_in_hf",
        "--optimizer.lr=0.1",
    ]
    ranks(1, train, arguments(folder, *save))
    return folder / "out"


def generate_text(capsys, *argv):
    status = run_main(command.main, [str(a) for a in argv])
    return status, *capsys.readouterr()


@pytest.mark.proof
def test_every_format_of_a_model_gives_the_same_text(run, capsys):
    ask = [
        "--prompt=def main(",
        "--prompt=import",
        "--temperature=0",
        "--max-new-tokens=8",
        "--json",
    ]
    folders = [run, run / "checkpoint", run / "checkpoint/step-4", run / "checkpoint/step-4-hf"]
    answers = []
    for folder in folders:
        status, out, err = generate_text(capsys, "--checkpoint", folder, *ask)
        assert status == 0, err
        answers.append(json.loads(out))
    assert [a["continuations"] for a in answers] == [answers[0]["continuations"]] * 4
    assert answers[0]["checkpoint"].endswith("checkpoint/step-4"), "the newest"
    first, second = answers[0]["continuations"]
    assert (first["prompt"], second["prompt"]) == ("def main(", "import")
    assert len(first["tokens"]) == 8
    assert first["end"] == "length"
    before = json.loads(generate_text(capsys, "--checkpoint", run / "checkpoint/step-2", *ask)[1])
    assert before["continuations"] != answers[0]["continuations"], "another step's weights"


@pytest.mark.parametrize("form", ["step-4", "step-4-hf"])
def test_weights_are_read_in_the_type_asked_for(run, form):
    source = sources.find(str(run / "checkpoint" / form))
    tokenizer = sources.open_tokenizer(source, None)
    wide, narrow = (
        sources.load(source, tokenizer, 16, 1, d, 1).model.state_dict()
        for d in ("float32", "bfloat16")
    )
    for name, weight in wide.items():
        assert torch.equal(weight.bfloat16(), narrow[name]), name


def on_this_rank(argv):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert command.main(argv) == 0
    return out.getvalue()


def test_two_ranks_share_a_checkpoint(ranks, run, capsys):
    ask = [f"--checkpoint={run}", "--prompt=def main(", "--max-new-tokens=12", "--json"]
    expected = json.loads(generate_text(capsys, *ask)[1])["continuations"]
    out, silent = ranks(2, on_this_rank, ask)
    assert json.loads(out)["continuations"] == expected
    assert silent == ""


def test_one_prompt_streams_and_several_are_separated(run, capsys, tmp_path):
    ask = ["--checkpoint", run, "--max-new-tokens=20"]
    expected = json.loads(generate_text(capsys, *ask, "--prompt=def", "--json")[1])[
        "continuations"
    ][0]["text"]
    status, out, err = generate_text(capsys, *ask, "--prompt=def")
    assert (status, out) == (0, f"def{expected}\n")
    assert "20 tokens" in err
    assert "tokens/s" in err
    (tmp_path / "prompts").write_text("def\n\nclass A:\n")
    out = generate_text(capsys, *ask, "--prompts-file", tmp_path / "prompts", "--batch-size=1")[1]
    assert out.startswith(f"def{expected}\n---")
    assert "\nclass A:" in out
    assert out.count("-" * 20) == 3, "a text for each line"


def test_prompts_with_line_breaks_and_a_full_context(run, capsys, tmp_path):
    write_tokenizer(tmp_path / "chat")
    lines = ["def\n", [{"role": "user", "content": "a?"}]]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    ask = [f"--checkpoint={run}", f"--prompts-file={file}", "--max-new-tokens=99", "--json"]
    (tmp_path / "no.jsonl").write_text('"a"\nb\n')
    assert (
        "no.jsonl, line 2: Expecting value"
        in generate_text(capsys, *ask[:1], f"--prompts-file={tmp_path / 'no.jsonl'}")[2]
    )
    assert "--prompts-file: the tokenizer of" in generate_text(capsys, *ask)[2], "no chat template"
    assets = f"--assets={tmp_path / 'chat'}"
    assert (
        "prompt 2 has the token 2049, which is not in the model's"
        in generate_text(capsys, *ask, assets)[2]
    )
    lines[1] = "x"
    file.write_text("\n".join(map(json.dumps, lines)))
    status, out, err = generate_text(capsys, *ask)
    assert status == 0
    rows = json.loads(out)["continuations"]
    assert [row["prompt"] for row in rows] == lines
    assert [row["end"] for row in rows] == ["context"] * 2
    counts = [len(row["tokens"]) for row in rows]
    assert err.startswith(
        "Ended at 32 tokens, all that the model reads, before --max-new-tokens 99: "
        f"prompt 1 after {counts[0]} tokens, prompt 2 after {counts[1]} tokens\n"
    )


BAD = {
    "missing": ([], "nowhere does not exist"),
    "empty": (["--checkpoint=."], "holds no complete checkpoint"),
    "long": (["--checkpoint=RUN", f"--prompt={'a b c d ' * 20}"], "the model reads 32"),
    "tokenizer": (["--checkpoint=RUN", "--assets=nowhere"], "--assets: nowhere does not exist"),
    "vocabulary": (["--checkpoint=RUN", "--assets=other"], "only 2048"),
    "file": (["--checkpoint=RUN", "--prompts-file=nowhere"], "--prompts-file: can't read nowhere"),
    "no weights": (["--checkpoint=other"], "no .safetensors files"),
    "other model": (
        ["--checkpoint=other"],
        "config.json: model_type: got 'gpt2', must be one of 'deepseek_v2'",
    ),
    "damaged": (["--checkpoint=damaged"], "has 3 bytes instead of"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_message(run, capsys, tmp_path, monkeypatch, case):
    extra, text = BAD[case]
    monkeypatch.chdir(tmp_path)
    if case == "vocabulary":
        vocabulary = {f"t{i}": i for i in range(3000)} | {"</s>": 3000}
        (tmp_path / "other").mkdir()
        (tmp_path / "other/tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        (tmp_path / "other/tokenizer.json").write_text(
            json.dumps(
                {
                    "version": "1.0",
                    "added_tokens": [],
                    "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
                }
            )
        )
    if case in ("no weights", "other model"):
        (tmp_path / "other").mkdir()
        (tmp_path / "other/config.json").write_text('{"model_type": "gpt2"}')
    if case == "other model":
        (tmp_path / "other/model.safetensors").touch()
    if case == "damaged":
        (tmp_path / "damaged").symlink_to(run / "checkpoint/step-2")
        shard = max((run / "checkpoint/step-2").glob("*.distcp"), key=lambda p: p.stat().st_size)
        shard.write_bytes(b"cut")
    argv = [a.replace("RUN", str(run)) for a in extra]
    argv += [] if any(a.startswith("--checkpoint") for a in argv) else ["--checkpoint=nowhere"]
    status, out, err = generate_text(capsys, *argv)
    assert status != 0
    assert text in err
    assert "Traceback" not in err
    assert out == ""

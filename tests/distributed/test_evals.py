"""lm-eval on our model against its `hf` backend on the exported model, in every layout; the
command, and in a run.
"""

import json
import math
import shutil

import pytest
import torch

from tests import families
from tests.chats import CHATML, CHATML_MARKED, LLAMA3, say, write_tokenizer
from tests.distributed.lm_eval_tasks import write_tasks
from tests.runs import EXPERTS, arguments, losses, train
from torchtitan.commands import ckpt
from torchtitan.commands import eval as command
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.tools.reports.collect import collect
from torchtitan.utils.assets import find_asset
from torchtitan.utils.process import run_main

pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of transformers, `ours` converted from it, `theirs` exported again, and tasks."""
    folder = tmp_path_factory.mktemp("evals")
    torch.manual_seed(0)
    twin = families.twin("llama3", families.build("llama3", vocab_size=2048))
    twin.save_pretrained(folder / "source")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(find_asset("./tests/assets/tokenizer") / name, folder / "source")
    assert ckpt.main(["from-hf", str(folder / "source"), str(folder / "ours")]) == 0
    assert ckpt.main(["to-hf", str(folder / "ours"), str(folder / "theirs")]) == 0
    write_tasks(folder / "tasks")
    return folder


TASKS = ["own_choice", "own_shots", "own_rolling", "own_texts"]


def evaluate(folder, model):
    """What the model answered to each request, and the scores."""
    from lm_eval.evaluator import evaluate

    from torchtitan.inference.tasks import Tasks, scores

    tasks = Tasks(TASKS, include_path=str(folder / "tasks"), num_fewshot=2)
    results = evaluate(model, tasks.tasks, bootstrap_iters=0)
    answers = {name: [doc["resps"] for doc in docs] for name, docs in results["samples"].items()}
    return answers, scores(results)


def ours(folder, *layout, rows=3, length=None):
    from torchtitan.inference.lm_eval_model import HarnessModel
    from torchtitan.inference.load import find, open_tokenizer
    from torchtitan.train.trained_model import load_probe

    source = find(str(folder / "ours"))
    tokenizer = open_tokenizer(source, None)
    probe = load_probe(
        source, tokenizer, list(layout), rows=rows, max_seq_len=length, dtype="float32"
    )
    return evaluate(folder, HarnessModel(probe, tokenizer))


def backend(folder):
    """lm-eval's own backend, on one process."""
    from lm_eval.models.huggingface import HFLM

    return evaluate(
        folder, HFLM(str(folder / "theirs"), device="cpu", dtype="float32", batch_size=3)
    )


def flat(answers):
    """Numbers and texts in a fixed order."""
    if isinstance(answers, dict):
        return [x for name in sorted(answers) for x in flat(answers[name])]
    return (
        [x for part in answers for x in flat(part)]
        if isinstance(answers, list | tuple)
        else [answers]
    )


@pytest.fixture(scope="module")
def expected(folder, ranks):
    pytest.importorskip("accelerate")
    return ranks(1, backend, folder, timeout=120)[0]


CP, TP, PP = (
    f"--parallelism.{axis}_parallel_degree=2" for axis in ("context", "tensor", "pipeline")
)
LAYOUTS = [
    pytest.param(1, [], marks=pytest.mark.slow),
    pytest.param(2, [], marks=pytest.mark.slow),
    pytest.param(2, [TP], marks=pytest.mark.slow),
    pytest.param(2, [CP], marks=pytest.mark.slow),
    (2, [PP]),
    pytest.param(8, [TP, CP, PP], marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_scores_are_those_of_the_hf_backend(ranks, folder, expected, world, layout):
    rows = 4 if layout == [PP] else 3
    answers, scores = ranks(world, ours, folder, *layout, rows=rows, timeout=240)[0]
    assert len(answers["own_choice"]) == 8
    for found, wanted in zip(flat(answers), flat(expected[0]), strict=True):
        assert found == (
            pytest.approx(wanted, rel=1e-4, abs=1e-4) if isinstance(wanted, float) else wanted
        )
    assert scores == pytest.approx(expected[1], rel=1e-4)
    assert len({str(text) for text in answers["own_texts"]}) > 2, (
        "a model that repeats itself proves nothing"
    )


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, LLAMA3])
def test_the_chat_template_asks_as_in_the_hf_backend(tmp_path, template):
    from transformers import AutoTokenizer

    from torchtitan.inference.lm_eval_model import HarnessModel

    path = write_tokenizer(tmp_path, template)
    model = HarnessModel(None, build_tokenizer(str(path)), chat=True)
    theirs = AutoTokenizer.from_pretrained(path)
    asked = say("2 + 2?", "4.", "3 + 3?", system="Be brief.")
    for messages, new_turn in ((asked, True), (say("2 + 2?", " It is "), False)):
        text = theirs.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=new_turn,
            continue_final_message=not new_turn,
        )
        assert model.apply_chat_template(messages, new_turn) == text
        ids = theirs.encode(text, add_special_tokens=False)
        assert model.tok_encode(text) == [0, *ids[int(ids[0] == 0) :]]


def score(capsys, *argv):
    status = run_main(command.main, [str(arg) for arg in argv])
    return status, *capsys.readouterr()


def test_a_run_scores_itself_as_the_command_scores_its_checkpoint(ranks, folder, tmp_path, capsys):
    """And is the same run as without, bit for bit."""
    (tmp_path / "chat").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    tasks = [
        "--eval.chat",
        f"--model.chat_template={tmp_path / 'chat'}",
        f"--eval.include_path={folder / 'tasks'}",
        "--eval.tasks=own_choice,own_rolling",
        "--eval.freq=3",
    ]
    plain = ranks(2, train, arguments(tmp_path, f"--job.dump_folder={tmp_path / 'plain'}"))[0]
    asked = ["--eval.enable", *tasks, "--eval.limit=6", "--checkpoint.enable"]
    run = ranks(2, train, arguments(tmp_path, *asked), timeout=120)[0]
    assert losses(run) == losses(plain)
    records = [record for record in run["metrics"] if "eval/own_choice/acc" in record]
    assert [record["step"] for record in records] == [3, 4]
    output = tmp_path / "scores.json"
    ask = [
        "--checkpoint",
        tmp_path / "out",
        "--tasks=own_choice,own_rolling",
        "--limit=6",
        "--chat",
        "--output",
        output,
    ]
    status, table, problem = score(capsys, *ask, "--include-path", folder / "tasks")
    assert status == 0, problem
    assert "own_rolling" in table
    found = json.loads(output.read_text())["scores"]
    bootstrapped = {name for name in found if "stderr" in name and "own_rolling" in name}
    assert len(found) == 5 + 2 + len(bootstrapped)
    for name, value in found.items():
        if name not in bootstrapped:  # during training only means have errors
            assert records[-1][f"eval/{name}"] == pytest.approx(value, rel=1e-5)
    share = records[-1]["eval/own_choice/acc"]
    error = math.sqrt(share * (1 - share) / (6 - 1))  # of a mean of 6 zeros and ones
    assert records[-1]["eval/own_choice/acc_stderr"] == pytest.approx(error)
    (shown,) = collect([tmp_path / "out"])["runs"]
    assert shown["evals"]["own_choice/acc"]["error"] == [
        record["eval/own_choice/acc_stderr"] for record in records
    ]
    scored = shown["evals"]["own_choice/acc (torchtitan eval, limit 6, chat template)"]
    assert (scored["step"], scored["value"]) == ([4], [found["own_choice/acc"]])


@pytest.mark.slow
def test_experts_score_the_same_on_two_ranks(ranks, folder, tmp_path):
    found = []
    for world, layout in ((1, []), (2, ["--parallelism.expert_parallel_degree=2"])):
        asked = [
            "--eval.enable",
            f"--eval.include_path={folder / 'tasks'}",
            "--eval.tasks=own_rolling",
        ]
        own = [*EXPERTS, *asked, *layout, f"--job.dump_folder={tmp_path / str(world)}"]
        run = ranks(world, train, arguments(tmp_path, *own, steps=1), timeout=120)[0]
        found.append(
            next(r["eval/own_rolling/byte_perplexity"] for r in run["metrics"] if len(r) < 9)
        )
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        pytest.param(
            ["--tasks=own_choise"], "no task 'own_choise'; did you mean", marks=pytest.mark.slow
        ),
        (["--tasks=own_choice", "--optimizer.lr=1"], "--optimizer.lr=1: unknown option"),
        (["--tasks=own_choice", "--include-path=nowhere"], "nowhere is no folder"),
        (
            ["--tasks=own_choice", "--parallelism.tensor_parallel_degree=2"],
            "but the number of ranks is 1",
        ),
    ],
)
def test_mistakes_of_the_command_are_told_in_a_sentence(folder, capsys, extra, text):
    ask = ["--checkpoint", folder / "ours", "--include-path", folder / "tasks", *extra]
    status, _, problem = score(capsys, *ask)
    assert status != 0
    assert text in problem

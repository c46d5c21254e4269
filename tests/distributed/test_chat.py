"""Training on conversations: the loss is that of the assistant's tokens, under every layout."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.chats import say, write_chats, write_tokenizer
from tests.runs import (
    EXPERTS,
    SAVE,
    SCHEDULE,
    arguments,
    assert_continues,
    read_metrics,
    train,
    write_corpus,
)
from torchtitan.config import resolve
from torchtitan.data.order.rows import IGNORE_INDEX

P = "--parallelism."
CHATS = [say(f"Say {i}. " * (1 + i % 3), "word " * (1 + i % 9), "More", f"{i}") for i in range(60)]
LAYOUTS = {
    "dp 2, accumulation": (2, ["--training.local_batch_size=2"]),
    "cp 2 x tp 2": (4, [f"{P}context_parallel_degree=2", f"{P}tensor_parallel_degree=2"]),
    "pp 2, chunks": (
        2,
        [
            f"{P}pipeline_parallel_degree=2",
            f"{P}pipeline_parallel_microbatch_size=2",
            "--training.loss_chunks=4",
        ],
    ),
}


def chats(folder, *extra, **sizes):
    """Arguments of a run on conversations and text, with rows and steps that predict nothing."""
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder / "tokenizer", eos="<|im_end|>")  # ends turns and documents
    silent = [say("x" * 3000, "y")]  # its rows are the user's alone
    write_chats(folder / "chats.jsonl", [*CHATS, *silent * 20])
    write_corpus(folder / "text.jsonl")
    sources = (
        f"[{{name = 'chat', dataset_path = '{folder}/chats.jsonl', messages_column = 'messages', "
        f"weight = 3}}, {{name = 'text', dataset_path = '{folder}/text.jsonl'}}]"
    )
    argv = [arg for arg in arguments(folder, *extra, **sizes) if "--training.dataset" not in arg]
    return [
        *argv,
        f"--training.sources={sources}",
        f"--model.hf_assets_path={folder / 'tokenizer'}",
        "--model.overrides.vocab_size=2056",
        "--training.document_mask",
    ]


def validated(folder, *extra, **sizes):
    """Such a run, validated on the conversations."""
    return [
        *chats(folder, *extra, **sizes),
        "--validation.enable",
        "--validation.freq=2",
        "--validation.steps=2",
        "--validation.seq_len=32",
        f"--validation.dataset_path={folder}/chats.jsonl",
        "--validation.messages_column=messages",
    ]


def first_loss(argv):
    """The loss of the first step by a plain forward of the initial model, and its metrics."""
    from torchtitan.train.preflight import preflight
    from torchtitan.train.trainer import Trainer

    config = resolve(argv, 1).config
    trainer = Trainer(config, preflight(config))
    try:
        batch = next(iter(trainer.engine.loader))
        documents = (batch.tokens == trainer.setup.tokenizer.bos_id).cumsum(1)
        mask = (documents[:, :, None] == documents[:, None, :]).tril()
        with torch.no_grad():
            logits = trainer.engine.models[0](batch.tokens, mask=mask[:, None])
        labels = batch.labels.flatten()
        expected = F.cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=IGNORE_INDEX)
        predicted = int((labels != IGNORE_INDEX).sum())
        trainer.train()
    finally:
        trainer.close()
    return expected.item(), predicted, labels.numel(), read_metrics(Path(config.job.dump_folder))


def test_the_loss_is_that_of_the_assistant(ranks, tmp_path):
    expected, predicted, read, records = ranks(1, first_loss, validated(tmp_path, steps=4))[0]
    assert 0 < predicted < 0.8 * read
    assert records[0]["tokens"] == predicted
    assert records[0]["loss"] == pytest.approx(expected, rel=1e-5)
    for name, (count, flags) in LAYOUTS.items():
        argv = validated(tmp_path / name.replace(" ", ""), *flags, steps=4, local_batch=4)
        run = ranks(count, train, argv)[0]
        for record, reference in zip(run["metrics"], records, strict=True):
            assert record.get("tokens") == reference.get("tokens"), name
            for key in reference:
                if ("loss" in key and key != "max_loss") or "bits_per_byte" in key:
                    assert record[key] == pytest.approx(reference[key], rel=2e-5), (name, key)


def compared(argv):
    from torchtitan.testing.difference import Tolerances
    from torchtitan.testing.parity import compare

    return compare(argv, Tolerances())


@pytest.mark.parametrize("axis", ["expert_parallel", "context_parallel"])
def test_experts_and_further_tokens_count_what_is_predicted(ranks, tmp_path, axis):
    """Losses, gradients and the balance of experts are those of one plain process."""
    flags = [*EXPERTS, "--model.overrides.n_mtp=1", "--training.packing=best_fit"]
    argv = chats(tmp_path, *flags, f"{P}{axis}_degree=2", "--training.max_norm=0", steps=3)
    found = ranks(2, compared, argv, timeout=240)[0]
    assert not found.problems, found


def test_resumes_on_another_layout(ranks, tmp_path):
    whole = ranks(1, train, chats(tmp_path, SCHEDULE, steps=8))[0]
    ranks(2, train, chats(tmp_path / "parts", *SAVE, SCHEDULE, steps=3))
    flags = [*SAVE, SCHEDULE, f"{P}context_parallel_degree=2"]
    resumed = ranks(2, train, chats(tmp_path / "parts", *flags, steps=8))[0]
    assert_continues(resumed, whole)

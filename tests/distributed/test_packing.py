"""Training on packed rows: the loss is that of the documents alone, under every layout."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from tests.runs import SAVE, SCHEDULE, arguments, assert_continues, losses, train
from torchtitan.commands import tokenize
from torchtitan.config import resolve
from torchtitan.data.order.rows import IGNORE_INDEX

P = "--parallelism."
PACKED = ["--training.packing=best_fit", "--training.document_mask", "--training.seq_len=64"]
LAYOUTS = {
    "dp 2, accumulation": (2, ["--training.local_batch_size=2"]),
    "cp 2 x tp 2": (4, [f"{P}context_parallel_degree=2", f"{P}tensor_parallel_degree=2"]),
    "pp 2": (2, [f"{P}pipeline_parallel_degree=2", f"{P}pipeline_parallel_microbatch_size=2"]),
}


def loss_of_documents(argv):
    """The loss of the first step's documents, or pieces of them, each in a forward of its own."""
    from torchtitan.train.preflight import preflight
    from torchtitan.train.trainer import Trainer

    config = resolve(argv, 1).config
    trainer = Trainer(config, preflight(config))
    try:
        batch = next(iter(trainer.engine.loader))
        end = trainer.setup.tokenizer.eos_id
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
                cuts = [0, *((tokens == end).nonzero()[:, 0] + 1).tolist(), len(tokens)]
                for begin, after in pairwise(cuts):
                    if (labels[begin:after] != IGNORE_INDEX).any():
                        logits = trainer.engine.models[0](tokens[None, begin:after])
                        total += F.cross_entropy(
                            logits[0].double(), labels[begin:after], reduction="sum"
                        )
        return total.item() / int((batch.labels != IGNORE_INDEX).sum())
    finally:
        trainer.close()


def test_the_loss_is_that_of_the_documents(ranks, tmp_path):
    argv = arguments(tmp_path, *PACKED, steps=4, local_batch=4)
    expected = ranks(1, loss_of_documents, argv)[0]
    whole = ranks(1, train, argv)[0]
    assert losses(whole)[0] == pytest.approx(expected, rel=1e-5)
    for name, (count, flags) in LAYOUTS.items():
        run = ranks(count, train, [*argv, *flags, f"--job.dump_folder={tmp_path / name}"])[0]
        assert losses(run) == pytest.approx(losses(whole), rel=2e-5), name
        for record, reference in zip(run["metrics"], whole["metrics"], strict=True):
            assert record["tokens"] == reference["tokens"]


def test_resumes_on_another_layout(ranks, tmp_path):
    whole = ranks(1, train, arguments(tmp_path, *PACKED, SCHEDULE, steps=8))[0]
    folder = tmp_path / "parts"
    folder.mkdir()
    ranks(2, train, arguments(folder, *PACKED, *SAVE, SCHEDULE, steps=3))
    flags = [*SAVE, SCHEDULE, f"{P}tensor_parallel_degree=2"]
    resumed = ranks(2, train, arguments(folder, *PACKED, *flags, steps=8))[0]
    assert_continues(resumed, whole)


def test_packed_token_files_train(ranks, tmp_path):
    """Every epoch has the same rows, in another order."""
    arguments(tmp_path)  # writes the text
    flags = ["--input", str(tmp_path / "corpus.jsonl"), "--workers", "1", "--best-fit", "64"]
    tokenize.main([*flags, "--output", str(tmp_path / "tokens")])
    argv = arguments(tmp_path, *PACKED, f"--training.dataset_path={tmp_path / 'tokens'}", steps=3)
    assert losses(ranks(2, train, argv)[0])[0] == pytest.approx(
        ranks(1, loss_of_documents, argv)[0], rel=1e-5
    )

"""Multi-token prediction under every layout, against plain PyTorch on one process."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.runs import EXPERTS, SAVE, arguments, assert_continues, train
from torchtitan.checkpoint.hf.weights import load_hf
from torchtitan.inference import load
from torchtitan.models.attention.backend import attention_backend
from torchtitan.testing.difference import Tolerances
from torchtitan.testing.parity import compare
from torchtitan.train import mtp_loss as mtp
from torchtitan.train import step
from torchtitan.utils.torch_compat import torch_is_before_2_13

MTP = ["--model.overrides.n_mtp=2", "--training.document_mask", "--training.seq_len=96"]
PP = ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4"]
AVERAGE = ["--ema.enable", "--ema.decay=0.8", "--ema.warmup=false"]
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
LAYOUTS = {
    "one process, accumulating": (1, []),
    "dp 2 with experts, accumulating": (2, EXPERTS),
    "tp 2, in chunks": (2, ["--parallelism.tensor_parallel_degree=2", "--training.loss_chunks=2"]),
    "cp 2 with experts": (2, [*EXPERTS, "--parallelism.context_parallel_degree=2"]),
    "1F1B with experts": (2, [*EXPERTS, *PP]),
    "Interleaved1F1B": (2, [*PP, f"{SCHEDULE}=Interleaved1F1B"]),
    "ZBVZeroBubble with experts": (2, [*EXPERTS, *PP, f"{SCHEDULE}=ZBVZeroBubble"]),
}
SLOW = ("one process, accumulating", "Interleaved1F1B")


def finding(argv, fault=None):
    """A comparison on every rank, with a mistake in the code."""
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            FAULTS[fault](patch)
        return compare(argv, Tolerances())


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in LAYOUTS]
)
def test_losses_and_gradients_equal_one_process(ranks, tmp_path, layout):
    if layout.startswith("ZBV") and torch_is_before_2_13():
        pytest.skip("refused with torch before 2.13")
    world, extra = LAYOUTS[layout]
    found = ranks(world, finding, arguments(tmp_path, *MTP, *extra, steps=2))[0]
    assert found.problems == []
    assert found.difference.mtp_loss > 0, "no loss was compared"


def test_modules_move_between_layouts_and_are_left_out_of_inference(ranks, tmp_path):
    tp = ["--parallelism.tensor_parallel_degree=2"]
    runs = []
    for steps, world, extra in ((1, 2, LAYOUTS["1F1B with experts"][1]), (2, 2, tp), (3, 1, [])):
        own = [*MTP, *EXPERTS, *SAVE, *AVERAGE, "--lr_scheduler.total_steps=3"]
        runs.append(ranks(world, train, arguments(tmp_path, *own, *extra, steps=steps))[0])
    alone = [*own, "--checkpoint.enable=false", f"--job.dump_folder={tmp_path / 'alone'}"]
    whole = ranks(1, train, arguments(tmp_path, *alone, steps=3))[0]
    assert_continues(runs[-1], whole)
    for run, steps in zip(runs, (1, 2, 3), strict=True):
        assert [r["mtp_loss"] for r in run["metrics"]] == pytest.approx(
            [r["mtp_loss"] for r in whole["metrics"][:steps]], rel=1e-5
        )
    assert any(name.startswith("layers.3.moe.router") for name in runs[-1]["weights"])
    assert "layers.3.eh_proj.weight" in runs[-1]["average"]

    source = load.find(str(tmp_path / "out"))
    model = source.spec.build(source.args, attention_backend("cpu"))
    load.load_weights(source, [model])
    trained = runs[-1]["weights"]
    assert not any(name.startswith(("layers.2.", "layers.3.")) for name in model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(value, trained[name]), name


def test_modules_are_exported_with_copies_of_embedding_and_output(ranks, tmp_path):
    """The export is compared with transformers, which leaves modules out."""
    sizes = {"n_mtp": 2, "n_kv_heads": 4, "n_experts": 8, "expert_dim": 16}
    extra = ["--model.name=deepseek_v3", *(f"--model.overrides.{k}={v}" for k, v in sizes.items())]
    extra += ["--checkpoint.enable", "--checkpoint.last_save_in_hf"]
    trained = ranks(1, train, arguments(tmp_path, *extra, steps=1))[0]["weights"]
    folder = tmp_path / "out/checkpoint/step-1-hf"
    exported = load_file(folder / "model.safetensors")
    for place in ("model.layers.2.", "model.layers.3."):
        copy = exported[f"{place}embed_tokens.weight"]
        assert torch.equal(copy, trained["tok_embeddings.weight"])
        assert torch.equal(exported[f"{place}shared_head.head.weight"], trained["output.weight"])
    source = load.find(str(folder))
    args = source.spec.hf.args(json.loads((folder / "config.json").read_text()))
    assert (args.n_mtp, source.args.n_mtp) == (2, 0)
    model = source.spec.build(args, attention_backend("cpu"))
    load_hf([model], folder, source.spec, args)
    for name, value in model.named_parameters():
        assert torch.equal(value, trained[name]), name


def _each_batch_alone(patch):
    """Each batch on each rank divides by its own tokens: means of means."""

    def factors(self, totals):
        return F.pad(totals[1:] * 0 + self.weight / self.modules, (1, 0), value=1.0)

    patch.setattr(mtp.MTPLoss, "factors", factors)


def _not_over_ranks(patch):
    """Each rank divides by its own tokens."""
    over_ranks = step.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        if tensor.ndim == 1 and not tensor.is_floating_point():  # the numbers of tokens
            tensor[:1] = over_ranks(tensor[:1].clone(), *args, **kwargs)
            return tensor
        return over_ranks(tensor, *args, **kwargs)

    patch.setattr(step, "all_reduce", all_reduce)


def _across_documents(patch):
    """The last tokens of a document predict the next one's."""
    right = mtp.stack_next_tokens

    def stack_next_tokens(tokens, labels, documents, count):
        return right(tokens, labels, None, count)

    patch.setattr("torchtitan.train.forward.stack_next_tokens", stack_next_tokens)


def _around_the_row(patch):
    """The last tokens of a row predict its first."""
    right = mtp.stack_next_tokens

    def stack_next_tokens(tokens, labels, documents, count):
        tokens_ahead, labels_ahead = right(tokens, labels, documents, count)
        for k in range(1, 1 + count):
            labels_ahead[:, -k:, k] = labels[:, :k]
        return tokens_ahead, labels_ahead

    patch.setattr("torchtitan.train.forward.stack_next_tokens", stack_next_tokens)


FAULTS = {
    "not by its own tokens": _each_batch_alone,
    "not over ranks": _not_over_ranks,
    "across documents": _across_documents,
    "around the row": _around_the_row,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_loss_is_found(ranks, tmp_path, fault):
    found = ranks(2, finding, arguments(tmp_path, *MTP, steps=1), fault)[0]
    assert any("loss of further tokens" in text or "gradient" in text for text in found.problems)

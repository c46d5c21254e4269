"""Tensor parallelism: what is split, what never exists whole, and tied weights."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rounding import assert_trained_alike
from tests.runs import LR, arguments, losses, train
from torchtitan.config import resolve
from torchtitan.models import get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.parallel.collectives import local
from torchtitan.parallel.mesh import build_mesh
from torchtitan.parallel.tensor.styles import apply_tensor_parallel
from torchtitan.testing.ranks import RankFailure
from torchtitan.train.build import build
from torchtitan.train.preflight import preflight
from torchtitan.train.step import HostUpdate, forward_backward

TP = ["--parallelism.tensor_parallel_degree=2"]
VOCABULARY = 2048
SEQ_LEN = 32


class Shapes(TorchDispatchMode):
    """Shapes of all plain tensors that operations on this rank produce."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:  # let it become operations on this rank's parts, which come here again
            return NotImplemented
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if type(tensor) is torch.Tensor:
                self.seen.add(tuple(tensor.shape))
        return out


def shapes_of_a_step(argv):
    config = resolve(argv, dist.get_world_size()).config
    engine = build(config, preflight(config), torch.device("cpu"))
    embedded = []
    engine.models[0].tok_embeddings.register_forward_hook(
        lambda *a: embedded.append((type(a[2]).__name__, a[2].shape))
    )
    with Shapes() as shapes:
        forward_backward(engine, next(iter(engine.loader)), HostUpdate(engine, 1.0))
    engine.loader.close()
    return shapes.seen, *embedded[0]


Z_LOSS = "--training.z_loss=0.02"
SPLIT = {
    "tp 2": TP,
    "pp 2, in chunks": ["--parallelism.pipeline_parallel_degree=2", "--training.loss_chunks=4"],
}


@pytest.mark.parametrize("layout", SPLIT)
def test_the_z_loss_is_that_of_whole_logits(ranks, tmp_path, layout):
    """On logits that are sharded over the vocabulary, and on slices of them; reported losses are
    without it.
    """
    whole = ranks(1, train, arguments(tmp_path, Z_LOSS, f"--job.dump_folder={tmp_path / 'one'}"))[0]
    plain = ranks(1, train, arguments(tmp_path, f"--job.dump_folder={tmp_path / 'none'}"))[0]
    assert losses(whole)[0] == losses(plain)[0]
    assert losses(whole)[-1] != pytest.approx(losses(plain)[-1], rel=1e-4)
    run = ranks(2, train, arguments(tmp_path, Z_LOSS, *SPLIT[layout]))[0]
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    for name, value in whole["weights"].items():
        assert_trained_alike(run["weights"][name], value, LR, 4, name)


def test_whole_logits_and_whole_hidden_states_never_exist_on_a_rank(ranks, tmp_path):
    argv = arguments(tmp_path, *TP, Z_LOSS, global_batch=3, local_batch=3)
    shapes, kind, embedded = ranks(2, shapes_of_a_step, argv)[0]
    assert (3 * SEQ_LEN, VOCABULARY // 2) in shapes
    assert not [s for s in shapes if s[-1:] == (VOCABULARY,) and torch.Size(s).numel() > VOCABULARY]
    assert (VOCABULARY // 2, 64) in shapes  # the embedding's gradient
    assert (VOCABULARY, 64) not in shapes
    # Between the matrices the sequence is split; only inside attention and feed-forward is it
    # whole.
    assert embedded == (3, SEQ_LEN // 2, 64)
    # torch 2.13 loses the gradient of an asynchronous tensor that enters a compiled block.
    assert kind == "Tensor"


def test_without_loss_parallel_they_do(ranks, tmp_path):
    """Shows that the test above can fail."""
    argv = arguments(
        tmp_path, *TP, "--parallelism.disable_loss_parallel", global_batch=3, local_batch=3
    )
    shapes, _, _ = ranks(2, shapes_of_a_step, argv)[0]
    assert [s for s in shapes if s[-1:] == (VOCABULARY,) and torch.Size(s).numel() > VOCABULARY]


@pytest.mark.parametrize("extra", [[], ["--parallelism.disable_loss_parallel"]])
def test_tied_embeddings(ranks, tmp_path, extra):
    tied = ["--model.overrides.tie_embeddings=true"]
    one = ranks(
        1, train, arguments(tmp_path, *tied, f"--job.dump_folder={tmp_path / 'a'}", local_batch=8)
    )[0]
    two = ranks(
        2, train, arguments(tmp_path, *tied, *TP, *extra, f"--job.dump_folder={tmp_path / 'b'}")
    )[0]
    assert "output.weight" not in two["weights"]
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    for name, weight in one["weights"].items():
        assert_trained_alike(two["weights"][name], weight, LR, 4, name)


def local_sizes(argv):
    config = resolve(argv, dist.get_world_size()).config
    engine = build(config, preflight(config), torch.device("cpu"))
    engine.loader.close()
    return {name: tuple(local(p).shape) for name, p in engine.models[0].named_parameters()}


def test_every_matrix_is_split(ranks, tmp_path):
    whole = ranks(1, local_sizes, arguments(tmp_path, global_batch=8, local_batch=8))[0]
    for rank in ranks(2, local_sizes, arguments(tmp_path, *TP)):
        for name, shape in rank.items():
            full = torch.Size(whole[name]).numel()
            own = torch.Size(shape).numel()
            assert own * (1 if "norm" in name else 2) == full, name


def incomplete_plan(forgotten, bare=""):
    """Apply a plan without a style for modules that are called `forgotten`, to a model in which the
    module `bare` has a parameter of its own.
    """
    spec = get_spec("llama3")
    args = spec.args("debugmodel", {"n_layers": 1}, max_seq_len=16)
    with torch.device("meta"):
        model = spec.build(args, attention_backend("cpu"))
    config = resolve(TP, 2).config
    plan = {
        pattern: style
        for pattern, style in spec.tensor_parallel_styles.items()
        if not pattern.endswith(forgotten)
    }
    if bare:
        model.get_submodule(bare).scale = torch.nn.Parameter(torch.ones(1, device="meta"))
    apply_tensor_parallel(
        model, build_mesh(config, "cpu").tp, plan, sharded_loss=True, float8=False
    )


def test_a_plan_that_forgets_a_weight_is_an_error(ranks):
    with pytest.raises(RankFailure, match=r"no style that shards layers\.0\.feed_forward\.w2"):
        ranks(2, incomplete_plan, "w2")
    with pytest.raises(RankFailure, match=r"no style that shards layers\.0\.attention\.scale"):
        ranks(2, incomplete_plan, "no module", "layers.0.attention")

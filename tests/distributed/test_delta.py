"""Gated DeltaNet on several ranks against one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.delta_layers import GRADIENT, batch, filled, mask_of, relative, trained
from torchtitan.models.delta.args import TENSOR_PARALLEL_STYLES
from torchtitan.parallel.context.delta import mix_across
from torchtitan.parallel.context.layout import RowLayout
from torchtitan.parallel.tensor.styles import apply_tensor_parallel
from torchtitan.testing import parity

SEQ = 136
LIMIT = 1e-5
DOCUMENTS = torch.tensor([[0] * 37 + [1] * 60 + [2] * 2 + [3] * 37, [0] * 68 + [1] * 68])


class Model(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer


def differences(tp, balanced, with_documents, compiled):
    """Of a layer that cp x tp ranks share to the whole one: outputs, and gradients by name."""
    documents = DOCUMENTS if with_documents else None
    whole = filled()
    expected_x, expected = trained(whole, SEQ, documents=documents)

    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("cp", "tp"))
    group = mesh.get_group("cp")
    layout = RowLayout(group.group_name, group.size(), group.rank(), balanced and group.size() > 1)
    mine = layout.positions(SEQ)
    layer = filled()
    if layout.ranks > 1:
        layer.mix = mix_across(layer.mix, layout)
    model = Model(layer)
    if tp > 1:
        mine = mine.chunk(tp)[mesh.get_local_rank("tp")]
        styles = {f"layer{name}": style for name, style in TENSOR_PARALLEL_STYLES.items()}
        apply_tensor_parallel(model, mesh["tp"], styles, sharded_loss=False, float8=False)
    if compiled:
        layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    x = batch(SEQ)[:, mine].requires_grad_()
    own = documents if documents is None else documents[:, layout.positions(SEQ)]
    out = layer(x, mask=mask_of(own))
    out = out.to_local() if isinstance(out, DTensor) else out
    out.backward(GRADIENT[:, :SEQ][:, mine])
    found = {
        "out": relative(out, expected[:, mine]),
        "x": relative(x.grad, expected_x.grad[:, mine]),
    }
    for (name, parameter), reference in zip(
        layer.named_parameters(), whole.parameters(), strict=True
    ):
        gradient = parameter.grad
        gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        dist.all_reduce(gradient, group=group)  # as FSDP does
        found[name] = relative(gradient, reference.grad)
    return found


@pytest.mark.parametrize(
    ("world", "tp", "balanced", "documents", "compiled"),
    [
        (2, 2, False, True, False),
        (2, 1, True, True, False),
        (2, 1, False, False, True),
        (4, 1, True, True, False),
        (4, 2, True, True, False),
    ],
)
def test_ranks_share_a_layer(ranks, world, tp, balanced, documents, compiled):
    """By heads within tokens (tp), by tokens (cp), and both."""
    for found in ranks(world, differences, tp, balanced, documents, compiled):
        assert len(found) == 11
        assert max(found.values()) < LIMIT, found


@pytest.mark.parametrize(
    "degrees",
    [
        {"context": 2, "tensor": 2},
        pytest.param({"pipeline": 2, "context": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_model_trains_as_on_one_process(ranks, degrees):
    """With attention in every second layer, and documents that end within rows."""
    argv = [
        *(f"--parallelism.{axis}_parallel_degree={degree}" for axis, degree in degrees.items()),
        "--model.overrides.layer_pattern=['delta','full']",
        *(f"--model.overrides.delta_key_{name}=8" for name in ("heads", "size")),
        *(f"--model.overrides.delta_value_{name}=8" for name in ("heads", "size")),
        "--training.document_mask",
        "--optimizer.name=Muon",
    ]
    for passed, text in ranks(4, parity.check, argv, timeout=240):
        assert passed, text

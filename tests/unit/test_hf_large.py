"""Folders of models of hundreds of gigabytes: real names and shapes, sparse files.

The tensors are listed from the published description, independently of our map of names.
"""

import json
from pathlib import Path

import pytest
import torch

from tests.unit.sparse_folders import deepseek_v3, gpt_oss, write_sparse
from torchtitan.checkpoint.hf.opening import meta_model, open_hf
from torchtitan.checkpoint.save import LazyPlanner
from torchtitan.checkpoint.state import model_state
from torchtitan.models import parameter_names

PIECE = 2**25
MEMORY = 5 * 2 * PIECE
"""Bytes of a piece in fp32, of what it is unpacked from in steps, and of what is freed but kept."""
PUBLISHED = json.loads((Path(__file__).parents[1] / "assets/published_models.json").read_text())
FP8 = {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
MODELS = {
    "gpt_oss/120b": (gpt_oss, {"quant_method": "mxfp4"}, 116_829_156_672, 65e9),
    "deepseek_v3/671B": (deepseek_v3, FP8, 671_026_404_352, 680e9),
    "deepseek_v3/Kimi-K2": (deepseek_v3, FP8, 1_026_408_209_408, 1020e9),
}
"""Tensors, quantization, parameters without those of multi-token prediction, bytes."""


def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if key in line)


SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("deepseek_v3/671B", "deepseek_v3/Kimi-K2")
]


@pytest.mark.parametrize("model", ["gpt_oss/120b", *SLOW])
def test_every_weight_of_a_large_model_has_its_source(tmp_path, model):
    list_tensors, quantization, parameters, size = MODELS[model]
    config = PUBLISHED[model] | {"quantization_config": quantization}
    tensors = list_tensors(config)
    assert write_sparse(tmp_path, config, tensors, files=64) > size
    opened = open_hf(tmp_path)  # nothing is missing, and nothing unknown
    spec, args, reader = opened.spec, opened.args, opened.reader
    assert not any("no place for it" in note for note in opened.notes)

    stored = reader.read_metadata().state_dict_metadata
    later = tuple(f"layers.{config['num_hidden_layers'] + i}." for i in range(9))
    main = [name for name in parameter_names(spec, args) if not name.startswith(later)]
    assert sum(stored[name].size.numel() for name in main) == parameters
    for name in reader.names.keys() - parameter_names(spec, args):
        assert stored[name].properties.dtype == torch.float32

    state = model_state([meta_model(spec, args)])
    wanted = {
        name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype, device="meta")
        for name in state
        if name in stored
    }
    planner = LazyPlanner(reader.read, PIECE)
    planner.set_up_planner(wanted, is_coordinator=True)
    items = planner.create_local_plan().items
    chunks = [(item, item.tensor_data.chunk.sizes.numel()) for item in items]
    assert sum(count for _, count in chunks) == sum(x.numel() for x in wanted.values())
    for item, count in chunks:
        whole_row = item.tensor_data.chunk.sizes[0] == 1
        assert whole_row or 4 * count <= 2 * PIECE, item.index

    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = status("VmRSS")
    largest = sorted(chunks, key=lambda chunk: -chunk[1])[:2]
    for item, _ in [*largest, chunks[-1], *chunks[:: len(chunks) // 8]]:
        value = planner.resolve_data(item)
        assert value.shape == item.tensor_data.chunk.sizes
        assert not value.any()
    assert status("VmHWM") - before < MEMORY

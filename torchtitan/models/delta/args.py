"""Initialization, FLOPs and sharding of a Gated DeltaNet layer, from its hyper-parameters. Imports
no torch.
"""

from collections.abc import Mapping
from typing import Protocol

from torchtitan.models.spec import Init
from torchtitan.models.spec import ShardingStyle as Style

CHUNK = 64
"""Tokens per chunk, as in the paper's kernels: longer chunks need fewer steps and more products."""

TENSOR_PARALLEL_STYLES: Mapping[str, Style] = {
    "": Style.GATHER_SEQUENCE,
    ".in_proj_qkvz": Style.COLUMNS,
    ".in_proj_ba": Style.COLUMNS,
    ".q_conv": Style.PER_HEAD,
    ".k_conv": Style.PER_HEAD,
    ".v_conv": Style.PER_HEAD,
    ".A_log": Style.PER_HEAD,
    ".dt_bias": Style.PER_HEAD,
    ".norm": Style.HEAD_NORM,
    ".out_proj": Style.ROWS,
}
"""Style of tensor parallelism by a module's name within the layer. Each rank gets whole key heads,
so its degree divides `delta_key_heads`.
"""


class DeltaArgs(Protocol):
    """The hyper-parameters of a layer."""

    @property
    def dim(self) -> int: ...
    @property
    def delta_key_heads(self) -> int: ...
    @property
    def delta_value_heads(self) -> int: ...
    @property
    def delta_key_size(self) -> int: ...
    @property
    def delta_value_size(self) -> int: ...
    @property
    def delta_conv_size(self) -> int: ...


def delta_init(module: str, args: DeltaArgs) -> Init | None:
    """Initialization of a layer's `A_log`, `dt_bias`, `norm` and convolutions; None: an ordinary
    matrix.

    Args:
        module: name of the module within the layer.
    """
    if module == "A_log":
        # The rate of decay A is uniform, as in transformers; without 0, whose logarithm is -inf.
        return Init("log_uniform", low=0.01, high=16.0)
    if module in ("dt_bias", "norm"):
        return Init("ones")
    if module.endswith("_conv"):
        # The deviation of torch's convolutions, which are uniform up to taps^-0.5.
        return Init("normal", (3 * args.delta_conv_size) ** -0.5)
    return None


def delta_flops(args: DeltaArgs, seq_len: int) -> float:
    """FLOPs per token of a layer's forward and backward.

    A backward costs twice its forward, and masked halves count, as in `module_flops`.
    """
    keys = args.delta_key_heads * args.delta_key_size
    values = args.delta_value_heads * args.delta_value_size
    projections = args.dim * (2 * keys + 3 * values + 2 * args.delta_value_heads)
    return 6.0 * projections + 3 * rule_flops(args, seq_len)


def rule_flops(args: DeltaArgs, seq_len: int) -> float:
    """FLOPs per token of the chunked rule's forward: its products, and the triangular system,
    solved for keys and values. The convolution doesn't count, as it is no product of matrices.
    """
    keys = args.delta_key_heads * args.delta_key_size
    values = args.delta_value_heads * args.delta_value_size
    key_size = args.delta_key_size
    chunk = min(CHUNK, seq_len)
    scores = 2 * chunk * keys
    system = chunk * (values + args.delta_value_heads * key_size)
    states = 3 * values * key_size
    return 2.0 * (scores + system + states + chunk * values)

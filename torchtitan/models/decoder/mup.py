"""The maximal update parametrization (muP): one learning rate for models of all widths.

Yang et al., arXiv:2203.03466, table 8, for Adam, relative to a model of width `mup_base_dim`, in
which nothing changes. With m = `dim` / `mup_base_dim`:

    weights                       deviation    learning rate   multiplier
    embedding, norms, biases      x 1          x 1             1
    matrices of the blocks        x m^-0.5     x 1/m           1
    a router's, a gate's          x 1/m        x 1/m           1
    output projection             x 1          x 1             1/m

A router has as many outputs in a wide model as in a narrow one, so it is an output weight, which
the paper's table 3 writes without a multiplier. Scores of attention are divided by the head size,
not its root. The widths of the blocks must grow with `dim`, except for latent vectors and heads.
Imports no torch.
"""

from torchtitan.models.args import DecoderArgs

OUTPUTS = ("router", "shared_gate")
"""Modules of a block whose number of outputs doesn't grow with the width."""
CONSTANT = ("norm", "conv", "sinks", "A_log", "dt_bias", "wq_b", "wkv_b")
"""Substrings of the names of modules whose number of inputs doesn't grow."""


def width_ratio(fqn: str, args: DecoderArgs) -> float:
    """Divisor of a parameter's learning rate: `args.width_multiple` for matrices of the blocks, 1
    for others.
    """
    path = fqn.split(".")
    module, leaf = path[-2:]
    hidden = path[0] == "layers" and leaf not in ("bias", "b1", "b2", "b3")
    return args.width_multiple if hidden and not any(name in module for name in CONSTANT) else 1.0


def std_factor(fqn: str, args: DecoderArgs) -> float:
    """Factor of an initial weight's standard deviation."""
    ratio = width_ratio(fqn, args)
    return 1 / ratio if any(name in fqn.split(".") for name in OUTPUTS) else ratio**-0.5

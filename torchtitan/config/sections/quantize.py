"""The section `[quantize]`: low-precision matrix products."""

from typing import Literal

from pydantic import field_validator

from torchtitan.config.types import Name, Section, split_names


class Float8(Section):
    """Linear layers in Float8. Enabled by `model.converters = ["float8"]`."""

    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """Scale values to Float8's range by one scale per tensor (`tensorwise`, the default and
    fastest), one per row (`rowwise`, more accurate), or `rowwise` with weight gradients in bf16
    (`rowwise_with_gw_hp`).
    """
    enable_fsdp_float8_all_gather: bool = False
    """Gather FSDP's weights in Float8, which halves the bytes sent. `tensorwise` only."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all weights in a single reduction after each update. Needs
    `enable_fsdp_float8_all_gather`."""
    filter_fqns: list[Name] = []
    """Skip linear layers whose name contains one of these, for example `output`.
    `auto_filter_small_kn` skips layers too small to gain. Layers whose sizes aren't multiples of 16
    (x tensor-parallel degree) are always skipped.
    """
    emulate: bool = False
    """Round to Float8 but multiply in the original type: the same numbers without Float8 hardware,
    slowly.
    """


class MXFP8(Section):
    """Linear layers in MXFP8. Enabled by `model.converters = ["mx"]`."""

    recipe_name: Literal["mxfp8_cublas", "mxfp8_cublas_rceil", "mxfp8_emulated"] = "mxfp8_cublas"
    """`mxfp8_cublas` needs a Blackwell GPU; `mxfp8_cublas_rceil` also rounds scales up;
    `mxfp8_emulated` runs anywhere, slowly.
    """
    mxfp8_dim1_cast_kernel_choice: Literal["triton", "cuda", "torch"] = "triton"
    """Kernel that quantizes along columns."""
    filter_fqns: list[Name] = ["output"]
    """Skip linear layers whose name contains one of these. Layers whose sizes aren't multiples of
    32 (x tensor-parallel degree) are always skipped.
    """


class QuantizedLinear(Section):
    """Low-precision types of linear layers."""

    float8: Float8 = Float8()
    mx: MXFP8 = MXFP8()


class GroupedFloat8(Section):
    """Experts in Float8, with one scale per row. Enabled by `model.converters =
    ["quantize.grouped_mm.float8"]`.
    """

    fqns: list[Name] = []
    """Convert experts whose module name contains one of these, for example `experts`."""
    emulate: bool = False
    """Round to Float8 but multiply in the original type: the same numbers without Float8 hardware,
    slowly.
    """

    _commas = field_validator("fqns", mode="before")(split_names)


class GroupedMXFP8(Section):
    """Experts in MXFP8. Enabled by `model.converters = ["quantize.grouped_mm.mx"]`."""

    recipe_name: Literal["mxfp8", "mxfp8_emulated"] = "mxfp8"
    """`mxfp8` needs a Blackwell GPU; `mxfp8_emulated` runs anywhere, slowly, and multiplies in
    bf16.
    """
    fqns: list[Name] = []
    """Convert experts whose module name contains one of these, for example `experts`."""

    _commas = field_validator("fqns", mode="before")(split_names)


class QuantizedGroups(Section):
    """Low-precision types of experts."""

    float8: GroupedFloat8 = GroupedFloat8()
    mx: GroupedMXFP8 = GroupedMXFP8()


class Quantize(Section):
    """Low-precision matrix products."""

    linear: QuantizedLinear = QuantizedLinear()
    grouped_mm: QuantizedGroups = QuantizedGroups()

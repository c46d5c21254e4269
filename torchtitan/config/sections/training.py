"""Data, batches and length of training and validation: `[training]`, `[moe]`, `[validation]`."""

from typing import Annotated, Literal

from pydantic import Field

from torchtitan.config.registry import losses
from torchtitan.config.sections.data import DataLoader, DataStage, Source, ValidationSet
from torchtitan.config.types import (
    Dtype,
    Factor,
    LocalPath,
    Name,
    Rows,
    Section,
    SeqLen,
    Steps,
    StepsOrDefault,
)


class Training(Section):
    """Data, batch, precision and length of the run."""

    dataset: Name = "demo"
    """`demo` (the text of Python's standard library; alias `c4_test`), `c4`, any Hugging Face
    dataset, a source that `experimental.custom_import` registers, or a name for the files of
    `dataset_path`.
    """
    dataset_path: LocalPath | None = None
    """Read local files instead of downloading: a file, folder or glob of JSON, text, CSV, Parquet
    or Arrow, a folder of `datasets`' `save_to_disk`, or token files of `torchtitan tokenize` or
    Megatron.
    """
    text_column: Name = "text"
    """The column or JSON key that holds the text. Others are not read."""
    messages_column: Name | None = None
    """Read conversations from this column or JSON key, instead of text: lists of messages with
    `role` and `content`. The tokenizer's chat template renders them, and only the assistant's turns
    are predicted.
    """
    sources: Annotated[list[Source], Field(max_length=1000)] = []
    """Mix several sources, instead of `dataset` and `dataset_path`: `[[training.sources]]` tables.
    """
    stages: Annotated[list[DataStage], Field(max_length=1000)] = []
    """Change weights, batch size or learning rate from a step on: `[[training.stages]]` tables, in
    order.
    """
    on_bad_document: Literal["stop", "skip"] = "stop"
    """Choose what happens when a document can't be decoded or has no text: `stop` with its file and
    line, or `skip` it, counted by kind in the log and in `run.json`. Applies to validation too.
    """
    on_changed_data: Literal["stop", "continue"] = "stop"
    """Choose what happens when a run resumes and its data files differ in contents or order from
    the checkpoint's: `stop` and name them, or `continue` with a warning. Applies to validation too.
    """
    local_batch_size: Rows = 8
    """Rows per forward and backward pass on each data-parallel rank."""
    global_batch_size: Annotated[int, Field(ge=-1, le=2**30)] = -1
    """Rows per optimizer step over all ranks, reached by gradient accumulation. -1:
    `local_batch_size` x data-parallel degree.
    """
    seq_len: SeqLen = 2048
    """Tokens per row."""
    packing: Literal["stream", "best_fit"] = "stream"
    """Choose how documents become rows. `stream`: cut from all documents, one after another.
    `best_fit`: every row begins with a document, and only documents longer than a row are cut
    (arXiv:2404.10830); about 1 % of the rows is padding. Token files are packed ahead, by
    `torchtitan tokenize --best-fit`.
    """
    document_mask: bool = False
    """Restrict attention to each token's own document; other documents in the row are masked."""
    loss: Annotated[Name, Field(examples=[*losses.built_in])] = "cross_entropy"
    """Loss of each token: `cross_entropy`, or one that `experimental.custom_import` registers. For
    validation too.
    """
    z_loss: Factor = 0.0
    """Coefficient of the squared log-sum-exp of each token's logits (PaLM, arXiv:2204.02311,
    section 5; OLMo: 1e-5), which keeps logits small. It adds to the gradients, not to the losses
    that are reported. 0: none.
    """
    loss_chunks: SeqLen = 1
    """Compute logits and loss in this many slices of the sequence, one at a time. Saves the memory
    of the full logits, which a large vocabulary makes big, and costs 8 bytes per parameter of the
    output projection, which is more if few tokens run at a time.
    """
    mtp_loss_weight: Factor = 0.3
    """Weight of the mean loss of the modules that predict further tokens (multi-token prediction,
    `n_mtp` in `[model.overrides]`), relative to the loss of the next token.
    """
    max_norm: Factor = 1.0
    """Clip gradients to this global norm. 0: measure the norm, don't clip."""
    steps: Steps = 10000
    """Optimizer steps of the whole run, including those before a resume."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    dtype: Dtype = "float32"
    """Type in which parameters and optimizer state are stored."""
    mixed_precision_param: Dtype = "bfloat16"
    """Type of parameters and activations in the forward and backward."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are reduced across ranks. `bfloat16` halves the bytes sent, but
    rounds every partial sum to 8 bits, so gradients depend on the number of ranks in the third
    digit.
    """
    gc_freq: Steps = 50
    """Steps between runs of Python's garbage collector. It is off in between, so that no single
    rank stalls.
    """
    gc_debug: bool = False
    """Report objects in reference cycles at each collection."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Choose what happens when the loss or gradient norm is NaN or infinite: `stop` with an error,
    or `skip` the optimizer step. `guard.policy` takes precedence if it is `skip` or `rewind`.
    """
    callbacks: Annotated[list[Name], Field(max_length=100)] = []
    """Call these before and after each step, in this order: callbacks that
    `experimental.custom_import` registers.
    """
    dataloader: DataLoader = DataLoader()


class MoE(Section):
    """Balance of the load of experts. Only for models with experts."""

    balance_bias_rate: Factor = 0.0
    """Change of each expert's routing bias after a step: up if it had fewer rows of the global
    batch than the mean, down if more (arXiv:2408.15664). 0: no bias. Of Hugging Face's classes,
    DeepSeek-V3's and GLM-4.5's store the bias.
    """
    sequence_balance_loss: Factor = 0.0
    """Coefficient of the auxiliary loss that balances the experts within each row."""
    global_balance_loss: Factor = 0.001
    """Coefficient of the auxiliary loss that balances the experts over the global batch
    (arXiv:2501.11873). An expert's share of the rows is the previous step's; its probability is
    this step's.
    """
    router_z_loss: Factor = 0.0
    """Coefficient of the squared log-sum-exp of the router's scores, which keeps them small."""


class Validation(Section):
    """Loss on held-out data during training."""

    enable: bool = False
    """Run validation."""
    dataset: Name = "c4_validation"
    """Like `training.dataset`; also `demo_validation`, a part of the demo text that training never
    sees.
    """
    dataset_path: LocalPath | None = None
    """Like `training.dataset_path`."""
    text_column: Name = "text"
    """Like `training.text_column`."""
    messages_column: Name | None = None
    """Like `training.messages_column`."""
    sets: Annotated[list[ValidationSet], Field(max_length=1000)] = []
    """Validate on several sets, instead of `dataset` and `dataset_path`: `[[validation.sets]]`
    tables.
    """
    local_batch_size: Annotated[int, Field(ge=-1, le=2**20)] = -1
    """Most rows per forward pass on a data-parallel rank. -1: `training.local_batch_size`."""
    global_batch_size: Annotated[int, Field(ge=-1, le=2**30)] = -1
    """Rows per batch over all ranks, on any number of them. -1: `training.global_batch_size` if it
    is set, else `local_batch_size`.
    """
    seq_len: Annotated[int, Field(ge=-1, le=2**27)] = -1
    """Tokens per row, in all stages. -1: `training.seq_len`."""
    freq: Steps = 10
    """Steps between validations."""
    steps: StepsOrDefault = -1
    """Batches of `global_batch_size` rows per validation. -1: the whole data set once."""
    dataloader: DataLoader = DataLoader()

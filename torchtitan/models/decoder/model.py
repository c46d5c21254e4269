"""A decoder-only transformer, dense or a mixture of experts: the one model behind all families.

Notable features:

- Written for one device: no process groups here, `torchtitan.parallel` splits it from outside
- Either end may be None: a pipeline stage is this model without some of its modules
- Layers may differ: full, windowed or position-free attention, or Gated DeltaNet (`layer_pattern`)
- Attention is a function chosen once, at build; masks of packed documents are an argument
- Tables of rotations belong to the model, not to layers: buffers, computed and never saved
- RMSNorm before, after or around attention and feed-forward; biases only where a family has them
- Experts drop no token; their forward has three parts, so that only the middle has dynamic shapes
- All logits come from `project`, so that a chunked loss or generation can ask for a few at a time
- No initialization (`traits.py`), Hugging Face names (`hf/`) or key-value cache (`inference/`) here

Shapes: b batch, s sequence, h query heads, k key-value heads, d head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from torchtitan.models.args import DecoderArgs, LayerKind
from torchtitan.models.attention.interface import Attend, DocumentMask, Mask, reads_documents
from torchtitan.models.attention.modules import Attention, LatentAttention, layer_scores
from torchtitan.models.costs import Cost, Product, cost_of
from torchtitan.models.decoder.mtp import embed_next, mtp_module
from torchtitan.models.delta.layer import GatedDeltaNet
from torchtitan.models.layers.feed_forward import FeedForward
from torchtitan.models.layers.norms import RMSNorm, build_norm
from torchtitan.models.layers.rope import rope_cache
from torchtitan.models.moe.moe import MoE, Routing
from torchtitan.models.moe.router import Load

__all__ = ["Attention", "Block", "Decoder", "MoEBlock"]


class _Block(nn.Module):
    """Base of the transformer blocks: a mixer of tokens, and norms before or after its two halves.

    Blocks are built from the hyper-parameters of their layer (`DecoderArgs.layer_args`).
    """

    attention_class: type[Attention] = Attention
    """Built from `(args, attend)`. Subclasses replace it."""
    mixer_name: str
    """Name of the attribute that is the mixer. Each kind of mixer has its own, by which its weights
    are initialized, sharded and converted.
    """

    def __init__(self, args: DecoderArgs, attend: Attend):
        super().__init__()
        self.dim = args.dim
        before = args.norm_placement != "after"
        after = args.norm_placement != "before"
        self.attention_norm = build_norm(args.dim, args) if before else None
        self.mixer_name = args.mixer
        if args.mixer == "delta":
            self.delta = GatedDeltaNet(args)
        elif args.mixer == "latent_attention":
            self.latent_attention = LatentAttention(args, attend)
        else:
            self.attention = self.attention_class(args, attend)
        self.attention_post_norm = build_norm(args.dim, args) if after else None
        self.ffn_norm = build_norm(args.dim, args) if before else None
        self.ffn_post_norm = build_norm(args.dim, args) if after else None

    @property
    def mixer(self) -> nn.Module:
        """The module that mixes tokens: called with `(x, cos, sin, mask)`, on `[b, s, dim]`."""
        return getattr(self, self.mixer_name)

    def mix(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Mask | None) -> Tensor:
        """Add the mixer's output to the residual stream `[b, s, dim]`."""
        inputs = x if self.attention_norm is None else self.attention_norm(x)
        if isinstance(mask, DocumentMask) and not reads_documents(self.mixer):
            mask = mask.mask
        out = self.mixer(inputs, cos, sin, mask)
        return x + (out if self.attention_post_norm is None else self.attention_post_norm(out))

    def cost(self, seq_len: int) -> Cost:
        """The mixer, norms, and additions to the residual stream. The backward needs each norm's
        input.
        """
        before, after = self.attention_norm, self.attention_post_norm
        norms = 4 if before is not None and after is not None else 2
        halves = Cost(
            moved=(5 + 2 * norms) * self.dim, saved=norms * self.dim, launches=(28, 39, 13, 22)
        )
        return halves + cost_of(self.mixer, seq_len, self.mixer_name)

    def read(self, x: Tensor) -> Tensor:
        """The input of the feed-forward network or the experts: the residual stream, normalized."""
        return x if self.ffn_norm is None else self.ffn_norm(x)

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Add the output of the feed-forward network or the experts to the residual stream."""
        return x + (out if self.ffn_post_norm is None else self.ffn_post_norm(out))


class Block(_Block):
    """Transformer block: `[b, s, dim] -> [b, s, dim]`."""

    feed_forward_class: type[nn.Module] = FeedForward
    """Built from `(dim, ffn_dim)` and, where they aren't the defaults, `activation` and `bias`.
    Subclasses replace it.
    """

    def __init__(self, args: DecoderArgs, attend: Attend):
        super().__init__(args, attend)
        options = args.feed_forward_options
        self.feed_forward = self.feed_forward_class(args.dim, args.ffn_dim, **options)

    def forward(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Mask | None
    ) -> Tensor:
        x = self.mix(x, cos, sin, mask)
        return self.add(x, self.feed_forward(self.read(x)))

    def cost(self, seq_len: int) -> Cost:
        """Both halves."""
        return super().cost(seq_len) + cost_of(self.feed_forward, seq_len, "feed_forward")


class MoEBlock(_Block):
    """Transformer block with experts: `[b, s, dim] -> [b, s, dim]`, and their load.

    Its forward has three parts, of which only the middle one has shapes that depend on the data, if
    the experts are on several ranks.
    """

    moe_class: type[MoE] = MoE
    """Built from `(args)`. Subclasses replace it."""

    def __init__(self, args: DecoderArgs, attend: Attend):
        super().__init__(args, attend)
        self.moe = self.moe_class(args)

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Mask | None,
        token_weights: Tensor | None,
    ) -> tuple[Tensor, Load | None]:
        """
        Args:
            token_weights: `[b, s]`, weight of each token in the loss; None in inference.
        """
        x, inputs, routing = self.before_experts(x, cos, sin, mask, token_weights)
        rows, shared = self.moe.compute(routing, inputs)
        # Replaced, not passed beside the old `rows`: checkpointing keeps the inputs of each part.
        out = self.after_experts(x, shared, routing._replace(rows=rows))
        return out, routing.load

    def cost(self, seq_len: int) -> Cost:
        """Both halves."""
        return super().cost(seq_len) + cost_of(self.moe, seq_len, "moe")

    def before_experts(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Mask | None,
        token_weights: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Routing]:
        x = self.mix(x, cos, sin, mask)
        inputs = self.read(x)
        routing = self.moe.dispatch(inputs, token_weights)
        return x, None if self.moe.shared is None else inputs, routing

    def after_experts(self, x: Tensor, shared: Tensor | None, routing: Routing) -> Tensor:
        out = self.moe.combine(routing.rows, routing, like=x)
        return self.add(x, out if shared is None else out + shared)


class TiedOutput(nn.Module):
    """Projection by the token embedding: `[b, s, dim], [vocab, dim] -> [b, s, vocab]`."""

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return F.linear(x, embedding)


class Decoder(nn.Module):
    """`forward(tokens [b, s]) -> logits [b, s, vocab]`.

    Without the embedding the input, and without the output projection the result, is hidden states
    `[b, s, dim]`.
    """

    block_class: type[nn.Module] = Block
    """The blocks without experts, built from `(args, attend)` with the `args` of their layer.
    Subclasses replace it.
    """
    moe_block_class: type[MoEBlock] = MoEBlock
    """The blocks with experts, likewise."""
    cos: Tensor
    sin: Tensor
    window_cos: Tensor
    window_sin: Tensor

    def __init__(self, args: DecoderArgs, attend: Attend):
        super().__init__()
        self.args = args
        self.reads_documents = "delta" in args.kinds
        self.windows = [args.window if kind == "window" else None for kind in sorted(args.kinds)]
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(args.vocab_size, args.dim)
        # A dictionary, because a layer keeps its index on every pipeline stage.
        self.layers = nn.ModuleDict()
        for i in range(args.n_layers + args.n_mtp):
            kind: Any = self.moe_block_class if args.has_experts(i) else self.block_class
            if i in args.mtp_layers:
                kind = mtp_module(kind)
            self.layers[str(i)] = kind(args.layer_args(i), attend)
        self.norm: RMSNorm | None = build_norm(args.dim, args)
        self.output: nn.Linear | TiedOutput | None = TiedOutput()
        if not args.tie_embeddings:
            self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Compute the RoPE tables, and reset loads. Called again when a meta model gets memory."""
        self._init_rope()
        for layer in self.layers.values():
            if isinstance(layer, MoEBlock):
                layer.moe.router.init_buffers()

    def change_positions(self, args: DecoderArgs) -> None:
        """Continue with hyper-parameters that differ in `rope_theta` and `rope_scaling`."""
        device = self.cos.device
        self.args = args
        self._init_rope()
        for name, table in list(self.named_buffers(recurse=False)):
            setattr(self, name, table.to(device))
        for index, layer in self.layers.items():
            for module in layer.modules():
                if isinstance(module, Attention | LatentAttention):
                    module.scores = layer_scores(args.layer_args(int(index)))

    def _init_rope(self) -> None:
        args = self.args
        tables = {"": (args.rope_theta, args.rope_scaling)}
        if args.has_window_rope:
            scaling = args.rope_scaling if args.scale_window_rope else None
            tables["window_"] = (args.window_rope_theta or args.rope_theta, scaling)
        for prefix, (theta, scaling) in tables.items():
            cos, sin = rope_cache(args.rope_dim, theta, scaling, args.max_seq_len)
            self.register_buffer(f"{prefix}cos", cos, persistent=False)
            self.register_buffer(f"{prefix}sin", sin, persistent=False)

    def rotations(self, positions: Tensor) -> dict[LayerKind, tuple[Tensor | None, Tensor | None]]:
        """Cosine and sine for each kind of layer, at `positions` `[s]` or `[b, s]`."""
        full = (self.cos[positions], self.sin[positions])
        window = full
        if self.args.has_window_rope:
            window = (self.window_cos[positions], self.window_sin[positions])
        none = (None, None)
        return {"full": full, "window": window, "nope": none, "delta": none}

    def embed(self, tokens: Tensor) -> Tensor:
        """Token embeddings `[b, s, dim]`, or `[b, s, (1 + n_mtp) dim]` followed by the embeddings
        of the next tokens; on later pipeline stages the input unchanged.
        """
        if self.tok_embeddings is None:
            return tokens
        if tokens.dim() == 3:
            return embed_next(self.embed, tokens)
        x = self.tok_embeddings(tokens)
        if self.args.embedding_scale != 1:  # rounded, as in Gemma
            # `full` fills on the device; a copy from the host would wait for it.
            x = x * torch.full((), self.args.embedding_scale, dtype=x.dtype, device=x.device)
        if self.args.embedding_norm:
            x = F.rms_norm(x, (self.args.dim,), eps=self.args.norm_eps)
        return x

    @property
    def output_weight(self) -> Tensor:
        """The output projection's weight, `[vocab, dim]`."""
        owner = self.tok_embeddings if isinstance(self.output, TiedOutput) else self.output
        assert owner is not None
        return owner.weight

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        """Logits `[b, s, vocab]` of final hidden states `[b, s, dim]`, projected by `weight`.

        All logits come from here: in `forward`, a chunked loss and generation.
        """
        assert self.output is not None
        if isinstance(self.output, TiedOutput):
            logits = self.output(x, weight)
        else:
            logits = functional_call(self.output, {"weight": weight}, (x,))
        if self.args.logit_factor != 1:
            logits = logits * self.args.logit_factor
        cap = self.args.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def cost(self, seq_len: int) -> Cost:
        """The projection to the vocabulary."""
        return Cost((Product("output", self.args.dim, self.args.vocab_size),))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Mask | None = None,
        token_weights: Tensor | None = None,
        *,
        project: bool = True,
    ) -> Tensor:
        """
        Args:
            tokens: `[b, s]`; or `[b, s, 1 + n_mtp]`, each with the tokens after it, which also runs
                the modules that predict further tokens.
            positions: position of each token in its row, `[s]` or `[b, s]`. Default: 0, 1, 2, ...
            mask: what each token attends to, from `document_mask`. Default: everything before it.
            token_weights: shaped like `tokens`, the weight of each token in the loss of each
                prediction, by which experts balance their load; 0 doesn't count. Default:
                inference.
            project: False returns the final hidden states, to be projected in slices.

        Returns:
            Logits `[b, s, vocab]`, or hidden states `[b, s, dim]`; with the modules
            `[b, s, 1 + n_mtp, vocab]`, or `[b, s, (1 + n_mtp) dim]`.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens)
        # The hidden states, and the next tokens' embeddings, which become hidden states below.
        slots = [x] if x.shape[-1] == self.args.dim else [*x.split(self.args.dim, dim=-1)]
        weights: Sequence[Tensor | None] = [None] * len(slots)
        if token_weights is not None:
            weights = [token_weights] if len(slots) == 1 else token_weights.unbind(-1)
        rotations = self.rotations(positions)
        mtp = self.args.mtp_layers
        for name, layer in self.layers.items():
            rotation = rotations[self.args.kind(int(name))]
            if int(name) not in mtp:
                slots[0] = _run(layer, slots[0], *rotation, mask, weights[0])
        slots[0] = self.norm(slots[0]) if self.norm is not None else slots[0]
        for k, index in enumerate(mtp[: len(slots) - 1], 1):
            if str(index) in self.layers:
                both = torch.cat(slots[k - 1 : k + 1], dim=-1)
                rotation = rotations[self.args.kind(index)]
                slots[k] = _run(self.layers[str(index)], both, *rotation, mask, weights[k])
        if not project or self.output is None:
            return slots[0] if len(slots) == 1 else torch.cat(slots, dim=-1)
        logits = [self.project(hidden, self.output_weight) for hidden in slots]
        return logits[0] if len(slots) == 1 else torch.stack(logits, dim=2)


def _run(
    layer: nn.Module,
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    mask: Mask | None,
    token_weights: Tensor | None,
) -> Tensor:
    """Run a block, and record the load of its experts if it has any."""
    if not isinstance(layer, MoEBlock):
        return layer(x, cos, sin, mask)
    x, load = layer(x, cos, sin, mask, token_weights)
    if load is not None:
        layer.moe.router.record(load)
    return x

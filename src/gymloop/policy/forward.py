"""Logprobs of sampled tokens: one number per sampled token, and never a ``[tokens, vocabulary]`` tensor.

Two paths give the same numbers. The *packed* path runs the backbone over a ``tree`` with an attention function of its
own, and the head only on nodes that predict a sampled token. The *padded* path uses nothing but the model's public
``forward`` on right-padded rows, and is what the packed path is compared with when a model is loaded: a model whose
tokens see more than their ancestors (state spaces, linear attention, chunked attention, ...) fails the comparison and
trains padded. Neither path keeps a KV cache, and padding can have no effect on either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gymloop.algorithms.batch import TrainSequence
from gymloop.compat import register_attention, set_attention
from gymloop.policy.tree import Layout, Tree, bins, grow, layout

ATTENTION = "gymloop_tree"
"""Name of the tree attention in transformers' registry."""

KEPT_LOGITS = 2**26
"""Most logits kept from forward to backward, elements (256 MiB in float32); beyond it backward computes them anew."""

CHUNK_LOGITS = 2**24
"""Logits computed at once, elements."""


class TreeTensors:
    """A tree on the device, in the form the attention function reads: built once, used by every layer."""

    def __init__(self, tree: Tree, arrangement: Layout, device: torch.device) -> None:
        self.tokens = torch.from_numpy(tree.tokens)[None].to(device)
        self.positions = torch.from_numpy(tree.depths)[None].to(device)
        self.rows = torch.from_numpy(arrangement.rows).to(device)
        self.blocks = [
            (
                torch.from_numpy(block.queries).to(device),
                torch.from_numpy(block.keys).to(device),
                torch.from_numpy(block.query_depths).to(device),
                block.causal,
            )
            for block in arrangement.blocks
        ]
        self.windows: set[int | None] = set()
        """Window lengths that layers asked for; what a model never mentions here cannot have been applied."""
        self._masks: dict[tuple[int, int | None, torch.dtype], Tensor | None] = {}

    def mask(self, block: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [runs, 1, Q, K] of a block; None where plain causal attention is the same.

        A query at depth d sees keys of depth d and less, with a window only those above d - window.
        """
        key = (block, window, dtype)
        if key not in self._masks:
            _, keys, query_depths, causal = self.blocks[block]
            reach = keys.shape[1]
            if causal and (window is None or window >= reach):
                self._masks[key] = None
            else:
                depth = torch.arange(reach, device=keys.device)
                hidden = depth > query_depths[..., None]
                if window is not None:
                    hidden |= depth <= query_depths[..., None] - window
                self._masks[key] = torch.zeros(hidden.shape, dtype=dtype, device=keys.device).masked_fill_(
                    hidden, -torch.inf
                )[:, None]
        return self._masks[key]


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    gymloop_tree: TreeTensors | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention in which a node sees its ancestors and itself, in transformers' attention interface.

    Args:
        module: the attention layer; not read.
        query: [1, heads, nodes, head_dim].
        key: [1, kv_heads, nodes, head_dim]; heads are shared without repeating them.
        value: like key.
        attention_mask: not used: transformers builds none for an attention it has no mask function for.
        scaling: of the scores; None takes head_dim ** -0.5.
        sliding_window: a node sees at most this many nodes, itself included.
        gymloop_tree: the layout, handed through the model's forward.
        unused: whatever else a layer passes; what matters and is not implemented shows in the probe.

    Returns:
        [1, nodes, heads, head_dim], and no attention weights.

    Raises:
        ValueError: the model did not hand the layout through.
    """
    del module, attention_mask, unused
    if gymloop_tree is None:
        raise ValueError("its layers do not receive the keyword arguments of forward")
    gymloop_tree.windows.add(sliding_window)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [nodes, heads, head_dim]
    results = []
    for index, (queries, keys, _, _) in enumerate(gymloop_tree.blocks):
        mask = gymloop_tree.mask(index, sliding_window, query.dtype)
        result = F.scaled_dot_product_attention(
            _gather(query, queries),
            _gather(key, keys),
            _gather(value, keys),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        results.append(result.transpose(1, 2).flatten(0, 1))
    flat = results[0] if len(results) == 1 else torch.cat(results)
    return flat.index_select(0, gymloop_tree.rows)[None], None


def _gather(nodes: Tensor, index: Tensor) -> Tensor:
    """[nodes, heads, head_dim] at [runs, length] -> [runs, heads, length, head_dim]."""
    return nodes.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


class HeadLogprobs(torch.autograd.Function):
    """``log softmax(hidden @ weight.T / temperature)`` at chosen tokens, in float32, over rows in chunks.

    Written out because autograd keeps several ``[rows, vocabulary]`` tensors where one, or none, is enough. With
    ``p = softmax(z / t)`` and upstream gradient ``g`` of token ``v`` in row ``r``: ``dz[r] = (sum g) (-p[r]) / t``,
    plus ``g / t`` at ``v``.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, tokens: Tensor, temperature: float
    ) -> Tensor:
        """Compute the logprobs.

        Args:
            ctx: of autograd.
            hidden: [rows, width].
            weight: [vocabulary, width].
            bias: [vocabulary] or None.
            rows: int64 [tokens], ascending: the row that predicts each token.
            tokens: int64 [tokens]; no (row, token) pair twice.
            temperature: positive.

        Returns:
            float32 [tokens].
        """
        vocabulary = weight.shape[0]
        ctx.temperature = temperature
        ctx.chunks = _chunks(rows, len(hidden), max(1, CHUNK_LOGITS // vocabulary))
        kept: list[Tensor] | None = [] if len(hidden) * vocabulary <= KEPT_LOGITS else None
        logprobs = hidden.new_empty(len(rows), dtype=torch.float32)
        normalisers = hidden.new_empty(len(hidden), dtype=torch.float32)
        for begin, end, first, last in ctx.chunks:
            logits = _scaled_logits(hidden[begin:end], weight, bias, temperature)
            normalisers[begin:end] = logits.logsumexp(1)
            logprobs[first:last] = logits[rows[first:last] - begin, tokens[first:last]]
            if kept is not None:
                kept.append(logits)
        ctx.kept = kept
        ctx.save_for_backward(hidden, weight, bias, rows, tokens, normalisers)
        return logprobs.sub_(normalisers[rows])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden, weight and bias."""
        (gradient,) = gradients
        hidden, weight, bias, rows, tokens, normalisers = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None  # overwritten below; a second backward computes them anew
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = bias_gradient = None
        for number, (begin, end, first, last) in enumerate(ctx.chunks):
            logits = kept[number] if kept else _scaled_logits(hidden[begin:end], weight, bias, ctx.temperature)
            here, upstream = rows[first:last] - begin, gradient[first:last] / ctx.temperature
            per_row = upstream.new_zeros(end - begin).index_add_(0, here, upstream)
            dlogits = logits.sub_(normalisers[begin:end, None]).exp_().mul_(-per_row[:, None])
            dlogits[here, tokens[first:last]] += upstream
            dlogits = dlogits.to(weight.dtype)
            hidden_gradient[begin:end] = dlogits @ weight
            weight_gradient = _add(weight_gradient, dlogits.T @ hidden[begin:end])
            if bias is not None:
                bias_gradient = _add(bias_gradient, dlogits.sum(0))
        return hidden_gradient, _cast(weight_gradient, weight), _cast(bias_gradient, weight), None, None, None


def _chunks(rows: Tensor, count: int, size: int) -> list[tuple[int, int, int, int]]:
    """(first row, end row, first token, end token) of each chunk."""
    borders = [*range(0, count, size), count]
    tokens = torch.searchsorted(rows, torch.tensor(borders, device=rows.device)).tolist()
    return list(zip(borders[:-1], borders[1:], tokens[:-1], tokens[1:], strict=True))


def _scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = F.linear(hidden, weight, bias).float()
    return logits if temperature == 1 else logits.div_(temperature)


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.float() + part


def _cast(gradient: Tensor | None, like: Tensor) -> Tensor | None:
    return None if gradient is None else gradient.to(like.dtype)


@dataclass(frozen=True, slots=True)
class Packed:
    """A tree and where its sampled tokens are.

    Attributes:
        tree: of all sequences of the microbatch.
        arrangement: its attention.
        predictors: int64 [rows], nodes that predict some sampled token; unique.
        rows: int64 [targets], index into ``predictors`` of each distinct sampled node, ascending.
        targets: int64 [targets], its token.
        expand: int64 [sampled], index into ``targets`` for each sampled token of each sequence, in order.
    """

    tree: Tree
    arrangement: Layout
    predictors: np.ndarray
    rows: np.ndarray
    targets: np.ndarray
    expand: np.ndarray

    @property
    def computed_tokens(self) -> int:
        """Tokens the backbone computes."""
        return len(self.tree.tokens)


@dataclass(frozen=True, slots=True)
class Padded:
    """Right-padded rows.

    Attributes:
        ids: int64 [sequences, longest]; padding is 0.
        rows: int64 [sampled], the sequence of each sampled token, in order.
        columns: int64 [sampled], its index in the sequence, at least 1.
    """

    ids: np.ndarray
    rows: np.ndarray
    columns: np.ndarray

    @property
    def computed_tokens(self) -> int:
        """Tokens the backbone computes, padding included."""
        return self.ids.size


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Sequences that go through the model together.

    Attributes:
        indices: where they lie in the batch, ascending.
        sequences: in that order; logprobs come flat in that order.
        trains: some token of it can have a gradient.
        input: what the model gets.
    """

    indices: tuple[int, ...]
    sequences: tuple[TrainSequence, ...]
    trains: bool
    input: Packed | Padded = field(repr=False)


def pack(sequences: Sequence[TrainSequence]) -> Packed:
    """Lay sequences out as one tree."""
    tree = grow([sequence.ids for sequence in sequences])
    paths = list(zip(tree.paths, sequences, strict=True))
    target_nodes = np.concatenate([path[sequence.sampled] for path, sequence in paths])
    predictor_nodes = np.concatenate([path[sequence.sampled - 1] for path, sequence in paths])
    nodes, first, expand = np.unique(target_nodes, return_index=True, return_inverse=True)
    predictors, rows = np.unique(predictor_nodes[first], return_inverse=True)
    order = np.argsort(rows, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return Packed(tree, layout(tree), predictors, rows[order], tree.tokens[nodes[order]], rank[expand])


def pad(sequences: Sequence[TrainSequence]) -> Padded:
    """Lay sequences out as right-padded rows."""
    ids = np.zeros((len(sequences), max(len(sequence.ids) for sequence in sequences)), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence.ids)] = sequence.ids
    counts = [len(sequence.sampled) for sequence in sequences]
    columns = np.concatenate([sequence.sampled for sequence in sequences])
    return Padded(ids, np.repeat(np.arange(len(sequences)), counts), columns)


def packed_microbatches(
    sequences: Sequence[TrainSequence], indices: Sequence[int], limit: int, *, trains: bool
) -> list[Microbatch]:
    """Trees of at most ``limit`` tokens over the sequences at ``indices``."""
    chosen = [sequences[index] for index in indices]
    result = []
    for members in bins([sequence.ids for sequence in chosen], [sequence.group_id for sequence in chosen], limit):
        own = tuple(chosen[member] for member in members)
        result.append(Microbatch(tuple(indices[member] for member in members), own, trains, pack(own)))
    return result


def padded_microbatches(
    sequences: Sequence[TrainSequence], indices: Sequence[int], size: int, *, trains: bool
) -> list[Microbatch]:
    """Rows of ``size`` sequences, in order, over the sequences at ``indices``."""
    result = []
    for begin in range(0, len(indices), size):
        members = tuple(indices[begin : begin + size])
        own = tuple(sequences[member] for member in members)
        result.append(Microbatch(members, own, trains, pad(own)))
    return result


def sampled_logprobs(model: Any, arranged: Packed | Padded, temperature: float) -> Tensor:
    """Logprobs of the sampled tokens of a microbatch under ``softmax(logits / temperature)``.

    Args:
        model: transformers causal language model, in eval mode; its attention must be the tree's
            (``use_tree_attention``) for packed sequences and the model's own for padded ones.
        arranged: the sequences.
        temperature: positive.

    Returns:
        float32 [sampled tokens], flat in the order of sequences; differentiable.
    """
    device = next(model.parameters()).device
    if isinstance(arranged, Padded):
        return _padded_logprobs(model, arranged, temperature, device)
    return _packed_logprobs(model, arranged, temperature, device)[0]


def _packed_logprobs(
    model: Any, packed: Packed, temperature: float, device: torch.device
) -> tuple[Tensor, TreeTensors]:
    tree = TreeTensors(packed.tree, packed.arrangement, device)
    hidden = model.base_model(
        input_ids=tree.tokens, position_ids=tree.positions, use_cache=False, gymloop_tree=tree
    ).last_hidden_state[0]
    head = model.get_output_embeddings()
    predictors, rows, targets, expand = (
        torch.from_numpy(array).to(device) for array in (packed.predictors, packed.rows, packed.targets, packed.expand)
    )
    distinct = HeadLogprobs.apply(
        hidden.index_select(0, predictors), head.weight, getattr(head, "bias", None), rows, targets, temperature
    )
    return distinct.index_select(0, expand), tree


def _padded_logprobs(model: Any, padded: Padded, temperature: float, device: torch.device) -> Tensor:
    # No attention mask: with causal attention a real token cannot see the padding to its right, and without a mask the
    # fast kernels apply.
    logits = model(input_ids=torch.from_numpy(padded.ids).to(device), use_cache=False).logits
    rows, columns = (torch.from_numpy(array).to(device) for array in (padded.rows, padded.columns))
    targets = torch.from_numpy(padded.ids[padded.rows, padded.columns]).to(device)
    chosen = logits[rows, columns - 1].float() / temperature
    return chosen.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def use_tree_attention(model: Any) -> bool:
    """Switch a model to the tree attention; False where its layers do not take registered functions."""
    register_attention(ATTENTION, tree_attention)
    return set_attention(model, ATTENTION)


def why_not_packed(model: Any, temperature: float, *, tolerance: float = 1e-4, seed: int = 0) -> str | None:
    """Compare packed with unpacked logprobs on a small random batch; the model is left on the tree attention if equal.

    Run it on float32 weights: the question is whether the tree means the same to the architecture, not how a type
    rounds.

    Args:
        model: transformers causal language model in float32, on its own attention.
        temperature: positive.
        tolerance: largest difference, in nats, or relative to the largest logprob where that exceeds 1.
        seed: of the batch.

    Returns:
        None where they agree, else one clause that says why the model trains unpacked.
    """
    config = model.config.get_text_config(decoder=True)
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if unknown:
        return f"its layers of type {', '.join(unknown)} let a token see more, or less, than its ancestors"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return f"its {rope['rope_type']} position encoding depends on the longest row of the microbatch"
    own = config._attn_implementation
    sequences = _probe_sequences(int(config.vocab_size), seed)
    with torch.no_grad():
        expected = torch.cat([sampled_logprobs(model, pad([sequence]), temperature) for sequence in sequences])
        if not use_tree_attention(model):
            return "its attention layers do not take registered attention functions"
        try:
            got, tree = _packed_logprobs(model, pack(sequences), temperature, expected.device)
            reason = _difference(expected, got, tolerance) or _missing_window(config, tree)
        # Whatever a foreign forward may raise when it is handed a tree; the padded path just ran, so the model works.
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, NotImplementedError) as error:
            reason = f"packing it fails: {(str(error) or type(error).__name__).splitlines()[0]}"
    if reason is not None:
        set_attention(model, own)
    return reason


def _difference(expected: Tensor, got: Tensor, tolerance: float) -> str | None:
    difference = float((expected - got).abs().max())
    if difference <= tolerance * max(1.0, float(expected.abs().max())):  # also False for NaN
        return None
    return f"packed and unpacked logprobs differ by up to {difference:.2g}"


def _missing_window(config: Any, tree: TreeTensors) -> str | None:
    """A window longer than the probe shows no difference, so it must at least have reached the attention."""
    layers = getattr(config, "layer_types", None)
    expects = "sliding_attention" in layers if layers else getattr(config, "sliding_window", None) is not None
    if expects and tree.windows == {None} and getattr(config, "use_sliding_window", True):
        return "its sliding window does not reach the attention function"
    return None


def _probe_sequences(vocabulary: int, seed: int) -> list[TrainSequence]:
    """Two groups: three sequences that branch early, late and by length; and one apart."""
    generator = np.random.default_rng(seed)
    stem = generator.integers(0, vocabulary, 24)
    early = np.concatenate([stem[:9], generator.integers(0, vocabulary, 11)])
    late = np.concatenate([stem[:20], generator.integers(0, vocabulary, 7)])
    apart = generator.integers(0, vocabulary, 13)
    sequences = []
    for index, ids in enumerate((stem, early, late, apart)):
        sampled = np.arange(6, len(ids))
        nothing = np.zeros(len(sampled), dtype=np.float32)
        sequences.append(TrainSequence("probe", index, ids, sampled, nothing, nothing, nothing))
    return sequences

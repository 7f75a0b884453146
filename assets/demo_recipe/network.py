"""The demo model's forward pass for training: the checkpoint's own parameters, arranged for many questions about one picture.

A training example is one prefix (the picture) and several bins of questions. Every question sees the prefix and itself, never
another question, so each learns exactly what it would learn alone, while the picture is encoded once for all of them. The
arithmetic is that of transformers' Qwen3-VL-MoE; tests/test_demo_model.py compares the two.

Shapes: B pictures rows, N images per row, V visual tokens per image, P prefix tokens, G bins of L tokens, S = P + G*L, H hidden,
T = B*S tokens, E experts, K chosen, I expert width. Matrix products in bfloat16 with float32 master weights, the rest in float32.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3VLMoeForConditionalGeneration
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

LOW = torch.bfloat16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, multiplied in bfloat16, returned in float32."""
    return F.linear(x.to(LOW), weight.to(LOW), None if bias is None else bias.to(LOW)).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


MIDDLE_LAYER = 4
ENOUGH = 0.92  # of a group's choices in a quarter of the experts: it need not specialise further
BLOCK_ROWS = 64  # an expert's rows are padded to a multiple of this, because oneDNN compiles a kernel per matrix shape


@dataclass
class Grouping:
    """The row of each (token, choice) when rows are grouped by expert, each group padded with rows of weight zero."""

    source: Tensor  # [R] the (token, choice) of each row; 0 for padding
    valid: Tensor  # [R] False for padding
    slot: Tensor  # [T, K] the row of each (token, choice)
    bounds: list[int]  # [E + 1] first row of each expert


def group_by_expert(index: Tensor, experts: int) -> Grouping:
    """index [T, K] -> the grouping; R is at most T*K + E*BLOCK_ROWS."""
    flat = index.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts)
    padded = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS
    first, first_padded = counts.cumsum(0) - counts, padded.cumsum(0) - padded
    row = torch.arange(len(flat), device=flat.device) + torch.repeat_interleave(first_padded - first, counts)
    bounds = [0, *padded.cumsum(0).tolist()]
    source, valid = flat.new_zeros(bounds[-1]), torch.zeros(bounds[-1], dtype=torch.bool, device=flat.device)
    source[row], valid[row] = order, True
    slot = torch.empty_like(flat)
    slot[order] = row
    return Grouping(source, valid, slot.view_as(index), bounds)


class Experts(torch.autograd.Function):
    """The routed experts with a hand-written backward: rows grouped by expert, one matrix product per expert and weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """x [T, H], index and weight [T, K], gate_up [E, 2I, H], down [E, H, I] -> [T, H] float32."""
        groups = group_by_expert(index, len(gate_up))
        gate_up_low, down_low = gate_up.to(LOW), down.to(LOW)
        rows = x.to(LOW).index_select(0, groups.source // index.shape[1])  # [R, H]
        row_weight = (weight.flatten().index_select(0, groups.source) * groups.valid)[:, None]  # [R, 1], 0 on padding
        both = _per_expert(rows, gate_up_low.transpose(1, 2), groups.bounds)  # [R, 2I]
        gate, up = both.float().chunk(2, dim=-1)
        weighted = (F.silu(gate) * up * row_weight).to(LOW)  # [R, I]
        outer = _per_expert(weighted, down_low.transpose(1, 2), groups.bounds)  # [R, H]
        ctx.save_for_backward(rows, row_weight, both, weighted, gate_up_low, down_low)
        ctx.groups = groups
        return _sum_choices(outer, groups.slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, Tensor, Tensor]:
        rows, row_weight, both, weighted, gate_up, down = ctx.saved_tensors
        groups = ctx.groups
        grad_rows = grad.to(LOW).index_select(0, groups.source // groups.slot.shape[1])  # [R, H]
        grad_down = _weight_gradient(grad_rows, weighted, groups.bounds)  # padding adds nothing: its weighted rows are 0
        grad_weighted = _per_expert(grad_rows, down, groups.bounds).float()  # [R, I]
        gate, up = both.float().chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        grad_weight = (grad_weighted * silu * up).sum(-1).index_select(0, groups.slot.flatten()).view_as(groups.slot)
        grad_weighted *= row_weight
        grad_both = torch.cat((grad_weighted * up * (sigmoid + silu * (1 - sigmoid)), grad_weighted * silu), dim=-1).to(LOW)
        grad_gate_up = _weight_gradient(grad_both, rows, groups.bounds)
        grad_x = _sum_choices(_per_expert(grad_both, gate_up, groups.bounds), groups.slot)
        return grad_x, None, grad_weight, grad_gate_up, grad_down


def _sum_choices(rows: Tensor, slot: Tensor) -> Tensor:
    """rows [R, H], slot [T, K] -> the sum of each token's K rows [T, H] float32."""
    return F.embedding_bag(slot, rows, mode="sum").float()


def _per_expert(rows: Tensor, matrices: Tensor, bounds: list[int]) -> Tensor:
    """rows [R, a] grouped by expert, matrices [E, a, b] -> [R, b]."""
    out = rows.new_empty(len(rows), matrices.shape[2])
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        if stop > start:
            torch.mm(rows[start:stop], matrices[expert], out=out[start:stop])
    return out


def _weight_gradient(grad: Tensor, rows: Tensor, bounds: list[int]) -> Tensor:
    """grad [R, a], rows [R, b], both grouped by expert -> [E, a, b] float32."""
    parts = [grad[start:stop].T @ rows[start:stop] for start, stop in pairwise(bounds)]
    return torch.stack(parts).float()


@dataclass
class Inside:
    """Intermediate results of one forward pass: the balancing loss, tokens per expert [layers, E], and the bins half way up.

    special_loss: of `specialising`, where a prompt's visual tokens are one group and its text is another; top_share: the share of
    a group's choices that the top quarter of the experts takes. middle: [B, G, L, H] after MIDDLE_LAYER.
    """

    balance_loss: Tensor
    special_loss: Tensor
    top_share: Tensor
    load: Tensor
    middle: Tensor


class TrainingNetwork(nn.Module):
    """The forward pass over (pictures, prefix, bins); uses only the model's parameters."""

    def __init__(self, model: Qwen3VLMoeForConditionalGeneration) -> None:
        super().__init__()
        self.model = model
        self.text = model.config.text_config

    def see(self, pixels: Tensor) -> list[Tensor]:
        """pixels [M, height, width, 3] uint8 -> the merged visual tokens and the deepstack features, each [M, V, H]."""
        visual, config = self.model.model.visual, self.model.config.vision_config
        x, grid = patches(pixels, config.patch_size, config.spatial_merge_size)  # [M, n, 3*16*16]
        kernel = visual.patch_embed.proj.weight.sum(2).flatten(1)  # both frames of a still picture are the same
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid, visual.num_grid_per_side, mode="bilinear", align_corners=True, spatial_merge_size=config.spatial_merge_size
        )
        place = (visual.pos_embed(indices.to(pixels.device)) * weights.to(pixels.device)[:, :, None]).sum(1)
        cos, sin = visual.rotary_pos_emb(x, get_vision_position_ids(grid, config.spatial_merge_size).to(pixels.device))
        x = linear(x, kernel, visual.patch_embed.proj.bias) + place
        features: list[Tensor] = []
        for index, block in enumerate(visual.blocks):
            x = x + self._look(block.attn, block.norm1(x), cos[:, None], sin[:, None])
            inner = F.gelu(linear(block.norm2(x), block.mlp.linear_fc1.weight, block.mlp.linear_fc1.bias), approximate="tanh")
            x = x + linear(inner, block.mlp.linear_fc2.weight, block.mlp.linear_fc2.bias)
            if index in config.deepstack_visual_indexes:
                features.append(self._merge(visual.deepstack_merger_list[len(features)], x))
        return [self._merge(visual.merger, x), *features]

    def _look(self, attention: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        images, count, width = x.shape
        qkv = linear(x, attention.qkv.weight, attention.qkv.bias).view(images, count, 3, attention.num_heads, -1)
        q, k, v = qkv.unbind(2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return linear(out.transpose(1, 2).reshape(images, count, width), attention.proj.weight, attention.proj.bias)

    def _merge(self, merger: Any, x: Tensor) -> Tensor:
        """[M, n, D] -> [M, n/4, H]; four consecutive patches are one visual token."""
        if merger.use_postshuffle_norm:
            x = merger.norm(x.reshape(len(x), -1, merger.hidden_size))
        else:
            x = merger.norm(x).reshape(len(x), -1, merger.hidden_size)
        inner = F.gelu(linear(x, merger.linear_fc1.weight, merger.linear_fc1.bias))
        return linear(inner, merger.linear_fc2.weight, merger.linear_fc2.bias)

    def read(
        self, features: list[Tensor], prefix: Tensor, bins: Tensor, positions: Tensor, mask: Tensor, real: Tensor
    ) -> tuple[Tensor, Inside]:
        """features [B, N*V, H] each, prefix [P], bins [B, G, L], positions [3, B, S], mask [B*G, 1, L, P+L] additive, real [B, S]

        -> hidden states of the bins [B, G, L, H] and the routing.
        """
        language = self.model.model.language_model
        (rows, groups, length), visible = bins.shape, prefix == self.model.config.image_token_id
        ids = torch.cat((prefix.expand(rows, -1), bins.view(rows, -1)), dim=1)
        x = F.embedding(ids, language.embed_tokens.weight)
        where = torch.zeros(ids.shape[1], dtype=torch.bool, device=ids.device)
        where[: len(prefix)] = visible
        x = torch.index_copy(x, 1, where.nonzero()[:, 0], features[0])
        cos, sin = language.rotary_emb(x, positions)
        groups_of = (torch.arange(rows, device=ids.device)[:, None] * 2 + where).flatten()  # [T]: of a picture, and of its text
        losses, specials, tops, loads = [], [], [], []
        for index, layer in enumerate(language.layers):
            x = x + self._attend(layer.self_attn, rms_norm(x, layer.input_layernorm.weight), cos, sin, mask, len(prefix), groups)
            normed = rms_norm(x, layer.post_attention_layernorm.weight)
            out, loss, (special, top), load = self._route(layer.mlp, normed.view(-1, normed.shape[-1]), real.flatten(), groups_of)
            x = x + out.view_as(x)
            losses.append(loss)
            specials.append(special)
            tops.append(top)
            loads.append(load)
            if index == MIDDLE_LAYER:
                middle = x[:, len(prefix) :].view(rows, groups, length, -1)
            if index < len(features) - 1:
                x = torch.index_add(x, 1, where.nonzero()[:, 0], features[index + 1])
        x = rms_norm(x[:, len(prefix) :], language.norm.weight).view(rows, groups, length, -1)
        balance, special, top = (torch.stack(each).mean() for each in (losses, specials, tops))
        return x, Inside(balance, special, top, torch.stack(loads), middle)

    def _attend(self, attention: Any, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, prefix: int, groups: int) -> Tensor:
        rows, length = x.shape[:2]
        weight = torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight))
        heads, kv_heads = self.text.num_attention_heads, self.text.num_key_value_heads
        q, k, v = linear(x, weight).view(rows, length, -1, self.text.head_dim).split((heads, kv_heads, kv_heads), dim=2)
        cos, sin = cos[:, :, None], sin[:, :, None]
        q = rotate(rms_norm(q, attention.q_norm.weight), cos, sin)
        k = rotate(rms_norm(k, attention.k_norm.weight), cos, sin)
        k, v = (t.repeat_interleave(heads // kv_heads, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, heads, S, head_dim]
        first = F.scaled_dot_product_attention(q[:, :, :prefix], k[:, :, :prefix], v[:, :, :prefix], is_causal=True)
        later = F.scaled_dot_product_attention(
            _bins(q, prefix, groups), _with_prefix(k, prefix, groups), _with_prefix(v, prefix, groups), attn_mask=mask
        )
        later = later.view(rows, groups, heads, -1, self.text.head_dim).transpose(1, 2).flatten(2, 3)
        out = torch.cat((first, later), dim=2).transpose(1, 2).reshape(rows, length, -1)
        return linear(out, attention.o_proj.weight)

    def _route(self, block: Any, x: Tensor, real: Tensor, group: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor]:
        probability = F.linear(x, block.gate.weight).softmax(-1)  # [T, E]
        weight, index = probability.topk(self.text.num_experts_per_tok, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = Experts.apply(x, index, weight, block.experts.gate_up_proj, block.experts.down_proj)
        experts, total = probability.shape[1], real.sum()
        load = torch.bincount(index[real].flatten(), minlength=experts).float()
        mean = (probability * real[:, None]).sum(0) / total
        return out, experts * (load / load.sum() * mean).sum(), specialising(probability[real], index[real], group[real]), load


def specialising(probability: Tensor, index: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """A loss that makes each group of tokens use fewer experts, and not the experts that all use; and how few they use.

    probability [T, E], index [T, K] of the chosen experts, group [T] -> the cross-entropy of each group's mean probability with a
    sharpened share of its choices, share^2 / popularity, as in deep embedded clustering (arXiv 1511.06335, equation 3); groups
    whose top quarter of the experts takes ENOUGH do not count. And the mean share of that quarter.
    """
    experts, groups = probability.shape[1], int(group.max()) + 1
    size = torch.bincount(group, minlength=groups)
    there = size > 0
    sums = probability.new_zeros(groups, experts).index_add(0, group, probability)
    mean = sums[there] / size[there, None]
    pairs = (group[:, None] * experts + index).flatten()
    loads = torch.bincount(pairs, minlength=groups * experts).view(groups, experts)[there].float()
    share = loads / loads.sum(1, keepdim=True)
    target = share.square() / loads.sum(0).clamp(min=1)
    target = target / target.sum(1, keepdim=True)
    top = share.topk(experts // 4, dim=1).values.sum(1)
    each = -(target * mean.clamp(min=1e-9).log()).sum(1) / math.log(experts)
    return (each * (top < ENOUGH)).mean(), top.mean()


def _bins(x: Tensor, prefix: int, groups: int) -> Tensor:
    """[B, heads, S, d] -> the bins as rows of a batch, [B*G, heads, L, d]."""
    rows, heads, _, width = x.shape
    return x[:, :, prefix:].view(rows, heads, groups, -1, width).transpose(1, 2).flatten(0, 1)


def _with_prefix(x: Tensor, prefix: int, groups: int) -> Tensor:
    """Keys or values of each bin, the prefix before them: [B*G, heads, P+L, d]."""
    first = x[:, None, :, :prefix].expand(-1, groups, -1, -1, -1).flatten(0, 1)
    return torch.cat((first, _bins(x, prefix, groups)), dim=2)


def patches(pixels: Tensor, size: int, merge: int) -> tuple[Tensor, Tensor]:
    """[M, height, width, 3] uint8 -> normalised patches in merge order [M, n, 3*size*size] and the grid [M (here 1), 3]."""
    images, height, width, channels = pixels.shape
    block = size * merge
    x = pixels.view(images, height // block, merge, size, width // block, merge, size, channels)
    x = x.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(images, -1, channels * size * size)
    return x.float() / 127.5 - 1, torch.tensor([[1, height // size, width // size]])

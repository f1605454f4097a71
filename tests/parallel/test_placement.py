from __future__ import annotations

import pytest
import torch

from surefoot.core.errors import LayoutError
from surefoot.models import ModelSpec, Transformer, declarations
from surefoot.models.spec import AttentionSpec, FeedForwardSpec
from surefoot.parallel import Layout
from surefoot.parallel.context import pieces, split_sequence
from surefoot.parallel.placement import coordinates, copies, place, sharded
from tests.parallel.cells import SPECS, TOKENS

LAYOUTS = [
    Layout(),
    Layout(tensor=4),
    Layout(replicate=2, tensor=2, expert=4),
    Layout(shard=2, context=2, tensor=2, expert=2),
    Layout(replicate=2, shard=3, tensor=2),
    Layout(shard=4, expert=2),
    Layout(shard=2, context=2, expert=4),
]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_element_lies_on_as_many_ranks_as_are_said_to_hold_it(name: str, layout: Layout) -> None:
    for decl in declarations(Transformer(SPECS[name], device="meta")).values():
        holders = torch.zeros(decl.shape, dtype=torch.int64)
        for rank in range(layout.tokens):
            at = coordinates(layout, rank)
            placement = sharded(place(decl, layout, at), decl, layout, at)
            for _, offsets, sizes in placement.boxes():
                holders[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
        assert holders.unique().tolist() == [copies(decl, layout)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parts_put_together_are_the_whole(layout: Layout) -> None:
    for decl in declarations(Transformer(SPECS["moe"], device="meta")).values():
        whole = torch.randn(decl.shape)
        found = torch.full(decl.shape, float("nan"))
        for rank in range(layout.tokens):
            at = coordinates(layout, rank)
            placement = sharded(place(decl, layout, at), decl, layout, at)
            part = placement.take(whole)
            assert tuple(part.shape) == placement.local_shape
            placement.put(part, found)
        assert torch.equal(found, whole)


def test_a_fused_matrix_is_cut_by_heads() -> None:
    """Each rank's rows are its own q heads, then its own k heads, then its own v heads."""
    decl = declarations(Transformer(SPECS["gqa"], device="meta"))["layers.0.mixer.qkv.weight"]
    q, k, v = decl.sections
    whole = torch.arange(sum(decl.sections))[:, None].expand(decl.shape)
    for rank in range(2):
        part = place(decl, Layout(tensor=2), coordinates(Layout(tensor=2), rank)).take(whole)[:, 0].tolist()
        expected = [start + rank * size // 2 + i for start, size in ((0, q), (q, k), (q + k, v)) for i in range(size // 2)]
        assert part == expected


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
@pytest.mark.parametrize("context", [1, 2, 4])
def test_context_ranks_share_out_a_sequence(context: int, attention: str) -> None:
    layout = Layout(context=context, attention=attention)
    x = torch.arange(TOKENS).repeat(3, 1)
    parts = [split_sequence(x, layout, rank) for rank in range(context)]
    assert torch.cat(parts, dim=1).sort(dim=1).values.equal(x)
    work = [sum(piece + 1 for piece in pieces(layout, rank)) for rank in range(context)]  # pieces of keys seen
    assert attention == "ulysses" or len(set(work)) == 1


SPEC = ModelSpec(vocab_size=64, dim=48, layers=4, attention=AttentionSpec(heads=6, kv_heads=3, head_dim=8), ffn=FeedForwardSpec(hidden=96))


@pytest.mark.parametrize(
    ("layout", "sequence", "says"),
    [
        (Layout(tensor=2), 32, r"layout\.tensor: 3 key/value heads do not divide among 2 — use 1 or 3"),
        (Layout(tensor=3), 32, r"data\.sequence_length: 32 tokens do not divide into 3 pieces .* — use 30 or 33"),
        (Layout(context=8), 24, r"24 tokens do not divide into 16 pieces"),
        (Layout(replicate=2, expert=2), 32, r"layout\.expert: the model has no experts"),
        (Layout(pipeline=8), 32, r"layout\.pipeline: 4 layers are fewer than 8 x 1 stages — use at most 4"),
        (Layout(context=2, attention="ulysses"), 32, r"layout\.context: 3 key/value heads of a tensor rank do not divide among 2"),
        (Layout(pipeline=2, shard=2, schedule="zero_bubble"), 32, r"layout\.schedule: zero_bubble puts weight gradients off"),
    ],
    ids=str,
)
def test_what_a_model_cannot_take_is_refused_with_what_it_can(layout: Layout, sequence: int, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        layout.check_model(SPEC, sequence)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(replicate=3, expert=3), r"8 experts do not divide among 3 — use 2 or 4"),
        (Layout(replicate=2, expert=4), r"2 token ranks .* do not divide among 4 — use 2 or 1"),
        (Layout(replicate=4, shard=2, expert=4), r"2 token ranks of a replica .* do not divide among 4"),
    ],
    ids=str,
)
def test_experts_that_do_not_divide_are_refused(layout: Layout, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        layout.check_model(SPECS["moe"], TOKENS)

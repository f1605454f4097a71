from __future__ import annotations

import math

import pytest
import torch

from surefoot.models import ModelSpec, Transformer, declarations, initialise, learning_rate_multiplier
from surefoot.models.init import drawn
from surefoot.models.spec import AttentionSpec, FeedForwardSpec, InitSpec


def spec_of(dim: int, layers: int = 2, scheme: str = "fan_in") -> ModelSpec:
    return ModelSpec(
        vocab_size=256, dim=dim, layers=layers, init=InitSpec(scheme=scheme, base_dim=64),
        attention=AttentionSpec(heads=dim // 16, kv_heads=dim // 16, head_dim=16), ffn=FeedForwardSpec(hidden=2 * dim),
    )  # fmt: skip


TOKENS = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scheme", ["fan_in", "mup"])
@pytest.mark.parametrize("dim", [64, 256])
def test_the_first_loss_is_ln_of_the_vocabulary(dim: int, scheme: str) -> None:
    model = Transformer(spec_of(dim, scheme=scheme))
    initialise(model, 0)
    loss = model(TOKENS, labels=TOKENS.roll(-1, 1), normaliser=TOKENS.numel())
    assert float(loss.cross_entropy) == pytest.approx(math.log(256), abs=0.1)


def test_the_stream_does_not_grow_with_depth() -> None:
    sizes = []
    for layers in (2, 16):
        model = Transformer(spec_of(64, layers))
        initialise(model, 0)
        seen: list[float] = []
        model.layers[str(layers - 1)].register_forward_hook(
            lambda module, inputs, out, seen=seen: seen.append(float(out[0].detach().square().mean()))
        )
        model(TOKENS)
        sizes.append(seen[0])
    assert sizes[1] < 2.0 * sizes[0]


def test_weights_depend_on_name_and_seed_alone() -> None:
    one, two, other = (Transformer(spec_of(64, layers)) for layers in (2, 2, 2))
    initialise(one, 3)
    torch.manual_seed(99)
    torch.randn(1000)
    initialise(two, 3)
    initialise(other, 4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.layers["0"].ffn.down.weight, other.layers["0"].ffn.down.weight)
    assert not torch.equal(one.layers["0"].ffn.down.weight, one.layers["1"].ffn.down.weight)


def coordinate_change(dim: int, scheme: str) -> float:
    """Mean absolute change of the logits after 3 Adam steps."""
    spec = spec_of(dim, scheme=scheme)
    model = Transformer(spec)
    initialise(model, 0)
    decls = declarations(model)
    groups = [{"params": [p], "lr": 1e-2 * learning_rate_multiplier(decls[n], spec)} for n, p in model.named_parameters()]
    optimizer = torch.optim.Adam(groups)
    with torch.no_grad():
        before = model(TOKENS)
    for _ in range(3):
        optimizer.zero_grad()
        model(TOKENS, labels=TOKENS.roll(-1, 1), normaliser=TOKENS.numel()).total.backward()
        optimizer.step()
    with torch.no_grad():
        return float((model(TOKENS) - before).abs().mean())


def test_mup_keeps_the_size_of_an_update_over_the_width() -> None:
    """The coordinate check of Yang et al. 2022 (arXiv 2203.03466, appendix D.1): flat under muP, growing without it."""
    growth = {scheme: coordinate_change(512, scheme) / coordinate_change(64, scheme) for scheme in ("mup", "fan_in")}
    assert 0.5 < growth["mup"] < 2.0
    assert growth["fan_in"] > 2.0 * growth["mup"]


@pytest.mark.parametrize("first", [torch.float64, torch.bfloat16])
def test_weights_are_the_same_numbers_in_every_dtype_and_order(first: torch.dtype) -> None:
    wide = Transformer(spec_of(64), dtype=torch.float32)
    initialise(wide, 3)
    other = Transformer(spec_of(64), device="meta", dtype=first).to_empty(device="cpu")
    initialise(other, 7)
    initialise(other, 3)
    decls = declarations(other)
    for name in reversed(decls):  # any order gives what the whole gave
        before = other.get_parameter(name).clone()
        other.get_parameter(name).data.zero_()
        other.get_parameter(name).data.copy_(drawn(name, decls[name], other.spec, 3, first))
        assert torch.equal(other.get_parameter(name), before)
    for one, two in zip(wide.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.to(first), two)


def test_drawn_deviations_are_the_stated_ones() -> None:
    for scheme, head in (("fan_in", 1 / 256), ("fixed", 0.02), ("mup", 1 / 64)):
        model = Transformer(spec_of(256, 8, scheme))
        initialise(model, 0)
        hidden = 0.02 if scheme == "fixed" else 1 / 16
        expected = {"embed.weight": 0.02, "head.weight": head, "layers.3.mixer.qkv.weight": hidden, "layers.3.mixer.out.weight": hidden / 4}
        for name, value in expected.items():
            assert float(model.get_parameter(name).detach().std()) == pytest.approx(value, rel=0.02), (scheme, name)


def block_change(dim: int, scheme: str) -> float:
    """Mean absolute change of the last block's output after 3 Adam steps, as `coordinate_change`."""
    spec = spec_of(dim, scheme=scheme)
    model = Transformer(spec)
    initialise(model, 0)
    decls = declarations(model)
    optimizer = torch.optim.Adam(
        [{"params": [p], "lr": 1e-2 * learning_rate_multiplier(decls[n], spec)} for n, p in model.named_parameters()]
    )
    outputs: list[torch.Tensor] = []
    model.layers[str(spec.layers - 1)].register_forward_hook(lambda module, inputs, out: outputs.append(out[0].detach()))
    for _ in range(3):
        optimizer.zero_grad()
        model(TOKENS, labels=TOKENS.roll(-1, 1), normaliser=TOKENS.numel()).total.backward()
        optimizer.step()
    model(TOKENS)
    return float((outputs[-1] - outputs[0]).abs().mean())


def test_mup_keeps_activations_changing_alike_over_every_width() -> None:
    changes = {scheme: [block_change(dim, scheme) for dim in (64, 128, 256, 512)] for scheme in ("mup", "fan_in")}
    assert max(changes["mup"]) < 1.5 * min(changes["mup"]), changes
    assert changes["fan_in"] == sorted(changes["fan_in"]), changes
    assert changes["fan_in"][-1] > 2.0 * changes["fan_in"][0], changes

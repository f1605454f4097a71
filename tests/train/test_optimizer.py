from __future__ import annotations

import pytest
import torch

from surefoot.models import ModelSpec, Transformer, declarations, initialise
from surefoot.models.spec import AttentionSpec, FeedForwardSpec, InitSpec
from surefoot.train.config import OptimizerConfig
from surefoot.train.optimizer import Optimizer, groups, muon_direction, orthogonalise

SPEC = ModelSpec(
    vocab_size=50, dim=16, layers=2, attention=AttentionSpec(heads=2, kv_heads=1, head_dim=8, qkv_bias=True), ffn=FeedForwardSpec(hidden=24)
)


def model_of(dtype: torch.dtype) -> Transformer:
    model = Transformer(SPEC, dtype=dtype)
    initialise(model, 0)
    return model


def gradients(model: Transformer, step: int) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        for name, parameter in model.named_parameters()
    }


def test_adamw_equals_torch_with_the_same_groups() -> None:
    ours, theirs = model_of(torch.float64), model_of(torch.float64)
    config = OptimizerConfig(lr=1e-2, weight_decay=0.3)
    optimizer = Optimizer(dict(ours.named_parameters()), declarations(ours), SPEC, config)
    decays = [p for n, p in theirs.named_parameters() if p.dim() == 2 and not n.startswith("embed")]
    others = [p for n, p in theirs.named_parameters() if p.dim() != 2 or n.startswith("embed")]
    reference = torch.optim.AdamW(
        [{"params": decays, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95), eps=1e-8
    )
    for step in range(5):
        found = gradients(ours, step)
        for name, parameter in theirs.named_parameters():
            gradient = found[name]
            assert gradient is not None
            parameter.grad = gradient * 0.5
        reference.step()
        optimizer.step(found, lr=1e-2, clip=0.5)
    for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14, msg=name)


def test_norms_biases_and_embeddings_never_decay() -> None:
    decls = declarations(model_of(torch.float32))
    for group in groups(decls, SPEC, OptimizerConfig(weight_decay=0.1)):
        for name in group.names:
            undecayed = decls[name].role in ("norm", "bias", "embedding")
            assert (group.weight_decay == 0.0) == undecayed, name


def test_mup_divides_the_rate_of_hidden_matrices_by_the_width() -> None:
    spec = SPEC.model_copy(update={"init": InitSpec(scheme="mup", base_dim=4)})
    found = {
        name: group.lr_multiplier for group in groups(declarations(Transformer(spec)), spec, OptimizerConfig()) for name in group.names
    }
    assert found["layers.0.mixer.qkv.weight"] == found["layers.1.ffn.down.weight"] == 0.25
    assert found["embed.weight"] == found["norm.weight"] == found["head.weight"] == 1.0


@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (32, 8), (3, 8, 12)])
def test_muon_makes_singular_values_near_one(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalise(matrix, iterations=8))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


def test_muon_treats_each_fused_product_on_its_own() -> None:
    matrix = torch.randn(24, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole = muon_direction(matrix, (16, 8))
    torch.testing.assert_close(whole[:16], muon_direction(matrix[:16], ()))
    torch.testing.assert_close(whole[16:], muon_direction(matrix[16:], ()))


def test_the_first_step_of_muon_is_its_direction_section_by_section() -> None:
    """Momentum starts at zero, so the first Nesterov direction is that of the gradient; its length does not matter."""
    model = model_of(torch.float64)
    optimizer = Optimizer(dict(model.named_parameters()), declarations(model), SPEC, OptimizerConfig(kind="muon", weight_decay=0.0))
    found, before = gradients(model, 0), {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer.step(found, lr=1e-2)
    name = "layers.0.mixer.qkv.weight"  # 16 rows of queries, 8 of keys, 8 of values
    gradient = found[name]
    assert gradient is not None
    expected = torch.cat([orthogonalise(piece) * 0.2 * 4.0 for piece in gradient.split((16, 8, 8))])  # 4 = sqrt(max(rows, 16))
    moved = (before[name] - model.get_parameter(name).detach()) / 1e-2
    torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-6)  # 1e-7 is added to the norm before dividing


def test_bfloat16_weights_are_the_rounding_of_float32_masters() -> None:
    """Updates far below a bfloat16 step must add up in the masters: without them a weight of one would never move."""
    model = model_of(torch.bfloat16)
    optimizer = Optimizer(dict(model.named_parameters()), declarations(model), SPEC, OptimizerConfig(lr=1e-5))
    for _ in range(400):
        optimizer.step({name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}, lr=1e-5)
    masters = optimizer.state["master"]
    assert float(masters["norm.weight"].mean()) == pytest.approx(1.0 - 400e-5, abs=1e-4)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, masters[name].to(torch.bfloat16)), name
    assert float(model.norm.weight.mean().detach()) < 1.0


def test_a_parameter_without_a_gradient_stays() -> None:
    model = model_of(torch.float64)
    optimizer = Optimizer(dict(model.named_parameters()), declarations(model), SPEC, OptimizerConfig())
    found = gradients(model, 0) | {"norm.weight": None}
    before = model.norm.weight.detach().clone()
    optimizer.step(found, lr=1e-2)
    assert torch.equal(model.norm.weight, before)

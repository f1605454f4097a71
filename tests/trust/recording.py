"""Traces of one real step of a small model: forward and backward by hooks, then clipping and AdamW by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from surefoot.models import ModelSpec, Transformer, initialise
from surefoot.models.spec import AttentionSpec, FeedForwardSpec
from surefoot.trust import Entry, Owner, Trace

ROWS, TOKENS, VOCAB = 4, 24, 41
SPEC = ModelSpec(
    vocab_size=VOCAB,
    dim=32,
    layers=2,
    max_positions=64,
    attention=AttentionSpec(heads=4, kv_heads=2, head_dim=8, qkv_bias=True, rotary_fraction=0.5),
    ffn=FeedForwardSpec(hidden=64),
)


@dataclass(frozen=True)
class Data:
    """tokens, labels, positions, documents: [B, T]."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor

    def rows(self, start: int, stop: int) -> Data:
        return Data(*(one[start:stop] for one in (self.tokens, self.labels, self.positions, self.documents)))


def data(seed: int = 0) -> Data:
    """Packed rows with unequal numbers of trained tokens."""
    g = torch.Generator().manual_seed(seed)
    stream = torch.randint(0, VOCAB, (ROWS, TOKENS + 1), generator=g)
    labels = stream[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : 3 * row] = -100
    documents, positions = torch.zeros(ROWS, TOKENS, dtype=torch.int32), torch.arange(TOKENS).repeat(ROWS, 1)
    documents[1, 10:], positions[1, 10:] = 1, torch.arange(TOKENS - 10)
    return Data(stream[:, :-1].clone(), labels, positions, documents)


@dataclass(frozen=True)
class Adam:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) after `step` - 1 earlier steps."""

    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    decay: float = 0.1
    step: int = 3
    clip: float = 0.05

    def __call__(self, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = self.betas
        m, v = a * m + (1 - a) * g, b * v + (1 - b) * g * g
        ahead = (m / (1 - a**self.step)) / ((v / (1 - b**self.step)).sqrt() + self.eps)
        return p * (1 - self.lr * self.decay) - self.lr * ahead, m, v


def model(dtype: torch.dtype = torch.float64, seed: int = 1) -> Transformer:
    """The model, its weights representable in bfloat16 and its biases not zero."""
    made = Transformer(SPEC, dtype=torch.float32)
    initialise(made, seed)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.1, generator=g)
            parameter.copy_(parameter.bfloat16())
    return made.to(dtype)


def record(
    *,
    dtype: torch.dtype = torch.float64,
    prepare: Callable[[Transformer], None] = lambda model: None,
    batch: Data | None = None,
    micro_batches: int = 1,
    mean_of_means: bool = False,
    reduce: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda gradients: gradients,
    moments: Callable[[str, Tensor], Tensor] = lambda name, moment: moment,
    optimizer: Adam | None = None,
    told: Adam | None = None,
    earlier_gradients: bool = True,
) -> Trace:
    """Return the trace of one step. `told`: what the facts say of the optimizer, if not the truth."""
    optimizer = optimizer or Adam()
    net, whole = model(dtype), batch or data()
    prepare(net)
    forward: dict[str, list[Tensor]] = {}
    backward: dict[str, list[Tensor]] = {}

    def watch(name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, __: object, output: object) -> None:
            out = output[0] if isinstance(output, tuple) else output
            assert isinstance(out, Tensor)
            forward.setdefault(name, []).append(out.detach().clone())
            out.register_hook(lambda grad: backward.setdefault(name, []).append(grad.detach().clone()))

        module.register_forward_hook(hook)

    for name, module in net.named_modules():
        if name and not isinstance(module, nn.ModuleDict):
            watch(name, module)
    trained = int((whole.labels != -100).sum())
    size = ROWS // micro_batches
    losses = []
    for start in range(0, ROWS, size):
        part = whole.rows(start, start + size)
        count = int((part.labels != -100).sum()) * micro_batches if mean_of_means else trained
        found = net(part.tokens, part.positions, part.documents, labels=part.labels, normaliser=count)
        found.total.backward()
        losses.append(found.total.detach())
    gradients = reduce({name: parameter.grad.detach().clone() for name, parameter in net.named_parameters() if parameter.grad is not None})
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    norm = torch.stack([one.to(wide).square().sum() for one in gradients.values()]).sum().sqrt()
    clipped = {name: one.to(wide) * min(1.0, optimizer.clip / float(norm)) for name, one in gradients.items()}
    entries = [Entry("tokens", "forward", 0, whole.tokens)]
    entries += [Entry(name, "forward", i + 1, torch.cat(parts)) for i, (name, parts) in enumerate(forward.items())]
    entries.append(Entry("loss", "forward", len(entries), torch.stack(losses).sum()))
    entries += [Entry(name, "backward", i, torch.cat(parts)) for i, (name, parts) in enumerate(backward.items())]
    entries += [Entry(name, "reduction", i, one) for i, (name, one) in enumerate(reversed(gradients.items()))]
    entries.append(Entry("gradient_norm", "clipping", 0, norm))
    entries += [Entry(name, "clipping", i + 1, one) for i, (name, one) in enumerate(clipped.items())]
    for i, (name, g) in enumerate(clipped.items()):
        draw = torch.Generator().manual_seed(i)
        first = 1e-3 * torch.randn(g.shape, generator=draw, dtype=torch.float64).to(wide)
        second = 1e-6 * torch.rand(g.shape, generator=draw, dtype=torch.float64).to(wide)
        if not earlier_gradients:
            first, second = torch.zeros_like(first), torch.zeros_like(second)
        p, m, v = optimizer(net.get_parameter(name).detach().to(wide), g, moments(name, first), moments(name, second))
        entries += [Entry(name, "update", 3 * i, p), Entry(f"{name}.exp_avg", "update", 3 * i + 1, m)]
        entries.append(Entry(f"{name}.exp_avg_sq", "update", 3 * i + 2, v))
    said = told or optimizer
    facts = {
        "optimizer": {"lr": said.lr, "betas": list(said.betas), "decay": said.decay, "step": said.step},
        "samples": [0, 1, 2, 3],
        "trained_tokens": trained,
        "layout": {"micro_batches": micro_batches},
    }
    return Trace(tuple(entries), facts)


def edit(trace: Trace, phase: str, name: str, change: Callable[[Tensor], Tensor], owners: tuple[Owner, ...] = ()) -> Trace:
    """Return the trace with one tensor changed."""
    return Trace(
        tuple(
            replace(one, tensor=change(one.tensor.clone()), owners=owners) if (one.phase, one.name) == (phase, name) else one
            for one in trace.entries
        ),
        trace.facts,
    )


def after(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Transformer], None]:
    """Change the output of the module `name` in the forward pass."""

    def prepare(net: Transformer) -> None:
        net.get_submodule(name).register_forward_hook(lambda module, inputs, output: change(output))

    return prepare


def gradient_of(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Transformer], None]:
    """Change the gradient of the output of the module `name`, as the modules before it receive it."""

    def hook(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        output.register_hook(change)
        return output

    return lambda net: net.get_submodule(name).register_forward_hook(hook) and None


def product(name: str, compute: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Transformer], None]:
    """Compute the product x W^T (+ b) of the linear layer `name` otherwise."""

    def prepare(net: Transformer) -> None:
        layer = net.get_submodule(name)
        layer.product = lambda x, w, b: compute(x, w) if b is None else compute(x, w) + b

    return prepare

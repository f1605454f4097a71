"""A stand-in for each layout, built from torch's own parallel APIs around a plain Llama module; a peer for layouts of two processes.

Data: DistributedDataParallel. Shards: fully_shard a block. Tensor: parallelize_module, column- and row-wise with sequence parallelism and
loss_parallel. Pipeline: PipelineStage and Schedule1F1B. Torch has none for experts, and its context_parallel has no rule for a CPU kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class Shape:
    vocab: int
    dim: int
    layers: int
    heads: int
    ffn: int
    sequence: int


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size = shape.dim // shape.heads
        self.q, self.k, self.v, self.out = (nn.Linear(shape.dim, shape.dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (layer(x).view(batch, tokens, -1, self.size).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, -1))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.dim, shape.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = (nn.RMSNorm(shape.dim, eps=1e-5) for _ in range(2))
        self.attention, self.ffn = Attention(shape), FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), cos, sin)
        return x + self.ffn(self.norm_2(x))


class Llama(nn.Module):
    """tokens: [B, T] -> logits [B, T, V]. As a pipeline stage it has some of the blocks and perhaps neither end."""

    def __init__(self, shape: Shape, blocks: range | None = None) -> None:
        super().__init__()
        mine = range(shape.layers) if blocks is None else blocks
        self.embed = nn.Embedding(shape.vocab, shape.dim) if mine.start == 0 else None
        self.blocks = nn.ModuleDict({str(index): Block(shape) for index in mine})
        last = mine.stop == shape.layers
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5) if last else None
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False) if last else None
        size = shape.dim // shape.heads
        theta = 10_000.0 ** (-torch.arange(0, size, 2) / size)
        angle = torch.arange(shape.sequence)[:, None] * theta
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x, self.cos, self.sin)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def load(model: Llama, source: Mapping[str, Tensor], shape: Shape) -> None:
    """Take the weights of a surefoot model of the same shape."""
    state = {}
    for name in model.state_dict():
        words = name.split(".")
        if words[0] != "blocks":
            state[name] = source[name]
            continue
        theirs = f"layers.{words[1]}."
        if words[2] == "attention":
            fused = source[theirs + "mixer.qkv.weight"].split(shape.dim)
            state[name] = source[theirs + "mixer.out.weight"] if words[3] == "out" else fused["qkv".index(words[3])]
        elif words[2] == "ffn":
            fused = source[theirs + "ffn.gate_up.weight"].split(shape.ffn)
            state[name] = source[theirs + "ffn.down.weight"] if words[3] == "down" else fused[words[3] == "up"]
        else:
            state[name] = source[theirs + ("mixer_norm.weight" if words[2] == "norm_1" else "ffn_norm.weight")]
    model.load_state_dict(state)


def stand_in(layout: str, shape: Shape, source: Mapping[str, Tensor], lr: float, rows: int) -> Step:
    """Return step(tokens, labels) -> loss of the whole batch; tokens: [rows, T], the same on every rank."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    if layout == "pipeline":
        return _pipeline(shape, source, lr, rows)
    model = Llama(shape)
    load(model, source, shape)
    if layout == "replicate":
        run: nn.Module = DistributedDataParallel(model)
    elif layout == "shard":
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh)
        run = fully_shard(model, mesh=mesh)
    else:
        run = _tensor(model, mesh)
    optimizer = _adamw(run, lr)
    mine = slice(None) if layout == "tensor" else slice(rank * rows // size, (rank + 1) * rows // size)

    def step(tokens: Tensor, labels: Tensor) -> float:
        with loss_parallel():
            logits = run(tokens[mine])
            loss = F.cross_entropy(logits.flatten(0, 1), labels[mine].flatten())
            loss.backward()
        norm = nn.utils.clip_grad_norm_(run.parameters(), 1.0)
        assert isinstance(norm, Tensor)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()
        if layout != "tensor":
            value = value.clone()
            dist.all_reduce(value)
            value /= size
        return float(value)

    return step


def _adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)


def _tensor(model: Llama, mesh: DeviceMesh) -> nn.Module:
    """As torchtitan lays it out: the stream cut along the sequence between blocks."""
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for block in model.blocks.values():
        parallelize_module(
            block,
            mesh,
            {
                "norm_1": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)),
                "attention.q": ColwiseParallel(),
                "attention.k": ColwiseParallel(),
                "attention.v": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "norm_2": SequenceParallel(),
                "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "ffn.gate": ColwiseParallel(),
                "ffn.up": ColwiseParallel(),
                "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    return model


def _pipeline(shape: Shape, source: Mapping[str, Tensor], lr: float, rows: int) -> Step:
    size, rank = dist.get_world_size(), dist.get_rank()
    per = shape.layers // size
    model = Llama(shape, range(rank * per, (rank + 1) * per))
    load(model, source, shape)
    stage = PipelineStage(model, rank, size, torch.device("cpu"))
    micro_batches = rows  # one row each

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    schedule = Schedule1F1B(stage, n_microbatches=micro_batches, loss_fn=loss_of)
    optimizer = _adamw(model, lr)

    def step(tokens: Tensor, labels: Tensor) -> float:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=labels, losses=losses)
        squares = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum()
        dist.all_reduce(squares)
        scale = (1.0 / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], scale)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(value)
        return float(value)

    return step

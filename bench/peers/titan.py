"""torchtitan's own Trainer and Llama model on a CPU, where it does not run by itself.

What is replaced, and nothing else: the device queries that assume an accelerator, the variable-length attention kernel that has
no CPU form (by SDPA, at the run's precision, its fastest form for one document a row), the data (the bench's tokens) and the
learning-rate schedule (constant). Activation checkpointing is off, since no other peer recomputes. FSDP2 stays installed, as
torchtitan always installs it, on a group of one.
"""

from __future__ import annotations

import collections
import logging
import os
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import llama, protocol


def pretend_device() -> None:
    """Make torchtitan see the CPU as its device; must run before torchtitan is imported."""
    device = types.ModuleType("cpu_device")
    device.__dict__.update(vars(torch.cpu))
    properties = types.SimpleNamespace(total_memory=2**34, name="cpu")
    device.__dict__.update(
        get_device_name=lambda *_: "cpu",
        get_device_properties=lambda *_: properties,
        memory_stats=lambda *_: collections.defaultdict(int),
        reset_peak_memory_stats=lambda *_: None,
        empty_cache=lambda: None,
        set_device=lambda *_: None,
        synchronize=lambda *_: None,
        current_device=lambda: 0,
    )
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda *_: device
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda *_, **__: None
    from torch.distributed.fsdp import FSDPModule

    divide = FSDPModule.set_gradient_divide_factor

    def divide_by_sum(self: Any, factor: float) -> None:
        self.set_force_sum_reduction_for_comms(True)
        divide(self, factor)

    FSDPModule.set_gradient_divide_factor = divide_by_sum


class Nothing:
    """Stands where torchtitan builds a tokenizer and a loader: the bench brings its own tokens."""

    interval = 10**9

    def build(self, **_: Any) -> Nothing:
        return self

    def to_dict(self) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def make_trainer(shape: llama.Shape, precision: str, compiled: bool, scratch: str) -> Any:
    pretend_device()
    from torchtitan.models import llama3
    from torchtitan.models.common import attention
    from torchtitan.models.llama3 import config_registry
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
    from torchtitan.trainer import Trainer

    logging.getLogger().setLevel(logging.WARNING)

    def sdpa(self: Any, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: Any = None, scale: float | None = None, **_: Any) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, scale=scale).transpose(1, 2)

    attention.VarlenAttention.forward = sdpa
    spec = config_registry.model_registry("debugmodel", attn_backend="varlen")
    model = spec.model
    model.dim, model.vocab_size = shape.dim, shape.vocab
    model.tok_embeddings.num_embeddings, model.tok_embeddings.embedding_dim = shape.vocab, shape.dim
    model.norm.normalized_shape, model.norm.eps = shape.dim, llama.NORM_EPS
    model.lm_head.in_features, model.lm_head.out_features = shape.dim, shape.vocab
    rope = llama3.ComplexRoPE.Config(dim=shape.head_dim, max_seq_len=shape.sequence, theta=llama.ROPE_THETA, scaling="none")
    model.layers = llama3._build_llama3_layers(
        n_layers=shape.layers, dim=shape.dim, n_heads=shape.heads, hidden_dim=shape.ffn, rope=rope, attn_backend="varlen"
    )
    for layer in model.layers:
        layer.attention_norm.eps = layer.ffn_norm.eps = llama.NORM_EPS
    config = config_registry.llama3_debugmodel_varlen_attn()
    config.model_spec = spec
    config.loss.loss_fn.global_vocab_size = shape.vocab
    config.tokenizer, config.dataloader, config.activation_checkpoint = Nothing(), Nothing(), None
    config.dump_folder = scratch
    config.optimizer = config_registry.default_adamw(lr=llama.LEARNING_RATE)
    config.training.local_batch_size, config.training.seq_len, config.training.steps = shape.batch, shape.sequence, 10**6
    config.training.dtype = "bfloat16" if precision == "bfloat16" else "float32"
    config.training.mixed_precision_param = "float32" if precision == "float32" else "bfloat16"
    config.training.max_norm = llama.CLIP
    config.parallelism.spmd_backend = "partial_dtensor"
    config.metrics.log_freq = 10**9
    config.validator.enable = config.checkpoint.enable = False
    config.compile.enable = compiled
    trainer = Trainer(config)
    adapter = Llama3StateDictAdapter(model, None)
    load(trainer.model_parts[0], adapter.from_hf(llama.weights(shape)))
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = llama.LEARNING_RATE
    trainer.lr_schedulers.step = lambda: None
    return trainer


def load(model: Any, source: dict[str, Tensor]) -> None:
    """Load plain weights into a model that FSDP2 has sharded over one process, whose local shard is the whole tensor."""
    from torch.distributed.tensor import DTensor

    target = model.state_dict()
    ready = {}
    for name, value in source.items():
        like = target[name]
        value = value.to(like.dtype)
        ready[name] = DTensor.from_local(value, like.device_mesh, like.placements) if isinstance(like, DTensor) else value
    model.load_state_dict(ready)


def main() -> None:
    args = protocol.parse()
    channel = protocol.open_channel(args.threads)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    store = Path(f"rendezvous-{os.getpid()}").resolve()
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    torch.distributed.init_process_group = lambda *_, **__: None
    shape = llama.SHAPES[args.size]
    trainer = make_trainer(shape, args.precision, args.compile, str(Path.cwd()))
    last: list[Tensor] = []
    inner = trainer.fwd_bwd_fn

    def keep(*arguments: Any) -> Tensor:
        loss = inner(*arguments)
        last[:] = [loss]
        return loss

    trainer.fwd_bwd_fn = keep
    positions = torch.arange(shape.sequence)[None].expand(shape.batch, -1)

    def step(index: int) -> Tensor:
        tokens, labels = llama.batch(shape, index)
        trainer.step = index + 2  # its first step is always logged
        trainer.train_step(iter([({"input": tokens, "positions": positions}, labels)]))
        return last[0]

    parameters = sum(parameter.numel() for parameter in trainer.model_parts[0].parameters())
    protocol.serve(
        channel, step, tokens_per_step=shape.tokens_per_step, parameters=parameters, version=f"torchtitan {version('torchtitan')}"
    )


if __name__ == "__main__":
    main()

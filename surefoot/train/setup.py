"""From a configuration to a session: model, optimizer and gradient sync on this process, fresh or taken up from a checkpoint."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from surefoot.cluster import matmul_peak
from surefoot.core.allocator import keep_freed_memory
from surefoot.core.config import to_json
from surefoot.core.errors import CheckpointError, ModelError
from surefoot.models import ModelSpec, ParamDecl, Transformer
from surefoot.models.flops import count_flops, count_parameters
from surefoot.models.moe import MoE
from surefoot.models.parameters import accumulation_dtype
from surefoot.parallel import GradientSync, Layout, Mesh, ParallelModel, Processes, make_mesh, parallelise
from surefoot.parallel.collectives import all_reduce
from surefoot.parallel.pipeline import Pipeline
from surefoot.parallel.process import device_of
from surefoot.train.checkpoint import load, load_model, newest_whole
from surefoot.train.config import CheckConfig, TrainConfig
from surefoot.train.feed import Feed
from surefoot.train.optimizer import Optimizer, groups
from surefoot.train.state import TrainState

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bfloat16_autocast": torch.float32,
    "float64": torch.float64,
}


@dataclass
class Session:
    """What a run needs on this process."""

    config: TrainConfig
    parallel: ParallelModel
    state: TrainState
    sync: GradientSync
    processes: Processes
    feed: Feed
    micro_batches: int
    flops_per_token: float
    facts: dict[str, Any]
    description: dict[str, Any]
    pipeline: Pipeline | None = None
    counts: dict[str, Tensor] = field(default_factory=dict)
    data: dict[str, Any] | None = None  # where a checkpoint says that the planning of a mixture stood

    @property
    def model(self) -> Transformer:
        return self.parallel.model

    def requests(self) -> Iterator[tuple[int, int]]:
        """Yield (position, count) of this process's micro-batches from the present step on."""
        batch = self.config.train.batch_size
        mine = batch // self.feed.layout.data
        micro = mine // self.micro_batches
        start = self.state.position
        for step in range(self.config.train.steps - self.state.step):
            for index in range(self.micro_batches):
                yield start + step * batch + self.feed.index * mine + index * micro, micro

    def count_experts(self, layers: range | None = None) -> None:
        """Add the routers' counts of the forward pass (of `layers`) that just ended, before a recomputed one could replace them."""
        for number, block in self.model.layers.items():
            if isinstance(block.ffn, MoE) and (layers is None or int(number) in layers):
                counts = block.ffn.counts
                self.counts[number] = self.counts[number] + counts if number in self.counts else counts.clone()

    def balance_experts(self) -> None:
        """Move selection biases by the counts of the whole step, summed over micro-batches and the ranks that hold its tokens."""
        if self.counts:
            total = torch.stack(list(self.counts.values()))
            group = self.parallel.mesh.sums["tokens"]
            self.model.update_balance(list(total if group is None else all_reduce(total, group)))


def open_mesh(config: TrainConfig, processes: Processes) -> Mesh:
    """Join the groups of the layout, after checking that model and sequences can be cut so."""
    layout = config.layout.for_world(processes.size)
    layout.check(processes.size)
    layout.check_model(config.model, config.data.sequence_length)
    return make_mesh(layout, processes, device_of(config.train.device))


def open_session(config: TrainConfig, processes: Processes, *, resume: bool, mesh: Mesh | None = None) -> Session:
    """Build everything on this process, on groups that stand already if `mesh` is given; `resume`: from the newest whole checkpoint."""
    keep_freed_memory()
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    mesh = mesh or open_mesh(config, processes)
    layout = mesh.layout
    micro_batches = config.micro_batches(layout.data)
    parallel = _make_model(config, mesh, resume=resume)
    _prepare_blocks(parallel.model, config)
    optimizer = Optimizer(parallel.parameters, parallel.decls, config.model, config.optimizer, parallel)
    state = TrainState(parallel, optimizer, _make_ema(config, optimizer, list(parallel.parameters)))
    sync = GradientSync(parallel.parameters, parallel.reductions(), micro_batches, sharded=layout.shard > 1)
    data = _take_up(config, state, processes) if resume else None
    return Session(
        config=config,
        parallel=parallel,
        state=state,
        sync=sync,
        processes=processes,
        feed=Feed(layout, mesh.at, mesh.device),
        micro_batches=micro_batches,
        pipeline=Pipeline(parallel.model, mesh) if layout.pipeline > 1 else None,
        data=data,
        flops_per_token=count_flops(config.model, config.data.sequence_length).training,
        facts={"config_hash": config_hash(config), "code": code_version(), "layout": layout.model_dump()},
        description=_describe(config, parallel.decls, layout),
    )


def peak_rate(config: TrainConfig, mesh: Mesh) -> float:
    """Return the FLOP/s of matrix products in the run's precision, of all processes together; measured once a process."""
    dtype = torch.bfloat16 if config.train.precision == "bfloat16_autocast" else DTYPES[config.train.precision]
    return matmul_peak(dtype, config.train.threads, device=mesh.device).rate * mesh.processes.size


def _make_model(config: TrainConfig, mesh: Mesh, *, resume: bool) -> ParallelModel:
    dtype = DTYPES[config.train.precision]
    source = None if config.train.init_from is None or resume else _source(config, config.train.init_from)
    parallel = parallelise(config.model, mesh, config.seed, dtype=dtype, source=source)
    parallel.model.train()
    return parallel


def _source(config: TrainConfig, path: str) -> Mapping[str, Tensor]:
    """Return the tensors of the model at `path`, by name, after checking that they are those of this model."""
    theirs = load_any(Path(path)).state_dict()
    ours = Transformer(config.model, device="meta").state_dict()
    for name in (*ours, *theirs):
        if name not in theirs or name not in ours or theirs[name].shape != ours[name].shape:
            raise ModelError(
                f"its tensor {name} does not fit this model",
                where=path,
                remedy="give [model] the same sizes; positions may differ",
            )
    return theirs


def load_any(path: Path) -> Transformer:
    """Return the model in a run, a checkpoint, a Surefoot model directory or a transformers directory."""
    from surefoot.models.hf import import_model, load_model_dir

    if (path / "checkpoints").is_dir() or (path / "manifest.json").is_file():
        return load_model(path)[1]
    if (path / "spec.json").is_file():
        return load_model_dir(path)[1]
    return import_model(path)[1]


def _prepare_blocks(model: Transformer, config: TrainConfig) -> None:
    for block in model.layers.values():
        if config.train.recompute:
            _recompute(block)
        if config.train.compile:
            block.compile()


def _recompute(block: nn.Module) -> None:
    """Make `block` keep only its input and run again in the backward pass (Chen et al. 2016, arXiv 1604.06174)."""
    forward = block.forward

    def recomputed(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False) if torch.is_grad_enabled() else forward(*args)

    block.forward = recomputed


def _make_ema(config: TrainConfig, optimizer: Optimizer, names: list[str]) -> dict[str, Tensor]:
    if config.train.ema_decay is None:
        return {}
    return {
        name: master.to(accumulation_dtype(master.dtype), copy=True) for name, master in zip(names, optimizer.masters(names), strict=True)
    }


def _take_up(config: TrainConfig, state: TrainState, processes: Processes) -> dict[str, Any] | None:
    newest = newest_whole(Path(config.run) / "checkpoints")
    if newest is None:
        raise CheckpointError("the run has no whole checkpoint", where=config.run, remedy="start it anew: surefoot train")
    return load(newest, state, processes).data


def config_hash(config: TrainConfig) -> str:
    """Return a hash of what determines the numbers of a run: all but its directory, its processes and its checks."""
    shown = config.model_copy(update={"run": "", "layout": Layout(), "trust": CheckConfig(), "trackers": ()})
    return hashlib.blake2b(to_json(shown).encode(), digest_size=8).hexdigest()


def code_version() -> str:
    """Return the version of this code: the git commit where it runs from a checkout, and whether that is altered."""
    import surefoot

    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(surefoot.__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return surefoot.__version__
    return f"{surefoot.__version__}+{found.stdout.strip()}"


def _describe(config: TrainConfig, decls: dict[str, ParamDecl], layout: Layout) -> dict[str, Any]:
    spec: ModelSpec = config.model
    return {
        "parameters": count_parameters(spec).total,
        "precision": config.train.precision,
        "layout": layout.model_dump(),
        "threads": torch.get_num_threads(),
        "optimizer_groups": [
            {"kind": group.kind, "lr_multiplier": group.lr_multiplier, "weight_decay": group.weight_decay, "tensors": len(group.names)}
            for group in groups(decls, spec, config.optimizer)
        ],
    }

"""Changes that must never be called wrong: other layouts, schedules, kernels' neighbours, precisions done right, recomputation."""

from __future__ import annotations

from surefoot.train.config import TrainConfig
from tests.parallel.cells import SPECS
from tests.trust.mutant import config_of
from tests.trust.mutations import Mutation, Tables


def _nothing() -> None:
    """Plant nothing."""


def change(model: str, layout: Tables | None = None, **tables: Tables) -> tuple[str, TrainConfig]:
    """Return the change's name and the run with it."""
    shown = ", ".join(f"{key} {value}" for table in (layout or {}, *tables.values()) for key, value in table.items())
    return f"{model}: {shown}", config_of(Mutation("none", "", _nothing, "", "", layout or {}, model, tables))


LAYOUTS: list[Tables] = [
    {"tensor": 2},
    {"context": 2},
    {"context": 2, "attention": "ulysses"},
    {"shard": 2},
    {"pipeline": 2, "schedule": "zero_bubble"},
]
CHANGES: dict[str, TrainConfig] = dict(
    [
        *(change(model, layout) for model in SPECS for layout in LAYOUTS),
        *(change(model, {"replicate": 2, "expert": 2}) for model in ("moe", "deepseek")),
        *(change(model, {"pipeline": 2, "schedule": "zbv"}) for model in ("gqa", "moe")),
        change("mla", {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}),
        *(change(model, train={"recompute": True}) for model in ("gqa", "moe", "hybrid")),
        *(change(model, train={"micro_batch_size": 2}) for model in ("gqa", "deepseek", "gemma")),
        *(change(model, {"tensor": 2}, train={"precision": "float32"}) for model in ("gqa", "mla", "moe")),
        *(change(model, {"tensor": 2}, train={"precision": "bfloat16"}) for model in ("gqa", "hybrid")),
        *(change(model, {"shard": 2}, train={"precision": "bfloat16_autocast", "micro_batch_size": 2}) for model in ("gqa", "mla")),
        *(change(model, {"tensor": 2}, optimizer={"kind": "muon", "lr": 1e-2}) for model in ("gqa", "moe")),
        change("gqa", train={"compile": True, "precision": "float32"}),
    ]
)

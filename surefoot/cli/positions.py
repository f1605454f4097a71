"""`surefoot eval --by-position`: perplexity by position, for each way to read beyond the trained length."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from surefoot.cli.face import show
from surefoot.cli.opening import Opened, open_model
from surefoot.core import terminal


def by_position(path: Path, opened: Opened, data: Path | None, factor: float, rows: int, split: str, as_json: bool) -> int:
    """Compare plain extrapolation, linear interpolation and YaRN on the model as trained, and the model continued from it.

    A run with `train.init_from` is compared with the model it started from; any other model with itself.
    """
    from surefoot.core.config import read_toml
    from surefoot.train.extension import losses_by_position, variants, with_rope

    config = read_toml(path / "config.toml") if (path / "config.toml").is_file() else {}
    source = config.get("train", {}).get("init_from")
    base = open_model(Path(source)) if source else opened
    length = base.spec.max_positions
    longest = round(length * factor)
    loader = opened.dataset(data).loader(split, longest, seed=None)
    edges = tuple(sorted({0, length // 4, length // 2, length, *(round(length * (1 + (factor - 1) * part / 3)) for part in (1, 2, 3))}))
    models = {name: with_rope(base.model, rope, longest) for name, rope in variants(base.spec, length, factor).items()}
    if source:
        models[f"continued ({opened.spec.rope.scaling})"] = opened.model
    found = {}
    for name, model in models.items():
        terminal.note(f"reading {min(rows, loader.samples)} rows of {longest} tokens: {name}")
        found[name] = losses_by_position(model, loader, rows=min(rows, loader.samples), batch=2, edges=edges)
    table: list[tuple[Any, ...]] = [("positions", "tokens", *found)]
    for index, (low, high) in enumerate(itertools.pairwise(edges)):
        cells = [f"{losses[index].perplexity:.2f}" for losses in found.values()]
        table.append((f"{low}-{high - 1}", f"{next(iter(found.values()))[index].tokens:,}", *cells))
    numbers = {
        name: [{"start": one.start, "end": one.end, "perplexity": one.perplexity, "tokens": one.tokens} for one in losses]
        for name, losses in found.items()
    }
    show(as_json, f"perplexity by position, trained on {length} tokens", table, {"trained_length": length, "perplexity": numbers})
    return 0

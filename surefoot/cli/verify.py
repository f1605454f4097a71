"""`surefoot verify`: does a layout, a precision, a compiler or other code compute what the reference computes?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.cli.face import PATH, common
from surefoot.core import terminal
from surefoot.core.files import write_atomic

if TYPE_CHECKING:
    from surefoot.trust import Evidence

PRECISIONS = ["float32", "bfloat16", "bfloat16_autocast", "float64"]


@click.command("verify")
@click.argument("config", type=PATH)
@click.argument("overrides", nargs=-1)
@click.option("--layout", default="", help="Degrees, such as tensor=2,context=2 (as layout.tensor=2 layout.context=2).")
@click.option("--precision", type=click.Choice(PRECISIONS), help="Instead of the configuration's.")
@click.option("--compile", "compiled", is_flag=True, help="Compile each block.")
@click.option("--code", type=PATH, help="Run this checkout of Surefoot instead, against the reference of this one.")
@click.option("--repeat", type=click.IntRange(min=2), help="Also run it N times under timing noise: the bits must be the same.")
@click.option("--batch-invariance", is_flag=True, help="Also ask whether a row's logits depend on who shares its batch.")
@click.option("--out", type=PATH, help="Where the evidence goes (JSON); evidence.json without it.")
@common
def verify_command(
    config: Path,
    overrides: tuple[str, ...],
    layout: str,
    precision: str | None,
    compiled: bool,
    code: Path | None,
    repeat: int | None,
    batch_invariance: bool,
    out: Path | None,
    as_json: bool,
) -> int:
    """Train a small model of CONFIG's kind a few steps, as CONFIG says and as the plain reference, and compare every tensor."""
    from surefoot.core.config import load
    from surefoot.core.errors import ConfigError
    from surefoot.train import TrainConfig
    from surefoot.train.steadiness import shares_batches
    from surefoot.train.verify import verify
    from surefoot.trust import Verdict

    settings = [*overrides, *(f"layout.{pair.strip()}" for pair in layout.split(",") if pair.strip())]
    settings += [f'train.precision="{precision}"'] if precision else []
    settings += ["train.compile=true"] if compiled else []
    asked = load(TrainConfig, config, settings)
    asked.layout.check_model(asked.model, asked.data.sequence_length)
    if code is not None and not (code / "surefoot" / "__init__.py").is_file():
        raise ConfigError("holds no surefoot package", where=str(code), remedy="name the root of a checkout")
    evidence = verify(asked, code=code, repeat=repeat or 0)
    shared = shares_batches(asked) if batch_invariance else None
    if batch_invariance:
        alone: dict[str, str | int] | None = None if shared is None else {"row": shared.name, "batch": shared.at}
        evidence = replace(evidence, facts={**evidence.facts, "batch_invariance": alone})
    target = out or Path("evidence.json")
    write_atomic(target, evidence.to_json() + "\n")
    if as_json:
        print(json.dumps({"verdict": evidence.verdict, "evidence": str(target)} | _asked_for(evidence)))
    else:
        tell(evidence, target)
    return 1 if evidence.verdict in (Verdict.LOSSY, Verdict.WRONG) or shared is not None else 0


def _asked_for(evidence: Evidence) -> dict[str, Any]:
    return {name: evidence.facts[name] for name in ("repeat", "batch_invariance") if name in evidence.facts}


def tell(evidence: Evidence, target: Path) -> None:
    """Print the verdict, the tensors that are furthest off, and what it means."""
    rows = [(row.phase, row.name, str(row.verdict), f"{row.error:.1e}", f"{row.floor:.1e}", row.note) for row in evidence.table(8)]
    terminal.table("Furthest from the reference", rows, header=("phase", "tensor", "verdict", "error", "floor", ""))
    rungs = ", ".join(f"{rung}: {verdict}" for rung, verdict in evidence.rungs.items())
    terminal.note(f"{evidence.verdict} ({rungs}; {len(evidence.rows)} tensors); evidence in {target}")
    if evidence.first is not None:
        terminal.note(f"first: {evidence.first.tensor} ({evidence.first.phase}) — {evidence.first.sentence}")
    asked = _asked_for(evidence)
    if "repeat" in asked and asked["repeat"]["first"] is None:
        terminal.note(f"the same bits in {asked['repeat']['times']} runs under timing noise")
    if "batch_invariance" in asked:
        found = asked["batch_invariance"]
        no = found and f"{found['row']} has other bits in a batch of {found['batch']} than alone: its order of summation follows the batch"
        terminal.note(no or "a row's logits are the same bits alone and in any batch tried")

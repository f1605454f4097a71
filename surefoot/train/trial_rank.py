"""One process of a candidate: python -m surefoot.train.trial_rank FOLDER, for the trials in FOLDER/trials.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from surefoot.parallel import Processes
from surefoot.parallel.process import leave
from surefoot.train.config import TrainConfig
from surefoot.train.recording import record
from surefoot.train.steadiness import unsteady


def main(arguments: list[str]) -> None:
    """Record the trials among the processes of this group, and store them as FOLDER/rank<N>.pt."""
    folder = Path(arguments[0])
    asked = json.loads((folder / "trials.json").read_text(encoding="utf-8"))
    processes = Processes.join()
    found = []
    for number, trial in enumerate(asked):
        config = TrainConfig.model_validate(trial["config"] | {"run": str(folder / f"run{number}")})
        found.append(record(config, processes, trial["steps"], rounded=trial["rounded"], interrupted=True))
        if trial["repeat"]:
            found[-1].unsteady = unsteady(config, processes, trial["repeat"], rounded=trial["rounded"])
    torch.save(found, folder / f"rank{processes.rank}.pt")
    leave()


if __name__ == "__main__":
    main(sys.argv[1:])

"""What a checkpoint at every step costs: time the training thread is held, and time of the whole step, over a step without.

    python -m bench.ckpt_stall

Runs with and without checkpoints alternate. Held = the log's stall_s: waiting for the copy before the optimizer, and for an
earlier save to reach the disk.
The rest of the slow-down is the copying and writing thread, which shares the cores.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from bench.common import Figure, arguments, show, write
from bench.runs import Steps, prepare, train


def between(steps: Steps) -> list[float]:
    """Seconds from the end of each step's clock to the start of the next one's."""
    return [interval - event["step_s"] for interval, event in zip(steps.intervals, steps.events, strict=True)]


def main() -> None:
    args = arguments("stall of a checkpoint every step")
    scratch = Path(tempfile.mkdtemp(prefix="bench-"))
    data = prepare(scratch)
    steps, turns = (6, 1) if args.quick else (14, 2)
    found: dict[bool, list[Steps]] = {False: [], True: []}
    stalls: list[float] = []
    for turn in range(2 * turns):
        for saving in (False, True) if turn % 2 == 0 else (True, False):
            every = "checkpoint.every=1" if saving else "checkpoint.every=0"
            found[saving].append(train(data, scratch, "10m", steps, every, threads=args.threads))
            if saving:
                lines = map(json.loads, (scratch / "run" / "events.jsonl").read_text().splitlines())
                stalls += [line["stall_s"] for line in lines if line["kind"] == "step"][3:-1]
    without, with_saves = (statistics.median(x for run in found[saving] for x in run.intervals) for saving in (False, True))
    gap = {saving: statistics.median(x for run in found[saving] for x in between(run)) for saving in (False, True)}
    captured = statistics.median(stalls)
    held = captured
    rows = [["step without checkpoints", without], ["step with one", with_saves], ["waiting for the copy", captured]]
    rows += [["between steps, without", gap[False]], ["between steps, with", gap[True]], ["held", held]]
    show("median seconds, 10M model, 8 x 512 tokens, float32", ["", "s"], rows)
    note = f"a checkpoint (weights, AdamW state, hashes, fsync) every step of {without:.2f} s: training thread held {held * 1e3:.1f} ms"
    slower = f"the same runs: step time with a checkpoint every step over without, {with_saves:.3f} s over {without:.3f} s"
    figures = [
        Figure("train.ckpt_stall", max(0.0, held) / without, [stall / without for stall in stalls], note),
        Figure("train.ckpt_slowdown", with_saves / without - 1, (), slower),
    ]
    show("figures", ["id", "value"], [[figure.id, figure.value] for figure in figures])
    print("wrote", write("ckpt_stall", figures, quick=args.quick).name)


if __name__ == "__main__":
    main()

"""Kills at random moments: is the ledger exact afterwards?

    python -m bench.data_faults

`surefoot train` on a mixture of three sources is killed (SIGKILL, the whole group) at a random moment and resumed, again and again, on one
and on two processes in turn. After each kill every step that the ledger holds must be the undisturbed run's, and in the end all of it.
Figure: data.fault_exact.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.common import ROOT, Figure, arguments, write
from surefoot.data.ledger import read

MODEL = """
run = "calm"
[model]
vocab_size = 400
dim = 32
layers = 2
max_positions = 64
[model.attention]
heads = 2
kv_heads = 1
head_dim = 16
[model.ffn]
hidden = 64
[data]
sequence_length = 64
[train]
steps = 1500
batch_size = 4
threads = 1
eval_rows = 4
[checkpoint]
every = 20
"""


def command(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "surefoot", *arguments], cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def prepared(folder: Path) -> None:
    chance, table = random.Random(0), ""
    for number, name in enumerate(("a", "b", "c")):
        (folder / f"{name}.d").mkdir()
        for index in range(200):
            text = " ".join(chance.choices(["def", "return", "x", "total", name * 3], k=chance.choice([5, 30, 200])))
            (folder / f"{name}.d" / f"{index}.txt").write_text(text)
        more = ["--tokenizer", "a"] if number else ["--vocab-size", "300"]
        if command(folder, "data", "prepare", f"{name}.d", "--out", name, *more).wait():
            raise SystemExit("the data could not be prepared")
        table += f'[[data.sources]]\nname = "{name}"\npath = "{name}"\nweight = {number + 1}.0\n'
    (folder / "c.toml").write_text(MODEL + table)


def main() -> None:
    args = arguments("ledger after kills")
    wanted = 4 if args.quick else 50
    chance, exact, kills = random.Random(1), [], 0
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = Path(scratch)
        prepared(folder)
        if command(folder, "train", "c.toml").wait():
            raise SystemExit("the undisturbed run failed")
        calm = {entry.step: entry.digest for entry in read(folder / "calm" / "ledger.bin")}
        number = 0
        while kills < wanted:
            run = folder / f"run{number}"
            number += 1
            first = True
            while kills < wanted:
                processes = ["--nproc", "2"] if kills % 2 else []
                started = command(folder, *(["train", "c.toml", f"run={run.name}"] if first else ["resume", run.name]), *processes)
                wait = chance.uniform(3.5, 9.0)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    if started.wait(timeout=wait) != 0 and (run / "checkpoints").is_dir() and list((run / "checkpoints").glob("step-*")):
                        raise SystemExit(f"{run.name} failed without being killed")
                    break  # done
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()
                time.sleep(0.5)  # the kernel ends its children
                kills += 1
                ledger = run / "ledger.bin"
                found = {entry.step: entry.digest for entry in read(ledger)} if ledger.exists() else {}
                exact.append(
                    all(calm[step] == digest for step, digest in found.items()) and sorted(found) == list(range(1, len(found) + 1))
                )
                first = not list((run / "checkpoints").glob("step-*")) if (run / "checkpoints").is_dir() else True
                if first and run.exists():
                    run = folder / f"run{number}"
                    number += 1
            if not first and command(folder, "resume", run.name).wait() == 0:
                found = {entry.step: entry.digest for entry in read(run / "ledger.bin")}
                exact.append(found == calm)
            print(f"{kills} kills, {sum(exact)} of {len(exact)} checks exact", flush=True)
    note = f"{kills} SIGKILLs on 1 and 2 processes, {len(exact)} checks of every step's digest"
    print("wrote", write("data_faults", [Figure("data.fault_exact", sum(exact) / len(exact), [], note)], quick=args.quick).name)


if __name__ == "__main__":
    main()

"""Generation tokens/s against transformers `generate`: a 100M Llama, the same weights, greedy, batch 1 and 16.

    python -m bench.generate_speed

Prompt of 64 tokens, 64 new ones (prefill included in the time on both sides). In float32 both must choose equal tokens.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from bench import families
from bench.common import Figure, Worker, WorkerError, arguments, interleave, show, start, write

PROMPT = 64


def main() -> None:
    args = arguments("generation speed against transformers", dtype={"choices": ["fp32", "bf16"], "default": "fp32"})
    precision = "float32" if args.dtype == "fp32" else "bfloat16"
    suffix = "" if args.dtype == "fp32" else ".bf16"
    scratch = Path(tempfile.mkdtemp(prefix="bench-"))
    new, rounds = (16, 2) if args.quick else (64, 6)
    model = families.make("llama", scratch)
    common = ["--model", str(model), "--precision", precision, "--task", "generate"]
    forms = [("surefoot", ["--side", "surefoot"]), ("transformers", ["--side", "transformers"])]
    forms.append(("transformers static cache", ["--side", "transformers", "--cache", "static"]))
    workers = [
        start(label, "bench.peers.family", [*common, *form], python=sys.executable, threads=args.threads, scratch=scratch)
        for label, form in forms
    ]
    figures, rows = [], []
    for batch in (1, 16):
        texts: dict[str, list[list[int]]] = {}

        def work(worker: Worker, batch: int = batch, texts: dict[str, list[list[int]]] = texts) -> None:
            answer = worker.ask(rows=batch, length=PROMPT, new=new)
            worker.rates.append(batch * new / answer["seconds"])
            texts[worker.label] = answer["tokens"]

        for worker in list(workers):
            try:
                work(worker)  # warms up
            except WorkerError as error:
                print(f"{worker.label}: left out, {str(error).splitlines()[-1]}", flush=True)
                workers.remove(worker)
            worker.rates.clear()
        interleave(workers, rounds, work)
        ours, best = workers[0], max(workers[1:], key=lambda worker: worker.rate)
        equal = texts[ours.label] == texts[best.label]
        note = f"{ours.facts['parameters']:,} parameters, {precision}, prompt {PROMPT}, {new} new, greedy: {ours.rate:,.1f} tokens/s over "
        note += f"{best.label} ({best.facts['version']}) {best.rate:,.1f}; tokens {'equal' if equal else 'differ'}"
        figures.append(Figure(f"generate.speed.b{batch}{suffix}", ours.rate / best.rate, [rate / best.rate for rate in ours.rates], note))
        rows += [
            [
                f"batch {batch}",
                w.label,
                w.rate,
                min(w.rates),
                max(w.rates),
                ours.rate / w.rate,
                "equal" if texts[w.label] == texts[ours.label] else "differ",
            ]
            for w in workers
        ]
        for worker in workers:
            worker.rates = []
    for worker in workers:
        worker.close()
    show(f"generation, {precision}", ["", "side", "tokens/s", "lowest", "highest", "ratio", "tokens"], rows)
    print("wrote", write(f"generate_speed.{args.dtype}", figures, quick=args.quick).name)


if __name__ == "__main__":
    main()

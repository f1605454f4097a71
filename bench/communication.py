"""Bytes that each rank sends in a step, counted in torch's collectives, against what the layout's formula says.

    python -m bench.communication

Figure: communication.max_rel_err, the largest deviation over the layouts, small exchanges (norms, losses, counts) left out of both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common import Figure, arguments, show, write
from surefoot.parallel import Layout, Processes
from tests.spawning import run_ranks

ROWS, TOKENS, DIM, LAYERS, HEADS, FFN, VOCAB, EXPERTS = 4, 256, 128, 4, 4, 256, 512, 4
SMALL = 20_000  # bytes: what is smaller travels for bookkeeping


def counted(processes: Processes, degrees: dict[str, Any], experts: bool) -> dict[str, float]:
    """Return the bytes that this rank sends in a step, by collective; a ring's all-reduce sends 2 (n - 1) / n of the tensor."""
    import torch
    import torch.distributed as dist

    from surefoot.train import TrainConfig
    from surefoot.train.recording import trial_rows
    from surefoot.train.setup import open_session
    from surefoot.train.step import gradients_of

    ffn = {"ffn_pattern": ["moe"], "moe": {"experts": EXPERTS, "top_k": 2, "hidden": FFN // 2}} if experts else {"ffn": {"hidden": FFN}}
    config = TrainConfig.model_validate(
        {
            "run": "bench",
            "model": {
                "vocab_size": VOCAB, "dim": DIM, "layers": LAYERS, "max_positions": TOKENS,
                "attention": {"heads": HEADS, "kv_heads": HEADS, "head_dim": DIM // HEADS}, **ffn,
            },
            "data": {"path": "none", "sequence_length": TOKENS},
            "train": {"steps": 100, "batch_size": ROWS, "threads": 1, "micro_batch_size": 1 if degrees.get("pipeline") else None},
            "layout": degrees,
        }
    )  # fmt: skip
    session = open_session(config, processes, resume=False)
    rows = trial_rows(config, 0)
    mine = ROWS // session.feed.layout.data
    micro = mine // session.micro_batches
    names = ("tokens", "labels", "positions", "documents")
    starts = [session.feed.index * mine + micro * index for index in range(session.micro_batches)]
    batches = [session.feed.split(type(rows)(*(getattr(rows, name)[start : start + micro] for name in names), 1, 1)) for start in starts]
    sent: dict[str, float] = {}

    def note(kind: str, size: float) -> None:
        if size >= SMALL:
            sent[kind] = sent.get(kind, 0.0) + size

    def size_of(group: Any) -> int:
        return dist.get_world_size(group)

    def watch(name: str, count: Callable[..., tuple[str, float]]) -> None:
        original = getattr(dist, name, None)
        if original is None:
            return

        def watched(*args: Any, **kwargs: Any) -> Any:
            note(*count(*args, **kwargs))
            return original(*args, **kwargs)

        setattr(dist, name, watched)

    def reduced(tensor: torch.Tensor, *_: Any, group: Any = None, **__: Any) -> tuple[str, float]:
        return "all_reduce", 2 * (size_of(group) - 1) / size_of(group) * tensor.nbytes

    def gathered(out: torch.Tensor, given: torch.Tensor, *_: Any, group: Any = None, **__: Any) -> tuple[str, float]:
        return "all_gather", (size_of(group) - 1) * given.nbytes

    def exchanged(
        out: torch.Tensor, given: torch.Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None, group: Any = None, **_: Any
    ) -> tuple[str, float]:
        if input_split_sizes is None:
            return "all_to_all", given.nbytes * (size_of(group) - 1) / size_of(group)
        here = input_split_sizes[dist.get_rank(group)]
        return "all_to_all", given.nbytes * (1 - here / max(1, sum(input_split_sizes)))

    watch("all_reduce", reduced)
    from surefoot.parallel import collectives

    gather = collectives._all_gather

    def watched_gather(*args: Any, **kwargs: Any) -> Any:
        note(*gathered(*args, **kwargs))
        return gather(*args, **kwargs)

    collectives._all_gather = watched_gather
    watch("all_to_all_single", exchanged)
    if session.pipeline is not None:  # the ring's operations must hold torch's own function
        watch("isend", lambda tensor, *_, **__: ("send", tensor.nbytes))
    ring = dist.batch_isend_irecv

    def watched_ring(operations: Any) -> Any:
        for one in operations:
            if one.op is dist.isend:
                note("send", one.tensor.nbytes)
        return ring(operations)

    dist.batch_isend_irecv = watched_ring
    gradients_of(session, batches, rows.trained)
    return sent


def expected(degrees: dict[str, Any]) -> dict[str, float]:
    """Return what docs/parallelism.md says of a rank in the middle of things, in bytes; a value has four."""
    layout = Layout(**degrees)
    n = layout.world_size
    parameters = 2 * VOCAB * DIM + LAYERS * (4 * DIM * DIM + 3 * DIM * FFN + 2 * DIM) + DIM
    stream = ROWS * TOKENS * DIM * 4 // layout.data
    if degrees.get("expert", 1) > 1:
        dense = 2 * VOCAB * DIM + LAYERS * (4 * DIM * DIM + EXPERTS * DIM + 2 * DIM) + DIM
        # Out and back, forward and backward; k copies of a token, of which the share of other ranks travels.
        return {"all_reduce": 2 * (n - 1) / n * dense * 4, "all_to_all": 4 * LAYERS * 2 * stream * (n - 1) / n}
    if layout.data > 1:
        return {"all_reduce": 2 * (n - 1) / n * parameters * 4}
    if layout.tensor > 1:
        # Two cut blocks a layer gather and scatter, forward and backward; so do the ends, whose stream is gathered once for the head.
        cuts = 2 * LAYERS
        part = stream * (n - 1) / n
        return {"all_gather": (2 * cuts + 2) * part, "all_to_all": (2 * cuts + 2) * part}
    if layout.context > 1 and layout.attention == "ring":
        # Keys and values forward; keys, values and their gradients backward, which come home with one more hop.
        pair = 2 * stream / n
        return {"send": LAYERS * ((n - 1) * pair + (n - 1) * pair + n * pair), "all_reduce": 2 * (n - 1) / n * parameters * 4}
    if layout.context > 1:
        # q, k, v one way and y the other, forward; their gradients backward.
        return {"all_to_all": LAYERS * 8 * stream / n * (n - 1) / n, "all_reduce": 2 * (n - 1) / n * parameters * 4}
    return {"send": stream}  # of a pipeline's first rank, forward; the last sends as much backward


CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "replicate 2": ({"replicate": 2}, False),
    "tensor 2": ({"tensor": 2}, False),
    "tensor 4": ({"tensor": 4}, False),
    "context 2 (ring)": ({"context": 2}, False),
    "context 4 (ring)": ({"context": 4}, False),
    "context 2 (Ulysses)": ({"context": 2, "attention": "ulysses"}, False),
    "pipeline 2": ({"pipeline": 2}, False),
    "expert 2": ({"replicate": 2, "expert": 2}, True),
}


def main() -> None:
    args = arguments("bytes sent against the formula")
    rows: list[list[object]] = []
    errors: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        for name, (degrees, experts) in CASES.items():
            size = Layout(**degrees).world_size
            if args.quick and size > 2:
                continue
            found = run_ranks(counted, size, Path(scratch) / name.replace(" ", "_"), degrees, experts)
            mean = {kind: sum(one.get(kind, 0.0) for one in found) / size for kind in {kind for one in found for kind in one}}
            wanted = expected(degrees)
            for kind in sorted(mean.keys() | wanted.keys()):
                error = abs(mean.get(kind, 0.0) / wanted[kind] - 1) if wanted.get(kind) else 1.0
                errors[kind == "all_to_all" and experts].append(error)
                rows.append([name, kind, mean.get(kind, 0.0) / 1e3, wanted.get(kind, 0.0) / 1e3, error])
    show("kB a rank sends in a step", ["layout", "collective", "counted", "formula", "error"], rows)
    note = "forward, backward and gradient sums of a 4-layer model, mean over ranks"
    figures = [
        Figure("communication.max_rel_err", max(errors[False]), errors[False], note),
        Figure(
            "communication.expert_err", max(errors[True]), errors[True], "the sizes follow the routing; the formula is that of an even one"
        ),
    ]
    print("wrote", write("communication", figures, quick=args.quick).name)


if __name__ == "__main__":
    main()

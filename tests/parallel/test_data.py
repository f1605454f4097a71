from __future__ import annotations

from pathlib import Path

import pytest
import torch

from surefoot.core.errors import LayoutError
from surefoot.models import ModelSpec, Transformer, initialise
from surefoot.models.spec import AttentionSpec, FeedForwardSpec
from surefoot.parallel import GradientSync, Layout, Processes, make_mesh, parallelise
from surefoot.parallel.data import Reduction
from tests.spawning import run_ranks

SPEC = ModelSpec(vocab_size=40, dim=16, layers=1, attention=AttentionSpec(heads=2, kv_heads=1, head_dim=8), ffn=FeedForwardSpec(hidden=24))


def model_of(dtype: torch.dtype, seed: int = 0) -> Transformer:
    model = Transformer(SPEC, dtype=dtype)
    initialise(model, seed)
    return model


def tokens(rank: int, micro: int) -> torch.Tensor:
    return torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(10 * rank + micro))


def summed(processes: Processes, dtype: torch.dtype, micro_batches: int, bucket_bytes: int) -> list[torch.Tensor]:
    from surefoot.parallel import data

    data.BUCKET_BYTES = bucket_bytes
    parallel = parallelise(SPEC, make_mesh(Layout(replicate=processes.size), processes), 0, dtype=dtype)
    model = parallel.model
    sync = GradientSync(parallel.parameters, parallel.reductions(), micro_batches)
    before: list[torch.Tensor] = []
    for step in range(2):  # the second step must not remember the first
        for micro in range(micro_batches):
            sync.start(micro)
            ids = tokens(processes.rank, micro)
            model(ids, labels=ids, normaliser=64).total.backward()
        found = [gradient.clone() for gradient in sync.finish().values() if gradient is not None]
        sync.clear()
        assert step == 0 or all(torch.equal(one, other) for one, other in zip(found, before, strict=True))
        before = found
    return before


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 2000, 1 << 25])
def test_gradients_are_the_sum_over_ranks_and_micro_batches(tmp_path: Path, micro_batches: int, bucket_bytes: int) -> None:
    results = run_ranks(summed, 2, tmp_path, torch.float64, micro_batches, bucket_bytes)
    model = model_of(torch.float64)
    for rank in range(2):
        for micro in range(micro_batches):
            ids = tokens(rank, micro)
            model(ids, labels=ids, normaliser=64).total.backward()
    for rank in range(2):
        for (name, parameter), found in zip(model.named_parameters(), results[rank], strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=1e-15, msg=name)


def test_bfloat16_gradients_are_summed_in_float32() -> None:
    """256 + 1 is 256 in bfloat16: many small micro-batches beside a large one would vanish."""
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    sync = GradientSync({"w": parameter}, {"w": Reduction()}, 9)
    for micro in range(9):
        sync.start(micro)
        (parameter * (256.0 if micro == 0 else 1.0)).sum().backward()
    found = sync.finish()["w"]
    assert found is not None
    assert found.tolist() == [264.0] * 4


def sharded_bfloat16(processes: Processes, micro_batches: int) -> list[torch.Tensor]:
    parallel = parallelise(SPEC, make_mesh(Layout(shard=processes.size), processes), 0, dtype=torch.bfloat16)
    model = parallel.model
    sync = GradientSync(parallel.parameters, parallel.reductions(), micro_batches, sharded=True)
    for _ in range(2):  # the second step must not remember the first
        for micro in range(micro_batches):
            sync.start(micro)
            ids = tokens(processes.rank, micro)
            model(ids, labels=ids, normaliser=64).total.backward()
        found = [gradient.clone() for gradient in sync.finish().values() if gradient is not None]
        sync.clear()
    return [parallel.whole(name, part) for part, name in zip(found, parallel.parameters, strict=True)]


def test_sharded_bfloat16_micro_batches_are_added_up_in_float32(tmp_path: Path) -> None:
    """Against float32 sums of the same bfloat16 gradients: one rounding a micro-batch and process, none of the running sum."""
    micro_batches = 8
    found = run_ranks(sharded_bfloat16, 2, tmp_path, micro_batches)[0]
    exact = [torch.zeros(one.shape) for one in found]
    model = model_of(torch.bfloat16)
    for micro in range(micro_batches):
        both = [torch.zeros(one.shape) for one in found]
        for rank in range(2):
            ids = tokens(rank, micro)
            model.zero_grad()
            model(ids, labels=ids, normaliser=64).total.backward()
            for total, parameter in zip(both, model.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad
        for total, one in zip(exact, both, strict=True):
            total += one.bfloat16()  # what FSDP hands over: the float32 sum over processes, rounded
    for one, total in zip(found, exact, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, total, rtol=1e-6, atol=1e-9)


def other_seed(processes: Processes) -> str:
    try:
        parallelise(SPEC, make_mesh(Layout(replicate=processes.size), processes), processes.rank, dtype=torch.float32)
    except LayoutError as error:
        return str(error)
    return ""


def test_replicas_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    assert all("embed.weight" in message for message in run_ranks(other_seed, 2, tmp_path))


def test_layouts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LayoutError, match="start 4"):
        Layout(replicate=2, shard=2).check(2)
    with pytest.raises(LayoutError, match="pipeline 2 x tensor 3 is 6 processes, but 4 run"):
        Layout(tensor=3, pipeline=2).check(4)
    assert Layout().for_world(3) == Layout(replicate=3)
    Layout(replicate=2, shard=2).check(4)

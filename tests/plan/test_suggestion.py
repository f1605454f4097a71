"""A budget turned into a shape, and the fit behind it under noise."""

from __future__ import annotations

import itertools
import random

import pytest

from surefoot.core.errors import InputError
from surefoot.models.flops import count_flops, count_parameters
from surefoot.plan import Observation, ScalingLaw, fit
from surefoot.plan.scaling import PUBLISHED
from surefoot.plan.suggestion import ladder, suggest


def test_fit_survives_noise_and_a_failed_run() -> None:
    """Half a percent of noise and one run that diverged: the Huber loss keeps the optimum within a factor."""
    law = ScalingLaw(1.69, 406.4, 410.7, 0.34, 0.28, "Hoffmann et al. 2022")
    draw = random.Random(0)
    pairs = [(n * 1e6, d * 1e7) for n in (1, 5, 20, 80, 300) for d in (2, 10, 60, 600)]
    runs = [Observation(n, d, law.loss(n, d) * (1 + draw.gauss(0, 0.005))) for n, d in pairs]
    runs[7] = Observation(runs[7].parameters, runs[7].tokens, runs[7].loss * 1.5)
    found = fit(runs)
    assert 0.4 < found.allocate(1e19).parameters / law.allocate(1e19).parameters < 2.5
    assert found.loss(1e8, 2e9) == pytest.approx(law.loss(1e8, 2e9), rel=0.02)


@pytest.mark.parametrize("flops", [1e16, 1e18, 1e21])
def test_suggestion_spends_the_budget_and_beats_its_neighbours(flops: float) -> None:
    found = suggest(flops, PUBLISHED, vocab_size=8192, sequence_length=512)
    assert 0.999 * flops < found.flops <= flops
    assert found.parameters == count_parameters(found.spec).active
    for other in ladder(8192, 512):
        price = count_flops(other, 512).training
        assert PUBLISHED.loss(count_parameters(other).active, flops / price) >= found.loss - 1e-6  # whole tokens against a fraction
    assert 0.5 < found.parameters / PUBLISHED.allocate(flops).parameters < 2.0


def test_more_compute_buys_a_larger_model_and_more_text() -> None:
    found = [suggest(flops, vocab_size=8192, sequence_length=512) for flops in (1e15, 1e17, 1e19, 1e21)]
    for less, more in itertools.pairwise(found):
        assert more.parameters > less.parameters and more.tokens > less.tokens and more.loss < less.loss


def test_a_budget_below_one_sequence_is_refused() -> None:
    with pytest.raises(InputError, match="do not pay one sequence"):
        suggest(1e6)

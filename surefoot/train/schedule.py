"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from surefoot.train.config import ScheduleConfig


def learning_rate_fraction(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Return the share of the peak learning rate at `step`, 0 <= step < steps.

    Warm-up rises linearly and reaches 1 at its last step; the last step of all has `final_fraction` (but for "constant").
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    final = schedule.final_fraction
    done = (step - warmup + 1) / (steps - warmup)
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "cosine":
        return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * done))
    if schedule.kind == "linear":
        return 1.0 - (1.0 - final) * done
    decay = max(1, round(schedule.decay_fraction * steps))
    remaining = steps - 1 - step
    return 1.0 if remaining >= decay else final + (1.0 - final) * remaining / decay

"""Floor 2: decisions made ahead of a run, as pure functions. So far: how large a model and how much text a budget of FLOPs wants."""

from __future__ import annotations

from surefoot.plan.scaling import Allocation as Allocation
from surefoot.plan.scaling import Observation as Observation
from surefoot.plan.scaling import ScalingLaw as ScalingLaw
from surefoot.plan.scaling import fit as fit
from surefoot.plan.scaling import observe as observe

"""Floor 2: decisions made ahead of a run, as pure functions.

How large a model and how much text a budget of FLOPs wants; which layout trains a model fastest on a cluster.
"""

from __future__ import annotations

from surefoot.plan.degrees import Degrees as Degrees
from surefoot.plan.degrees import enumerate_layouts as enumerate_layouts
from surefoot.plan.footprint import predict_memory as predict_memory
from surefoot.plan.layout import Prediction as Prediction
from surefoot.plan.layout import predict as predict
from surefoot.plan.layout import rank_layouts as rank_layouts
from surefoot.plan.scaling import Allocation as Allocation
from surefoot.plan.scaling import Observation as Observation
from surefoot.plan.scaling import ScalingLaw as ScalingLaw
from surefoot.plan.scaling import fit as fit
from surefoot.plan.scaling import observe as observe
from surefoot.plan.timing import predict_time as predict_time
from surefoot.plan.workload import Candidate as Candidate
from surefoot.plan.workload import Workload as Workload

"""Training: the loop, optimisers, schedules, evaluation and checkpoints."""

from surefoot.train.checkpoint import load_model as load_model
from surefoot.train.config import TrainConfig as TrainConfig
from surefoot.train.evaluate import Evaluation as Evaluation
from surefoot.train.evaluate import evaluate as evaluate
from surefoot.train.loop import Summary as Summary
from surefoot.train.loop import fit as fit
from surefoot.train.setup import load_any as load_any

"""Floor 0: what every other package stands on. Configuration, run directory, event log, errors, keyed randomness.

Nothing here knows of models or training, and importing any of it does not import torch.
"""

from __future__ import annotations

from surefoot.core.config import Config as Config
from surefoot.core.errors import SurefootError as SurefootError
from surefoot.core.events import Event as Event
from surefoot.core.events import EventLog as EventLog
from surefoot.core.rundir import Run as Run

"""The grid, the judge and the float64 mode are modules of this folder, shared with `bench/parity.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

"""What every test shares: few threads, so that several test processes do not fight for the cores."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import settings

# A busy machine is no failure: pytest's own time-out is the limit.
settings.register_profile("surefoot", deadline=None)
settings.load_profile("surefoot")

"""Train language models, and prove as you go that what you trained is what you asked for."""

from __future__ import annotations

__version__ = "0.1.0"

"""What can go wrong, as types a caller can tell apart.

    SurefootError
    ├── InputError          the user's input is at fault          exit code 2
    │   ├── ConfigError     a configuration key, value or combination
    │   ├── DataError       a file of training data
    │   ├── ModelError      a model directory, specification or vocabulary
    │   ├── LayoutError     a layout the model or the world size cannot take
    │   ├── CheckpointError a checkpoint that is missing, cut short or altered
    │   └── RunError        a run directory that is missing, in use or occupied
    ├── NumericsError       training produced a non-finite number  exit code 3
    └── EngineError         the machine failed (disk, process)     exit code 3

Each message is one line: where, what is wrong, and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SurefootError(Exception):
    """An error whose message is one line: what is wrong, where, and the remedy."""

    exit_code = 3

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what, self.where, self.remedy = what, where, remedy
        super().__init__(" ".join(part for part in (f"{where}: {what}" if where else what, f"— {remedy}" if remedy else "") if part))


class InputError(SurefootError, ValueError):
    exit_code = 2


class ConfigError(InputError):
    """A configuration key, value or combination that cannot be used."""


class DataError(InputError):
    """A training-data file that cannot be used."""


class ModelError(InputError):
    """A model directory, specification or vocabulary that cannot be used."""


class LayoutError(InputError):
    """A parallel layout that the model or the number of processes cannot take."""


class CheckpointError(InputError):
    """A checkpoint that is missing, incomplete or altered."""


class RunError(InputError):
    """A run directory that is missing, in use by another process, or already occupied."""


class NumericsError(SurefootError):
    """Training produced a number that is not finite, or copies that must be the same bits and are not."""


class EngineError(SurefootError):
    """The machine under the run failed: disk, process group, memory."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return ``did you mean 'x'?`` for the closest of `choices`, or the list of them all when none is close."""
    options = sorted(choices)
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.55)
    return f"did you mean '{close[0]}'?" if close else "choose one of: " + ", ".join(options)

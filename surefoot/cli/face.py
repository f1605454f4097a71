"""What all verbs share: the options --json and --debug, and how a result is shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from surefoot.core import terminal

F = TypeVar("F", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)


def common(function: F) -> F:
    """Add --json and --debug; the verb receives `as_json`, and `debug` is read by the boundary."""
    function = click.option("--debug", is_flag=True, expose_value=False, help="On a failure, print the traceback.")(function)
    return click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object on standard output.")(function)


def show(as_json: bool, title: str, rows: Mapping[str, Any] | Iterable[Sequence[Any]], data: Mapping[str, Any]) -> None:
    """Print `data` as JSON, or `rows` as a table under `title`."""
    if as_json:
        print(json.dumps(data, default=str), flush=True)
    else:
        terminal.table(title, rows)

"""The command `surefoot`: its verbs, loaded when called, and what becomes of an error.

Exit codes: 0 done; 1 the answer is no; 2 the input is at fault; 3 the system failed; 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import TracebackType

import click

from surefoot import __version__
from surefoot.core.errors import SurefootError, nearest

VERBS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "Train, judge and export a small model on text this machine has."),
    "doctor": ("doctor", "Check this machine and measure how fast it multiplies."),
    "data": ("data", "Prepare text for training; look at a dataset; plan and audit mixtures."),
    "train": ("train", "Train a model as a TOML file says."),
    "resume": ("train", "Go on with a run from its last checkpoint."),
    "verify": ("verify", "Prove that a layout, a precision or other code computes the same."),
    "eval": ("evaluate", "Measure a model on validation text."),
    "generate": ("generate", "Continue a prompt."),
    "export": ("transfer", "Write a model in the transformers format."),
    "import": ("transfer", "Read a model in the transformers format."),
    "flops": ("flops", "Count parameters, FLOPs and memory; plan a budget."),
    "plan": ("plan", "Find the layout that trains a model fastest on a cluster."),
    "report": ("report", "Make a page of a run: plots, samples, settings."),
}
"""Verb -> (module of this package that defines it, one line of help)."""


class LazyGroup(click.Group):
    """A group that imports a verb's module only when that verb is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = getattr(import_module(f"surefoot.cli.{VERBS[cmd_name][0]}"), f"{cmd_name}_command")
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in VERBS:
            raise click.UsageError(f"no verb '{args[0]}' — {nearest(args[0], VERBS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="surefoot")
@click.pass_context
def root(ctx: click.Context) -> None:
    """Train language models, and prove as you go that what you trained is what you asked for.

    Every verb takes --json (the result as JSON on standard output) and --debug (a traceback when something fails).
    """
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and end the process with its exit code."""
    # OpenMP threads that spin while they wait make training many times slower as soon as another process is busy; a short spin
    # costs a few per cent on an idle machine. Read by libgomp when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    boundary = Boundary(debug="--debug" in arguments, as_json="--json" in arguments)
    with boundary:
        result = root.main(arguments, prog_name="surefoot", standalone_mode=False)
        boundary.code = result if isinstance(result, int) else 0
    sys.stdout.flush()
    if "torch.distributed" in sys.modules:
        from surefoot.parallel.process import leave

        leave(boundary.code)
    sys.exit(boundary.code)


class Boundary:
    """Where an error becomes one line and an exit code; with `debug` a failure of the program itself keeps its traceback."""

    def __init__(self, *, debug: bool, as_json: bool) -> None:
        self.debug, self.as_json = debug, as_json
        self.code = 0

    def __enter__(self) -> Boundary:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None:
            return False
        if isinstance(error, SystemExit):
            return False
        self.code, message = describe(error)
        if self.debug and not isinstance(error, click.ClickException | click.exceptions.Exit):
            import traceback

            traceback.print_exception(error)
        elif message:
            print(f"surefoot: {message}", file=sys.stderr)
        if self.as_json and message:
            print(json.dumps({"error": type(error).__name__, "message": message, "exit_code": self.code}))
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True


def describe(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the one line that `error` deserves."""
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code, ""
    if isinstance(error, click.ClickException):
        command = getattr(getattr(error, "ctx", None), "command_path", "surefoot")
        return 2, f"{error.format_message().rstrip('.')} (see `{command} --help`)"
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, SurefootError):
        return error.exit_code, str(error)
    if isinstance(error, BrokenPipeError):
        return 0, ""
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return 3, f"{place}{error.strerror or error}"
    if isinstance(error, MemoryError):
        return 3, "the machine has not enough memory — make the model, the batch or the sequence smaller"
    line = " ".join(str(error).split())
    return 3, f"failed inside: {type(error).__name__}: {line[:300]} — run again with --debug to see where"

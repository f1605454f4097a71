from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from surefoot.cli.app import VERBS, describe, main, root
from surefoot.core.errors import ConfigError, EngineError, NumericsError

Command = Callable[..., subprocess.CompletedProcess[str]]
HEAVY = ("torch", "numpy", "transformers", "tokenizers", "matplotlib", "pyarrow")


def test_help_imports_nothing_heavy_and_names_every_verb() -> None:
    code = (
        "import sys\nfrom surefoot.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        f"print('LOADED', [name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True, check=True)
    assert "LOADED []" in done.stdout
    assert all(f"  {verb} " in done.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_has_help_json_and_debug(verb: str) -> None:
    command = root.get_command(click.Context(root), verb)
    assert command is not None
    leaves = command.commands.values() if isinstance(command, click.Group) else [command]
    for leaf in leaves:
        options = {option for parameter in leaf.params for option in parameter.opts}
        assert {"--json", "--debug"} <= options
        assert leaf.help


@pytest.mark.parametrize(
    ("error", "code", "part"),
    [
        (ConfigError("unknown key", where="a.toml: stepz", remedy="did you mean 'steps'?"), 2, "a.toml: stepz: unknown key — did you mean"),
        (NumericsError("step 3 is not finite"), 3, "not finite"),
        (EngineError("the disk is full"), 3, "disk is full"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 3, "/x: No space left"),
        (MemoryError(), 3, "not enough memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("two\nlines"), 3, "RuntimeError: two lines"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 0, ""),
        (click.UsageError("give a MODEL"), 2, "give a MODEL"),
    ],
)
def test_every_error_is_one_line_and_a_code(error: BaseException, code: int, part: str) -> None:
    found, message = describe(error)
    assert found == code
    assert part in message
    assert "\n" not in message


def _fail(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    def broken(ctx: click.Context) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(root, "callback", click.pass_context(broken))
    with pytest.raises(SystemExit) as ended:
        main(["flops", "x.toml", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_traceback_is_shown_only_with_debug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _fail(monkeypatch) == 3
    assert capsys.readouterr().err == "surefoot: failed inside: RuntimeError: a bug — run again with --debug to see where\n"
    assert _fail(monkeypatch, "--debug") == 3
    assert "Traceback" in capsys.readouterr().err


CONFIG = """
run = "run"
[model]
vocab_size = 300
dim = 16
layers = 1
max_positions = 32
[model.attention]
heads = 2
kv_heads = 1
head_dim = 8
[model.ffn]
hidden = 32
[data]
path = "data"
sequence_length = 32
[train]
steps = 2
batch_size = 2
"""


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["trian"], "did you mean 'train'?"),
        (["train"], "Missing argument 'CONFIG'"),
        (["train", "absent.toml"], "absent.toml: no such file"),
        (["train", "bad.toml"], "bad.toml is not valid TOML"),
        (["train", "c.toml", "train.stepz=3"], "c.toml: train.stepz: unknown key — did you mean 'steps'?"),
        (["train", "c.toml", "optimizer.kind=adam"], "did you mean 'adamw'?"),
        (["train", "c.toml", "model.attention.kv_heads=3"], "3 does not divide heads = 2"),
        (["train", "c.toml", "data.sequence_length=64"], "model.max_positions = 32"),
        (["train", "c.toml"], "data"),  # the dataset is missing
        (["resume", "nowhere"], "no such run directory"),
        (["eval", "nowhere"], "no such file or directory"),
        (["generate", "."], "is not a run, a checkpoint or a model directory"),
        (["export", "nowhere", "out"], "no such file"),
        (["import", ".", "out"], "config.json"),
        (["flops"], "give a MODEL, or --budget"),
        (["flops", "c.toml", "--runs", "."], "--runs needs --budget"),
        (["flops", "--budget", "-1"], "not a budget"),
        (["report", "nowhere"], "no such run directory"),
        (["data", "prepare", "nowhere", "--out", "d"], "nowhere: no such file"),
        (["data", "prepare", "c.toml", "--out", "d", "--on-bad", "stopp"], "did you mean 'stop'?"),
        (["data", "inspect", "nowhere"], "nowhere: there is no prepared dataset here"),
        (["data", "inspekt", "d"], "No such command 'inspekt'"),
        (["demo", "--data", "nowhere", "--out", "d"], "nowhere: no such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(CONFIG)
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    captured = capsys.readouterr()
    assert ended.value.code == 2, captured.err
    assert part in captured.err.replace(": is not", " is not")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not (tmp_path / "run").exists()  # refused before any work


def test_errors_are_json_too_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["resume", "nowhere", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (told["error"], told["exit_code"]) == ("RunError", 2)
    assert "no such run directory" in told["message"]


def test_python_m_surefoot_is_the_command(surefoot: Command) -> None:
    done = surefoot("--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "surefoot,")

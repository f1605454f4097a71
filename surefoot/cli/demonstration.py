"""The steps of `surefoot demo`, each a small function; `demonstrate` is the order they are done in."""

from __future__ import annotations

import shutil
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.cli.baselines import byte_entropy, xz_bits_per_byte
from surefoot.core import terminal
from surefoot.core.errors import DataError, RunError
from surefoot.core.events import Event
from surefoot.core.terminal import duration

if TYPE_CHECKING:
    from surefoot.core.rundir import Run
    from surefoot.data import Dataset
    from surefoot.train import Summary, TrainConfig
    from surefoot.web import Sample

NOT_PROSE = tuple(f"*/{name}/*" for name in ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"))
"""Of the library: what is not its own, and tests and tables, which repeat themselves so much that any compressor does well."""
VOCABULARY, SEQUENCE, BATCH = 4096, 512, 4
WARMUP_STEPS = 16
BFLOAT16_GAIN = 1.5  # of the measured matmul peak, from which on bfloat16 training is faster (bench/train_speed.py: 2 gives 1.6)
PROBE_SHARE = 0.35  # of the time: trained at a constant rate before the number of steps is settled
CHECKED_TOKENS = 64
MARK = ".surefoot-demo"  # says that a directory is a demo's, and may be replaced by one


@dataclass(frozen=True)
class Demonstration:
    """What the demo found and where it wrote; bits per byte are over the same validation text."""

    parameters: int
    trained_tokens: int
    tokens_per_s: float
    bits_per_byte: float
    xz: float
    token_unigram: float
    byte_unigram: float
    validation_bytes: int
    same_in_transformers: bool | None  # None: transformers is not installed
    report: Path
    exported: Path
    run: Path
    seconds: float
    samples: tuple[Sample, ...]

    def numbers(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {**asdict(self), "ratio_to_xz": self.bits_per_byte / self.xz}

    def comparison(self) -> list[tuple[str, str, str]]:
        """Return rows (what, bits per byte, share of xz)."""
        parts = (
            ("this model", self.bits_per_byte),
            ("xz -9", self.xz),
            ("unigram model of the same tokens", self.token_unigram),
            ("unigram model of bytes", self.byte_unigram),
        )
        return [(name, f"{bits:.3f}", f"{bits / self.xz:.2f} x") for name, bits in parts]

    def show(self) -> None:
        """Print the texts and the tables."""
        for sample in self.samples[:2]:
            print(f"\nThe model continues:\n{_indented(sample.prompt)}\n    ----\n{_indented(sample.text)}")
        title = f"Bits per byte of {self.validation_bytes:,} bytes of validation text (less is better)"
        terminal.table(title, self.comparison(), header=("", "bits/byte", "of xz"))
        checked = {True: "continues identically", False: "DOES NOT continue identically", None: "not checked: pip install 'surefoot[hf]'"}
        rows = [
            ("model", f"{self.parameters:,} parameters, {self.trained_tokens:,} tokens, {self.tokens_per_s:,.0f} tokens/s"),
            ("in transformers", checked[self.same_in_transformers]),
            ("exported model", str(self.exported)),
            ("report", str(self.report)),
            ("run", str(self.run)),
            ("time", duration(self.seconds)),
        ]
        terminal.table("Done", rows)
        print(f"\nGo on: surefoot generate {self.run} 'def main():'   surefoot eval {self.run}")


def demonstrate(data: Path | None, out: Path, *, minutes: float, overwrite: bool, quiet: bool = False) -> Demonstration:
    """Do the main job from beginning to end in the directory `out`, training for `minutes`.

    Raises `RunError` when `out` is occupied, `DataError` when there is no text.
    """
    start = time.monotonic()
    text_files = find_text(data)
    _make_room(out, overwrite)
    dataset = prepare_text(*text_files, out / "data", minutes, quiet=quiet)
    run = train_for(minutes, dataset, out, quiet=quiet)
    from surefoot.cli.opening import open_model
    from surefoot.cli.report import validation_samples
    from surefoot.train.evaluate import evaluate
    from surefoot.web import write_report

    opened = open_model(run)
    text = dataset.validation_bytes()
    result = evaluate(opened.model, dataset.loader("validation", SEQUENCE, seed=None))
    samples = tuple(validation_samples(run, 3))
    exported = export(run, out / "exported")
    steps = _steps(run)
    found = Demonstration(
        parameters=sum(parameter.numel() for parameter in opened.model.parameters()),
        trained_tokens=sum(int(step["tokens"]) for step in steps),
        tokens_per_s=_median([float(step["tokens_per_s"]) for step in steps]),
        bits_per_byte=result.bits_per_byte,
        xz=xz_bits_per_byte(text),
        token_unigram=dataset.unigram_bits_per_byte(),
        byte_unigram=byte_entropy(text),
        validation_bytes=len(text),
        same_in_transformers=same_in_transformers(exported, opened.path, dataset),
        report=run / "report.html",
        exported=exported,
        run=run,
        seconds=0.0,
        samples=samples,
    )
    write_report(run, samples=samples, extra={"Bits per byte of the validation text": found.comparison()})
    return replace(found, seconds=time.monotonic() - start)


def find_text(data: Path | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (inputs, excluded globs): the user's `data`, or the sources of Python's standard library without its tests."""
    if data is not None:
        if not data.expanduser().exists():
            raise DataError("no such file or directory", where=str(data), remedy="give a folder of texts: make demo DATA=folder")
        return (str(data.expanduser()),), ()
    library = Path(sysconfig.get_paths()["stdlib"])
    if len(list(library.glob("*.py"))) < 20:
        raise DataError("Python's library has no sources here", where=str(library), remedy="give text of your own: make demo DATA=folder")
    return (f"{library}/**/*.py",), NOT_PROSE


def prepare_text(inputs: Sequence[str], exclude: Sequence[str], out: Path, minutes: float, *, quiet: bool) -> Dataset:
    """Train a tokenizer on the text and write the dataset; a short demo reads less text for its tokenizer."""
    from surefoot.cli.data import prepare_with_progress
    from surefoot.core.config import parse
    from surefoot.data import PrepareConfig

    table = {
        "inputs": inputs,
        "exclude": exclude,
        "on_bad": "skip",
        "validation_fraction": 0.04,
        "tokenizer": {"vocab_size": VOCABULARY, "sample_bytes": int(min(1.0, minutes / 5) * (16 << 20)) + 1},
    }
    dataset = prepare_with_progress(parse(PrepareConfig, table), out, quiet=quiet)
    if "validation" not in dataset.manifest.splits:
        raise DataError("too few documents to keep one for validation", where=inputs[0], remedy="give more text, in several files")
    if not quiet:
        terminal.table("Text", dataset.describe())
    return dataset


def demo_config(dataset: Dataset, run: Path, *, steps: int, schedule: dict[str, Any]) -> TrainConfig:
    """Return the settings of the demo's run: a model of 4 layers, Muon, and bfloat16 where this processor gains by it."""
    from surefoot.core.config import parse
    from surefoot.train import TrainConfig

    table = {
        "run": str(run),
        "seed": 1,
        "model": {
            "vocab_size": dataset.vocab_size,
            "dim": 256,
            "layers": 4,
            "max_positions": SEQUENCE,
            "tied_embeddings": True,
            "attention": {"heads": 4, "kv_heads": 2, "head_dim": 64, "qk_norm": "head"},
            "ffn": {"hidden": 704},
        },
        "data": {"path": str(dataset.path), "sequence_length": SEQUENCE},
        "train": {"steps": steps, "batch_size": BATCH, "precision": fastest_precision(), "eval_rows": 32},
        "optimizer": {"kind": "muon", "lr": 4e-3, "weight_decay": 0.05},
        "schedule": {"warmup_steps": WARMUP_STEPS - 1, **schedule},
    }
    return parse(TrainConfig, table)


def fastest_precision() -> str:
    """Return bfloat16 (with float32 masters) where this processor multiplies it clearly faster than float32, else float32."""
    import torch

    from surefoot.cluster import matmul_peak

    gains = matmul_peak(torch.bfloat16).rate > BFLOAT16_GAIN * matmul_peak(torch.float32).rate
    return "bfloat16" if gains else "float32"


def train_for(minutes: float, dataset: Dataset, out: Path, *, quiet: bool) -> Path:
    """Train until `minutes` are over and return the run.

    In three stretches of one run, each resumed bit for bit from the last: warm-up tells roughly how fast this machine is, a
    stretch at constant rate tells it well, and then the number of steps is settled, over the rest of which the rate falls to 0.
    """
    from surefoot.core.rundir import Run
    from surefoot.train import fit

    path, limit = out / "run", minutes * 60
    constant = {"kind": "constant"}
    config = demo_config(dataset, path, steps=WARMUP_STEPS, schedule=constant)
    with Run.create(path, config) as run, terminal.progress("train", limit, quiet=quiet) as bar:
        watch = Watch(bar, limit)
        _go_on(fit(config, run, watch))
        first = min(max(WARMUP_STEPS + 1, watch.steps_by(PROBE_SHARE * limit)), 100_000)
        config = demo_config(dataset, path, steps=first, schedule=constant)
        _go_on(fit(config, run, watch, resume=True))
        steps = max(first + 1, watch.steps_by(limit))
        falling = {"kind": "wsd", "decay_fraction": (steps - first) / steps, "final_fraction": 0.0}
        config = demo_config(dataset, path, steps=steps, schedule=falling)
        _record(run, config)
        _go_on(fit(config, run, watch, resume=True))
    return path


def _go_on(summary: Summary) -> None:
    """End the demo when its training was interrupted: `fit` has saved, and the rest would judge half a model."""
    if summary.interrupted:
        terminal.note(f"saved at step {summary.step}; go on with: surefoot resume {summary.run} train.steps={10 * summary.step}")
        raise KeyboardInterrupt


class Watch:
    """Follows training by the clock: shows progress, and tells how many steps will be done by a given second."""

    def __init__(self, bar: terminal.Progress, limit_s: float) -> None:
        self.bar, self.limit_s = bar, limit_s
        self.start = time.monotonic()
        self.recent: list[float] = []
        self.step = 0

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        """Take an event of `fit`."""
        if kind != "step":
            return
        from surefoot.cli.watching import shown

        self.step = int(fields["step"])
        self.recent = [*self.recent[-63:], float(fields["step_s"])]
        self.bar.update(min(time.monotonic() - self.start, self.limit_s), **shown(Event(0.0, kind, fields)))

    def steps_by(self, second: float) -> int:
        """Return the number of steps that will be done `second` seconds after the start, at the pace of the last steps."""
        left = second - (time.monotonic() - self.start)
        return self.step + max(0, int(left / (sum(self.recent) / len(self.recent))))


def export(run: Path, out: Path) -> Path:
    """Write the run's model for transformers."""
    from surefoot.cli.opening import generation_of, open_model
    from surefoot.models.hf import export_model

    opened = open_model(run)
    vocabulary = opened.vocabulary()
    return export_model(opened.spec, opened.model, out, tokenizer=opened.home, generation=generation_of(opened, vocabulary), overwrite=True)


def same_in_transformers(exported: Path, run: Path, dataset: Dataset) -> bool | None:
    """Tell whether transformers loads `exported` and continues a prompt with the very tokens we do; None without transformers.

    Both run greedily in float64, where rounding cannot tip a choice.
    """
    import importlib.util

    if importlib.util.find_spec("transformers") is None:
        return None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from surefoot.cli.opening import open_model, prompt_tokens
    from surefoot.models import generate

    disable_progress_bar()
    ours = open_model(run).model.double()
    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float64, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(exported, local_files_only=True)
    prompt = "def "
    (tokens,) = prompt_tokens(dataset.vocabulary, [prompt])
    (expected,) = generate(ours, [tokens], CHECKED_TOKENS)
    count = {"max_new_tokens": CHECKED_TOKENS, "min_new_tokens": CHECKED_TOKENS, "do_sample": False, "eos_token_id": None}
    found = theirs.generate(torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens), dtype=torch.int64), **count)
    same_prompt = tokenizer(prompt, add_special_tokens=False)["input_ids"] == tokens[1:]
    return bool(same_prompt and found[0, len(tokens) :].tolist() == expected)


def _make_room(out: Path, overwrite: bool) -> None:
    """Make `out` an empty directory for the demo; only what an earlier demo made is ever removed."""
    if out.exists() and not out.is_dir():
        raise RunError("is a file, not a directory", where=str(out), remedy="choose another --out")
    if out.is_dir() and any(out.iterdir()):
        if not (out / MARK).is_file():
            raise RunError("holds something that no demo made", where=str(out), remedy="choose an empty or new directory")
        if not overwrite:
            raise RunError("already holds a demo", where=str(out), remedy="add --overwrite, or choose another --out")
        for name in ("data", "run", "exported"):
            shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()


def _record(run: Run, config: TrainConfig) -> None:
    from surefoot.core.config import dumps
    from surefoot.core.files import write_atomic

    write_atomic(run.config_path, dumps(config))


def _steps(run: Path) -> list[dict[str, Any]]:
    from surefoot.core.events import read

    return [dict(event.fields) for event in read(run / "events.jsonl") if event.kind == "step"]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())

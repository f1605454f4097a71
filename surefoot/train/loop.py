"""The training loop. `fit` is the algorithm, top to bottom; what it calls is a file each beside this one."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from surefoot.core.errors import EngineError, SurefootError
from surefoot.core.rundir import Run
from surefoot.data import Batch, Corpus, Loader, Prefetcher
from surefoot.data.mixed import EndOfDataError
from surefoot.parallel import Processes
from surefoot.parallel.replicas import ReplicaError, check_replicas
from surefoot.train.admission import admit
from surefoot.train.checkpoint import Saver
from surefoot.train.config import TrainConfig, check_corpus
from surefoot.train.evaluate import Evaluation, evaluate, together
from surefoot.train.finite import NotFiniteError, culprit
from surefoot.train.interrupt import Interrupt
from surefoot.train.mixing import Mixing
from surefoot.train.setup import Session, open_mesh, open_session, peak_rate
from surefoot.train.state import TrainState
from surefoot.train.step import autocast, gradients_of, update

OnEvent = Callable[[str, dict[str, Any]], None]
Stop = Callable[[], bool]


@dataclass(frozen=True)
class Summary:
    """How a run ended: after `step` steps, `interrupted` or not, with its last evaluation."""

    run: str
    step: int
    loss: float
    evaluation: Evaluation | None
    interrupted: bool
    tokens_per_s: float


def fit(
    config: TrainConfig, run: Run | None, on_event: OnEvent | None = None, *, resume: bool = False, stop: Stop | None = None
) -> Summary:
    """Train as `config` says and return how it ended.

    `run` is the locked run directory, on the first process only. `on_event` is called with (kind, fields) of every event. With
    `resume` the newest whole checkpoint of the run is taken up; the continuation is bit-identical to a run never interrupted.
    `stop` is asked before each step: once it answers True on any process, all save and leave, as after Ctrl-C.

    Raises `ConfigError`, `LayoutError` and `DataError` before any work; `VerdictError` when a trial of the layout goes wrong;
    `NumericsError` when a number is not finite or copies of a tensor are not alike, `EngineError` when a disk is full or a process
    dies, each after an `error` event.
    """
    corpus = Corpus.open(config.data)
    check_corpus(config, corpus)
    processes = Processes.join()
    report = _reporter(run, on_event)
    mesh = open_mesh(config, processes)
    peak_flops_per_s = peak_rate(config, mesh)
    admission = admit(config, mesh, processes, peak_flops_per_s, None if run is None else run.evidence)
    if admission is not None:
        report("verify", verdict=admission.verdict, seconds=admission.seconds)
    session = open_session(config, processes, resume=resume, mesh=mesh)
    state, steps = session.state, config.train.steps
    train_set = corpus.train(config.train.batch_size, session.feed.layout.data, session.micro_batches, session.data, state.position)
    validation = corpus.validation()
    mixing = Mixing.of(config.data, train_set, None if run is None else run.path, processes, report, state.step)
    saver = Saver(
        Path(config.run) / "checkpoints",
        state,
        config.checkpoint,
        processes,
        session.facts,
        on_saved=lambda **fields: report("checkpoint", **fields),
    )
    clock = Clock(session.flops_per_token, peak_flops_per_s)
    evaluation: Evaluation | None = None
    evaluated_at = -1
    loss = math.nan
    report("start", step=state.step, steps=steps, **session.description)

    with (
        _told(report, state),
        Interrupt() as interrupt,
        Prefetcher(train_set, session.requests(), depth=config.data.prefetch * session.micro_batches) as batches,
    ):
        try:
            while state.step < steps and not processes.any(interrupt.asked or saver.failed or (stop is not None and stop())):
                clock.start()
                mixing.asked(state.step)
                # Of all processes: everyone can count it. A step in which masks leave nothing to train has a sum of zero.
                normaliser = max(1, train_set.trained(state.position, config.train.batch_size))
                micro_batches = [session.feed.split(clock.waiting(batches)) for _ in range(session.micro_batches)]

                gradients = gradients_of(session, micro_batches, normaliser)
                if not gradients.finite:
                    raise _not_finite(session, micro_batches, gradients.parts)
                clock.held(saver.captured())
                lr = update(session, gradients)
                loss = gradients.loss
                mixing.trained(state.step)

                if state.step % config.train.log_every == 0 or state.step == steps:
                    bits = loss * normaliser / math.log(2.0) / max(gradients.bytes, 1.0)
                    report(
                        "step",
                        step=state.step,
                        loss=loss,
                        bits_per_byte=bits,
                        grad_norm=gradients.norm,
                        lr=lr,
                        position=state.position,
                        **clock.stop(config.train.batch_size * config.data.sequence_length),
                    )
                if _due(state.step, config.train.eval_every, steps) and validation:
                    evaluations = {name: _evaluate(session, loader, processes) for name, loader in validation.items()}
                    evaluation, evaluated_at = together(evaluations.values()), state.step
                    losses = {name: one.loss for name, one in evaluations.items()}
                    by_source = {"sources": losses} if len(losses) > 1 else {}
                    report(
                        "eval",
                        step=state.step,
                        loss=evaluation.loss,
                        bits_per_byte=evaluation.bits_per_byte,
                        tokens=evaluation.tokens,
                        **by_source,
                    )
                    mixing.measured(state.step, losses)
                saving = _due(state.step, config.checkpoint.every, steps)
                if saving or _due(state.step, config.trust.hash_every, steps):
                    _check_copies(session)
                if saving:
                    clock.held(
                        saver.save(
                            loss=evaluation.loss if evaluation and evaluated_at == state.step else None, data=mixing.state(state.step)
                        )
                    )
            if state.step < steps:
                _check_copies(session)
                saver.save(loss=None, data=mixing.state(state.step))
        except EndOfDataError:
            _check_copies(session)
            saver.save(loss=None, data=mixing.state(state.step))  # what was trained is kept
            raise
        finally:
            mixing.close()
            saver.finish()
    interrupted = state.step < steps
    report("interrupt" if interrupted else "finish", step=state.step, run=config.run)
    return Summary(config.run, state.step, loss, evaluation, interrupted, clock.tokens_per_s)


@dataclass
class Clock:
    """Times a step and what it waited for."""

    flops_per_token: float
    peak_flops_per_s: float
    tokens_per_s: float = 0.0
    _stalled: float = 0.0
    _started: float = field(default=0.0)
    _waited: float = field(default=0.0)

    def start(self) -> None:
        self._started, self._waited = time.perf_counter(), 0.0

    def held(self, seconds: float) -> None:
        """Note that a checkpoint held up this thread; it counts for the step that is reported next."""
        self._stalled += seconds

    def waiting(self, batches: Iterator[Batch]) -> Batch:
        start = time.perf_counter()
        batch = next(batches)
        self._waited += time.perf_counter() - start
        return batch

    def stop(self, tokens: int) -> dict[str, float]:
        seconds = time.perf_counter() - self._started
        stalled, self._stalled = self._stalled, 0.0
        self.tokens_per_s = tokens / seconds
        mfu = self.tokens_per_s * self.flops_per_token / self.peak_flops_per_s
        return {
            "tokens": tokens,
            "tokens_per_s": self.tokens_per_s,
            "mfu": mfu,
            "step_s": seconds,
            "data_wait_s": self._waited,
            "stall_s": stalled,
        }


def _reporter(run: Run | None, on_event: OnEvent | None) -> Callable[..., None]:
    def report(kind: str, **fields: Any) -> None:
        if run is not None:
            run.log.append(kind, **fields)
            if on_event is not None:
                on_event(kind, fields)

    return report


@contextlib.contextmanager
def _told(report: Callable[..., None], state: TrainState) -> Iterator[None]:
    """Write an error that ends the run into its log."""
    try:
        yield
    except SurefootError as error:
        tensor = {"culprit": error.culprit} if isinstance(error, NotFiniteError | ReplicaError) else {}
        with contextlib.suppress(EngineError):  # the log may lie on the disk that is full
            report("error", step=state.step, message=str(error), **tensor)
        raise


def _due(step: int, every: int, steps: int) -> bool:
    return step == steps or bool(every and step % every == 0)


def _check_copies(session: Session) -> None:
    """Halt before a step is saved of which copies on several processes are not the same bits."""
    if session.config.trust.hash_every:
        check_replicas(session.parallel, session.state.tensors(), session.processes, step=session.state.step)


def _evaluate(session: Session, loader: Loader, processes: Processes) -> Evaluation:
    config = session.config
    batch = config.train.micro_batch_size or config.train.batch_size // session.feed.layout.data
    with autocast(config.train.precision, session.feed.device):
        return evaluate(
            session.model,
            loader,
            rows=config.train.eval_rows,
            batch=batch,
            processes=processes,
            feed=session.feed,
            pipeline=session.pipeline,
        )


def _not_finite(session: Session, batches: list[Batch], gradients: dict[str, Tensor | None]) -> NotFiniteError:
    """Name the tensor; nothing of this step is applied or saved."""
    with autocast(session.config.train.precision, session.feed.device):
        name = culprit(session.model, batches, gradients, session.processes)
    return NotFiniteError(
        f"step {session.state.step + 1} is not finite, first in {name}",
        where=session.config.run,
        remedy="nothing of it was saved; resume with a lower optimizer.lr, or look at the tensor",
        culprit=name,
    )

"""What one process sees of training steps: activations, gradients, moments and weights, each with its place in the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.core.random import generator
from surefoot.data import Batch
from surefoot.parallel import Mesh, Placement, Processes, local
from surefoot.parallel.context import split_sequence
from surefoot.parallel.placement import everything
from surefoot.train.checkpoint import Saver
from surefoot.train.config import TrainConfig
from surefoot.train.setup import Session, open_session
from surefoot.train.state import persistent_buffers
from surefoot.train.step import gradients_of, update
from surefoot.train.sums import Added, Addends
from surefoot.trust.repeat import Difference

STREAM = ("embed", "mixer_norm", "mixer", "mixer_post_norm", "ffn_norm", "ffn", "ffn_post_norm", "norm")
"""Modules whose outputs are recorded, besides whole layers: each is a stream [B, T, D]."""


@dataclass(frozen=True)
class Recorded:
    """A process's `part` of the tensor `name`, as it was in `phase` of `step`; `order` counts within the phase."""

    step: int
    phase: str
    order: int
    name: str
    part: Tensor
    placement: Placement


@dataclass
class Recording:
    """All of it on one process. `facts`: what must be equal to the letter, by step; `added`: what each gradient is the sum of, by step.

    `unsteady`: what timing changed, if that was tried.
    """

    entries: list[Recorded] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)
    added: list[dict[str, tuple[Added, Placement]]] = field(default_factory=list)
    unsteady: Difference | None = None


def trial_rows(config: TrainConfig, step: int) -> Batch:
    """Return the rows of a trial step: packed documents of odd lengths, some padding, labels that are not all trained."""
    count, length, vocab = config.train.batch_size, config.data.sequence_length, config.model.vocab_size
    chance = generator(config.seed, "trial", step)
    tokens = torch.randint(0, vocab, (count, length), generator=chance)
    labels = torch.randint(0, vocab, (count, length), generator=chance)
    documents, positions = torch.zeros(count, length, dtype=torch.int32), torch.arange(length).repeat(count, 1)
    for row in range(count):
        for cut in torch.randint(1, length, (row % 4,), generator=chance).sort().values.tolist():
            documents[row, cut:] += 1
            positions[row, cut:] = torch.arange(length - cut)
        labels[row, torch.rand(length, generator=chance) < 0.15 * (row % 3)] = -100
    padding = length // 7
    documents[-1, length - padding :], labels[-1, length - padding :] = -1, -100
    return Batch(tokens, labels, positions, documents, int((labels != -100).sum()), count * length)


def record(
    config: TrainConfig,
    processes: Processes,
    steps: int = 2,
    *,
    rounded: str | None = None,
    interrupted: bool = False,
    mesh: Mesh | None = None,
    pause: Callable[[], None] = lambda: None,
) -> Recording:
    """Run `steps` steps of `config` on trial rows, through the code of a real run, and record them.

    `rounded`: begin from weights rounded to this dtype, so that runs in it and in a wider one begin from the same. `interrupted`: save
    a checkpoint into `config.run` after the first step and go on from it in a new session. `mesh`: groups of the layout that stand already.
    `pause` is called at each recorded operation.
    """
    session = open_session(config, processes, resume=False, mesh=mesh)
    torch.manual_seed(config.seed)  # nothing here draws from it; code under trial may
    if rounded is not None:
        with torch.no_grad():
            for parameter in session.state.optimizer.parameters.values():
                parameter.copy_(parameter.to(getattr(torch, rounded)))
    found = Recording()
    watch, addends = _Watch(session, pause), Addends(session)
    for step in range(steps):
        if interrupted and step == 1:
            _save(session)
            session = open_session(config, processes, resume=True)
            watch, addends = _Watch(session, pause), Addends(session)
        rows = trial_rows(config, step)
        batches = [session.feed.split(_rows(rows, start, count)) for start, count in _requests(session)]
        watch.clear()
        addends.found = {}
        gradients = gradients_of(session, batches, rows.trained)
        found.entries += watch.entries(step)
        found.entries += _numbers(step, gradients.loss, gradients.norm)
        decls, placements = session.parallel.decls, session.parallel.placements
        found.added.append({name: (one, placements[name]) for name, one in addends.found.items()})
        for order, name in enumerate(reversed(decls)):
            part = gradients.parts[name]
            if part is not None:
                found.entries.append(Recorded(step, "reduction", order, name, _kept(part), placements[name]))
        lr = update(session, gradients)
        found.entries += list(_updated(step, session))
        found.facts.append(
            {
                "trained_tokens": rows.trained,
                "lr": lr,
                "step": session.state.step,
                "position": session.state.position,
                "optimizer_steps": session.state.optimizer.steps,
                "optimizer": session.config.optimizer.model_dump(mode="json"),
                "groups": {
                    name: [group.kind, group.lr_multiplier, group.weight_decay]
                    for group in session.state.optimizer.groups
                    for name in group.names
                },
            }
        )
    return found


def _save(session: Session) -> None:
    folder = Path(session.config.run) / "checkpoints"
    saver = Saver(folder, session.state, session.config.checkpoint, session.processes, session.facts, on_saved=lambda **fields: None)
    saver.save(loss=None)
    saver.finish()


def _requests(session: Session) -> Iterator[tuple[int, int]]:
    """The rows of this process's micro-batches, as the loader would be asked for them, from the beginning of a step."""
    asked = islice(session.requests(), session.micro_batches)
    return ((position - session.state.position, count) for position, count in asked)


def _rows(rows: Batch, start: int, count: int) -> Batch:
    piece = slice(start, start + count)
    labels = rows.labels[piece]
    return Batch(rows.tokens[piece], labels, rows.positions[piece], rows.documents[piece], int((labels != -100).sum()), labels.numel())


def _numbers(step: int, loss: float, norm: float) -> list[Recorded]:
    one = everything((1,))
    return [
        Recorded(step, "forward", 1 << 30, "loss", torch.tensor([loss], dtype=torch.float64), one),
        Recorded(step, "clipping", 0, "gradient_norm", torch.tensor([norm], dtype=torch.float64), one),
    ]


def _updated(step: int, session: Session) -> Iterator[Recorded]:
    optimizer, placements = session.state.optimizer, session.parallel.placements
    weights = {name: local(parameter.detach()) for name, parameter in session.parallel.parameters.items()}
    order = 0
    for slot, tensors in (*optimizer.state.items(), ("weight", weights), ("ema", session.state.ema)):
        for name, tensor in tensors.items():
            yield Recorded(step, "update", order, name if slot == "weight" else f"{slot}.{name}", _kept(tensor), placements[name])
            order += 1
    for name, buffer in persistent_buffers(session.model).items():
        yield Recorded(step, "update", order, name, _kept(buffer), everything(tuple(buffer.shape)))
        order += 1


class _Watch:
    """Hooks that keep the streams of a step and their gradients, one a micro-batch."""

    def __init__(self, session: Session, pause: Callable[[], None]) -> None:
        self.session, self.pause = session, pause
        self.outputs: dict[str, list[Tensor]] = {}
        self.gradients: dict[str, dict[int, Tensor]] = {}
        compiled = session.config.train.compile  # what runs inside a compiled block cannot be watched from outside
        for name, module in session.model.named_modules():
            if _recorded(name) and not (compiled and name.startswith("layers.")):
                module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def keep(module: nn.Module, inputs: object, output: Any) -> None:
            self.pause()
            stream = output[0] if isinstance(output, tuple) else output
            if torch._C._current_graph_task_id() != -1:
                return  # the same output again, recomputed in the backward pass
            place = len(self.outputs.setdefault(name, []))
            self.outputs[name].append(_kept(stream))
            if stream.requires_grad:
                stream.register_hook(lambda grad: self._keep_gradient(name, place, grad))

        return keep

    def _keep_gradient(self, name: str, place: int, grad: Tensor) -> None:
        self.pause()
        self.gradients.setdefault(name, {})[place] = _kept(grad)

    def clear(self) -> None:
        self.outputs, self.gradients = {}, {}

    def entries(self, step: int) -> Iterator[Recorded]:
        """Yield what was kept, in the order of the layers, gradients against it."""
        names = sorted(self.outputs, key=_place)
        placement = self._placement()
        for name in names:
            yield Recorded(step, "forward", _place(name), name, torch.cat(self.outputs[name]), placement)
        for name in reversed(names):
            if name in self.gradients:
                parts = self.gradients[name]
                yield Recorded(step, "backward", -_place(name), name, torch.cat([parts[i] for i in sorted(parts)]), placement)

    def _placement(self) -> Placement:
        """Where this process's stream lies among [rows, tokens, D] of a step."""
        config, feed = self.session.config, self.session.feed
        rows, length, dim = config.train.batch_size, config.data.sequence_length, config.model.dim
        mine = rows // feed.layout.data
        tokens = split_sequence(torch.arange(length)[None], feed.layout, feed.at.context)[0].chunk(feed.layout.tensor)[feed.at.tensor]
        starts = [0, *(1 + i for i in range(len(tokens) - 1) if tokens[i + 1] != tokens[i] + 1), len(tokens)]
        runs = tuple((a, int(tokens[a]), b - a) for a, b in pairwise(starts))
        return Placement((rows, length, dim), (((0, feed.index * mine, mine),), runs, ((0, 0, dim),)))


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _recorded(name: str) -> bool:
    parts = name.split(".")
    return len(parts) == 2 or (len(parts) == 3 and parts[2] in STREAM) if parts[0] == "layers" else name in STREAM


def _place(name: str) -> int:
    """Return the place of a module in data-flow order."""
    parts = name.split(".")
    if parts[0] != "layers":
        return 0 if parts[0] == "embed" else 1 << 20
    inner = STREAM.index(parts[2]) if len(parts) > 2 else len(STREAM)
    return 1 + int(parts[1]) * (len(STREAM) + 1) + inner

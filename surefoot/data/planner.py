"""The plan of a step: which pieces of which documents make its rows. A pure function of the state before; metadata only.

Documents are drawn from the mixture and packed into rows of `length` tokens. One that is longer becomes full rows and a rest. The first
half of a row is for the pieces that have waited longest, so that none waits for long; then the longest piece that fits is taken, and so
on (best fit): among the pieces that wait, some rows' worth of tokens, there nearly always is one. What is left waits in the state for
the next step. Which rows a step has does not depend on ranks; where they go is decided afterwards (`arranged`), and changes no sum.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from surefoot.data.ledger import Pieces
from surefoot.data.mixture import Length, Mixture, MixtureState, Unit

WAITING_ROWS = 32  # so many rows' worth of tokens wait at least when a row is filled; a step's worth where that is more


class Piece(NamedTuple):
    """Tokens lo..hi-1 of the n-th document that source number `source` gave."""

    source: int
    n: int
    low: int
    high: int

    @property
    def size(self) -> int:
        return self.high - self.low


Row = tuple[Piece, ...]


@dataclass(frozen=True)
class PlanState:
    """Where planning stands after `step` steps. `full` are pieces of whole rows, `waiting` shorter ones, both in order of arrival."""

    step: int
    mixture: MixtureState
    full: tuple[Piece, ...] = ()
    waiting: tuple[Piece, ...] = ()
    changes: tuple[tuple[int, tuple[float, ...]], ...] = ()  # weights set while the run went on, from which step

    @staticmethod
    def fresh(sources: int) -> PlanState:
        return PlanState(0, MixtureState.fresh(sources))

    def to_json(self) -> dict[str, Any]:
        """Return plain values: a few numbers for each source and each piece that waits."""
        return {
            "step": self.step,
            "total": self.mixture.total,
            "drawn": list(self.mixture.drawn),
            "given": list(self.mixture.given),
            "earned": list(self.mixture.earned),
            "full": [list(piece) for piece in self.full],
            "waiting": [list(piece) for piece in self.waiting],
            "changes": [[step, list(weights)] for step, weights in self.changes],
        }

    @staticmethod
    def from_json(table: dict[str, Any]) -> PlanState:
        mixture = MixtureState(table["total"], tuple(table["drawn"]), tuple(table["given"]), tuple(table["earned"]))
        full, waiting = (tuple(Piece(*piece) for piece in table[name]) for name in ("full", "waiting"))
        return PlanState(table["step"], mixture, full, waiting, tuple((step, tuple(weights)) for step, weights in table["changes"]))


@dataclass(frozen=True)
class StepPlan:
    """The rows of `step`, each a tuple of pieces; `weights` in force at its end; `spent` sources have given all they may."""

    step: int
    rows: tuple[Row, ...]
    weights: tuple[float, ...]
    spent: tuple[int, ...] = ()

    def pieces(self) -> Pieces:
        """Return [pieces, 4] for the ledger: source, n, low, high, in the order of planning, whatever ranks do with them."""
        flat = [piece for row in self.rows for piece in row]
        return np.array(flat, dtype=np.int64).reshape(len(flat), 4)

    def padding(self, length: int) -> float:
        """Return the share of the rows' tokens that nothing fills."""
        held = sum(piece.size for row in self.rows for piece in row)
        return 1.0 - held / (length * len(self.rows)) if self.rows else 0.0


class OutOfDocuments(Exception):  # noqa: N818 - an end, not a failure
    """The sources have given all they may, and what is left fills no whole step."""


@dataclass
class Planner:
    """Plans steps of `rows` rows of `length` tokens. `schedule`: (tokens of the mixture, weights), the first at 0."""

    schedule: Sequence[tuple[int, tuple[float, ...]]]
    document: Length
    rows: int
    length: int
    by: Unit = "tokens"
    limits: tuple[int | None, ...] = ()

    def plan(self, state: PlanState) -> tuple[StepPlan, PlanState]:
        """Return the step after `state`, and the state after it. Raises `OutOfDocuments`."""
        step = state.step + 1
        mixture = Mixture(self.weights_at(state, step), self.document, self.by, self.limits, state.mixture)
        pool = _Pool(state.full, state.waiting)
        pending = deque(change for change in self.schedule if change[0] > state.mixture.total and not self._set_by_hand(state, step))
        enough = max(WAITING_ROWS, self.rows) * self.length
        rows: list[Row] = []
        ended = False
        while len(rows) < self.rows:
            while not ended and not pool.full and pool.tokens < enough:
                if pending and mixture.total >= pending[0][0]:
                    mixture.reweigh(pending.popleft()[1])
                drawn = mixture.draw()
                if drawn is None:
                    ended = True
                else:
                    pool.add(drawn.source, drawn.n, drawn.length, self.length)
            row = pool.row(self.length)
            if not row:
                raise OutOfDocuments
            rows.append(row)
        full, waiting = pool.left()
        return (
            StepPlan(step, tuple(rows), tuple(mixture.weights), tuple(mixture.exhausted)),
            PlanState(step, mixture.state, full, waiting, state.changes),
        )

    def weights_at(self, state: PlanState, step: int) -> tuple[float, ...]:
        """Return the weights with which `step` begins: those set by hand if any are in force, else the schedule's."""
        by_hand = [weights for start, weights in state.changes if start <= step]
        if by_hand:
            return by_hand[-1]
        places = [at for at, _ in self.schedule]
        return self.schedule[max(0, bisect_right(places, state.mixture.total) - 1)][1]

    @staticmethod
    def _set_by_hand(state: PlanState, step: int) -> bool:
        return any(start <= step for start, _ in state.changes)


class _Pool:
    """Pieces that wait: whole rows in order of arrival, shorter ones by length and by age."""

    def __init__(self, full: Sequence[Piece], waiting: Sequence[Piece]) -> None:
        self.full = deque(full)
        self.tokens = 0
        self._age = 0
        self._by_age: dict[int, Piece] = {}
        self._by_size: list[tuple[int, int]] = []  # (size, -age): among equals the oldest is found first
        for piece in waiting:
            self._keep(piece)

    def add(self, source: int, n: int, size: int, length: int) -> None:
        """Take in a document of `size` tokens."""
        low = 0
        while size - low >= length:
            self.full.append(Piece(source, n, low, low + length))
            low += length
        if low < size:
            self._keep(Piece(source, n, low, size))

    def row(self, length: int) -> Row:
        """Take out a row; empty when nothing waits."""
        if self.full:
            return (self.full.popleft(),)
        if not self._by_age:
            return ()
        found: list[Piece] = []
        room = length
        while 2 * room > length and self._by_age:
            oldest = next(iter(self._by_age))
            size = self._by_age[oldest].size
            if size > room:
                break
            found.append(self._take(oldest, size))
            room -= size
        while room > 0:
            place = bisect_right(self._by_size, (room, 0)) - 1
            if place < 0:
                break
            size, age = self._by_size[place]
            found.append(self._take(-age, size, place))
            room -= size
        return tuple(found)

    def left(self) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        return tuple(self.full), tuple(self._by_age.values())

    def _keep(self, piece: Piece) -> None:
        self._by_age[self._age] = piece
        insort(self._by_size, (piece.size, -self._age))
        self._age += 1
        self.tokens += piece.size

    def _take(self, age: int, size: int, place: int | None = None) -> Piece:
        if place is None:
            place = bisect_right(self._by_size, (size, -age)) - 1
        del self._by_size[place]
        self.tokens -= size
        return self._by_age.pop(age)


Floats = npt.NDArray[np.float64]


def arranged(costs: Floats, ranks: int, micro_batches: int) -> list[int]:
    """Return an order of rows in which rank r's micro-batch m is the m-th stretch of the r-th part, equally many rows in each.

    Costliest first, each on the rank, and then in the micro-batch, that has least so far and still has room (longest processing time
    first, Graham 1969), ties by number. The rows are the same ones in every arrangement.
    """
    each = len(costs) // ranks
    order = np.argsort(-costs, kind="stable").tolist()
    found: list[int] = []
    for mine in _dealt(order, costs, ranks, each):
        for part in _dealt(mine, costs, micro_batches, each // micro_batches):
            found += part
    return found


def _dealt(order: Sequence[int], costs: Floats, bins: int, each: int) -> list[list[int]]:
    import heapq

    heap = [(0.0, place) for place in range(bins)]
    parts: list[list[int]] = [[] for _ in range(bins)]
    for item in order:
        load, place = heapq.heappop(heap)
        parts[place].append(item)
        if len(parts[place]) < each:
            heapq.heappush(heap, (load + float(costs[item]), place))
    return parts


def attention_pairs(row: Row) -> int:
    """Return the (query, key) pairs of a row's causal, document-masked attention."""
    return sum(piece.size * (piece.size + 1) // 2 for piece in row)


Cost = Callable[[Row], float]

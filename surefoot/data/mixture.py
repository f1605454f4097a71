"""Which source the next document comes from: shares that are exact at every prefix, and a state of a few numbers a source.

A source with weight w has a right to w tokens of each token drawn. What it has a right to and has not been given is its lag. A document
becomes eligible when its source's lag is not negative, and among eligible documents the one goes first whose length its source will
have earned soonest: earliest eligible virtual deadline first (Stoica & Abdel-Wahab 1995), with the mixture's own tokens as the clock. No
lag ever exceeds one longest document, whatever the lengths and weights; where every document counts one (`by = "documents"`) this is
Tijdeman's chairman assignment (1980), and no count is ever off by a whole document.

Rights are summed as they accrue, so a change of weights neither repays nor forgives what went before.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

Unit = Literal["tokens", "documents"]
Length = Callable[[int, int], int]
"""(source, n) -> tokens of the n-th document that this source gives, counted over all epochs."""


class Draw(NamedTuple):
    """The `n`-th document (over all epochs) of source number `source`, `length` tokens long."""

    source: int
    n: int
    length: int


@dataclass(frozen=True)
class MixtureState:
    """Where a mixture stands. By source number: documents `drawn`, what was `given` and what was `earned`, in the mixture's unit."""

    total: int
    drawn: tuple[int, ...]
    given: tuple[int, ...]
    earned: tuple[float, ...]

    @staticmethod
    def fresh(sources: int) -> MixtureState:
        return MixtureState(0, (0,) * sources, (0,) * sources, (0.0,) * sources)

    def extended(self, sources: int) -> MixtureState:
        """Return this state with sources added behind, which have earned nothing yet."""
        more = sources - len(self.drawn)
        return replace(self, drawn=self.drawn + (0,) * more, given=self.given + (0,) * more, earned=self.earned + (0.0,) * more)


def normalised(weights: Sequence[float]) -> tuple[float, ...]:
    """Return `weights` divided by their sum, each at least 0."""
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


def natural(sizes: Sequence[int], temperature: float) -> tuple[float, ...]:
    """Return weights proportional to size^(1 / temperature): 1 is natural, larger is flatter."""
    return normalised([size ** (1.0 / temperature) for size in sizes])


@dataclass
class Mixture:
    """Draws documents by `weights` (they sum to 1; 0 gives nothing) from the state it is given; `state` says where it stands then.

    `limits`: how many documents each source may give in all, None for no limit. A source that has given them all has no weight any
    more: the others share its part. Nothing is left to draw when all have.
    """

    weights: tuple[float, ...]
    length: Length
    by: Unit = "tokens"
    limits: tuple[int | None, ...] = ()
    start: MixtureState | None = None
    exhausted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        state = self.start or MixtureState.fresh(len(self.weights))
        self.limits = self.limits or (None,) * len(self.weights)
        self.total, self._drawn, self._given = state.total, list(state.drawn), list(state.given)
        self._earned = list(state.earned)
        self._rates = list(self.weights)
        self._since = state.total  # `_earned` is of this moment
        for source, limit in enumerate(self.limits):
            if limit is not None and self._drawn[source] >= limit:
                self._rates[source] = 0.0
        self._rerate(self._rates)

    @property
    def state(self) -> MixtureState:
        return MixtureState(self.total, tuple(self._drawn), tuple(self._given), tuple(self._settled()))

    def reweigh(self, weights: Sequence[float]) -> None:
        """Go on with other weights from here."""
        self._earned = self._settled()
        self.weights = tuple(weights)
        spent = [limit is not None and drawn >= limit for limit, drawn in zip(self.limits, self._drawn, strict=True)]
        self._rerate([0.0 if gone else weight for gone, weight in zip(spent, weights, strict=True)])

    def draw(self) -> Draw | None:
        """Return the next document; None when no source has any."""
        eligible, waiting, total = self._eligible, self._waiting, self.total
        while waiting and waiting[0][0] <= total:
            _, deadline, source = heapq.heappop(waiting)
            heapq.heappush(eligible, (deadline, source))
        if eligible:
            source = heapq.heappop(eligible)[1]
        elif waiting:  # rounding alone, or lags carried over from other weights: the first to become eligible
            source = heapq.heappop(waiting)[2]
        else:
            return None
        n = self._drawn[source]
        length = self._next[source]
        size = 1 if self.by == "documents" else length
        self._drawn[source] = n + 1
        self._given[source] += size
        self.total = total + size
        limit = self.limits[source]
        if limit is not None and n + 1 >= limit:
            self.exhausted.append(source)
            self._earned = self._settled()
            self._rates[source] = 0.0
            self._rerate(self._rates)
        else:
            self._queue(source)
        return Draw(source, n, length)

    def draws(self) -> Iterator[Draw]:
        """Yield documents until no source has any."""
        while (found := self.draw()) is not None:
            yield found

    def lags(self) -> list[float]:
        """Return by source what it has earned and not been given."""
        return [earned - given for earned, given in zip(self._settled(), self._given, strict=True)]

    def _settled(self) -> list[float]:
        passed = self.total - self._since
        return [earned + rate * passed for earned, rate in zip(self._earned, self._rates, strict=True)]

    def _rerate(self, rates: Sequence[float]) -> None:
        """Set the rates (made to sum to 1) from here on, and put every source's next document in its queue."""
        whole = math.fsum(rates)
        self._rates = [rate / whole for rate in rates] if whole else [0.0] * len(rates)
        self._since = self.total
        self._eligible: list[tuple[float, int]] = []
        self._waiting: list[tuple[float, float, int]] = []
        self._next = [0] * len(rates)
        for source, rate in enumerate(self._rates):
            if rate > 0.0:
                self._queue(source)

    def _queue(self, source: int) -> None:
        """Work out when the next document of `source` becomes eligible, and by when it is due, on the clock of the total."""
        length = self._next[source] = self.length(source, self._drawn[source])
        rate, owed = self._rates[source], self._given[source] - self._earned[source]
        release = self._since + owed / rate
        deadline = release + (1 if self.by == "documents" else length) / rate
        # Rounding must not decide: a document is eligible from half a millionth of a token before.
        heapq.heappush(self._waiting, (release - 5e-7, deadline, source))


@dataclass(frozen=True)
class Stage:
    """From `at` tokens of the mixture on: these weights, by source name, reached at once or in a straight line from the stage before."""

    at: int
    weights: Mapping[str, float]
    shape: Literal["step", "linear"] = "step"


STEPS = 64  # pieces that a straight line is cut into


def schedule(names: Sequence[str], stages: Sequence[Stage]) -> list[tuple[int, tuple[float, ...]]]:
    """Return (tokens, weights) of every change, in order; a straight line becomes `STEPS` equal steps."""
    found: list[tuple[int, tuple[float, ...]]] = []
    before: tuple[float, ...] | None = None
    since = 0
    for stage in sorted(stages, key=lambda one: one.at):
        now = normalised([stage.weights.get(name, 0.0) for name in names])
        if stage.shape == "linear" and before is not None and stage.at > since:
            for piece in range(1, STEPS):
                part = piece / STEPS
                mixed = normalised([(1.0 - part) * a + part * b for a, b in zip(before, now, strict=True)])
                found.append((since + (stage.at - since) * piece // STEPS, mixed))
        found.append((stage.at, now))
        before, since = now, stage.at
    return found


FLOOR = 0.1  # of the shares is dealt out equally: a source that is never heard of cannot be judged


def by_excess_loss(
    weights: Sequence[float], losses: Sequence[float], best: Mapping[str, float], names: Sequence[str], rate: float
) -> tuple[tuple[float, ...], dict[str, float]]:
    """Return weights that give more to sources whose loss stands above the best they have reached, and those best losses.

    Exponentiated gradient on the excess, as DoReMi's inner loop (Xie et al. 2023, arXiv 2305.10429, algorithm 1), with the run's own
    best loss as the reference in place of a proxy model's, smoothed towards equal shares so that no source is starved.
    """
    reached = {name: min(best.get(name, loss), loss) for name, loss in zip(names, losses, strict=True)}
    excess = [max(0.0, loss - reached[name]) for name, loss in zip(names, losses, strict=True)]
    raised = normalised([weight * math.exp(rate * over) for weight, over in zip(weights, excess, strict=True)])
    return tuple((1.0 - FLOOR) * weight + FLOOR / len(names) for weight in raised), reached

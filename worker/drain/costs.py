"""What tokens cost on this engine in seconds, by least squares over stretches of full work.

    seconds = a * prompt tokens computed + b * tokens written + c * tokens of context read

A token that is written reads the context before it, so an answer of d tokens to a prompt of p
reads d * (p + d / 2). Of the forms tried on the shipped model on a CPU this was the best: over
files of three shapes it was within 10 % where a and b alone were 31 % off (docs/planning.md).

Work of one shape cannot tell the three apart. What it leaves open is decided by their usual
proportion (USUAL), known to a factor of about two; work of other shapes overrides it. The
covariance says how sure the three are together, so that whoever plans a file knows what they are
worth for its shape.
"""

import math
from collections.abc import Sequence

#: a : b : c, between those of Llama-3-8B on an H200 (1 : 1.7 : 0.0016) and of the shipped model on
#: two cores of a CPU (1 : 4.1 : 0.012).
USUAL = (1.0, 2.6, 0.0044)
#: The standard deviation of each around that proportion, as a share of it.
DOUBT = 0.7
#: Passes of fitting and weighing.
PASSES = 8
#: Fewer stretches than this say nothing.
FEWEST = 2
_N = len(USUAL)

Matrix = list[list[float]]


class Costs:
    """Adds up stretches of work, the latest counting most."""

    def __init__(self) -> None:
        #: Sums over stretches, in units of USUAL: products of amounts with each other and with
        #: the seconds, squares of the seconds, how many stretches they are, and their seconds.
        self._products: Matrix = [[0.0] * _N for _ in range(_N)]
        self._with_seconds = [0.0] * _N
        self._squares = 0.0
        self.stretches = self.seconds = 0.0

    def add(self, amounts: Sequence[float], seconds: float, keep: float) -> None:
        """Take in one stretch: tokens computed, written and read; what was before counts `keep`."""
        scaled = [amount * usual for amount, usual in zip(amounts, USUAL, strict=True)]
        for i in range(_N):
            row = self._products[i]
            for j in range(_N):
                row[j] = row[j] * keep + scaled[i] * scaled[j]
            self._with_seconds[i] = self._with_seconds[i] * keep + scaled[i] * seconds
        self._squares = self._squares * keep + seconds * seconds
        self.stretches = self.stretches * keep + 1
        self.seconds = self.seconds * keep + seconds

    def fitted(self) -> tuple[list[float], Matrix] | None:
        """Return the seconds of a token of each kind and their covariance; None: too early."""
        whole = sum(map(sum, self._products))
        if self.stretches < FEWEST or whole <= 0:
            return None
        level = sum(self._with_seconds) / whole  # as if the usual proportion were exact
        costs = [level] * _N
        for _ in range(PASSES):  # what is left unexplained says how far to trust them
            scatter = max(self._scatter(costs), 1e-4 * self._squares / self.stretches)
            pull = scatter / (DOUBT * level) ** 2
            matrix = [[p + pull * (i == j) for j, p in enumerate(self._products[i])]
                      for i in range(_N)]  # fmt: skip
            inverse = inverted(matrix)
            pulled = [sums + pull * level for sums in self._with_seconds]
            costs = _not_negative(matrix, pulled)
        covariance = [
            [scatter * inverse[i][j] * USUAL[i] * USUAL[j] for j in range(_N)] for i in range(_N)
        ]
        return [cost * usual for cost, usual in zip(costs, USUAL, strict=True)], covariance

    def _scatter(self, costs: Sequence[float]) -> float:
        """Return the mean square of the seconds that these costs leave unexplained."""
        explained = sum(cost * sums for cost, sums in zip(costs, self._with_seconds, strict=True))
        own = sum(costs[i] * costs[j] * self._products[i][j] for i in range(_N) for j in range(_N))
        return (self._squares - 2 * explained + own) / self.stretches


def _not_negative(matrix: Matrix, right: Sequence[float]) -> list[float]:
    """Return the least squares of which none is negative: what would be is left out."""
    used = list(range(len(right)))
    found = [0.0] * len(right)
    while used:
        part = inverted([[matrix[i][j] for j in used] for i in used])
        solved = [sum(row[k] * right[j] for k, j in enumerate(used)) for row in part]
        if min(solved) >= 0:
            for position, i in enumerate(used):
                found[i] = solved[position]
            break
        del used[solved.index(min(solved))]
    return found


def inverted(matrix: Matrix) -> Matrix:
    """Return the inverse of a symmetric, positive definite matrix (Gauss and Jordan)."""
    size = len(matrix)
    rows = [
        [*map(float, row), *(float(i == j) for j in range(size))] for i, row in enumerate(matrix)
    ]
    for i in range(size):
        pivot = rows[i][i] or math.ulp(1.0)
        rows[i] = [value / pivot for value in rows[i]]
        for j in range(size):
            if j != i and (factor := rows[j][i]):
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [row[size:] for row in rows]

"""A forward and a backward pass that run together: each computes while the other exchanges tokens between experts.

So do DualPipe and DualPipeV. Both passes keep their own order. One stream computes: it takes the next operator of the
pass that reaches its next exchange sooner, and weight gradients, which nobody waits for, where neither pass can go on.
Another stream exchanges, in the order in which exchanges are asked for. What no work is left to hide is exposed.
Operators are slower beside an exchange (`lumos.costs.contention`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from lumos.costs.contention import Beside
from lumos.costs.model_costs import ModelCosts
from lumos.program.op import Op
from lumos.program.operators import Collective
from lumos.schedules import Phase
from lumos.step.block_timeline import Row, end_beside


class Piece(NamedTuple):
    """One operator or collective of a pass."""

    op: Op
    us: float  # its time alone
    phase: Phase


class _Thread:
    """A pass on its way: the pieces to come, and when the next of them may begin."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces, self.ready = deque(pieces), 0.0
        self.ahead = deque[float]()  # work before every exchange that is still to come
        work = 0.0
        for piece in pieces:
            if piece.op.stream:
                self.ahead.append(work)
                work = 0.0
            elif not piece.op.weight_gradient:
                work += piece.us
        self.ahead.append(inf)  # after the last exchange nothing is urgent

    def take(self) -> Piece:
        piece = self.pieces.popleft()
        if piece.op.stream:
            self.ahead.popleft()
        elif not piece.op.weight_gradient:
            self.ahead[0] -= piece.us
        return piece


class _Pair:
    """Two passes, and what has run of them so far."""

    def __init__(self, passes: Sequence[Sequence[Piece]], costs: ModelCosts) -> None:
        self.threads, self.costs = [_Thread(pieces) for pieces in passes], costs
        self.rows: list[tuple[Phase, Row]] = []
        self.now = self.wire = 0.0  # when each of both streams is free
        self.beside: list[tuple[float, Beside]] = []  # the exchange that runs last
        self.later = deque[Piece]()  # weight gradients whose time has come, but need not

    def run(self) -> list[tuple[Phase, Row]]:
        while True:
            for thread in sorted(self.threads, key=lambda thread: thread.ready):
                self._let_go(thread)
            waiting = [thread for thread in self.threads if thread.pieces]
            ready = [thread for thread in waiting if thread.ready <= self.now]
            if ready:
                thread = min(ready, key=lambda thread: thread.ahead[0])
                self._compute(thread.take())
                thread.ready = self.now
            elif self.later:
                self._compute(self.later.popleft())
            elif waiting:
                self.now = min(thread.ready for thread in waiting)
            else:
                return self.rows

    def _let_go(self, thread: _Thread) -> None:
        """What needs no turn of the computing stream: exchanges, and weight gradients, which are set aside."""
        while thread.pieces and (thread.pieces[0].op.stream or thread.pieces[0].op.weight_gradient):
            piece = thread.take()
            if not piece.op.stream:
                self.later.append(piece)
                continue
            begin = max(self.wire, thread.ready)
            self.wire = thread.ready = begin + piece.us
            self.rows.append((piece.phase, Row(piece.op, begin, self.wire)))
            assert isinstance(piece.op.work, Collective)
            self.beside = [(self.wire, self.costs.running(piece.op.work, piece.us))]

    def _compute(self, piece: Piece) -> None:
        """An operator; or a collective of another kind, which holds up the stream as it does in a pass alone."""
        begin = self.now
        if isinstance(piece.op.work, Collective):
            self.now = begin + piece.us
        else:
            beside = [(until, kernel) for until, kernel in self.beside if until > begin]
            self.now = end_beside(begin, piece.us, piece.op, beside, self.costs)
        self.rows.append((piece.phase, Row(piece.op, begin, self.now)))


def together(forward: Sequence[Piece], backward: Sequence[Piece], costs: ModelCosts) -> list[tuple[Phase, Row]]:
    """When each operator and collective of two passes runs that run together, and which phase it belongs to."""
    return _Pair((forward, backward), costs).run()

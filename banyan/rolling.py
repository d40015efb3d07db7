"""Which of a conversation's snapshots stay: a new one takes the place of those before it.

Every turn leaves two checkpoints, at the end of its prompt and of its answer, and the next turn
reads one of them, once. Kept by last use alone they would fill the state pool with snapshots that
nobody comes back to. Two rules keep them few:

- *Superseded*: when a conversation goes on, its earlier snapshots become the first to go: those of
  the turn before when the prompt is computed, those of the prompt when the answer is. Not so branch
  points, the first message's end and intervals, nor whatever was resumed at more than once or goes
  on in several ways: others come back to those.
- *Crowded*: when conversations come back later than the pool can remember, last use keeps none of
  them long enough. Then a snapshot stays only if it takes the place of one that was still there, so
  that some conversations are served always, rather than all of them never. Whether that is better
  is told by how many snapshots are published between a turn and the next, which does not depend on
  what was kept (reuse distance, Mattson 1970; the admission is that of bimodal insertion, Qureshi
  2007).

What must not stay is not dropped: with room to spare it stays. Owns these rules and their evidence.
Knows the tree and the lease. Called by `PrefixCache`, from the scheduler thread.
"""

from __future__ import annotations

from banyan.lease import Lease
from banyan.tree import Mark, Match, Node, Tree
from banyan.tree.keys import TOKEN_BYTES

_WEIGHT = 1 / 32
"""Of the latest resumption in what is known of all."""

_GAIN = 1.25
"""How much better it must look to serve some conversations always."""

_LUCKY = 32
"""When crowded, one of so many newcomers stays, so that those who never come back are replaced."""

_ROLLING = (Mark.TURN, Mark.PROMPT, Mark.MESSAGE)


class Rolling:
    """The rules, for one cache.

    Args:
        room: checkpoints that the larger tier holds.

    Attributes:
        turns: share of resumptions that go on from an answer's end, not a prompt's end: also those
            whose state was gone, since the tokens say it.
        near: share of resumptions that last use alone would have served.
        distance: snapshots published between a turn and the next, on average.
    """

    def __init__(self, tree: Tree, room: int) -> None:
        self._tree, self._room = tree, room
        self._published = self._newcomers = 0
        self.turns, self.near, self.distance = 1.0, 1.0, 0.0

    @property
    def crowded(self) -> bool:
        """Whether to serve some conversations always serves more than last use."""
        return self._room > _GAIN * self.near * max(self.distance, self._room)

    def granted(self, lease: Lease, match: Match) -> None:
        """Note where the lease resumed, and which snapshot its prompt continues.

        Cost: O(nodes of the match beyond the boundary).
        """
        if lease.node.mark in _ROLLING:
            lease.rolling.append(lease.node)
        for node in reversed(match.path):
            if node.end < lease.boundary:
                return
            if node.end <= match.full_len and node.mark in (Mark.TURN, Mark.PROMPT):
                lease.continues = node
                more = len(match.key) // TOKEN_BYTES - node.end
                lease.repeats = more <= 2 * self._tree.page_size
                return

    def used(self, lease: Lease) -> None:
        """The lease's prompt is being computed: what it continues counts as evidence."""
        node = lease.continues
        if node is None:
            return
        distance = self._published - node.snapshot
        if not lease.repeats:
            self.turns += _WEIGHT * ((node.mark is Mark.TURN) - self.turns)
        self.near += _WEIGHT * ((distance < self._room) - self.near)
        self.distance += _WEIGHT * (distance - self.distance)

    def published(self, lease: Lease, node: Node, mark: Mark) -> bool:
        """A checkpoint of `lease` stands at `node`; whether it should stay.

        Mutates: the node's mark, and the recency of what this one supersedes.
        """
        if mark is Mark.PASSED:
            return False
        if mark is Mark.KEEP or node.mark is Mark.KEEP:
            node.mark = Mark.KEEP
            return True
        node.mark = mark
        if mark is Mark.TURN:
            self._published += 1
        node.snapshot = self._published
        if not self._is_welcome(lease) or (mark is Mark.TURN and self.turns < 0.5):
            return False
        older = [] if mark is Mark.MESSAGE else lease.rolling
        if mark is Mark.PROMPT:
            older = [n for n in older if n.mark is not Mark.MESSAGE or n.end <= lease.boundary]
        for n in older:
            if n is not node and self._is_superseded(n):
                self._tree.cool(n)
        lease.rolling = [n for n in lease.rolling if n not in older and n is not node]
        lease.rolling.append(node)
        return True

    def _is_welcome(self, lease: Lease) -> bool:
        """Whether snapshots of this conversation may stay: they take the place of one that did."""
        if lease.welcome is None:
            lease.welcome = not self.crowded or bool(lease.rolling)
            if not lease.welcome:
                self._newcomers += 1
                lease.welcome = self._newcomers % _LUCKY == 0
        return lease.welcome

    def _is_superseded(self, node: Node) -> bool:
        """Whether nobody but the conversation itself has come back to `node`.

        Publishing counts as one use, its own next turn as another.
        """
        return node.mark in _ROLLING and node.hits <= 2 and len(node.children) <= 1

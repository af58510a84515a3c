"""Far keys by choice: a query sees the blocks of far keys that matter to it most."""

from __future__ import annotations

from dataclasses import dataclass

from isentrope.core.choice import BlockChoice
from isentrope.parts import Part, check_choice, check_integer

SCORES = ("representative", "votes")
HEADS = ("each", "all")
MAX_BLOCKS = 1 << 12
MAX_VOTES = 1 << 10


@dataclass(frozen=True)
class Retrieve(BlockChoice, Part):
    """Of the far keys, see the first tokens and the `blocks` best blocks of `size`: O(n · budget) in time.

    For causal attention and a position method with near and far keys, such as `ReRoPE`; near keys are all seen.

    Blocks of far keys are cut at multiples of `size`, groups of queries at multiples of `queries`, both counted from
    the first token of the row (or document). A group chooses together, among the blocks after the first tokens all of
    whose keys are far for all of its queries. Far keys in no such block are always seen: the first tokens, to the end
    of their block, and fewer than size + queries keys between the last such block and the window. A group with at most
    `blocks` blocks to choose from sees everything, so that short rows are as without the part.

    A group is within one call: text that is fed in piece by piece, as in generation, chooses anew for the queries of
    each call. With queries=1 the result does not depend on how text is fed in.

    Chosen blocks are a constant to gradients. n of temperatures that count "visible" keys, and n_far of a share law,
    count what is seen after the choice.

    With score="representative", after InfLLM (Xiao et al., 2024), means q̄ of `pool` neighbouring queries of the group,
    as they are rotated for far keys, meet every far key, and the best key represents its block b:

        r_b(q̄) = max_{j in b} scale · q̄·k_j,    score of b = mean over heads of max over q̄ of softmax_b(r(q̄))

    Temperatures are in q before the mean, each as it is after the choice; votes do not depend on them.

    InfLLM instead takes one mean for all queries of a group, which hides what a single one looks for, and the mean of
    a block's four most attended keys, which needs the attention over all keys. The products cost a fraction
    1 / (2 pool) of dense attention.

    With score="votes", after ReAttention (Liu et al., 2024), every query votes, in each head, for the `votes` keys with
    the largest q·k, both unrotated, among the keys of the group's blocks; score of b = votes for its keys. That costs
    about half of dense attention, whatever the number of queries.

    Of blocks with equal scores, and of keys with equal products, those nearer to the beginning win.

    Attributes:
        blocks: how many blocks a group chooses.
        size: keys of a block.
        sinks: the first tokens, which are always seen, at far positions where they are far.
        queries: queries of a group: fewer choose more sharply, more choose faster.
        score: "representative" or "votes".
        heads: whose scores are added: "each" key head chooses for itself, from the query heads that share it, or "all"
            choose together.
        votes: keys that a query votes for, with score="votes".
        pool: queries of a mean, with score="representative": fewer see more sharply, more choose faster.
    """

    def __post_init__(self) -> None:
        check_integer(self, "blocks", 1, MAX_BLOCKS)
        check_integer(self, "size", 1)
        check_integer(self, "sinks", 0)
        check_integer(self, "queries", 1)
        check_choice(self, "score", SCORES)
        check_choice(self, "heads", HEADS)
        check_integer(self, "votes", 1, MAX_VOTES)
        check_integer(self, "pool", 1)
        unused = "pool" if self.score == "votes" else "votes"
        if getattr(self, unused) != getattr(BlockChoice, unused):
            raise ValueError(f"Retrieve({unused}=…): has no effect with score={self.score!r}; leave it out")

    def idle(self, length: int) -> bool:
        return True  # by itself: `Recipe.idle` asks whether there are far keys that it changes

    def describe_budget(self, window: int) -> str:
        """Return how many keys a query sees at most, in words."""
        return (
            f"{self.blocks} blocks of {self.size} far keys by {self.score}, the first {self.first_block * self.size} "
            f"keys and a window of {window}: at most {self.count_most_far() + window} keys"
        )

"""Which recorded calls are imitated: selected from stores or from rollouts in memory, with the student's tokens."""

from agl.trainer.traces.choice import Candidate, Chosen, choose
from agl.trainer.traces.pairs import Pair, Pairs, pairs
from agl.trainer.traces.stored import Traces

__all__ = ["Candidate", "Chosen", "Pair", "Pairs", "Traces", "choose", "pairs"]

"""
What the next tokens are of: one loop over sequences, for whoever has a model.

    sequence     one text that is being continued
    scheduler    who is in the next step
    engine       the loop: add, step; stream and generate
"""
from engine.engine import Engine, default_pool, pool_for
from engine.sequence import Sequence

__all__ = ['Engine', 'Sequence', 'default_pool', 'pool_for']

"""
Generation: which tokens of which sequences each call of an executor computes.

    sequence     tokens that are being continued
    scheduler    who is in the next call
    engine       the loop: add, step; stream and generate
"""
from engine.engine import Engine, default_pool, pool_for
from engine.sequence import Sequence

__all__ = ['Engine', 'Sequence', 'default_pool', 'pool_for']

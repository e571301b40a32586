"""The functions of a step as launches of Triton kernels; see plain.py, which says what each computes."""
from decode.gpu.attention import attend, embed, store, turn
from decode.gpu.drawing import draw
from decode.gpu.linear import linear

__all__ = 'attend', 'draw', 'embed', 'linear', 'store', 'turn'

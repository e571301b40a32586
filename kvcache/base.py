"""What the caches for sequences have in common: sequence numbers and lengths, operations on sequences, and recovery."""
import threading
from contextlib import suppress

import torch

from kvcache.exclusive import exclusive
from kvcache.placement import dtype_of, zero_all
from kvcache.protocol import check_shift
from kvcache.rotary import Rotary
from kvcache.steps import Steps


class BaseCache(Steps):
    """
    Sequences of one model, by number.

    Several threads can use a cache: its operations run one at a time, and their sequences together need room. An
    operation that raises, or that a KeyboardInterrupt ends, leaves all sequences usable; a step that fails leaves each
    of its sequences with its first `start` tokens. In a child process, after a fork, the cache goes on with its own
    copy.

    If the model has a window, the cache keeps what the next token of a sequence sees, and perhaps a few positions
    before that. A sequence can then be cut only to a length whose next token sees nothing that is gone. After a step
    that failed, a sequence for which that is not so has no tokens.

    model: a GPT. n_seq: the largest number of sequences. lengths: {sequence: how many of its tokens are in the cache}.
    name: what sample.py prints. layers: the `Layer`s.
    decoder: a decoder of the model. If it has `execute_model`, and its compiled step reads keys and values as they are
    stored here, that step takes the place of the model in PyTorch; if not, the attribute `decoder` is None.

    A subclass says where keys and values are, in `copy`, `cut`, `forward_pass`, `make_room` and, for windows,
    `first_held`. It may hold more tokens of a sequence than `lengths` says, during a step or after one that failed;
    `recover` then cuts the rest. mixes_lengths: can one forward pass take sequences with different numbers of new
    tokens? The compiled step always can. keeps_shifts: are quantised keys turned for their shifts whenever they are
    read?
    """
    mixes_lengths, keeps_shifts = True, False

    def __init__(self, model, n_seq, layers, kind, type_kv, decoder=None):
        super().__init__()
        self.model, self.n_seq, self.layers, self.dtype = model, n_seq, layers, dtype_of(model)
        self.window, self.n_sink = model.config.window, model.config.n_sink
        self.kernel = None  # a `KernelPass`
        if hasattr(decoder, 'execute_model'):
            from kvcache.kernel_pass import KernelPass  # here, because it needs numba
            self.kernel = KernelPass.over(decoder, model, layers)
        self.decoder = decoder if self.kernel else None
        self.name = f"{self.decoder.name if self.decoder else 'the model'}, on a cache that is {kind}, {type_kv}"
        self.lengths, self.salts = {}, {}  # salts: see `PagedCache.new`
        self.to_free = []  # sequences that were freed in the middle of an operation
        # True after a step with broken weights: its keys may be so large that a mask does not hide them
        self.needs_zeroing = False

    def copy(self, seq, new):
        """Give a new sequence all tokens of seq."""
        raise NotImplementedError

    def cut(self, seq, n):
        """Keep the first n tokens of a sequence that has at least n. With n = 0 the sequence need not exist."""
        raise NotImplementedError

    def remove_behind(self, seq, length, n_keep, n):
        """
        Remove the n tokens behind the first n_keep of a sequence of this length, and move the others down, see `shift`.
        ValueError if there is no room, with nothing changed.
        """
        raise NotImplementedError

    def first_held(self, seq):
        """The first position, from n_sink on, that is stored with all after it. Called if the model has a window."""
        raise NotImplementedError

    def holds(self, seq, n):
        """Is all in the cache that the token at position n of a sequence sees before it?"""
        first = max(self.n_sink, n - self.window + 1)
        return not self.window or first >= n or self.first_held(seq) <= first

    def new(self):
        """
        The number of a new, empty sequence, to be freed by `free`. ValueError if there are n_seq sequences already.
        """
        return self.made_by(self.begin)

    def fork(self, seq):
        """
        The number of a new sequence with all tokens of seq, to be freed by `free`. ValueError if there is no room.
        """
        return self.made_by(self.begin_copy, seq)

    def made_by(self, operation, *args):
        """The sequence that an operation makes. If an interrupt comes before the caller has its number, it is freed."""
        made = []
        try:
            operation(made, *args)
            return made[0]
        except BaseException:
            for seq in made:
                self.free(seq)
            raise

    @exclusive
    def begin(self, made, salt=''):
        seq = self.vacant()
        self.lengths[seq], self.salts[seq] = 0, salt
        made.append(seq)

    @exclusive
    def begin_copy(self, made, seq):
        length, new = self.length(seq), self.vacant()
        if length:
            self.copy(seq, new)
        self.lengths[new], self.salts[new] = length, self.salts[seq]
        made.append(new)

    def vacant(self):
        """The lowest number that no sequence has."""
        self.remove_freed()
        if len(self.lengths) == self.n_seq:
            raise ValueError(f"the cache has room for {self.n_seq} sequences, and all are in use: "
                             "free one, or make a larger cache")
        if self.needs_zeroing and not self.lengths:
            self.zero_all()
            self.needs_zeroing = False
        return next(number for number in range(self.n_seq) if number not in self.lengths)

    @exclusive
    def truncate(self, seq, n):
        """
        Keep the first n tokens of a sequence. ValueError if it has fewer, or if some of these are gone that the next
        token would see through the window.
        """
        if not 0 <= n <= self.length(seq):
            raise ValueError(f"sequence {seq} has {self.lengths[seq]} tokens in the cache and cannot be cut to {n}")
        self.check_held(seq, n)
        self.cut_to(seq, n)

    def check_held(self, seq, n):
        if n < self.lengths[seq] and not self.holds(seq, n):
            raise ValueError(f"sequence {seq} cannot go back from {self.lengths[seq]} tokens to {n}: the window of "
                             f"{self.window} before position {n} is not in the cache any more; feed it from 0 on")

    @exclusive
    @torch.inference_mode()
    def shift(self, seq, n_keep, n):
        """
        Remove the n tokens behind the first n_keep of a sequence; the tokens behind them move down to their positions.

        Rotary keys are turned by -n. Values, and keys without positions, stay as they are: they were computed from the
        removed tokens too, so that later tokens differ from those of a sequence that is computed anew. ValueError, with
        nothing changed, if the model has learned positions or a window, or if there is no room. After an interrupt the
        sequence is unchanged or has no tokens.
        """
        self.remove_freed()
        length, config = self.length(seq), self.model.config
        check_shift(config, seq, length, n_keep, n)
        if n_keep + n == length or n == 0:
            self.cut_to(seq, length - n)
            return
        if config.position == 'rope' and self.layers[0].k.scale is not None and not self.keeps_shifts:
            raise ValueError(f"sequence {seq} cannot be shifted: its keys are {self.layers[0].k.kind}, and would be "
                             "rounded again; use a cache of cells (streams or unified), which keeps the shifts")
        self.lengths[seq] = 0  # if an interrupt comes before all has moved, `recover` removes the rest
        try:
            self.remove_behind(seq, length, n_keep, n)
        except ValueError:
            self.lengths[seq] = length
            raise
        self.lengths[seq] = length - n

    def turning(self, shifts):
        """A function that turns stored keys (n_head, n, head_dim) by shifts (n,), or None if keys are not rotary."""
        config = self.model.config
        if config.position != 'rope':
            return None
        return lambda keys: Rotary(config.head_dim, config.rope_theta).turned(keys, shifts)

    def cut_to(self, seq, n):
        if n < self.lengths[seq]:
            self.lengths[seq] = n  # before the cut: if that is interrupted, `recover` finishes it
            self.cut(seq, n)

    def free(self, seq):
        """Remove a sequence. Its number may be given to a new one. An interrupt is raised after it is removed."""
        if self.holder == threading.get_ident():  # the garbage collector ended a stream in the middle of an operation
            self.to_free.append(seq)
            return
        removed = []
        try:
            self.remove(seq, removed)
        except ValueError:
            raise
        except BaseException:
            if not removed:
                with suppress(ValueError):  # it was removed after all
                    self.remove(seq, removed)
            raise

    @exclusive
    def remove(self, seq, removed):
        self.length(seq)
        del self.lengths[seq], self.salts[seq]
        removed.append(seq)
        self.cut(seq, 0)

    def remove_freed(self):
        while self.to_free:
            seq, self.decoding = self.to_free.pop(), None
            self.salts.pop(seq, None)
            if self.lengths.pop(seq, None) is not None:
                self.cut(seq, 0)

    def length(self, seq):
        """How many tokens of a sequence are in the cache. ValueError if there is no such sequence."""
        if seq not in self.lengths:
            raise ValueError(f"there is no sequence {seq!r} in this cache: it was freed, or is of another cache")
        return self.lengths[seq]

    def recover(self):
        self.decoding = None
        for seq, n in self.lengths.items():
            if not self.holds(seq, n):
                self.lengths[seq] = 0
        for seq in range(self.n_seq):
            self.cut(seq, self.lengths.get(seq, 0))

    def zero_all(self):
        """Set all stored numbers to zero. Called when there are no sequences."""
        zero_all(self.layers)

    def nbytes(self):
        """Bytes of the stored keys and values; the `Scratch` memory comes on top."""
        return sum(layer.nbytes() for layer in self.layers)

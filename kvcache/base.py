"""What the caches for sequences have in common: sequence numbers and lengths, the checks of a step, and recovery."""
import threading
from contextlib import suppress

import torch

from kvcache.exclusive import Exclusive, exclusive
from kvcache.placement import NotNumbers, check_tokens, dtype_of, logits_of, zero_all
from kvcache.protocol import check_shift
from kvcache.rotary import Rotary


class BaseCache(Exclusive):
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

    A subclass says where keys and values are, in `copy`, `cut`, `forward_pass` and, for windows, `first_held`. It may
    hold more tokens of a sequence than `lengths` says, during a step or after one that failed; `recover` then cuts the
    rest. mixes_lengths: can one forward pass take sequences with different numbers of new tokens? keeps_shifts: are
    quantised keys turned for their shifts whenever they are read?
    """
    mixes_lengths, keeps_shifts = True, False

    def __init__(self, model, n_seq, layers, kind, type_kv):
        super().__init__()
        self.model, self.n_seq, self.layers, self.dtype = model, n_seq, layers, dtype_of(model)
        self.window, self.n_sink = model.config.window, model.config.n_sink
        self.name = f"the model, on a cache that is {kind}, {type_kv}"
        self.lengths, self.to_free = {}, []  # to_free: sequences that were freed in the middle of an operation
        # True after a step with broken weights: its keys may be so large that a mask does not hide them
        self.needs_zeroing = False

    def copy(self, seq, new):
        """Give a new sequence all tokens of seq."""
        raise NotImplementedError

    def cut(self, seq, n):
        """Keep the first n tokens of a sequence that has at least n. With n = 0 the sequence need not exist."""
        raise NotImplementedError

    def forward_pass(self, seqs, starts, counts, ids, hiding=False):
        """
        One forward pass: new tokens of these sequences, which have `starts` tokens so far.

        counts: how many each brings; all the same unless `mixes_lengths`. ids: the tokens, int64 (sum(counts),).
        hiding: see `LayerList.hiding`. Returns logits (B, vocab_size), of each sequence's last token.
        """
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

    def begin_texts(self, seqs, texts):
        """
        Called before the first tokens of sequences are fed. texts: all tokens of the step, int64 (T_i,) each. Returns
        how many of each, from the first on, are in the cache already and need not be fed; never all.
        """
        return [0] * len(seqs)

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
    def begin(self, made):
        seq = self.vacant()
        self.lengths[seq] = 0
        made.append(seq)

    @exclusive
    def begin_copy(self, made, seq):
        length, new = self.length(seq), self.vacant()
        if length:
            self.copy(seq, new)
        self.lengths[new] = length
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
        """A function that turns stored keys (n, width) by shifts (n,), or None if keys are not rotary."""
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
        del self.lengths[seq]
        removed.append(seq)
        self.cut(seq, 0)

    def remove_freed(self):
        while self.to_free:
            seq = self.to_free.pop()
            if self.lengths.pop(seq, None) is not None:
                self.cut(seq, 0)

    @exclusive
    @torch.inference_mode()
    def step(self, work):
        """
        Feed new tokens to some sequences: work has handles, starts and tokens, see `protocol.Work`. Returns logits
        (B, vocab_size), of each sequence's last token.

        A sequence that is longer than its start is first truncated to it. ValueError, with nothing changed, if work
        does not fit the model or the sequences. If the step fails later (there is no room, the logits are not
        numbers, an interrupt), each sequence has its first `start` tokens, or none if these are not all stored any
        more that the next token sees.
        """
        self.remove_freed()
        seqs, starts, counts, ids = self.checked(work)
        ends = {seq: start + n for seq, start, n in zip(seqs, starts, counts)}
        for seq, start in zip(seqs, starts):
            self.cut_to(seq, start)
        if 0 in starts:
            new, parts = [i for i, start in enumerate(starts) if start == 0], list(ids.split(counts))
            for i, n in zip(new, self.begin_texts([seqs[i] for i in new], [parts[i] for i in new])):
                starts[i], counts[i], parts[i] = n, counts[i] - n, parts[i][n:]
            ids = torch.cat(parts)
        logits = self.feed(seqs, starts, counts, ids)
        self.lengths |= ends
        return logits

    def feed(self, seqs, starts, counts, ids):
        """
        The logits of a step. Through a window at most window + 1 tokens of each sequence are fed at once, so that its
        memory need not hold more than two windows.
        """
        most = self.window + 1 if self.window else max(counts)
        if max(counts) <= most:
            return self.feed_once(seqs, starts, counts, ids)
        parts, rows = ids.split(counts), {}
        for done in range(0, max(counts), most):
            group = [i for i, n in enumerate(counts) if n > done]
            chunks = [parts[i][done:done + most] for i in group]
            rows |= zip(group, self.feed_once([seqs[i] for i in group], [starts[i] + done for i in group],
                                              [len(chunk) for chunk in chunks], torch.cat(chunks)))
        return torch.stack([rows[i] for i in range(len(seqs))])

    def feed_once(self, seqs, starts, counts, ids):
        """`forward_pass`; once for each sequence if the logits of all together are not numbers."""
        try:
            return self.forward_groups(seqs, starts, counts, ids)
        except NotNumbers:  # because of the weights, or of keys of other sequences that a mask does not hide
            self.needs_zeroing = True
            for seq, start in zip(seqs, starts):
                self.cut(seq, start)
            return torch.cat([self.forward_pass([seq], [start], [n], part, hiding=True)
                              for seq, start, n, part in zip(seqs, starts, counts, ids.split(counts))])

    def forward_groups(self, seqs, starts, counts, ids):
        """`forward_pass`, once, or once for each different number of new tokens where lengths cannot be mixed."""
        if self.mixes_lengths or len(set(counts)) == 1:
            return self.forward_pass(seqs, starts, counts, ids)
        parts, rows = ids.split(counts), {}
        for count in sorted(set(counts)):
            group = [i for i, n in enumerate(counts) if n == count]
            of_group = [seqs[i] for i in group], [starts[i] for i in group], [count] * len(group)
            rows |= zip(group, self.forward_pass(*of_group, torch.cat([parts[i] for i in group])))
        return torch.stack([rows[i] for i in range(len(seqs))])

    def checked(self, work):
        """(sequences, starts, numbers of new tokens, ids (n,) of all of them) of work, or ValueError."""
        if dtype_of(self.model) is not self.dtype:
            raise ValueError(f"the model was {self.dtype} when its cache was made, and is {dtype_of(self.model)}: "
                             "make a new cache")
        seqs, starts = list(work.handles), list(work.starts)
        if isinstance(work.tokens, (list, tuple)):
            rows = [row[None] if isinstance(row, torch.Tensor) else row for row in work.tokens]
            rows = [self.model.checked_input(row, None)[0][0] for row in rows]
        else:
            rows = self.model.checked_input(work.tokens, None)[0]
        if not seqs or len(set(seqs)) < len(seqs):
            raise ValueError(f"a step is for one sequence or more, each named once, not for {seqs}")
        if not len(seqs) == len(starts) == len(rows):
            raise ValueError(f"{len(seqs)} sequences have {len(starts)} starts and {len(rows)} rows of tokens: "
                             "give one of both for each sequence")
        counts = [len(row) for row in rows] if isinstance(rows, list) else [rows.size(1)] * len(rows)
        for i, (seq, count) in enumerate(zip(seqs, counts)):
            length = self.length(seq)
            starts[i] = start = int(self.model.checked_cache_pos(starts[i], 1, count))
            if start > length:
                raise ValueError(f"sequence {seq} has {length} tokens in the cache, and new ones cannot start at "
                                 f"{start}: feed it from {length} on")
            self.check_held(seq, start)
        ids = torch.cat(rows) if isinstance(rows, list) else rows.flatten()
        check_tokens(self.model, ids)
        return seqs, starts, counts, ids

    def length(self, seq):
        """How many tokens of a sequence are in the cache. ValueError if there is no such sequence."""
        if seq not in self.lengths:
            raise ValueError(f"there is no sequence {seq!r} in this cache: it was freed, or is of another cache")
        return self.lengths[seq]

    def logits(self, layers, counts, ids, hiding):
        """Logits (B, vocab_size) of the last of each sequence's `counts` tokens, over a `LayerList`."""
        if len(set(counts)) == 1:
            last = slice(counts[0] - 1, None, counts[0])
        else:
            last = torch.tensor(counts, device=ids.device).cumsum(0) - 1
        return logits_of(self.model, ids.view(layers.positions.shape), layers.hiding() if hiding else layers, last)

    def recover(self):
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

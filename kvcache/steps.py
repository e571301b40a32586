"""A step of a cache: its checks, its chunks, and its forward passes, compiled or in PyTorch."""
from operator import add

import torch

from kvcache.decoding import Decoding
from kvcache.exclusive import Exclusive, exclusive
from kvcache.placement import NotNumbers, check_ids, check_tokens, dtype_of, logits_of
from kvcache.protocol import checked_tokens

OF_OTHER_TOKENS = ("the logits of other tokens than the last ones take no remembered tokens, and at most window + 1 "
                   "new tokens of a sequence")


class Steps(Exclusive):
    """`step` of a `base.BaseCache`, which documents the attributes."""
    decoding = None  # the `Decoding` of the last step, if it was one

    def forward_pass(self, seqs, starts, counts, ids, hiding=False):
        """
        One forward pass in PyTorch: new tokens of these sequences, which have `starts` tokens so far.

        counts: how many each brings; all the same unless `mixes_lengths`. ids: the tokens, int64 (sum(counts),).
        hiding: see `LayerList.hiding`. Returns logits (B, vocab_size), of each sequence's last token.
        """
        raise NotImplementedError

    def make_room(self, seqs, starts, counts):
        """
        Reserve slots for the new tokens of a forward pass. Returns the `Runs` of each sequence, with what its new
        tokens see, and their own positions. ValueError if there is no room.
        """
        raise NotImplementedError

    def make_room_again(self, decoding):
        """Write the `Runs` of all sequences of a `Decoding` to its metadata, for its next step."""
        d = decoding
        d.metadata.runs[:] = self.make_room(d.seqs, d.positions.tolist(), d.counts)

    def readable(self):
        """Can the compiled step read the keys as they are stored now?"""
        return True

    def has_begun(self, seq):
        """Is it known already which of its first tokens are in the cache?"""
        return False

    def begin_texts(self, seqs, texts):
        """
        Called before the first tokens of sequences are fed. texts: all tokens of the step, int64 (T_i,) each. Returns
        how many of each, from the first on, are in the cache already and need not be fed; never all.
        """
        return [0] * len(seqs)

    @exclusive
    def step(self, work, wanted=None):
        """
        Feed new tokens to some sequences: work has handles, starts and tokens, see `protocol.Work`. Returns logits
        (B, vocab_size), of each sequence's last token.

        wanted: row numbers, ascending, of the new tokens of all sequences one after the other: then the logits of these
        are returned, (W, vocab_size). This takes a decoder, tokens that are not remembered, and at most window + 1 new
        ones of each sequence.

        A sequence that is longer than its start is first truncated to it. ValueError, with nothing changed, if work
        does not fit the model or the sequences. If the step fails later (there is no room, the logits are not
        numbers, an interrupt), each sequence has its first `start` tokens, or none if these are not all stored any
        more that the next token sees.
        """
        self.remove_freed()
        decoding = self.last_decoding()
        if decoding and wanted is None and self.repeats(decoding, work):
            return self.decode(decoding, work.tokens.ravel())
        seqs, starts, counts, ids, go_on = self.checked(work)
        if wanted is not None and 0 < self.window < max(counts) - 1:
            raise ValueError(OF_OTHER_TOKENS)
        ends, n_new, new = list(map(add, starts, counts)), len(ids), []
        if 0 in starts:
            new = [i for i, start in enumerate(starts) if start == 0 and not self.has_begun(seqs[i])]
        if new and self.decoder:
            self.decoder.notice_changes(thorough=True)
        if not go_on:
            for seq, start in zip(seqs, starts):
                self.cut_to(seq, start)
        if new:
            parts = list(ids.split(counts))
            for i, n in zip(new, self.begin_texts([seqs[i] for i in new], [parts[i] for i in new])):
                starts[i], counts[i], parts[i] = n, counts[i] - n, parts[i][n:]
            ids = torch.cat(parts)
        if wanted is not None:
            if len(ids) < n_new:
                raise ValueError(OF_OTHER_TOKENS)
            with torch.inference_mode():
                one_pass = self.kernel_pass if self.kernel and self.readable() else self.forward_pass
                logits = one_pass(seqs, starts, counts, ids, wanted=wanted)
        elif self.kernel and self.readable():
            logits = self.in_chunks(self.kernel_pass, seqs, starts, counts, ids)
        else:
            with torch.inference_mode():
                logits = self.in_chunks(self.feed_once, seqs, starts, counts, ids)
        self.lengths.update(zip(seqs, ends))
        if wanted is None and len(ids) == len(seqs) and self.kernel and self.readable():
            self.decoding = self.begin_decoding(seqs, ends)
        return logits

    def last_decoding(self):
        """The `Decoding` that the operation before this one has used, or None. `add_decoded` keeps it for the next."""
        decoding, self.decoding = self.decoding, None
        return decoding if decoding and decoding.operation == self.n_operations - 1 else None

    def begin_decoding(self, seqs, ends):
        """A `Decoding` of sequences that have so many tokens."""
        return Decoding(seqs, ends, self.model.config.max_positions, self.kernel, self.n_operations)

    def repeats(self, decoding, work):
        """Does this `Work` feed one more token to each sequence of a `Decoding`?"""
        tokens = work.tokens
        return (isinstance(tokens, torch.Tensor) and tokens.dtype is torch.int64 and tokens.is_cpu
                and tokens.dim() == 2 and tokens.size(1) == 1
                and decoding.goes_on(list(work.handles), list(work.starts), len(tokens)) and self.readable())

    def decode(self, decoding, ids):
        """
        The next step of a `Decoding`: logits (B, vocab_size) behind one more token of each sequence; ids: int64 (B,),
        contiguous, on the CPU.
        """
        new = ids.tolist()
        check_ids(self.model, new)
        decoding.advance()
        self.make_room_again(decoding)
        logits = self.compiled(ids, decoding.positions, decoding.metadata)
        self.add_decoded(decoding, [new])
        return logits

    def add_decoded(self, decoding, steps):
        """Add the tokens of the last steps of a `Decoding` to its sequences. steps: the tokens of each step."""
        n, seqs = len(steps), decoding.seqs
        self.lengths.update(zip(seqs, [self.lengths[seq] + n for seq in seqs]))
        decoding.operation, self.decoding = self.n_operations, decoding

    def in_chunks(self, forward, seqs, starts, counts, ids):
        """
        The logits of a step, by `kernel_pass` or `feed_once`. Through a window at most window + 1 tokens of each
        sequence are fed at once, so that its memory need not hold more than two windows.
        """
        most = self.window + 1
        if not self.window or max(counts) <= most:
            return forward(seqs, starts, counts, ids)
        parts, rows = ids.split(counts), {}
        for done in range(0, max(counts), most):
            group = [i for i, n in enumerate(counts) if n > done]
            chunks = [parts[i][done:done + most] for i in group]
            rows |= zip(group, forward([seqs[i] for i in group], [starts[i] + done for i in group],
                                       [len(chunk) for chunk in chunks], torch.cat(chunks)))
        return torch.stack([rows[i] for i in range(len(seqs))])

    def kernel_pass(self, seqs, starts, counts, ids, wanted=None):
        """
        One forward pass by the decoder. It reads no slot of another sequence, so that the logits of each sequence are
        those that it has alone.
        """
        runs = self.make_room(seqs, starts, counts)
        return self.compiled(ids.contiguous(), self.kernel.positions(starts, counts),
                             self.kernel.metadata(counts, runs, wanted))

    def compiled(self, ids, positions, metadata):
        """A step of the decoder. `NotNumbers` if its logits are not numbers."""
        try:
            return self.kernel(ids, positions, metadata)
        except NotNumbers:
            self.needs_zeroing = True
            raise

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
        """
        (sequences, starts, numbers of new tokens, ids (n,) of all of them, do all sequences go on where they end?) of
        work, or ValueError.
        """
        if not self.kernel and dtype_of(self.model) is not self.dtype:  # the compiled step checks its model itself
            raise ValueError(f"the model was {self.dtype} when its cache was made, and is {dtype_of(self.model)}: "
                             "make a new cache")
        seqs, starts = list(work.handles), list(work.starts)
        rows, counts = checked_tokens(self.model, work.tokens)
        if not seqs or len(set(seqs)) < len(seqs):
            raise ValueError(f"a step is for one sequence or more, each named once, not for {seqs}")
        if not len(seqs) == len(starts) == len(rows):
            raise ValueError(f"{len(seqs)} sequences have {len(starts)} starts and {len(rows)} rows of tokens: "
                             "give one of both for each sequence")
        go_on = {*map(type, starts)} == {int} and list(map(self.lengths.get, seqs)) == starts
        if not go_on or max(map(add, starts, counts)) > self.model.config.max_positions:
            starts = list(map(self.checked_start, seqs, starts, counts))
        ids = torch.cat(rows) if isinstance(rows, list) else rows.flatten()
        check_tokens(self.model, ids)
        if self.kernel and not ids.is_cpu:
            raise ValueError(f"the compiled step reads tokens on the CPU, but these are on {ids.device}: move them")
        return seqs, starts, counts, ids, go_on

    def checked_start(self, seq, start, count):
        """The position where `count` new tokens of a sequence begin, as an int. ValueError if they cannot."""
        length, start = self.length(seq), int(self.model.checked_cache_pos(start, 1, count))
        if start > length:
            raise ValueError(f"sequence {seq} has {length} tokens in the cache, and new ones cannot start at "
                             f"{start}: feed it from {length} on")
        self.check_held(seq, start)
        return start

    def logits(self, layers, counts, ids, hiding):
        """Logits (B, vocab_size) of the last of each sequence's `counts` tokens, over a `LayerList`."""
        if len(set(counts)) == 1:
            last = slice(counts[0] - 1, None, counts[0])
        else:
            last = torch.tensor(counts, device=ids.device).cumsum(0) - 1
        return logits_of(self.model, ids.view(layers.positions.shape), layers.hiding() if hiding else layers, last)

"""
Speculative decoding (arXiv:2211.17192). Its tokens are exactly those of plain decoding.

A draft proposes the next k tokens of each sequence. One step of the model computes them all as a chunk, behind the
newest token: k + 1 rows of logits, which have the same bits as those of k + 1 single steps. From these rows the model
draws its own tokens, each with the noise that the token would have had, for as long as what it draws is what was
proposed. The last token that it draws is not one of the proposals, or stands behind all of them. So each round gives 1
to k + 1 tokens, and no draft changes one.

`drafts` says who proposes. `Pace` says how many tokens, by timing; it is 0 where plain steps are faster.
"""
import math
import time
from collections import deque

import numpy as np
import torch

from decode import DRAFTED_SEQUENCES, drafts
from decode.cpu import CPUDecoder
from decode.kernel.sampling import DRAW, TAKE_BACK, TOGETHER, UNTIL, VERIFY
from decode.metadata import InputMetadata
from decode.process import step_lock

MOST_PROPOSALS = 15  # of a sequence in a round
FIRST_PROPOSALS, TRIAL_ROUNDS = 4, 4  # of a trial
GAIN = 1.08          # drafts are used where they are expected to be so many times faster than plain steps
SHARE = 60           # after a trial that has shown no gain, plain steps take so many times what it has cost
LATEST = 16          # at most so many times longer, after several such trials
ROUNDS = 64          # after so many rounds one plain step is timed
MEMORY = 0.95        # a round counts so much less for the acceptance than the round behind it


class SpeculativeDecoder(CPUDecoder):
    """
    A `CPUDecoder` whose calls of several steps, see `metadata.NextTokens`, are made with the proposals of a draft where
    that is faster. All else is as there, and so are the logits, the tokens, and the keys and values of these.

    draft: 'int4', 'int8' or 'ngram', see `drafts`, or a `drafts.ModelDraft`. paces: {(number of sequences, do they draw
    together?): `Pace`}. ValueError if the draft has another vocabulary.

    Sequences of one call may draw different numbers of tokens, unless their `NextTokens` have no limits.
    """
    ends_rows = True

    def __init__(self, model, draft, weights='float32', threads=None):
        self.draft, self.paces = None, {}
        super().__init__(model, weights, threads)
        self.draft = drafts.made(draft, self)
        VERIFY.compiled  # noqa: B018 (it is compiled here)
        self.name += f", drafts by {self.draft.name}"

    def refresh(self):
        super().refresh()
        if self.draft:
            self.draft.refresh()

    def pace(self, batch_size, together):
        key = batch_size, together
        if key not in self.paces:
            self.paces[key] = Pace()
        return self.paces[key]

    def n_proposals(self, batch_size, together=False):
        """How many tokens of each of so many sequences the next round is to propose."""
        return self.pace(batch_size, together).k if batch_size <= DRAFTED_SEQUENCES else 0

    def run(self, input_ids, input_positions, kv_caches, input_metadata, logits, n_threads=None):
        new, B = input_metadata.next_tokens, len(input_metadata.runs)
        if new is None or len(input_ids) != B or input_metadata.wanted is not None:
            super().run(input_ids, input_positions, kv_caches, input_metadata, logits, n_threads)
            return
        with step_lock:
            pace = self.pace(B, new.limits is None) if B <= DRAFTED_SEQUENCES and new.draw is DRAW else None
            most = new.n_steps if new.limits is None else min(new.n_steps, int(new.limits.min()))
            k = pace.k if pace and not pace.times_plain else 0
            if min(k, most - 1) > 0:
                new.check(input_ids)
                n_threads = n_threads or (self.n_threads if self.fixed else self.choice(B).best)
                Rounds(self, kv_caches, input_metadata, np.array(input_positions), n_threads).make(pace, k, logits)
                return
            new.n_steps = 1 if k or pace and pace.times_plain or new.logits is not None else most
            began, n_before = time.perf_counter_ns(), new.n_drawn
            super().run(input_ids, input_positions, kv_caches, input_metadata, logits, n_threads)
            if pace and new.n_drawn > n_before:
                pace.record_plain(time.perf_counter_ns() - began, new.n_drawn - n_before)
            if new.logits is not None and new.n_drawn > n_before:
                new.logits[n_before] = logits


class Rounds:
    """
    The rounds of one call of a `SpeculativeDecoder`. positions: int64 (B,), of the newest tokens. n_threads: those of
    plain steps, since a worker that has slept is slow for some milliseconds. drawn: int64 (B,), how many tokens each
    sequence has drawn in this call. data: of `NextTokens`, for a draft, whose steps may begin at any time.
    """

    def __init__(self, decoder, kv_caches, metadata, positions, n_threads):
        self.began = time.perf_counter_ns()  # the round that is made
        self.decoder, self.kv, self.runs, self.new = decoder, kv_caches, metadata.runs, metadata.next_tokens
        self.positions, self.n_threads, self.first = positions, n_threads, self.new.n_drawn
        self.data = self.new.data.copy()
        self.data[UNTIL] = 2**63 - 1
        self.drawn, self.together = np.zeros(len(positions), np.int64), self.new.limits is None
        self.limits = np.full(len(positions), self.new.n_steps)
        if not self.together:
            self.limits = np.minimum(self.limits, self.new.limits)

    def make(self, pace, k, logits):
        """
        Make rounds, the first with k proposals, until a sequence ends, the call is late, or too few tokens are left.
        Writes the last logits.
        """
        new, ended = self.new, False
        new.tokens[self.first + 1:self.first + new.n_steps + 1] = -1
        newest = new.tokens[self.first].copy()
        while not ended:
            most = int((self.limits - self.drawn).min()) - 1
            if min(k, most) < 1 or self.drawn.any() and (most < k or new.is_late() or pace.times_plain):
                break
            k = min(k, most)
            new.n_written = max(new.n_written, int(self.drawn.max()) + k + 1)
            tokens, of_rows, ended, ns_draft = self.round(k, newest)
            if not self.kv.finite:
                return
            counts = (tokens[1:] >= 0).sum(0)
            for i, n in enumerate(counts.tolist()):
                first = self.first + 1 + int(self.drawn[i])
                new.tokens[first:first + n, i] = tokens[1:n + 1, i]
                newest[i], logits[i] = tokens[n, i], of_rows[i, n - 1]
                if new.logits is not None:
                    new.logits[first - 1:first - 1 + n, i] = of_rows[i, :n]
            self.drawn += counts
            self.positions += counts
            new.n_drawn, new.ended = self.first + int(self.drawn.max()), ended
            now = time.perf_counter_ns()
            pace.record_round(k, len(tokens) - 2, counts.mean(), ns_draft, now - self.began - ns_draft, ended)
            self.began, k = now, pace.k

    def drawn_since(self, i):
        """The tokens that sequence i has drawn behind its text, see `NextTokens.texts`, a list."""
        return self.new.tokens[1:self.first + int(self.drawn[i]) + 1, i].tolist()

    def round(self, k, newest):
        """
        (tokens, int64 (n + 1, B), as `kernel.sampling.verify_tokens` leaves them; the logits of the chunk, float32
        (B, n, vocab_size); has a sequence ended?; the nanoseconds that the draft took)
        """
        began, new, B = time.perf_counter_ns(), self.new, len(newest)
        tokens = np.empty((k + 2, B), np.int64)
        tokens[0] = newest
        n = 1 + self.decoder.draft.propose(tokens[:k + 1], self)
        ns_draft = time.perf_counter_ns() - began
        chunk, positions = torch.from_numpy(tokens[:n].T.ravel()), (self.positions[:, None] + np.arange(n)).ravel()
        logits = torch.empty(B, n, self.decoder.vocab_size, device='cpu')
        metadata = InputMetadata([n] * B, self.runs, np.arange(B * n))
        self.decoder.run(chunk, positions, self.kv, metadata, logits, self.n_threads)
        broken = None if self.kv.finite else ~logits.isfinite().all(dim=-1).numpy()
        if broken is not None:
            logits[broken] = 0.0
        how = TAKE_BACK * self.decoder.draft.draws | TOGETHER * self.together
        most = VERIFY.call(new.data.ctypes.data, logits.data_ptr(), tokens.ctypes.data, n, how)
        if broken is not None:  # behind a proposal that was rejected they are nobody's
            self.kv.finite = not broken[(tokens[1:n + 1] >= 0).T].any()
        return tokens[:n + 1], logits, most < 0, ns_draft


class Pace:
    """
    How many tokens to propose in a round, for a number of sequences.

    k: so many; 0 for plain steps. It is the number for which the most tokens are expected in a second, by what was
    measured: plain, the nanoseconds of a plain step; draft, those of a proposal; chunks, {n: those of a chunk of n
    tokens of each sequence and of what is drawn from it}; the share of proposals that are accepted, if those before
    them were; and the share of rounds in which there are proposals. Now and then there is a trial: TRIAL_ROUNDS rounds
    with FIRST_PROPOSALS. If no k is faster than plain steps, the next trial comes after plain steps that take SHARE
    times what this one has cost.
    """

    def __init__(self):
        self.k, self.plain, self.draft = 0, Recent(), Recent()
        self.chunks, self.sizes = {}, set()  # sizes: those that were measured since the last plain step
        self.accepted, self.tried, self.offered, self.asked = 0.0, 0.0, 0.0, 0.0
        self.trial = self.n_rounds = self.n_failed = 0  # rounds left of a trial; since a plain step; failed trials
        self.ns = self.given = 0.0  # of the last rounds: nanoseconds, and tokens of a sequence
        self.rest, self.n_drawn = 0, 0.0  # nanoseconds of plain steps until the next trial; tokens drawn in this one

    @property
    def times_plain(self):
        """Is the next step a plain one, so that it is timed?"""
        return self.n_rounds >= ROUNDS

    def record_plain(self, ns, n_steps):
        """n_steps plain steps have taken so long."""
        self.plain.add(ns / n_steps)
        self.n_rounds = 0
        if self.k:  # what was measured long ago may be wrong by now
            self.chunks = {size: self.chunks[size] for size in self.sizes}
            self.sizes.clear()
            return
        self.rest -= ns
        if self.rest <= 0 and len(self.plain.values) > 1:
            self.k, self.trial, self.n_drawn = FIRST_PROPOSALS, TRIAL_ROUNDS + 1, 0.0
            self.ns = self.given = 0.0

    def record_round(self, k, n, n_drawn, ns_draft, ns_chunk, ended=False):
        """
        A round in which k proposals were asked for and n came. n_drawn: tokens of a sequence that it gave, on average.
        ended: has a sequence ended? Then fewer could be accepted than were proposed.
        """
        self.n_rounds += 1
        if self.trial > TRIAL_ROUNDS:  # the first round waits for memory and caches
            self.trial -= 1
            return
        self.n_drawn += n_drawn
        self.ns, self.given = MEMORY * self.ns + ns_draft + ns_chunk, MEMORY * self.given + n_drawn
        self.chunks.setdefault(n + 1, Recent()).add(ns_chunk)
        self.sizes.add(n + 1)
        self.asked, self.offered = MEMORY * self.asked + 1, MEMORY * self.offered + (n > 0)
        if n:
            self.draft.add(ns_draft / n)
            accepted = n_drawn - 1
            self.accepted, self.tried = MEMORY * self.accepted + accepted, MEMORY * self.tried + accepted
            self.tried += accepted < n and not ended
        self.trial = max(0, self.trial - 1)
        if not self.trial or (n + 1) * self.plain.usual() < ns_draft + ns_chunk:  # too slow whatever is accepted
            self.decide()

    def decide(self):
        k, plain = max(range(1, MOST_PROPOSALS + 1), key=self.speed), self.plain.usual()
        if self.speed(k) * plain >= GAIN and (self.trial or self.given * plain > self.ns):
            self.k, self.n_failed = k, 0
            return
        k = FIRST_PROPOSALS
        cost = (TRIAL_ROUNDS - self.trial) * (k * self.draft.usual() + self.of_chunk(k + 1)) - self.n_drawn * plain
        self.rest = SHARE * max(cost, plain) * min(2**self.n_failed, LATEST)
        self.k, self.n_failed = 0, self.n_failed + 1

    def speed(self, k):
        """The tokens of a sequence in a nanosecond that are expected of rounds with k proposals."""
        share, offers = self.accepted / max(self.tried, 1), self.offered / self.asked
        n_accepted = sum(share**j for j in range(1, k + 1))
        ns = offers * (k * self.draft.usual() + self.of_chunk(k + 1)) + (1 - offers) * self.of_chunk(1)
        return (1 + offers * n_accepted) / ns

    def of_chunk(self, n):
        """
        The nanoseconds of a chunk of n tokens of each sequence: of sizes without three measurements by others, and no
        more than those of a longer one.
        """
        known = {1: self.plain.usual()} | {size: r.usual() for size, r in self.chunks.items() if len(r.values) > 2}
        if len(known) == 1 and n > 1:
            known |= {size: r.usual() for size, r in self.chunks.items()}
        sizes, least = sorted(known), math.inf
        for size in reversed(sizes):
            least = known[size] = min(least, known[size])
        if n in known or len(sizes) == 1:
            return known.get(n, known[1])
        after = next((i for i, size in enumerate(sizes) if size > n), len(sizes) - 1)
        a, b = sizes[after - 1], sizes[after]
        return max(known[1], known[a] + (n - a) * (known[b] - known[a]) / (b - a))


class Recent:
    """The lower quartile of the last five values, which others have disturbed least; 0 without any."""

    def __init__(self):
        self.values = deque(maxlen=5)

    def add(self, value):
        self.values.append(value)

    def usual(self):
        ordered = sorted(self.values)
        return ordered[(len(ordered) - 1) // 4] if ordered else 0.0

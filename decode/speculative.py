"""
Speculative decoding (arXiv:2211.17192): an executor around an executor. Its tokens are exactly those of plain decoding.

A draft proposes the next k tokens of each sequence. One step of the target, the model's own executor, computes them all
as a chunk after the newest token: k + 1 rows of logits, which have the same bits as those of k + 1 single steps. From
these rows the model draws its own tokens, each with the noise that the token has without a draft. A round ends with
the first token that differs from its proposal, or with the token after all k proposals. So it gives 1 to k + 1 tokens,
and a draft changes none of them.
"""
import time
from collections import defaultdict, deque
from dataclasses import replace
from functools import partial

import numpy as np

from decode import DRAFTED_SEQUENCES, drafts
from decode.batch import NotNumbers, Refused, SequenceOutput
from decode.kernel.step import workers

MOST_PROPOSALS = 15  # of a sequence in a round
FIRST_PROPOSALS, TRIAL_ROUNDS = 4, 4  # of a trial
GAIN = 1.08          # drafts are used where they are expected to be so many times faster than plain steps
REST = 60            # after a trial without gain, plain steps are made for so many times the cost of the trial
LONGEST_REST = 16    # at most so many times longer, after several such trials
ROUNDS = 64          # after so many rounds one plain step is timed
DECAY = 0.95         # the weight of a round in sums over rounds, relative to the round after it
recent = partial(deque, maxlen=5)  # the times of the last steps of a kind


class Drafting:
    """
    An executor whose tokens, logits, keys and values are those of the target, a `cpu.CPUExecutor`. A batch that
    decodes, of up to DRAFTED_SEQUENCES sequences without constraints, is a round with proposals where that is
    faster. All others go to the target.

    draft: 'int4', 'int8' or 'ngram', see `drafts`, or a `drafts.ModelDraft`. ValueError if it has another vocabulary.
    paces: {number of sequences: `Pace`}.
    """

    def __init__(self, target, draft):
        self.target, self.draft = target, drafts.draft_for(draft, target)
        self.paces = defaultdict(lambda: Pace(self.draft.cost))
        self.model, self.layers, self.type_kv = target.model, target.layers, target.type_kv
        self.torch_on_one_thread = target.torch_on_one_thread

    @property
    def name(self):
        return f"{self.target.name}, drafts by {self.draft.name}"

    def hold(self, layers):
        """Let the steps of target and draft read and write these `kvcache.storage.Layer`s."""
        self.target.hold(layers)
        self.draft.hold(layers)
        self.layers = layers

    def refresh(self):
        """Use the model's present weights from now on."""
        self.target.refresh()
        self.draft.refresh()

    def execute_model(self, batch):
        """See `cpu.CPUExecutor.execute_model`. A call is one round, or plain steps."""
        if not batch.decodes or len(batch.sequences) > DRAFTED_SEQUENCES or any(
                s.settings.allowed is not None for s in batch.sequences):
            return self.target.execute_model(batch)
        pace = self.paces[len(batch.sequences)]
        k = 0 if pace.is_plain_next else min(pace.k, int(batch.n_steps.min()) - 1)
        if k > 0:
            with workers.lock:
                return self.round(batch, k, pace)
        began = time.perf_counter_ns()
        outputs = self.target.execute_model(replace(batch, n_steps=np.ones_like(batch.n_steps)) if pace.k else batch)
        pace.record_plain(time.perf_counter_ns() - began, max(len(output.tokens) for output in outputs))
        return outputs

    def round(self, batch, k, pace):
        """What `execute_model` returns of a batch, by up to k proposals for each sequence."""
        target, began = self.target, time.perf_counter_ns()
        # in the way of plain steps: a thread that has slept is slow for some milliseconds
        way = target.choice(len(batch.sequences), target.n_largest(batch.sequences, batch.logprobs) > 0).best
        try:
            batch.make_copies(target.layers)
            proposals = self.draft.propose(batch, k, way[0])
            drafted = time.perf_counter_ns()
            outputs, ended = self.verified(batch, proposals, way)
        except (NotNumbers, Refused):  # also of a proposal that the model would not have drawn
            outputs = self.target.execute_model(replace(batch, n_steps=np.ones_like(batch.n_steps)))
            proposals, drafted, ended = [], began, False
        n_drawn = sum(len(output.tokens) for output in outputs) / len(outputs)
        pace.record_round(len(proposals), n_drawn, drafted - began, time.perf_counter_ns() - drafted, ended)
        return outputs

    def verified(self, batch, proposals, way):
        """
        The `SequenceOutput` of each sequence of a batch, and whether one has ended. proposals: int64 (n, S). One step
        computes the logits of n + 1 tokens of each sequence.
        """
        target, S, n = self.target, len(batch.sequences), len(proposals) + 1
        chunk = np.vstack([batch.tokens, proposals]).T.ravel()
        positions = (batch.positions[:, None] + np.arange(n)).ravel()
        logits = target.logits_of(batch, chunk, positions, [n] * S, np.arange(S * n), way).view(S, n, -1)
        drawn = target.draws.draw(batch.sequences, logits, proposals)
        ended = any(tokens[-1] in s.settings.stop_ids for s, tokens in zip(batch.sequences, drawn))
        return [SequenceOutput(tokens, rows[:len(tokens)] if kept else None)
                for tokens, rows, kept in zip(drawn, logits, batch.logprobs)], ended


class Pace:
    """
    How many tokens to propose in a round, for a number of sequences: k; 0 is plain steps.

    It begins with plain steps for `rest` nanoseconds, then makes a trial of TRIAL_ROUNDS rounds with FIRST_PROPOSALS.
    One round before these is not counted, because it waits for memory and caches, or for the draft. From then on k
    is the number for which the most tokens a second are expected. If these are fewer than GAIN times those of plain
    steps, plain steps follow until they have taken REST times the cost of the trial. Each further trial that fails
    doubles this time, up to LONGEST_REST times.

    It measures the nanoseconds of a plain step, `plain`; of a proposal, `draft`; and of a chunk of n tokens of each
    sequence with its draws, `chunks` {n: nanoseconds}. It counts the proposals that were compared with a draw, `tried`,
    and those that were equal to it, `accepted`; the rounds, `asked`, and those with proposals, `offered`.
    """

    def __init__(self, rest=0):
        self.k, self.plain, self.draft, self.chunks = 0, recent(), recent(), {}
        self.accepted = self.tried = self.offered = self.asked = 0.0
        self.sizes = set()  # of the chunks that were measured since the last plain step
        self.n_rounds = 0   # since the last plain step
        self.trial = self.n_failed = 0  # the rounds that are left of a trial; the trials in a row that have failed
        self.ns = self.given = 0.0      # of the rounds since a trial began: nanoseconds, and tokens of a sequence
        self.n_drawn = 0.0  # tokens of a sequence that this trial has given
        self.rest = rest    # nanoseconds of plain steps until the next trial

    @property
    def is_plain_next(self):
        """Is the next step a plain one, so that it is timed?"""
        return self.n_rounds >= ROUNDS

    def record_plain(self, ns, n_steps):
        """n_steps plain steps have taken so long."""
        self.plain.append(ns / n_steps)
        self.n_rounds = 0
        if self.k:  # what was measured long ago may be wrong by now
            self.chunks = {size: self.chunks[size] for size in self.sizes}
            self.sizes.clear()
            return
        self.rest -= ns
        if self.rest <= 0 and len(self.plain) > 1:
            self.k, self.trial, self.n_drawn = FIRST_PROPOSALS, TRIAL_ROUNDS + 1, 0.0
            self.ns = self.given = 0.0

    def record_round(self, n, n_drawn, ns_draft, ns_chunk, ended=False):
        """
        A round with n proposals. n_drawn: tokens of a sequence that it gave, on average. ended: has a sequence ended?
        The proposals behind its end were not compared with draws.
        """
        self.n_rounds += 1
        if self.trial > TRIAL_ROUNDS:
            self.trial -= 1
            return
        self.n_drawn += n_drawn
        self.ns, self.given = DECAY * self.ns + ns_draft + ns_chunk, DECAY * self.given + n_drawn
        self.chunks.setdefault(n + 1, recent()).append(ns_chunk)
        self.sizes.add(n + 1)
        self.asked, self.offered = DECAY * self.asked + 1, DECAY * self.offered + (n > 0)
        if n:
            self.draft.append(ns_draft / n)
            accepted = n_drawn - 1
            self.accepted, self.tried = DECAY * self.accepted + accepted, DECAY * self.tried + accepted
            self.tried += accepted < n and not ended  # the one after them was not drawn
        self.trial = max(0, self.trial - 1)
        if not self.trial or (n + 1) * usual(self.plain) < ns_draft + ns_chunk:  # too slow whatever is accepted
            self.decide()

    def decide(self):
        """Go on with the best k, or with plain steps if it is not expected to be GAIN times as fast as these."""
        k, plain, chunks = np.arange(1, MOST_PROPOSALS + 1), usual(self.plain), self.chunk_times()
        rounds = k * usual(self.draft) + chunks[1:]
        acceptance, offers = self.accepted / max(self.tried, 1), self.offered / self.asked
        n_tokens, ns = 1 + offers * np.cumsum(acceptance**k), offers * rounds + (1 - offers) * chunks[0]
        best = int((n_tokens / ns).argmax())
        if n_tokens[best] * plain >= GAIN * ns[best] and (self.trial or self.given * plain > self.ns):
            self.k, self.n_failed = int(k[best]), 0
            return
        cost = (TRIAL_ROUNDS - self.trial) * rounds[FIRST_PROPOSALS - 1] - self.n_drawn * plain
        self.rest = REST * max(cost, plain) * min(2**self.n_failed, LONGEST_REST)
        self.k, self.n_failed = 0, self.n_failed + 1

    def chunk_times(self):
        """
        The nanoseconds of chunks of 1 to MOST_PROPOSALS + 1 tokens of each sequence, an array. Sizes that were measured
        three times are known, or all measured sizes if there are none; one token is known from the plain steps. A chunk
        takes no longer than a larger one. Other sizes are on the lines through the known ones.
        """
        enough = 2 if any(n > 1 and len(times) > 2 for n, times in self.chunks.items()) else 0
        known = {1: self.plain} | {n: times for n, times in self.chunks.items() if len(times) > enough}
        sizes, n = sorted(known), np.arange(1, MOST_PROPOSALS + 2)
        ns = np.minimum.accumulate([usual(known[size]) for size in reversed(sizes)])[::-1]
        slope = (ns[-1] - ns[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else 0.0  # of the last line
        return np.interp(n, sizes, ns) + slope * np.maximum(n - sizes[-1], 0)


def usual(times):
    """The lower quartile of some times, which others have disturbed least; 0 without any."""
    ordered = sorted(times)
    return ordered[(len(ordered) - 1) // 4] if ordered else 0.0

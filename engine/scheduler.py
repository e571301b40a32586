"""
Who is in the next call. There are no phases: a sequence has tokens, some of them computed, and each step computes some
of the others. After vLLM's scheduler. It handles no tensors.
"""
from bisect import insort

import numpy as np

from decode.batch import Batch

MOST_LOGITS = 2**22  # numbers that a call keeps for log probabilities
AFTER_AN_END = 8    # the most steps of a call after a sequence has ended: its last tokens come when the call ends
MOST_LONG = 4       # long prompts that are read at a time; a long one lacks a MOST_LONG-th part of a step or more


class Scheduler:
    """
    pool: nothing else begins or frees its sequences. budget: the largest number of tokens that a step computes.
    most_running: sequences at a time.

    The oldest sequences come first. Each that runs gets one token of a step, as far as the budget goes. Half of the
    rest goes to the oldest that lacks more. What then remains goes to those that lack least, one after the other. So a
    long prompt does not hold up short ones. When there are too few slots, the newest sequence gives its own up and
    waits again; its tokens are computed anew later. So the oldest one always advances. A sequence begins to run if
    there are slots for all of its tokens (with a window: for the first step), and one more page for each running
    sequence that will need one.
    """

    def __init__(self, pool, budget, most_running):
        if budget < 1:
            raise ValueError(f"a step must be allowed to compute at least 1 token, not {budget}")
        if most_running < 1:
            raise ValueError(f"at least 1 sequence must be allowed to run, not {most_running}")
        self.pool, self.budget = pool, budget
        self.most_running = min(most_running, pool.most_sequences)
        self.at_once = pool.window + 1 if pool.window else self.budget  # tokens of one sequence in a step, at most
        self.going = {}  # {sequence: None} of all that have not ended, in order of age
        self.running, self.waiting = [], []  # of these, also by age; siblings are in neither before they begin
        self.suspects = []  # groups of sequences of a call that failed: while there are any, only the first is tried
        self.n_added = self.n_preempted = 0
        self.n_looked_up = self.n_found = 0  # tokens of prompts that were looked for, and found, in remembered pages
        self.no_room = None  # when a sequence found no room: (the sequence, free pages, how many ran)
        self.n_growing = None  # of those that run, how many will need another page; None: to be counted

    def add(self, sequences):
        """Sequences of one prompt wait after all others; all but the first of them begin as forks of the first."""
        for i, s in enumerate(sequences):
            s.rank = self.n_added, i
            self.going[s] = None
        self.n_added += 1
        sequences[0].siblings = sequences[1:]
        self.waiting.append(sequences[0])

    def remove(self, sequence):
        """A sequence has ended: its slots are free."""
        self.going.pop(sequence, None)
        if sequence in self.running:
            self.running.remove(sequence)
            self.pool.free(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        for sibling in sequence.siblings:
            if not sibling.ended:
                insort(self.waiting, sibling)
        sequence.siblings = []
        self.settle(sequence)

    def settle(self, sequence):
        """A sequence has drawn a token, or ended: it did not fail, and leaves the suspects."""
        sequence.n_failed = 0
        if self.suspects:
            groups = [[s for s in group if s is not sequence] for group in self.suspects]
            self.suspects = [group for group in groups if group]

    def wait_again(self):
        """All slots are lost, and an interrupt may have left any list as it was: all that go on wait again."""
        self.going = {s: None for s in self.going if not s.ended}
        for s in self.going:
            s.siblings = []
            s.forget()
        self.running, self.waiting, self.no_room = [], [*self.going], None

    def next(self, until, return_soon):
        """The next `Batch`, None if there is nothing to compute. until, return_soon: see `Batch`."""
        self.admit()
        self.fork_siblings()
        tried = [s for s in self.running if s in self.suspects[0]] if self.suspects else self.running
        tried = tried[:self.budget]
        for s in tried:
            if s.n_computed >= s.length:  # the context was cut: its tokens have other positions
                self.pool.cut(s, 0)
        plan = {}
        for s, n in self.shares(tried).items():  # the oldest first: none preempts an older one of them
            if len(plan) == len(self.running) or not self.make_room(s, n, plan):  # s gave way before, or now
                break
            plan[s] = n
        return self.batch_of([*plan.items()], until, return_soon) if plan else None

    def shares(self, sequences):
        """{sequence: how many of its tokens the next step computes}, for sequences in order of age."""
        lacking = {s: min(self.lacks(s), self.at_once) for s in sequences}
        spare, shares = max(0, self.budget - len(self.running)), dict.fromkeys(sequences, 1)
        if wanting := [s for s in sequences if lacking[s] > 1]:
            for s, most in [(wanting[0], -(-spare // 2)), *((s, spare) for s in sorted(wanting, key=lacking.get))]:
                n = min(lacking[s] - shares[s], most, spare)
                shares[s], spare = shares[s] + n, spare - n
        return shares

    @staticmethod
    def lacks(sequence):
        """
        How many tokens of a sequence are to be computed before it can draw, or before its siblings can begin. If
        nothing is drawn after a prompt, its last token is not computed.
        """
        s = sequence
        last_waits = s.siblings or len(s.tokens) == s.n_end
        return max(1, s.length - s.n_computed - bool(last_waits))

    def batch_of(self, plan, until, return_soon):
        """The `Batch` of these sequences and so many new tokens of each: a list of pairs."""
        sequences, counts = map(list, zip(*plan))
        n_steps = [int(s.n_computed + n == s.length and len(s.tokens) < s.n_end and not s.siblings) for s, n in plan]
        prompt_logits = [s.prompt_logits and s.n_computed < s.n_prompt - 1 and not s.n_drawn for s in sequences]
        # several steps can follow each other if all running sequences bring one token each and draw
        if len(plan) == len(self.running) == sum(counts) == sum(n_steps) and not any(prompt_logits):
            n_steps = self.steps_ahead(sequences)
        tokens = [token for s, n in plan for token in s.uncomputed(n)]
        positions = np.concatenate([np.arange(s.n_computed, s.n_computed + n) for s, n in plan]) if (
            len(tokens) > len(plan)) else np.array([s.n_computed for s in sequences])
        copies = self.pool.copies[:]
        self.pool.copies.clear()
        return Batch(sequences, counts, np.array(tokens, np.int64), positions, np.array(n_steps), prompt_logits,
                     [s.logprobs for s in sequences], copies, until, return_soon)

    def steps_ahead(self, sequences):
        """How many tokens each of these sequences may draw in the next call, and has slots for: a list."""
        wanted, most = [s.most_steps() for s in sequences], min(s.most_ahead for s in sequences)
        if self.pool.window:
            most = min(most, self.at_once)
        if any(s.logprobs for s in sequences):
            most = max(1, min(most, MOST_LOGITS // (len(sequences) * sequences[0].settings.vocab_size)))
        most = min(most, min(wanted) + AFTER_AN_END)
        if self.waiting:
            most = min(most, self.pool.page_size)  # leave slots for a sequence that waits
        while most > 1 and not all([self.pool.extend(s, min(n, most)) for s, n in zip(sequences, wanted)]):
            most //= 2
        return [min(n, most) for n in wanted]

    def make_room(self, sequence, n, planned):
        """
        Get slots for n more tokens of a sequence. If there are too few, the newest sequence is preempted; returns False
        if that is this sequence. Sequences that are planned for this step keep all of theirs.
        """
        while not self.pool.extend(sequence, n):
            if not self.trim(planned):
                victim = self.who_gives_way()
                self.preempt(victim)
                if victim is sequence:
                    return False
        return True

    def who_gives_way(self):
        """The newest that runs; while there are suspects, the newest that is not tried, if there is one."""
        others = [s for s in self.running if s not in self.suspects[0]] if self.suspects else []
        return (others or self.running)[-1]

    def trim(self, planned=()):
        """Free the slots for later tokens of running sequences that are not planned. Returns whether there were any."""
        n_free = self.pool.n_free
        for s in self.running:
            if s not in planned:
                self.pool.cut(s, s.n_computed)
        return self.pool.n_free > n_free

    def preempt(self, sequence):
        """Free the slots of a sequence that runs. It waits until there is room to compute all of its tokens again."""
        self.running.remove(sequence)
        self.pool.free(sequence)
        insort(self.waiting, sequence)
        self.n_preempted += 1

    def fork_siblings(self):
        """The siblings of sequences whose prompts are computed up to the last token begin."""
        for s in [s for s in self.running if s.siblings and s.n_computed >= s.length - 1]:
            siblings, s.siblings = [sibling for sibling in s.siblings if not sibling.ended], []
            for sibling in siblings:
                if len(self.running) < self.most_running and not self.suspects:  # those that are tried come first
                    self.pool.fork(s, sibling)
                    self.pool.extend(sibling, 1)  # it gets the copy, so that the pages of siblings follow each other
                    sibling.n_found = s.n_found
                    insort(self.running, sibling)
                else:
                    insort(self.waiting, sibling)

    def admit(self):
        """
        Begin sequences that wait, in order, while there is room. While running sequences lack as many tokens as a step
        computes, a newer one begins only if it `may_begin_beside` them. While there are suspects, only sequences of
        their first group begin.
        """
        waiting = [s for s in self.suspects[0] if s in self.waiting] if self.suspects else self.waiting
        lacking, self.n_growing = sum(map(self.lacks, self.running)) if waiting else 0, None
        while waiting and len(self.running) < self.most_running:
            s = waiting[0]
            is_beside = lacking >= self.budget and self.running[-1] < s
            if is_beside and not self.may_begin_beside(s):
                return
            if not self.begin(s, trims=not is_beside):
                if is_beside:
                    return
                victim = self.who_gives_way() if self.running else None
                if victim is None or victim < s and (not self.suspects or victim in self.suspects[0]):
                    return
                lacking, self.n_growing = lacking - self.lacks(victim), None
                self.preempt(victim)  # a sibling that could not be forked is older than those that came later
                continue
            lacking, self.n_growing = lacking + self.lacks(s), self.n_growing + self.pool.will_grow(s)
            self.waiting.remove(s)
            if waiting is not self.waiting:
                waiting.remove(s)
            insort(self.running, s)

    def may_begin_beside(self, sequence):
        """
        May a sequence begin beside prompts that take all of a step? Yes, if waiting for one of them would not give
        it more remembered pages, and if few enough others are read: for a long one, fewer than MOST_LONG long ones; for
        a short one, short ones that together lack less than a step computes.
        """
        s, long, page_size = sequence, max(2, self.budget // MOST_LONG), self.pool.page_size
        read = [(r, self.lacks(r)) for r in self.running]
        if s.length >= long and sum(n >= long for _, n in read) >= MOST_LONG:
            return False
        if s.length < long and sum(n for _, n in read if n < long) >= self.budget:
            return False
        ends = [(r, (r.n_computed // page_size + 1) * page_size) for r, n in read if n > 1]  # of the pages they compute
        return not any(r.salt == s.salt and s.tokens[:end] == r.tokens[:end] for r, end in ends)

    def begin(self, sequence, trims):
        """Begin a sequence in the pool, for which others may be trimmed. Returns False if there is no room."""
        s, pool = sequence, self.pool
        if self.no_room:
            refused, n_free, n_running = self.no_room
            if s is refused and pool.n_free <= n_free and len(self.running) >= n_running:
                return False
        while True:
            if self.n_growing is None:
                self.n_growing = sum(map(pool.will_grow, self.running))
            # a prompt whose logits are wanted is computed from the first one of these on
            sought = s.tokens[:s.logits_from + 1] if s.prompt_logits and not s.n_drawn else s.tokens
            found = pool.begin(s, sought if s.whole else ())
            if pool.extend(s, min(s.length - found, self.at_once) if pool.window else s.length - found) and (
                    pool.n_free >= self.n_growing):
                break
            pool.free(s)
            self.n_growing = None
            if not trims:
                return False
            if not self.trim():
                self.no_room = s, pool.n_free, len(self.running)
                return False
        self.no_room = None
        if s.n_found is None:
            s.n_found = found
            self.n_looked_up += s.n_prompt
            self.n_found += found
        return True

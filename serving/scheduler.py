"""
Who runs next. There are no phases: a `Sample` has tokens, of which so many are computed, and each step lets computed
catch up. After vLLM's scheduler. Pure Python.

    plan, n_steps = scheduler.plan()      [(sample, how many of its next tokens a step computes), ...]
    ...                                   one step of the model
    caught_up = scheduler.commit(plan)    a token is drawn for each of these, and added to its tokens

If n_steps is not 0, the plan is of decode steps: one token of each sample, the newest one. Up to n_steps of them may
follow each other, for which blocks are reserved. The caller draws a token of each sample behind each of them, and then
calls `commit_steps` instead of `commit`.
"""
from bisect import insort
from collections import deque

MOST_STEPS = 64  # that are reserved at a time


class Sample:
    """
    One of the n texts that a request continues.

    tokens: the prompt's and its own, the only record of them. n_end: with so many it is finished. computed: so many are
    in the cache, as its sequence `handle`; without a handle none are. rank: the order of arrival. siblings: the other
    samples of the request, which begin as forks of this one once its prompt is computed. scores: are the logits of all
    tokens of the prompt wanted? They are computed then, whatever is remembered. n_cached: how many tokens of the prompt
    were found in remembered blocks when it first ran.

    live, drawing, text, stop_ids, scored, first_time: what the engine keeps of it, see `EngineCore.begin`.
    """
    __slots__ = ('request', 'index', 'rank', 'tokens', 'n_prompt', 'n_end', 'computed', 'handle', 'siblings', 'scores',
                 'n_cached', 'finished', 'live', 'drawing', 'text', 'stop_ids', 'scored', 'first_time')

    def __init__(self, request, index, rank):
        self.request, self.index, self.rank, self.finished = request, index, rank, False
        self.tokens, self.n_prompt = list(request.prompt), len(request.prompt)
        self.n_end = self.n_prompt + request.max_tokens
        self.computed, self.handle, self.siblings, self.n_cached = 0, None, [], None
        self.scores = request.params.prompt_logprobs and index == 0

    def __lt__(self, other):
        return self.rank < other.rank

    @property
    def decodes(self):
        """Are all tokens but the newest computed, and was that one drawn?"""
        return self.n_prompt < len(self.tokens) == self.computed + 1

    def __repr__(self):
        return f"{self.request.id}/{self.index}: {self.computed} of {len(self.tokens)} computed"


class Scheduler:
    """
    cache: a `PagedCache`; nothing else begins or frees its sequences. budget: the largest number of tokens that a step
    computes.

    The oldest samples come first. Each that runs gets one token of a step; what is left of the budget goes to those
    that lack more, in order of age, so that a long prompt holds up no other sample. When a step finds too few blocks,
    the newest sample loses its own and waits again; its tokens are computed anew later. So the oldest one always
    advances.

    A sample begins to run only if there are blocks for all of its tokens, and for page_size more of it and of each that
    runs. So it does not take blocks only to lose them again in the next step. Blocks that are reserved for later steps
    keep no sample waiting: they are released where it would find no room otherwise.

    most_running: samples at a time, as many as the cache has room for, or as one call of the executor takes.
    running, waiting: samples, the oldest first. All that run are older than all that wait. Siblings are in neither
    before they begin.
    """

    def __init__(self, cache, budget):
        if budget < 1:
            raise ValueError(f"a step must be allowed to compute at least 1 token, not {budget}")
        self.cache, self.budget = cache, budget
        self.most_running = min(cache.n_seq, getattr(cache.executor, 'most_sequences', cache.n_seq))
        self.at_once = cache.window + 1 if cache.window else budget  # the most tokens of a sample in a step
        self.running, self.waiting, self.n_submitted = [], deque(), 0
        self.decode_plan = None  # the last plan, if it is of decode steps and the same samples still run
        self.n_reserved = 0      # for so many more steps of it blocks are reserved
        self.refused = None      # when a sample found no room: (the sample, free blocks, samples that ran)
        self.n_preempted = self.n_looked_up = self.n_found = 0  # the last two are tokens of prompts

    def check(self, request):
        """ValueError if a request can never fit into the pool or into the model's context."""
        n, most = len(request.prompt) + request.max_tokens, self.cache.model.config.max_positions
        asked = f"the prompt has {len(request.prompt)} tokens and max_tokens is {request.max_tokens}: "
        if n > most:
            raise ValueError(f"{asked}together {n}, but the model's context is {most} tokens")
        n_blocks = self.cache.n_missing(None, max(len(request.prompt), n - 1))  # the last token is not fed
        if n_blocks > self.cache.n_seq:
            raise ValueError(f"{asked}this takes {n_blocks} blocks of {self.cache.page_size}, but the pool has "
                             f"{self.cache.n_seq}")

    def submit(self, request):
        """A checked request's samples wait behind all others. Returns them."""
        samples = [Sample(request, i, (self.n_submitted, i)) for i in range(request.n)]
        samples[0].siblings = samples[1:]
        self.n_submitted += 1
        self.waiting.append(samples[0])
        return samples

    def plan(self):
        """
        (plan, n_steps), see above. plan: the oldest first, and empty only if there are no samples. For decode steps
        there are blocks; another step may find too few, and `preempt_newest` makes room for it.
        """
        while True:
            while self.waiting and self.running and self.waiting[0] < self.running[-1]:
                self.preempt_newest()  # for a sibling that could not be forked, see `fork`
            plan = self.decode_plan or self.plan_running()
            if self.waiting and not self.is_refused(self.waiting[0]):
                begun = self.plan_waiting(self.budget - sum([n for _, n in plan]))
                if begun:
                    return plan + begun, 0
            if not self.decode_plan:
                if not plan or len(plan) < len(self.running) or not all([sample.decodes for sample, _ in plan]):
                    return plan, 0
                self.decode_plan, self.n_reserved = plan, 0
            if not self.n_reserved:
                left = [sample.n_end - len(sample.tokens) for sample, _ in plan]
                self.n_reserved = self.reserve(min(MOST_STEPS, (max if self.cache.ends_rows else min)(left)), left)
            if self.n_reserved:
                return plan, self.n_reserved
            self.preempt_newest()

    def plan_running(self):
        """The part of the plan for those that run."""
        plan, spare = [], self.budget - len(self.running)
        for sample in self.running[:self.budget]:
            n = len(sample.tokens) - sample.computed
            if n > 1:
                n = min(n, 1 + max(0, spare), self.at_once)
                spare -= n - 1
            plan.append((sample, n))
        return plan

    def plan_waiting(self, budget):
        """Begin samples that wait, in order, while there is room. Returns their part of the plan."""
        plan, promised = [], None  # promised: the sum of `n_missing` of all that run
        while budget > 0 and self.waiting:
            if promised is None:
                promised = sum(map(self.n_missing, self.running))
            sample = self.waiting[0]
            missing = self.begin(sample, promised, noticed=bool(plan))
            if missing is None:
                n_free = self.cache.n_free
                self.n_reserved = self.reserve(0)
                if self.cache.n_free == n_free:
                    break
                promised = None
                continue
            self.running.append(self.waiting.popleft())
            self.decode_plan = None
            promised += missing
            n = min(len(sample.tokens) - sample.computed, budget, self.at_once)
            plan.append((sample, n))
            budget -= n
        return plan

    def reserve(self, n, left=None):
        """
        Blocks for the next n tokens of each sample that runs, or for those that it has left, and for no later ones.
        Returns for how many of n.
        """
        return self.cache.reserve([sample.handle for sample in self.running], n, left)

    def n_missing(self, sample):
        """How many free blocks a sample takes for all of its tokens and for page_size more, if it gets so many."""
        n = len(sample.tokens)
        n = max(n, min(n + self.cache.page_size, sample.n_end - 1))
        return self.cache.n_missing(sample.handle, n - sample.computed)

    def is_refused(self, sample):
        """Was there no room for a sample that waits, and has nothing changed since that could have made room?"""
        if not self.refused:
            return False
        refused, n_free, n_ran = self.refused
        return sample is refused and self.cache.n_free <= n_free and len(self.running) >= n_ran

    def begin(self, sample, promised, noticed):
        """
        Begin a sequence for a sample, if there is room behind the blocks that are promised to others. Returns its
        `n_missing`, or None if there is no room. noticed: see `PagedCache.reuse_prefix`.
        """
        cache, n_running = self.cache, len(self.running)
        if n_running < self.most_running:
            salt = object() if sample.scores else sample.request.cache_salt  # nothing is found for a new object
            sample.handle = cache.new(salt)
            sample.computed = cache.reuse_prefix(sample.handle, sample.tokens, noticed)
            if cache.window:  # blocks that it shares now are not freed behind the windows of others
                promised = sum(map(self.n_missing, self.running))
            missing = self.n_missing(sample)
            if promised + missing <= cache.n_free:
                if sample.n_cached is None:
                    sample.n_cached = sample.computed
                    self.n_looked_up += sample.n_prompt
                    self.n_found += sample.computed
                self.refused = None
                return missing
            self.release(sample)
        self.refused = sample, cache.n_free, n_running
        return None

    def commit(self, plan):
        """
        A step has computed a plan. Returns [(sample, the number of its row)] of those that have caught up, and for
        which a token is drawn. Siblings of a sample with a computed prompt are among them: they are forks now.
        """
        caught_up, self.n_reserved = [], 0
        for row, (sample, n) in enumerate(plan):
            sample.computed += n
            if sample.computed == len(sample.tokens):
                caught_up.append((sample, row))
                if sample.siblings or sample.scores:
                    sample.scores = False
                    caught_up += [(sibling, row) for sibling in self.fork(sample)]
        return caught_up

    def commit_steps(self, plan, counts, n_steps):
        """
        n_steps steps have computed a plan of decode steps, so many tokens of each sample; a token is drawn behind each.
        """
        self.n_reserved = self.n_reserved - n_steps if min(counts) == n_steps else 0
        for (sample, _), n in zip(plan, counts):
            sample.computed += n

    def fork(self, sample):
        """The siblings of a sample, with its prompt. Where there are no sequences left, a sibling waits instead."""
        siblings, sample.siblings = sample.siblings, []
        for sibling in siblings:
            if len(self.running) < self.most_running:
                sibling.handle, sibling.computed = self.cache.fork(sample.handle), sample.computed
                insort(self.running, sibling)
                self.decode_plan = None
            else:
                insort(self.waiting, sibling)
        return siblings

    def preempt_newest(self):
        self.preempt(self.running[-1])

    def preempt(self, sample):
        """Free the blocks of a sample that runs. It waits until there is room to compute all of its tokens again."""
        self.stop_running(sample)
        insort(self.waiting, sample)
        self.n_preempted += 1

    def remove(self, sample):
        """A sample has ended: free its blocks."""
        sample.finished = True
        if sample.handle is not None:
            self.stop_running(sample)
        elif sample in self.waiting:
            self.waiting.remove(sample)

    def clear(self):
        """Forget all samples, and free all sequences of the cache."""
        self.running, self.refused, self.decode_plan = [], None, None
        self.waiting.clear()
        for handle in list(self.cache.records):
            self.cache.free(handle)

    def stop_running(self, sample):
        self.running.remove(sample)
        self.decode_plan = None
        self.release(sample)

    def release(self, sample):
        """Free the blocks of a sample."""
        self.cache.free(sample.handle)
        sample.handle, sample.computed = None, 0

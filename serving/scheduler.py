"""
Who runs next. There are no phases: a `Sample` has tokens, of which so many are computed, and each step lets computed
catch up. After vLLM's scheduler. Pure Python.

    plan = scheduler.plan()               [(sample, how many of its next tokens this step computes), ...]
    ...                                   one step of the model
    caught_up = scheduler.commit(plan)    a token is drawn for each of these, and added to its tokens

If the plan is `steady`, `n_repeats` steps of it may follow each other. The caller then draws a token of each sample
behind each step, and calls `commit_repeats` once instead of `commit`.
"""
from bisect import insort
from collections import deque

MOST_REPEATS = 64  # of a plan


class Sample:
    """
    One of the n texts that a request continues.

    tokens: the prompt's and its own, the only record of them. n_end: with so many it is finished. computed: so many are
    in the cache, as its sequence `handle`; without a handle none are. rank: the order of arrival. siblings: the other
    samples of the request, which begin as forks of this one once its prompt is computed. scores: are the logits of all
    tokens of the prompt wanted? They are computed then, whatever is remembered. n_cached: how many tokens of the prompt
    were found in remembered blocks when it first ran. progress: what the engine keeps of it.
    """
    __slots__ = ('request', 'index', 'rank', 'tokens', 'n_prompt', 'n_end', 'computed', 'handle', 'siblings', 'scores',
                 'n_cached', 'finished', 'progress')

    def __init__(self, request, index, rank):
        self.request, self.index, self.rank, self.finished = request, index, rank, False
        self.tokens, self.n_prompt = list(request.prompt), len(request.prompt)
        self.n_end = self.n_prompt + request.max_tokens
        self.computed, self.handle, self.siblings, self.n_cached, self.progress = 0, None, [], None, None
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
    computes. scored_at_once: how many tokens of a sample that `scores` a step may compute; None for any number.

    The oldest samples come first. Each that runs gets one token of a step; what is left of the budget goes to those
    that lack more, in order of age, so that a long prompt holds up no other sample. When blocks run out, the newest
    sample loses its blocks and waits again; its tokens are computed anew later. So the oldest one advances in every
    step.

    A sample begins to run only if there are blocks for all of its tokens, and for block_size more of it and of each
    that runs. So it does not take blocks only to lose them again in the next step.

    running, waiting: samples, the oldest first. All that run are older than all that wait. Siblings are in neither
    before they begin.
    """

    def __init__(self, cache, budget, scored_at_once=None):
        if budget < 1:
            raise ValueError(f"a step must be allowed to compute at least 1 token, not {budget}")
        self.cache, self.budget, self.block_size = cache, budget, cache.blocks.block_size
        self.at_once = cache.window + 1 if cache.window else budget
        self.scored_at_once = scored_at_once or self.at_once
        self.running, self.waiting, self.n_submitted = [], deque(), 0
        self.steady = None  # the last plan, if it is of decode steps and the same samples run on: the next is the same
        self.n_repeats = 0  # so many steps of the steady plan may follow each other, and need no other plan
        self.no_room = None  # what was so when the first that waits found no room: (it, free blocks, how many ran)
        self.n_preempted = self.n_looked_up = self.n_found = 0  # the last two are tokens of prompts

    def check(self, request):
        """ValueError if a request can never fit into the pool or into the model's context."""
        n, most = len(request.prompt) + request.max_tokens, self.cache.model.config.max_positions
        if n > most:
            raise ValueError(f"the prompt has {len(request.prompt)} tokens and max_tokens is {request.max_tokens}: "
                             f"together {n}, but the model's context is {most} tokens")
        n_blocks = self.cache.n_needed(max(len(request.prompt), n - 1))  # the last token is not fed
        if n_blocks > self.cache.n_seq:
            raise ValueError(f"the prompt has {len(request.prompt)} tokens and max_tokens is {request.max_tokens}: "
                             f"this takes {n_blocks} blocks of {self.block_size}, but the pool has {self.cache.n_seq}")

    def submit(self, request):
        """A checked request's samples wait behind all others. Returns them."""
        samples = [Sample(request, i, (self.n_submitted, i)) for i in range(request.n)]
        samples[0].siblings = samples[1:]
        self.n_submitted += 1
        self.waiting.append(samples[0])
        return samples

    def plan(self):
        """
        [(sample, n)], the oldest first: the next n tokens of each of these are to be computed in one step, for which
        there are blocks. Empty only if there are no samples.
        """
        while self.waiting and self.running and self.waiting[0] < self.running[-1]:
            self.preempt(self.running[-1])  # for a sibling that could not be forked, see `commit`
        n_preempted = self.n_preempted
        plan = self.plan_running()
        complete = self.n_preempted == n_preempted and len(plan) == len(self.running)
        if complete and self.waiting and not self.has_no_room():
            begun = self.plan_waiting(self.budget - sum(n for _, n in plan))
            if begun:
                return plan + begun
        if plan and complete and not self.steady and all([sample.decodes for sample, _ in plan]):
            self.steady, self.n_repeats = plan, self.count_repeats(plan, self.cache.n_free)
        return plan

    def plan_waiting(self, budget):
        """Begin samples that wait, in order, while there is room. Returns their part of the plan."""
        plan, ahead, compare = [], sum(map(self.missing_ahead, self.running)), True
        while budget and self.waiting:
            missing = self.begin(self.waiting[0], ahead, compare)
            compare = False
            if missing is None:
                if not self.cache.release_ahead([sample.handle for sample in self.running]):
                    break
                ahead = sum(map(self.missing_ahead, self.running))
                continue
            sample = self.waiting.popleft()
            self.running.append(sample)
            self.steady = None
            ahead += missing
            n = min(len(sample.tokens) - sample.computed, budget, self.most(sample))
            plan.append((sample, n))
            budget -= n
        return plan

    def has_no_room(self):
        """Was there no room for the first that waits, and is there no more now?"""
        if not self.no_room:
            return False
        sample, n_free, n_ran = self.no_room
        return sample is self.waiting[0] and self.cache.n_free <= n_free and len(self.running) >= n_ran

    def plan_running(self):
        """The part of the plan for those that run. If blocks do not suffice the newest are preempted."""
        plan, cache, running = [], self.cache, self.running
        spare, free = self.budget - len(running), cache.n_free
        # a sample takes at most one block for its first token, or for a copy of its last block, and one for a rest
        is_tight = free < 2 * len(running) + self.budget // self.block_size
        if self.steady:
            self.n_repeats = self.n_repeats or self.count_repeats(self.steady, free)
            if self.n_repeats:
                return self.steady
            self.steady = None
        for sample in running[:self.budget]:
            if sample.handle is None:  # it was preempted, and so were all after it
                break
            n = len(sample.tokens) - sample.computed
            if n > 1:
                n = min(n, 1 + max(0, spare), self.most(sample))
                spare -= n - 1
            if is_tight:
                missing = cache.n_missing(sample.handle, n)
                while missing > free and running[-1] is not sample:
                    self.preempt(running[-1])
                    free = cache.n_free - sum(cache.n_missing(s.handle, n) for s, n in plan)
                    missing = cache.n_missing(sample.handle, n)
                if missing > free:
                    self.preempt(sample)
                    break
                free -= missing
            plan.append((sample, n))
        return plan

    def count_repeats(self, plan, free):
        """
        `n_repeats` of a plan of decode steps: until a sample has all of its tokens, at most MOST_REPEATS, and fewer if
        there are not enough free blocks. 0: not even one step.
        """
        n = min(MOST_REPEATS, min([sample.n_end - len(sample.tokens) for sample, _ in plan]))
        if self.cache.window:
            n = min(n, self.cache.window + 1)  # for more, `PagedCache.n_missing` is an estimate
        # a sample takes a block for each block_size tokens, one for a rest, and a copy of its last one
        is_tight = free < (n // self.block_size + 2) * len(plan)
        while n and is_tight and sum([self.cache.n_missing(s.handle, n) for s, _ in plan]) > free:
            n //= 2
        return n

    def most(self, sample):
        return self.scored_at_once if sample.scores else self.at_once

    def begin(self, sample, ahead, compare):
        """
        Begin a sequence for a sample, if there is room. Returns how many blocks it will take, see `missing_ahead`, or
        None if there is no room. ahead: the sum of `missing_ahead` of all that run. compare: see
        `PagedCache.reuse_prefix`.
        """
        cache, n_running = self.cache, len(self.running)
        if n_running < cache.n_seq:
            salt = object() if sample.scores else sample.request.cache_salt  # nothing is found for a new object
            sample.handle = cache.new(salt)
            sample.computed = cache.reuse_prefix(sample.handle, sample.tokens, compare)
            if cache.window:  # blocks that it shares now are not freed behind the windows of others
                ahead = sum(map(self.missing_ahead, self.running))
            missing = self.missing_ahead(sample)
            if ahead + missing <= cache.n_free:
                if sample.n_cached is None:
                    sample.n_cached = sample.computed
                    self.n_looked_up += sample.n_prompt
                    self.n_found += sample.computed
                self.no_room = None
                return missing
            self.release(sample)
        self.no_room = sample, cache.n_free, n_running
        return None

    def missing_ahead(self, sample):
        """How many blocks a sample takes for all of its tokens and for block_size more, if it gets so many."""
        n = len(sample.tokens)
        n = max(n, min(n + self.block_size, sample.n_end - 1))
        return self.cache.n_missing(sample.handle, n - sample.computed)

    def commit(self, plan):
        """
        A step has computed a plan. Returns [(sample, the number of its row)] of those that have caught up, and for
        which a token is drawn. Siblings of a sample with a computed prompt are among them: they are forks now.
        """
        caught_up, self.n_repeats = [], 0
        for row, (sample, n) in enumerate(plan):
            sample.computed += n
            if sample.computed == len(sample.tokens):
                caught_up.append((sample, row))
                if sample.siblings or sample.scores:
                    sample.scores = False
                    caught_up += [(sibling, row) for sibling in self.fork(sample)]
        return caught_up

    def commit_repeats(self, plan, n):
        """`n_repeats` steps, or fewer, have computed the steady plan; a token is drawn behind each token."""
        self.n_repeats -= n
        for sample, _ in plan:
            sample.computed += n

    def fork(self, sample):
        """The siblings of a sample, with its prompt. Where there are no sequences left, a sibling waits instead."""
        siblings, sample.siblings = sample.siblings, []
        for sibling in siblings:
            if len(self.running) < self.cache.n_seq:
                sibling.handle, sibling.computed = self.cache.fork(sample.handle), sample.computed
                insort(self.running, sibling)
                self.steady = None
            else:
                insort(self.waiting, sibling)
        return siblings

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
        self.running, self.no_room, self.steady = [], None, None
        self.waiting.clear()
        for handle in list(self.cache.lengths):
            self.cache.free(handle)

    def stop_running(self, sample):
        self.steady = None  # first: an interrupt behind it leaves no plan with a sample that does not run
        self.running.remove(sample)
        self.release(sample)

    def release(self, sample):
        """Free the blocks of a sample."""
        self.cache.free(sample.handle)
        sample.handle, sample.computed = None, 0

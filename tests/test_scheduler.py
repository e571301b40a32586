"""The scheduler over a paged cache on the toy kernel: each test is named after a bug that an engine had."""
import pytest
import torch
from toy_kernel import ToyKernel, begin_with_nan, chain_of, lengths_of, logits_of_chain, toy_model

from kvcache.blocks import OutOfBlocks
from kvcache.paged import PagedCache
from serving.request import Request, SamplingParams
from serving.scheduler import Scheduler

V = 11


class Served:
    """A scheduler with its cache, and the loop that the engine is. A sample draws its likeliest token."""

    def __init__(self, n_blocks=16, block_size=4, budget=64, **how):
        model = toy_model(**how)
        self.kernel = ToyKernel(model)
        self.cache = self.kernel.cache = PagedCache(model, n_blocks, block_size, decoder=self.kernel)
        begin_with_nan(self.cache)
        self.scheduler, self.n_computed, self.samples = Scheduler(self.cache, budget), 0, []

    def submit(self, prompt, max_tokens=4, n=1, salt='', **params):
        request = Request(str(len(self.samples)), list(prompt), max_tokens, SamplingParams(**params), n=n,
                          cache_salt=salt)
        self.scheduler.check(request)
        samples = self.scheduler.submit(request)
        self.samples += samples
        return samples if n > 1 else samples[0]

    def step(self):
        """Run a step. Returns its plan, as [(sample, its tokens that were computed before, how many now)]."""
        plan, n_steps = self.scheduler.plan()
        if not plan:
            return []
        assert sum(n for _, n in plan) <= self.scheduler.budget and all(n > 0 for _, n in plan)
        before = [(sample, sample.computed, n) for sample, n in plan]
        assert not n_steps or all(sample.decodes for sample, _ in plan)
        try:
            logits = self.cache.step(
                [sample.handle for sample, _ in plan], [sample.computed for sample, _ in plan],
                [torch.tensor(sample.tokens[sample.computed:sample.computed + n]) for sample, n in plan])
        except OutOfBlocks:
            assert not n_steps and len(self.scheduler.running) > 1
            self.scheduler.preempt_newest()
            return self.step()
        self.n_computed += sum(n for _, n in plan)
        for sample, row in self.scheduler.commit(plan):
            sample.tokens.append(int(logits[row].argmax()))
            if len(sample.tokens) == sample.n_end:
                self.scheduler.remove(sample)
        self.check()
        return before

    def check(self):
        """References equal table counts, running ones are older than waiting ones, each in order."""
        blocks, s = self.cache.blocks, self.scheduler
        tables = [block for record in self.cache.records.values() for block in record.table if block is not None]
        assert blocks.references == [tables.count(block) for block in range(len(blocks.references))]
        assert {sample.handle: sample.computed for sample in s.running} == lengths_of(self.cache)
        order = [*s.running, *s.waiting]
        assert order == sorted(order) or self.cache.n_seq == len(s.running)
        assert all(sample.handle is None and sample.computed == 0 for sample in s.waiting)

    def run(self, most=10000):
        while self.step():
            most -= 1
            assert most, "the scheduler does not come to an end"
        for sample in self.samples:
            if sample.finished and len(sample.tokens) == sample.n_end:
                assert sample.tokens == self.alone(sample)
        assert self.cache.n_free == self.cache.n_seq and not self.cache.records and not self.scheduler.waiting

    def alone(self, sample):
        """The tokens of a sample by the definition of the toy kernel, without cache."""
        tokens = sample.request.prompt[:]
        while len(tokens) < sample.n_end:
            tokens.append(int(logits_of_chain(chain_of(tokens, self.kernel.version), V).argmax()))
        return tokens


@pytest.mark.parametrize('budget', [1, 3, 64])
@pytest.mark.parametrize('n_blocks', [8, 10, 40])
def test_no_request_reads_anothers_blocks(budget, n_blocks):
    served = Served(n_blocks=n_blocks, budget=budget)
    for i in range(9):
        served.submit([i % 3, 1, 2, 3, 4, i][:1 + i % 6], max_tokens=20 - i, n=1 + i % 3)
    served.run()


def test_duplicate_prefix_never_frees_a_live_block():
    """Two compute the same prompt at the same time; one ends first, and its copy is taken by others."""
    served = Served(n_blocks=9)
    served.submit([1, 2, 3, 4, 5], max_tokens=2)
    served.submit([1, 2, 3, 4, 5], max_tokens=12)
    served.step()
    tables = [record.table for record in served.cache.records.values()]
    assert not set(tables[0]) & set(tables[1])
    for i in range(6):
        served.submit([6 + i % 3, 2, 3, 4, 5], max_tokens=9)
    served.run()


def test_uncomputed_blocks_are_not_findable():
    served = Served(budget=6)
    first = served.submit(range(10), max_tokens=2)
    second = served.submit(range(10), max_tokens=2)
    served.step()
    assert first.computed == 6 and second.handle is None
    assert len(served.cache.blocks.cached_blocks(list(range(10)))) == 1
    served.step()
    assert second.n_cached == 4, "found when it began: the block that was computed in the step before"
    served.run()


def test_fully_cached_prompt_still_runs_its_last_token():
    served = Served()
    served.submit(range(8))
    served.run()
    again = served.submit(range(8))
    (sample, computed, n), = served.step()
    assert sample is again and (computed, n) == (4, 4) and again.n_cached == 4
    served.run()
    longer = served.submit(list(range(8)) + [8])
    (_, computed, n), = served.step()
    assert (computed, n) == (8, 1) and longer.n_cached == 8
    served.run()


def test_cache_hit_after_preemption():
    """What a preempted sample had computed is found again as far as nobody needed its blocks."""
    served = Served(n_blocks=8, budget=64)
    served.submit(range(4), max_tokens=24)
    second = served.submit([9, 8, 7, 6, 5, 4, 3, 2, 1], max_tokens=12)
    while not served.scheduler.n_preempted:
        assert served.step()
    assert second.handle is None and second.computed == 0 and len(second.tokens) > 9
    text = second.tokens[:]
    while second.handle is None:
        served.step()
    assert second.tokens[:len(text)] == text
    served.run()
    assert served.n_computed < sum(len(s.tokens) - 1 for s in served.samples) + len(text)


def test_no_preempt_resume_thrash():
    """A pool for half of the samples: what is computed more than once is a small part, not each text at each step."""
    served = Served(n_blocks=12, budget=64)
    for i in range(12):
        served.submit([i % 7, i % 11, 3, 1, 4], max_tokens=24)
    served.run()
    needed = sum(len(s.tokens) - 1 for s in served.samples)
    assert served.scheduler.n_preempted and served.n_computed < 1.5 * needed


def test_larger_than_the_pool_is_400():
    served = Served(n_blocks=4, block_size=4)
    served.submit([1] * 8, max_tokens=9)  # the last token is not fed: 16 positions
    with pytest.raises(ValueError, match='5 blocks of 4, but the pool has 4'):
        served.submit([1] * 8, max_tokens=10)
    with pytest.raises(ValueError, match="together 33, but the model's context is 32"):
        served.submit([1] * 8, max_tokens=25)
    served.run()


@pytest.mark.parametrize('n_blocks', [8, 9, 13])
def test_oldest_always_advances(n_blocks):
    served, chooser = Served(n_blocks=n_blocks, budget=7), torch.Generator().manual_seed(n_blocks)
    for i in range(14):
        n = int(torch.randint(1, 15, (), generator=chooser))
        served.submit([i % 11] * n, max_tokens=int(torch.randint(1, 18, (), generator=chooser)), n=1 + i % 3)
    while True:
        left = [sample for sample in served.samples if not sample.finished and not (
            sample.handle is None and sample not in served.scheduler.waiting)]  # forks come with their sample
        plan = served.step()
        if not plan:
            break
        assert min(left) is plan[0][0]
    served.run()


def test_long_prompt_does_not_stall_decoders():
    """Each sample that draws gets its token in each step; the prompt has the rest of the budget."""
    served = Served(n_blocks=64, budget=8, block_size=4)
    short = [served.submit([i], max_tokens=20) for i in range(3)]
    served.step()
    long = served.submit([1] * 30, max_tokens=2)
    while len(long.tokens) < 31:
        lengths, computed = [len(s.tokens) for s in short], long.computed
        served.step()
        assert long.computed == min(30, computed + 5)
        assert [len(s.tokens) for s in short] == [n + 1 for n in lengths]
    served.run()


def test_samples_share_the_blocks_of_their_prompt():
    served = Served()
    a, b, c = served.submit(range(9), max_tokens=4, n=3)
    assert [s for s, *_ in served.step()] == [a] and len(served.scheduler.running) == 3
    tables = [served.cache.records[s.handle].table for s in (a, b, c)]
    assert tables[0] == tables[1] == tables[2] and [len(s.tokens) for s in (a, b, c)] == [10] * 3
    served.step()
    tables = [served.cache.records[s.handle].table for s in (a, b, c)]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2] and len({table[2] for table in tables}) == 3
    served.run()
    assert served.n_computed == 9 + 3 * 3


def test_more_samples_than_the_pool_has_sequences():
    served = Served(n_blocks=2, block_size=8)
    served.submit([1, 2, 3], max_tokens=6, n=7)
    served.submit([4, 5, 6], max_tokens=6)
    served.run()


def test_salt_separates_users():
    served = Served()
    for salt, found in (('', 0), ('a', 0), ('a', 8), ('b', 0), ('', 8)):
        sample = served.submit(range(10), salt=salt)
        served.run()
        assert sample.n_cached == found


def test_hash_collision_is_a_miss():
    served = Served()
    served.cache.blocks.hash = lambda of: 7
    for text in ([1, 2, 3, 4, 5], [4, 3, 2, 1, 5], [1, 2, 3, 4, 5]):
        served.submit(text)
        served.run()
    assert served.scheduler.n_found == 4


def test_scoring_computes_its_whole_prompt():
    served = Served(n_blocks=16)
    served.submit(range(10))
    served.run()
    scoring = served.submit(range(10), prompt_logprobs=True, max_tokens=20)
    assert served.step() == [(scoring, 0, 10)]
    served.run()
    assert served.submit(range(10)) and served.step()[0][1] == 8, "others still find what was remembered"


@pytest.mark.parametrize('n_blocks', [7, 8, 20])
@pytest.mark.parametrize('how', [dict(window=5, n_sink=0), dict(window=6, n_sink=3), dict(window=2, n_sink=0)], ids=str)
def test_windows_free_blocks_behind_them(how, n_blocks):
    served = Served(n_blocks=n_blocks, budget=20, position='rope', block_size=32, **how)
    for i in range(6):
        served.submit([i % 4, 1, 2] * (1 + i), max_tokens=90)  # each of them longer than the pool
    served.run()

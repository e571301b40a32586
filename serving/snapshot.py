"""What the engine shows of itself: counters and observations for /metrics, and the pool's state for the page."""
import time
from collections import Counter, deque

MOST_OBSERVATIONS = 100_000  # that are kept until they are read


class Stats:
    """
    Counters: prompt_tokens, generated_tokens, requests (received), finished ({finish_reason: samples}), steps,
    computed_tokens. Observations, to be taken with popleft: first_token (seconds from `submit` to a request's first
    token), per_token (mean seconds a token of a sample after its first one). The rest is what is so now, and may be
    read by any thread.
    """

    def __init__(self, scheduler):
        self.scheduler, self.finished = scheduler, Counter()
        self.requests = self.prompt_tokens = self.generated_tokens = self.computed_tokens = self.steps = 0
        self.first_token, self.per_token = deque(maxlen=MOST_OBSERVATIONS), deque(maxlen=MOST_OBSERVATIONS)

    @property
    def running(self):
        """Samples that have blocks."""
        return len(self.scheduler.running)

    @property
    def waiting(self):
        """Samples that wait for blocks, those that were preempted included."""
        return len(self.scheduler.waiting)

    @property
    def blocks(self):
        return self.scheduler.cache.blocks

    @property
    def blocks_total(self):
        return len(self.blocks.references)

    @property
    def blocks_used(self):
        return self.blocks_total - len(self.blocks.free)

    @property
    def blocks_shared(self):
        return sum(n > 1 for n in self.blocks.references)

    @property
    def blocks_cached(self):
        """Blocks that no sample has, and that are remembered."""
        return sum(prefix is not None and not n for prefix, n in zip(self.blocks.prefix_of, self.blocks.references))

    @property
    def preemptions(self):
        return self.scheduler.n_preempted

    @property
    def prefix_queries(self):
        """Tokens of prompts that were looked for in remembered blocks."""
        return self.scheduler.n_looked_up

    @property
    def prefix_hits(self):
        """Tokens of prompts that were found there."""
        return self.scheduler.n_found


class Snapshots:
    """
    Makes the dict of `Engine.state`:

    time: seconds, monotonic. block_size, n_blocks: of the pool.
    blocks: for each block {'samples': which have it, a list of [request id, index]; 'remembered': can it be found?;
    'text': of the tokens in it}.
    running, waiting: samples by age, {'id': of the request, 'index', 'n_prompt': tokens of the prompt, 'n_tokens': with
    its own, 'computed': how many are in the cache, 'blocks': its block table, with None for blocks behind the window}.
    counters: {'steps', 'prompt_tokens', 'generated_tokens', 'prefix_hits', 'prefix_queries', 'preemptions',
    'blocks_used', 'blocks_shared', 'blocks_cached'}.
    """
    COUNTERS = ('steps', 'prompt_tokens', 'generated_tokens', 'prefix_hits', 'prefix_queries', 'preemptions',
                'blocks_used', 'blocks_shared', 'blocks_cached')

    def __init__(self, scheduler, stats, bytes_of):
        self.scheduler, self.stats, self.bytes_of = scheduler, stats, bytes_of
        self.text_of = {}  # {block: (its Prefix, its text)}

    def take(self):
        blocks, running = self.scheduler.cache.blocks, []
        shown = [{'samples': [], 'remembered': prefix is not None,
                  'text': '' if prefix is None else self.text(block, prefix)}
                 for block, prefix in enumerate(blocks.prefix_of)]
        for sample in self.scheduler.running:
            table = blocks.tables.get(sample.handle, [])
            running.append(self.shown(sample) | {'blocks': table[:]})
            for i, block in enumerate(table):
                if block is not None:
                    shown[block]['samples'].append([sample.request.id, sample.index])
                    if not shown[block]['remembered']:
                        start = i * blocks.block_size
                        shown[block]['text'] = self.decoded(
                            sample.tokens[start:min(start + blocks.block_size, sample.computed)])
        waiting = [self.shown(sample) | {'blocks': []} for sample in self.scheduler.waiting]
        return {'time': time.monotonic(), 'block_size': blocks.block_size, 'n_blocks': len(shown), 'blocks': shown,
                'running': running, 'waiting': waiting,
                'counters': {name: getattr(self.stats, name) for name in self.COUNTERS}}

    def shown(self, sample):
        return {'id': sample.request.id, 'index': sample.index, 'n_prompt': sample.n_prompt,
                'n_tokens': len(sample.tokens), 'computed': sample.computed}

    def text(self, block, prefix):
        of, text = self.text_of.get(block, (None, ''))
        if of is not prefix:
            text = self.decoded(prefix.tokens)
            self.text_of[block] = prefix, text
        return text

    def decoded(self, tokens):
        return b''.join(map(self.bytes_of, tokens)).decode('utf-8', 'replace')

"""What the engine shows of itself: counters and times, their text for Prometheus, and the pool's state for the page."""
import time
from bisect import bisect_left
from collections import Counter

SECONDS = (.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 25, 50, 100)  # the buckets of a `Histogram`
FORMAT = 'text/plain; version=0.0.4; charset=utf-8'  # of `Stats.text`
GAUGES = {
    'running': "Samples that have blocks",
    'waiting': "Samples that wait for blocks, those that were preempted included",
    'blocks_total': "Blocks of the pool",
    'blocks_used': "Blocks that a sample has",
    'blocks_shared': "Blocks that several samples have",
    'blocks_cached': "Blocks that no sample has, and that are remembered",
}
COUNTERS = {
    'requests': "Requests received",
    'steps': "Steps of the model",
    'prompt_tokens': "Tokens of the prompts received",
    'generated_tokens': "Tokens drawn",
    'computed_tokens': "Tokens whose keys and values were computed",
    'prefix_queries': "Tokens of prompts that were looked for in remembered blocks",
    'prefix_hits': "Tokens of prompts that were found in remembered blocks",
    'preemptions': "Samples that lost their blocks, to be computed again",
}
HISTOGRAMS = {
    'first_token': ('time_to_first_token_seconds', "From a request to its first token"),
    'per_token': ('time_per_token_seconds', "Mean time of the tokens of a sample after its first one"),
}
SHOWN = ('steps', 'prompt_tokens', 'generated_tokens', 'prefix_hits', 'prefix_queries', 'preemptions', 'blocks_used',
         'blocks_shared', 'blocks_cached')  # on the page


class Histogram:
    """Of seconds. counts: how many were at most so long as each of SECONDS and longer than the one before, and longer
    than all."""

    def __init__(self):
        self.counts, self.sum = [0] * (len(SECONDS) + 1), 0.0

    def observe(self, seconds):
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds


class Stats:
    """
    Counters: see COUNTERS; finished: {finish_reason: samples}. first_token, per_token: `Histogram`s, see HISTOGRAMS.
    Any thread may read them.
    """

    def __init__(self, scheduler):
        self.scheduler, self.finished = scheduler, Counter()
        self.requests = self.prompt_tokens = self.generated_tokens = self.computed_tokens = self.steps = 0
        self.first_token, self.per_token = Histogram(), Histogram()

    def read(self):
        """{name: value} of all GAUGES and COUNTERS."""
        scheduler, blocks = self.scheduler, self.scheduler.cache.blocks
        references, n_free = blocks.references[:], len(blocks.free)
        gauges = {
            'running': len(scheduler.running), 'waiting': len(scheduler.waiting), 'blocks_total': len(references),
            'blocks_used': len(references) - n_free, 'blocks_shared': sum(n > 1 for n in references),
            'blocks_cached': sum(prefix is not None and not n for prefix, n in zip(blocks.prefix_of, references)),
            'preemptions': scheduler.n_preempted, 'prefix_queries': scheduler.n_looked_up,
            'prefix_hits': scheduler.n_found}
        return gauges | {name: getattr(self, name) for name in COUNTERS if name not in gauges}

    def text(self):
        """What Prometheus reads, in its text format."""
        values, lines = self.read(), []

        def add(kind, name, help, samples):
            lines.extend([f'# HELP nanogpt_{name} {help}', f'# TYPE nanogpt_{name} {kind}'])
            lines.extend(f'nanogpt_{name}{suffix} {value}' for suffix, value in samples)
        for name, help in GAUGES.items():
            add('gauge', name, help, [('', values[name])])
        for name, help in COUNTERS.items():
            add('counter', f'{name}_total', help, [('', values[name])])
        add('counter', 'finished_total', "Samples that ended",
            [(f'{{reason="{reason}"}}', n) for reason, n in dict(self.finished).items()])
        for name, (metric, help) in HISTOGRAMS.items():
            histogram, n, samples = getattr(self, name), 0, []
            for bound, count in zip((*SECONDS, '+Inf'), histogram.counts[:]):
                n += count
                samples.append((f'_bucket{{le="{bound}"}}', n))
            add('histogram', metric, help, [*samples, ('_count', n), ('_sum', histogram.sum)])
        return '\n'.join(lines) + '\n'


class Snapshots:
    """
    Makes the dict of `Engine.state`:

    time: seconds, monotonic. page_size, n_blocks: of the pool.
    blocks: for each block {'samples': which have it, a list of [request id, index]; 'remembered': can it be found?;
    'text': of the tokens in it}.
    running, waiting: samples by age, {'id': of the request, 'index', 'n_prompt': tokens of the prompt, 'n_tokens': with
    its own, 'computed': how many are in the cache, 'blocks': its block table, with None for blocks behind the window}.
    counters: {name: value} of SHOWN.
    """

    def __init__(self, scheduler, stats, bytes_of):
        self.scheduler, self.stats, self.bytes_of = scheduler, stats, bytes_of
        self.text_of = {}  # {block: (its Prefix, its text)}

    def take(self):
        cache, values = self.scheduler.cache, self.stats.read()
        page_size, running = cache.page_size, []
        shown = [{'samples': [], 'remembered': prefix is not None,
                  'text': '' if prefix is None else self.text(block, prefix)}
                 for block, prefix in enumerate(cache.blocks.prefix_of)]
        for sample in self.scheduler.running:
            table = cache.records[sample.handle].table
            running.append(self.shown(sample) | {'blocks': table[:]})
            for i, block in enumerate(table):
                if block is not None:
                    shown[block]['samples'].append([sample.request.id, sample.index])
                    if not shown[block]['remembered']:
                        shown[block]['text'] = self.decoded(
                            sample.tokens[i * page_size:min((i + 1) * page_size, sample.computed)])
        waiting = [self.shown(sample) | {'blocks': []} for sample in self.scheduler.waiting]
        return {'time': time.monotonic(), 'page_size': page_size, 'n_blocks': len(shown), 'blocks': shown,
                'running': running, 'waiting': waiting, 'counters': {name: values[name] for name in SHOWN}}

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

"""What the engine shows of itself: counters and times, their text for Prometheus, and the pool for the web page."""
import time
from collections import Counter
from functools import lru_cache

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

SECONDS = (.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 25, 50, 100)  # the buckets of histograms
GAUGES = {  # {name: (what it is, its value by a `Stats`)}
    'running': ("Samples that have blocks", lambda stats: len(stats.scheduler.running)),
    'waiting': ("Samples that wait for blocks, those that were preempted included",
                lambda stats: len(stats.scheduler.waiting)),
    'blocks_total': ("Blocks of the pool", lambda stats: stats.pool.n_pages),
    'blocks_used': ("Blocks that a sample has", lambda stats: stats.pool.n_pages - stats.pool.n_free),
    'blocks_shared': ("Blocks that several samples have", lambda stats: sum(n > 1 for n in stats.pool.references)),
    'blocks_cached': ("Blocks that no sample has, and that are remembered", lambda stats: sum(
        prefix is not None and not n for prefix, n in zip(stats.pool.prefix_of, stats.pool.references))),
}
COUNTERS = {
    'requests': ("Requests received", lambda stats: stats.requests),
    'steps': ("Steps of the model", lambda stats: stats.engine.n_steps),
    'prompt_tokens': ("Tokens of the prompts received", lambda stats: stats.prompt_tokens),
    'generated_tokens': ("Tokens drawn", lambda stats: stats.generated_tokens),
    'computed_tokens': ("Tokens whose keys and values were computed", lambda stats: stats.engine.n_computed),
    'prefix_queries': ("Tokens of prompts that were looked for in remembered blocks",
                       lambda stats: stats.scheduler.n_looked_up),
    'prefix_hits': ("Tokens of prompts that were found in remembered blocks", lambda stats: stats.scheduler.n_found),
    'preemptions': ("Samples that lost their blocks, to be computed again", lambda stats: stats.scheduler.n_preempted),
}


class Stats:
    """
    Counters of an `engine.Engine` and its thread: see COUNTERS; finished: {finish_reason: samples}. first_token,
    per_token: histograms of seconds. registry: of prometheus_client, with all of them. Any thread may read them.
    bytes_of: a function of a token id.
    """

    def __init__(self, engine, bytes_of):
        self.engine, self.scheduler, self.pool = engine, engine.scheduler, engine.pool
        self.text = lru_cache(maxsize=2 * self.pool.n_pages)(  # most blocks have the text that they had
            lambda tokens: b''.join(map(bytes_of, tokens)).decode('utf-8', 'replace'))
        self.finished, self.registry = Counter(), CollectorRegistry()
        self.requests = self.prompt_tokens = self.generated_tokens = 0
        self.first_token, self.per_token = [
            Histogram(f'nanogpt_{name}_seconds', what, buckets=SECONDS, registry=self.registry) for name, what in (
                ('time_to_first_token', "From a request to its first token"),
                ('time_per_token', "Mean time of the tokens of a sample after its first one"))]
        self.registry.register(self)

    def collect(self):
        """For prometheus_client: all that is counted."""
        for kind, metrics in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, (help, value) in metrics.items():
                yield kind(f'nanogpt_{name}', help, value(self))
        finished = CounterMetricFamily('nanogpt_finished', "Samples that ended", labels=['reason'])
        for reason, n in dict(self.finished).items():
            finished.add_metric([reason], n)
        yield finished

    def snapshot(self):
        """The dict of `EngineThread.state`: the blocks of the pool, samples by age, and the values of all metrics."""
        size = self.pool.page_size
        blocks = [{'samples': [],                     # that have it, as [request id, index]
                   'remembered': prefix is not None,  # can it be found?
                   'text': self.text(prefix.tokens if prefix else ())} for prefix in self.pool.prefix_of]
        for s in self.scheduler.running:
            for i, page in enumerate(s.table):
                if page is not None:
                    blocks[page]['samples'].append([s.owner.live.request.id, s.owner.index])
                    if not blocks[page]['remembered']:
                        blocks[page]['text'] = self.text(tuple(s.tokens[i * size:min((i + 1) * size, s.n_computed)]))
        return {'time': time.monotonic(), 'page_size': size, 'n_blocks': len(blocks), 'blocks': blocks,
                'running': [self.shown(s) for s in self.scheduler.running],
                'waiting': [self.shown(s) for s in self.scheduler.waiting],
                'counters': {name: value(self) for name, (_, value) in (GAUGES | COUNTERS).items()}}

    def shown(self, s):
        """A sample. computed: tokens in the cache. blocks: its table, with None where the window has passed."""
        return {'id': s.owner.live.request.id, 'index': s.owner.index, 'n_prompt': s.n_prompt,
                'n_tokens': len(s.tokens), 'computed': s.n_computed, 'blocks': s.table[:]}

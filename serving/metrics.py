"""The engine's counters and observations in the text format of Prometheus."""
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

FORMAT = 'text/plain; version=0.0.4; charset=utf-8'  # what `generate_latest` writes
SECONDS = (.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 25, 50, 100)
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


class Metrics:
    """Of an engine. Its observations are moved into histograms whenever they are asked for."""

    def __init__(self, engine):
        self.engine, self.registry = engine, CollectorRegistry()
        self.histograms = {name: Histogram(f'nanogpt_{metric}', text, buckets=SECONDS, registry=self.registry)
                           for name, (metric, text) in HISTOGRAMS.items()}
        self.registry.register(self)

    def collect(self):
        """For prometheus-client: what is counted by the engine itself."""
        stats = self.engine.stats
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f'nanogpt_{name}', text, getattr(stats, name))
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f'nanogpt_{name}', text, getattr(stats, name))
        finished = CounterMetricFamily('nanogpt_finished', "Samples that ended", labels=['reason'])
        for reason, n in dict(stats.finished).items():
            finished.add_metric([reason], n)
        yield finished

    def text(self):
        """The bytes that Prometheus reads."""
        for name, histogram in self.histograms.items():
            observations = getattr(self.engine.stats, name)
            for _ in range(len(observations)):
                histogram.observe(observations.popleft())
        return generate_latest(self.registry)

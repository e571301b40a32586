"""Our ways to generate, as engines: without a cache, with it, and with the fastest decoder."""
import decode
from benchmarks.peers.engine import Engine, torch_threads


class NoCache(Engine):
    """A full pass for every token."""
    name = 'no cache'

    def __init__(self, model, weights='float32', threads=1):
        super().__init__(model, weights, threads)
        self.model = model

    def generate(self, prompts, n_new, **how):
        prompts = self.checked(prompts, n_new)
        with torch_threads(self.threads):
            return self.model.generate(prompts, n_new, temperature=0, **how)[:, prompts.size(1):]


class Cache(NoCache):
    """The cache of model.py, each step run by PyTorch."""
    name = 'cache'

    def generate(self, prompts, n_new):
        return super().generate(prompts, n_new, use_cache=True)


class Decoder(NoCache):
    """The cache, and the fastest decoder for the batch."""
    name = 'cache + decoder'
    packages = {'decode.cpu': 'numba'}
    ways = {'float32': [{}], 'bfloat16': [{}], 'int8': [{}]}

    def __init__(self, model, weights='float32', threads=1):
        super().__init__(model, weights, threads)
        self.weights, self.decoders = weights, {}

    def generate(self, prompts, n_new):
        B = len(prompts)
        if B not in self.decoders:
            self.decoders[B] = decode.best(self.model, B, self.weights, self.threads)
        return super().generate(prompts, n_new, use_cache=True, decoder=self.decoders[B])

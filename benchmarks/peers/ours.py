"""Our ways to generate, as engines: without a cache, with it, with the fastest decoder, and through pages."""
import torch

import decode
import kvcache
from benchmarks.peers.engine import Engine, torch_threads


class NoCache(Engine):
    """A full pass for every token."""
    name = 'no cache'

    def __init__(self, model, weights='float32', threads=1):
        super().__init__(model, weights, threads)
        self.model = model

    def generate(self, prompts, n_new, **how):
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
    ways = {'float32': [{}], 'bfloat16': [{}], 'int8': [{}], 'int4': [{}]}

    def __init__(self, model, weights='float32', threads=1):
        super().__init__(model, weights, threads)
        self.weights, self.decoders = weights, {}

    def generate(self, prompts, n_new):
        B = len(prompts)
        if B not in self.decoders:
            self.decoders[B] = decode.best(self.model, B, self.weights, self.threads)
        return super().generate(prompts, n_new, use_cache=True, decoder=self.decoders[B])


class Pages(Engine):
    """The paged cache on the decoder. kv: keys and values in float32, bfloat16 or int8."""
    name, packages, ways = 'pages', Decoder.packages, Decoder.ways

    def __init__(self, model, weights='float32', threads=1, kv='float32'):
        super().__init__(model, weights, threads)
        self.model, self.kv, self.decoder = model, kv, decode.best(model, 1, weights, threads)
        self.cache, self.handles = None, []

    def begin(self, prompts):
        """Read prompts (B, T). Returns the token after each, (B,)."""
        self.cache = kvcache.KINDS['paged'](self.model, len(prompts), self.kv, self.decoder)
        self.handles = [self.cache.new() for _ in prompts]
        return self.read(prompts, 0)

    def read(self, tokens, start):
        """Read tokens (B, T) at positions from `start`, in place of what was there. Returns the next of each, (B,)."""
        with self.decoder.torch_on_one_thread():
            return torch.cat([self.cache.step([handle], [start], row[None]).argmax(dim=-1)
                              for handle, row in zip(self.handles, tokens)])

    def all_logits(self, tokens):
        """Read tokens (T,) in place of all that was read before. Returns the logits after each, (T, vocab_size)."""
        if len(self.handles) != 1:
            self.begin(tokens[None, :1])
        return self.cache.step(self.handles, [0], tokens[None], wanted=range(len(tokens)))

    def go_on(self, newest, start, n_new):
        """The (B, n_new) tokens after newest (B,), which is fed at position `start`. What was there is overwritten."""
        tokens = []
        with self.decoder.torch_on_one_thread():
            for i in range(start, start + n_new):
                newest = self.cache.step(self.handles, [i] * len(newest), newest[:, None]).argmax(dim=-1)
                tokens.append(newest)
        return torch.stack(tokens, dim=1)

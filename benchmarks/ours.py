"""
Our own engine, as benchmarks use it. No other file of benchmarks/ imports generation.py, decode/, kvcache/ or serving/.

    NoCache, Cache     `GPT.generate`, without the cache and with it, as engines that are compared with others
    Ours               what sample.py and serve.py run, as one of them
    gpu_decoder, served, generated, first_answer      what `bench.py --mode=gpu` measures
"""
from functools import lru_cache
from types import SimpleNamespace

import torch

import decode
import generation
import kvcache
from benchmarks.peers.engine import Engine, torch_threads
from benchmarks.shapes import model_of, random_tokens
from device import synchronize


class NoCache(Engine):
    """`GPT.generate` of model.py: a full pass for every token."""
    name, use_cache = 'no cache', False

    def __init__(self, model, weights='float32', threads=1):
        super().__init__(model, weights, threads)
        self.model = model

    def generate(self, prompts, n_new):
        with torch_threads(self.threads):
            tokens = self.model.generate(prompts, n_new, temperature=0, use_cache=self.use_cache)
        return tokens[:, prompts.size(1):]


class Cache(NoCache):
    """The same with the cache: each step is run by PyTorch."""
    name, use_cache = 'cache', True


class Ours(Engine):
    """
    The engine that sample.py and serve.py run, with the fastest step for the number of sequences.

    threads: None lets it choose by timing. kv: keys and values in float32, bfloat16 or int8, for `all_logits`.
    """
    name, chooses_threads = 'ours', True
    packages = {'decode.cpu': 'numba'}
    ways = {weights: [{}] for weights in decode.WEIGHTS}

    def __init__(self, model, weights='float32', threads=None, kv='float32'):
        super().__init__(model, weights, threads)
        self.model, self.kv = model, kv
        self.decoder = lru_cache(lambda B: decode.best(model, B, weights, threads))

    def generate(self, prompts, n_new, num_samples=1, **how):
        """The tokens behind prompts (B, T): (B * num_samples, n_new). how: of a full context, as sample.py has it."""
        B, T = prompts.shape
        return generation.generate(self.model, prompts, n_new, temperature=0, use_cache=True, num_samples=num_samples,
                                   decoder=self.decoder(B * num_samples), **how)[:, T:]

    def all_logits(self, tokens):
        """The logits after each of tokens (T,), (T, vocab_size)."""
        cache = kvcache.KINDS['paged'](self.model, 1, self.kv, self.decoder(1))
        return cache.step([cache.new()], [0], tokens[None], wanted=range(len(tokens)))


def gpu_decoder(model, weights='float32', vendor=False):
    """The step on a GPU. vendor: with the matmuls that PyTorch calls, whose bits depend on the number of rows."""
    from decode.gpu import plain
    from decode.gpu.decoder import GPUDecoder, kernels
    functions = None
    if vendor:
        functions = SimpleNamespace(**{name: getattr(kernels(), name) for name in kernels().__all__}
                                    | dict(linear=plain.linear))
    return GPUDecoder(model, weights, functions)


def weight_bytes(decoder):
    """Bytes of weights that a step of a `gpu_decoder` reads."""
    return decoder.packed.nbytes()


def served(model, decoder, B, n_prompt, n_new):
    """
    A function that serves B requests at once, without HTTP: prompts of n_prompt tokens, and n_new tokens drawn at
    temperature 0.8 by the step itself. It returns how many tokens have come.
    """
    from serving.engine import Engine as Serving
    from serving.request import Request, SamplingParams
    prompts = [random_tokens(model, n_prompt, seed=i).tolist() for i in range(B)]
    engine = Serving(model, decoder, [b' '] * model.config.vocab_size, n_blocks=B * -(-(n_prompt + n_new) // 16),
                     type_kv=getattr(decoder, 'type_kv', 'float32'), max_num_batched_tokens=2048)
    if hasattr(decoder, 'prepare'):
        decoder.prepare(engine.cache.arrays)
    drawn = SamplingParams(temperature=0.8, ignore_eos=True)

    def serve():
        outputs = []
        for i, prompt in enumerate(prompts):
            engine.submit(Request(str(i), prompt, n_new, drawn, seed=i, deliver=outputs.extend))
        while engine.run_once():
            pass
        return sum(len(output.token_ids) for output in outputs)
    return serve


def generated(model, step, B, n_new):
    """A function that draws n_new tokens for B sequences by another step: 'eager', or 'graph', a CUDA graph of it."""
    decoder, device = decode.best(model, B, name=step), model.lm_head.weight.device
    idx = random_tokens(model, B, 1).to(device)

    def run():
        generation.generate(model, idx, n_new, temperature=0.8, use_cache=True, decoder=decoder)
        synchronize(str(device))
    return run


def first_answer(shape, device, dtype):
    """A model from random weights to its first answer, with all that a server prepares before."""
    model = model_of(shape, False).to(device, getattr(torch, dtype))
    served(model, decode.best(model, 1), 1, 3, 1)()

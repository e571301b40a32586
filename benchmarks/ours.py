"""Our own engine, as benchmarks use it. No other file of benchmarks/ imports engine/, kvcache/ or decode/."""
from functools import lru_cache

import torch
import torch.nn.functional as F

import decode
from benchmarks.peers.peer import Peer
from benchmarks.shapes import model_of, random_tokens
from device import torch_threads
from engine import Engine, pool_for


class NoCache(Peer):
    """`GPT.generate` of model.py: a full pass for every token."""
    name, use_cache = 'no cache', False

    def generate(self, prompts, n_new, temperature=0):
        with torch_threads(self.threads):
            tokens = self.gpt.generate(prompts, n_new, temperature, use_cache=self.use_cache)
        return tokens[:, prompts.size(1):]


class Cache(NoCache):
    """The same with the cache: each step is run by PyTorch."""
    name, use_cache = 'cache', True


class Ours(Peer):
    """
    The engine that sample.py and serve.py run, with the fastest executor for the number of sequences.

    threads: None lets it choose by timing.
    """
    name, chooses_threads = 'ours', True
    packages = {'decode.cpu': 'numba'}
    ways = {weights: [{}] for weights in decode.WEIGHTS}

    def __init__(self, model, weights='float32', threads=None):
        super().__init__(model, weights, threads)
        self.executor = lru_cache(lambda n: decode.best(model, n, weights, threads))
        self.engine, self.room = None, (0, 0)  # the sequences and the tokens of each that it was made for

    def generate(self, prompts, n_new, num_samples=1, **how):
        """The tokens after prompts (B, T): (B * num_samples, n_new). how: of a full context, as sample.py has it."""
        B, T = prompts.shape
        n = B * num_samples
        if n != self.room[0] or T + n_new > self.room[1]:  # a shorter run takes the engine that is there
            pool = pool_for(self.config, n, T + n_new)
            self.engine, self.room = Engine(self.gpt, self.executor(n), pool, 2**14, n), (n, T + n_new)
        self.engine.pool.reset()  # so that no prompt is found
        texts = self.engine.generate(prompts.tolist(), n_new, num_samples, temperature=0, **how)
        return torch.tensor([text[T:] for text in texts])


def log_likelihoods(model, weights='float32', kv_bits=0):
    """
    A function of pairs (context, continuation) of token ids, of at most block_size + 1 tokens. It returns for each pair
    the log probabilities of the continuation's tokens, float64 (n,). Pages of contexts stay in the pool, where the next
    call finds them.
    """
    engine = Engine(model, decode.best(model, 1, weights, kv_bits=kv_bits), kv_bits=kv_bits)

    def score(pairs):
        found = {}
        for context, continuation in pairs:
            prompt = [*context, *continuation[:-1]]
            s, = engine.add(prompt, 1, prompt_logits=True, logprobs=True, logits_from=len(context) - 1)
            found[s] = torch.zeros(len(continuation), dtype=torch.float64), torch.tensor(continuation)
        while not engine.is_idle:
            for s, output in engine.step():
                if s.error:
                    raise s.error
                if output.logits is not None:
                    scores, targets = found[s]
                    first = max(output.first, s.logits_from)  # pages and chunks have logits of the context too
                    logits = output.logits[first - output.first:]
                    part = slice(first - s.logits_from, first - s.logits_from + len(logits))
                    scores[part] = -F.cross_entropy(logits, targets[part], reduction='none').double()
        return [scores for scores, _ in found.values()]
    return score


def gpu_executor(model, as_they_come=False):
    """The step on a GPU. as_they_come: with PyTorch's products of all rows at once, whose bits depend on how many."""
    from decode.gpu.executor import GPUExecutor, kernels
    functions = kernels()
    if as_they_come:
        functions.linear = linear_as_it_comes
    return GPUExecutor(model, functions)


def linear_as_it_comes(x, out, linear, ended, activation='', gate=None, add=False):
    """See decode/gpu/linears.py."""
    found = linear(x)
    if activation:
        found = F.gelu(found, approximate=activation)
    if gate:
        found = F.silu(gate(x)) * found
    out.copy_(out + found if add else found)


def served(model, executor, B, n_prompt, n_new):
    """
    A function that serves B requests at once, without HTTP: prompts of n_prompt tokens, and n_new tokens drawn at
    temperature 0.8 by the step itself. It returns how many tokens have come.
    """
    prompts = [random_tokens(model, n_prompt, seed=i).tolist() for i in range(B)]
    engine = Engine(model, executor, pool_for(model.config, B, n_prompt + n_new))
    if hasattr(executor, 'prepare'):
        executor.prepare()
    return lambda: sum(len(text) - n_prompt for text in engine.generate(prompts, n_new, temperature=0.8))


def first_answer(shape, device, dtype):
    """A model from random weights to its first answer, with all that a server prepares before."""
    model = model_of(shape, False).to(device, getattr(torch, dtype))
    served(model, decode.best(model, 1, name='gpu' if device.startswith('cuda') else 'auto'), 1, 3, 1)()

"""Small engines without a thread, what their requests are given, and what each would have had alone."""
import torch

from decode.cpu import CPUDecoder
from model import GPT, GPTConfig
from serving.engine import Engine
from serving.request import Request, SamplingParams
from serving.sampler import Drawing, Sampler

V = 29
BYTES = [bytes([97 + i % 26]) for i in range(V)]


class Got:
    """What a request was given, sample by sample."""

    def __init__(self, request):
        self.request, request.deliver = request, self.deliver
        self.tokens, self.logprobs = [[] for _ in range(request.n)], [[] for _ in range(request.n)]
        self.text, self.reasons = [''] * request.n, [None] * request.n
        self.first, self.error, self.n_calls = None, None, 0

    def deliver(self, outputs):
        self.first, self.n_calls = self.first or outputs[0], self.n_calls + 1
        for output in outputs:
            self.tokens[output.index] += output.token_ids
            self.logprobs[output.index] += output.logprobs or []
            self.text[output.index] += output.text
            self.reasons[output.index] = output.finish_reason
            self.error = output.error or self.error


def submit(engine, id, prompt, max_tokens=8, seed=0, n=1, **how):
    more = {name: how.pop(name) for name in ('stop', 'cache_salt') if name in how}
    got = Got(Request(id, prompt, max_tokens, SamplingParams(**how), seed, n, **more))
    engine.submit(got.request)
    return got


def run(engine):
    while engine.run_once():
        pass
    assert not engine.live and engine.cache.n_free == engine.cache.n_seq


def finished(engine, *args, **how):
    got = submit(engine, *args, **how)
    run(engine)
    return got


def alone(decoder, request, stop_ids=()):
    """The tokens and log probabilities of each sample by the decoder and its own tuple, a token after the other."""
    sampler, samples = Sampler(decoder.vocab_size), []
    for i in range(request.n):
        drawing, cache, tokens, logprobs = Drawing(request, i, stop_ids, decoder.vocab_size), None, [], []
        for token in request.prompt:
            logits, cache = decoder(torch.tensor([[token]]), cache)
        while len(tokens) < request.max_tokens:
            logits = logits[0].numpy()
            tokens += sampler.draw(logits, [0], [drawing])
            logprobs += sampler.logprobs(logits, tokens[-1:], 5)
            if tokens[-1] in stop_ids:
                break
            logits, cache = decoder(torch.tensor([tokens[-1:]]), cache)
        samples.append((tokens, logprobs))
    return samples


def tiny(n_blocks=16, block_size=4, budget=64, **how):
    torch.manual_seed(1)
    model = GPT(GPTConfig(block_size=64, vocab_size=V, n_layer=2, n_head=2, n_embd=16)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)
    decoder = CPUDecoder(model, threads=1)
    return Engine(model, decoder, BYTES, None, n_blocks, block_size, budget, **how), decoder

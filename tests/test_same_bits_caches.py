"""
Every cache system on the compiled step: whatever happens to the other sequences, each token's logits have the bits that
its text gives alone, token by token, in the tuple.
"""
import random

import pytest
import torch
from conftest import sizes
from test_same_bits import KINDS, SHAPES, model_of, reference_logits, threads

import kvcache
from decode.cpu import CPUDecoder
from kvcache.protocol import Work

N_SEQ = 6
SYSTEMS = sorted(kvcache.KINDS)


class Alone:
    """The logits of texts, each computed token by token by the decoder in its tuple, and kept."""

    def __init__(self, decoder):
        self.decoder, self.known = decoder, {}

    def __call__(self, text):
        n = len(text)
        while n and tuple(text[:n]) not in self.known:
            n -= 1
        cache = self.known[tuple(text[:n])][1] if n else None
        cache = cache and [layer.clone() for layer in cache]
        for i in range(n, len(text)):
            logits, cache = self.decoder(torch.tensor([text[i:i + 1]]), cache)
            self.known[tuple(text[:i + 1])] = logits[0, 0], cache
            cache = [layer.clone() for layer in cache]
        return self.known[tuple(text)][0]


def run_randomly(cache, alone, chooser, n_steps, longest, shared):
    """Add, feed, fork, cut, free and recompute sequences in any order; compare the bits of each step."""
    held, n_compared = {}, 0  # {sequence: its tokens}
    for _ in range(n_steps):
        action = chooser.choice(['feed', 'feed', 'feed', 'feed', 'new', 'fork', 'cut', 'free', 'recompute'])
        if action == 'new' and len(held) < N_SEQ or not held:
            held[cache.new()] = []
        elif action == 'fork' and len(held) < N_SEQ:
            seq = chooser.choice(list(held))
            held[cache.fork(seq)] = held[seq][:]
        elif action == 'cut':
            seq = chooser.choice(list(held))
            n = chooser.randrange(len(held[seq]) + 1)
            try:
                cache.truncate(seq, n)
            except ValueError:  # the window before n has gone
                continue
            del held[seq][n:]
        elif action == 'free' and len(held) > 2:
            seq = chooser.choice(list(held))
            cache.free(seq)
            del held[seq]
        elif action == 'recompute':
            seq = chooser.choice(list(held))
            if held[seq]:
                logits = cache.step(Work([seq], [0], [torch.tensor(held[seq])]))
                assert torch.equal(logits[0], alone(held[seq]))
        else:
            fed, starts, tokens = [], [], []
            for seq in chooser.sample(list(held), chooser.randint(1, len(held))):
                n = min(chooser.choice([1, 1, 1, 2, 5, 11, 23]), longest - len(held[seq]))
                if n < 1:
                    continue
                new = [chooser.randrange(29) for _ in range(n)] if held[seq] else (
                    shared[:chooser.choice([1, 16, 20])] + [chooser.randrange(29)])
                fed.append(seq)
                starts.append(len(held[seq]))
                tokens.append(torch.tensor(new))
                held[seq] += new
            if not fed:
                continue
            for seq, logits in zip(fed, cache.step(Work(fed, starts, tokens))):
                assert torch.equal(logits, alone(held[seq])), (seq, starts)
                n_compared += 1
    return n_compared, held


@pytest.mark.parametrize('system', SYSTEMS)
@pytest.mark.parametrize('case', KINDS, ids=lambda case: ' '.join(map(str, case.values())) or 'learned')
def test_random_operations(system, case):
    compared = 0
    for seed in range(sizes(1, 8)):
        chooser, shape = random.Random(seed), SHAPES[seed % 3]
        weights = ('float32', 'bfloat16', 'int8')[seed % 3]
        decoder = CPUDecoder(model_of(shape | case, seed), weights, max(threads))
        cache = kvcache.make_cache(decoder.model, system, N_SEQ, decoder=decoder)
        assert cache.decoder is decoder
        shared = [chooser.randrange(29) for _ in range(40)]
        n, held = run_randomly(cache, Alone(decoder), chooser, sizes(40, 150), 60, shared)
        compared += n
    assert compared > 20
    text = next(text for text in held.values() if text)
    if weights == 'float32':
        expected = reference_logits(decoder.model, text)[-1]
        torch.testing.assert_close(Alone(decoder)(text), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize('case', [dict(position='rope', n_kv_head=2), dict(position='alibi'), dict(position='none')],
                         ids=lambda case: case['position'])
def test_shifted_sequences_have_the_same_bits_in_all_systems(case):
    """A shift turns stored keys. The sequence that is shifted, and those beside it, go on alike in every system."""
    decoder = CPUDecoder(model_of(SHAPES[1] | case), threads=max(threads))
    results = {}
    for system in SYSTEMS:
        chooser, logits = random.Random(7), []
        cache = kvcache.make_cache(decoder.model, system, N_SEQ, decoder=decoder)
        lengths = {cache.new(): 0 for _ in range(3)}
        for _ in range(sizes(12, 60)):
            fed = chooser.sample(list(lengths), chooser.randint(1, 3))
            new = [torch.tensor([chooser.randrange(29) for _ in range(chooser.choice([1, 2, 9]))]) for _ in fed]
            for seq, tokens in zip(fed, new):
                if lengths[seq] + len(tokens) > 64:
                    n_keep, n = chooser.randint(0, 5), chooser.randint(10, 40)
                    cache.shift(seq, n_keep, n)
                    lengths[seq] -= n
            logits.append(cache.step(Work(fed, [lengths[seq] for seq in fed], new)))
            for seq, tokens in zip(fed, new):
                lengths[seq] += len(tokens)
        results[system] = torch.cat(logits)
    for system in SYSTEMS:
        assert torch.equal(results[system], results['tuple']), system

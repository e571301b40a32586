"""What is tried when the executor is made: does it compute what PyTorch does, and are the bits of a row its own?"""
import copy
from types import SimpleNamespace

import numpy as np
import torch

from decode.batch import Runs
from decode.draw import DrawSettings, draw
from decode.gpu.executor import GPUExecutor

N_TEXTS, LONGEST = 20, 300
# how far logits may be away, the root of a mean square in standard deviations; on a CPU it is 2e-6, 0.002 and 0.015
MOST_OFF = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
HOWS = [dict(temperature=0.0), dict(top_k=20), dict(top_p=0.8), dict(repetition_penalty=1.5, frequency_penalty=1.0),
        dict(logit_bias={0: 3.0}, min_p=0.05), dict(stop_ids=[0], min_tokens=3)]


def check_here(model, functions, queue):
    """
    ValueError unless, with the first layer alone, N_TEXTS texts of up to LONGEST tokens, one of them longer than a
    window and its ring, have the logits of PyTorch in float32, and tokens that `decode.draw` draws from them; and their
    last rows the same bits in any order, in any company, in a step of their own and in one that draws.
    """
    executor = GPUExecutor(first_layer(model), functions, queue)
    texts, order = texts_for(executor), np.random.default_rng(0).permutation(N_TEXTS)
    lengths, tokens = [len(text.tokens) for text in texts], np.concatenate([text.tokens for text in texts])
    last, positions = np.cumsum(lengths) - 1, np.concatenate([np.arange(n) for n in lengths])

    def step_of(order):
        """Last tokens in this order, in a step of their own: its sequences, counts, tokens and positions."""
        return [texts[i] for i in order], np.ones(len(order), int), tokens[last[order]], positions[last[order]]

    def logits_after_a_draw(order):
        graph = executor.graph('step', len(order))
        executor.load(*step_of(order))
        executor.tables.send()  # nobody draws: the draw leaves logits alone
        graph.replay()
        return executor.step.logits[:len(order)]
    try:
        shape = model.config.n_kv_head, len(tokens), model.config.head_dim
        k, v = (SimpleNamespace(data=model.lm_head.weight.new_zeros(shape), scale=None) for _ in 'kv')
        executor.hold([SimpleNamespace(n_slots=len(tokens), k=k, v=v)])
        with executor.on_device():
            found = executor.logits_of(texts, lengths, tokens, positions, last)
            same = [torch.equal(found[some], executor.logits_of(*step_of(some), np.arange(len(some))))
                    for some in (order, np.tile(order, 12), order[:1], order[:9], order[2:])]
            same += [torch.equal(found[some], logits_after_a_draw(some)) for some in (order, order[:1])]
            wrong = [] if all(same) else ["rows have other bits among others"]
            drawn = executor.drawn(texts, found)
            defined = draw(found, [text.settings for text in texts], [0] * N_TEXTS).tolist()
            judge = copy.deepcopy(executor.model).float().eval()
            off = found - torch.cat([judge(torch.tensor([text.tokens], device=found.device), use_cache=False)[0][:, 0]
                                     for text in texts])
            off = float((off.square().mean(1).sqrt() / found.std()).max())
    except Exception as e:  # of a compiler, or of a device; torch hides one within a capture behind that of its end
        raise ValueError(f"the GPU executor does not run here: {(e.__context__ if 'capture' in str(e) else e)!r:.200}. "
                         "Its kernels must compile and run on this GPU: take decoder=eager") from e
    finally:
        executor.hold(())
    if not off <= MOST_OFF[model.lm_head.weight.dtype]:
        wrong.append(f"logits are {off:.2g} of their standard deviation away from PyTorch's")
    if sum(a != b for a, b in zip(drawn, defined)) > 1:  # two scores may be nearly equal
        wrong.append(f"it draws {drawn} in place of {defined}")
    if wrong:
        raise ValueError(f"the GPU executor must compute what PyTorch does, but {', and '.join(wrong)}. Take "
                         "decoder=eager if model.py was changed. If not, report it with torch's and triton's versions")


def first_layer(model):
    """A model of the same weights, with the first layer alone."""
    small, t, config = copy.copy(model), copy.copy(model.transformer), copy.copy(model.config)
    vars(t)['_modules'] = t._modules | {'h': t.h[:1]}
    vars(small)['_modules'] = small._modules | {'transformer': t}
    small.config, config.n_layer = config, 1
    return small


def texts_for(executor):
    """Texts of random tokens, as executors read them, which draw in different ways."""
    c, ring, choose, texts, start = executor.model.config, executor.tables.columns.ring, np.random.default_rng(0), [], 0
    for i in range(N_TEXTS):
        n = int(min(ring + LONGEST if ring and not i else LONGEST * (N_TEXTS - i) // N_TEXTS, c.max_positions))
        tokens = choose.integers(c.vocab_size, size=n).tolist()
        settings = DrawSettings(c.vocab_size, i, prompt=tokens, **HOWS[i % len(HOWS)])
        settings.count([])
        texts.append(SimpleNamespace(tokens=tokens, n_drawn=0, runs=Runs([(0, start, n)]), settings=settings))
        start += n
    return texts

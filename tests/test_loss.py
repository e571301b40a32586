"""The loss of a policy for full contexts is measured on the contexts that generation would have had."""
import pytest
import torch
from example_models import f32

import decode
from benchmarks.loss import negative_log_likelihoods
from kvcache.contiguous import ContiguousCache

BLOCK = 16


POLICIES = [dict(), dict(when_full='shift'), *(dict(when_full='shift', keep=3, n_keep=n) for n in (1, 4))]


@pytest.mark.parametrize('policy', POLICIES, ids=str)
@pytest.mark.parametrize('decoder', [False, True])
def test_against_a_loop_over_lists(policy, decoder):
    model = f32(0)
    tokens = torch.randint(29, (3, 50))
    keep = BLOCK if not policy else policy.get('keep', BLOCK // 2)
    cache = ContiguousCache.for_decoder(model, 3, decode.best(model, 3)) if decoder else None
    nll, context = negative_log_likelihoods(model, tokens, cache, skip=4, **policy)
    assert nll.shape == (45, 3) and context.shape == (45,)
    for row, text in enumerate(tokens.tolist()):
        seen = text[:1]
        for t in range(1, 50):
            if t > 4:
                logp = model(torch.tensor([seen]), use_cache=False)[0][0, -1].log_softmax(-1)
                assert len(seen) == context[t - 5] and abs(nll[t - 5, row] + logp[text[t]]) < 1e-3
            seen = seen + [text[t]]
            if len(seen) > BLOCK:
                seen = text[:min(1, policy.get('n_keep', 0))] + seen[-keep:]

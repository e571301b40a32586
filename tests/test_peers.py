"""Other engines compute the same model: those with our arithmetic give our tokens, with bias and without."""
import gc

import pytest
import torch

from benchmarks.peers.engine import Engine, torch_threads
from benchmarks.peers.hugging_face import HuggingFace
from benchmarks.peers.llamacpp import LlamaCpp
from benchmarks.peers.onnx_engine import OnnxRuntime
from benchmarks.peers.ours import Pages
from benchmarks.peers.race import PEERS
from model import GPT, GPTConfig


def tiny(bias=True, n_head=2, n_embd=32, noise=0.1):
    """A small model. At its initial weights, noise=0, a GPT repeats its last token; with noise its text varies."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=24, vocab_size=50, n_layer=2, n_head=n_head, n_embd=n_embd, bias=bias)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if 'wte' not in name:
                p.add_(torch.randn_like(p) * noise)
    return model


def ours(model, prompts, n_new):
    return model.generate(prompts, n_new, temperature=0)[:, prompts.size(1):]


def built(peer, *args, **way):
    if peer.missing():
        pytest.skip(f"{peer.name}: {peer.missing()}")
    return peer(*args, **way)


@pytest.mark.parametrize('threads', [1, 2])
@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('peer', [peer for peer in PEERS if peer.same_tokens], ids=lambda peer: peer.name)
def test_the_same_tokens(peer, bias, threads):
    for n_head, n_embd in ((2, 32), (2, 64), (1, 128)):  # heads of 16, 32 and 128 channels
        model = tiny(bias, n_head, n_embd)
        engine = built(peer, model, threads=threads)
        for shape in ((1, 5), (3, 5), (2, 1), (1, 24)):
            prompts = torch.randint(50, shape)
            n_new = 25 - prompts.size(1)  # up to the last position of the window
            want = ours(model, prompts, n_new)
            assert torch.equal(engine.generate(prompts, n_new), want)
            assert torch.equal(engine.generate(prompts.tolist(), n_new), want)  # again, on the caches of the first call
        turned = torch.randint(50, (5, 3)).t()  # not contiguous
        assert torch.equal(engine.generate(turned, 4), ours(model, turned, 4))


EVERY_WAY = [(peer, weights, way) for peer in PEERS for weights in peer.ways for way in peer.ways[weights]]


@pytest.mark.parametrize('peer, weights, way', EVERY_WAY, ids=lambda x: getattr(x, 'name', None) or str(x))
def test_the_same_model_but_for_rounding(peer, weights, way):
    """Most first tokens of 40 prompts are ours, in spite of rounding or another GELU; with a wrong weight few are."""
    model = tiny()
    prompts = torch.randint(50, (40, 6))
    want = ours(model, prompts, 1)
    got = built(peer, model, weights, **way).generate(prompts, 3)
    assert got.shape == (40, 3) and got.dtype == torch.int64
    assert (got[:, :1] == want).float().mean() > 0.8
    assert torch.equal(ours(model, prompts, 1), want)  # our weights have not changed


@pytest.mark.parametrize('peer', PEERS, ids=lambda peer: peer.name)
def test_no_token_ends_a_row(peer):
    """The tokens here include the one that an engine takes for the end of a text. Rows go on after it."""
    model, prompts = tiny(noise=0), torch.arange(50)[:, None]
    want = ours(model, prompts, 20)
    assert len(want[:, 0].unique()) > 45
    assert torch.equal(built(peer, model).generate(prompts, 20), want)


@pytest.mark.parametrize('peer', PEERS, ids=lambda peer: peer.name)
def test_an_engine_outlives_another(peer):
    model, prompts = tiny(), torch.randint(50, (2, 5))
    engines = [built(peer, model) for _ in range(2)]
    want = engines[0].generate(prompts, 8)
    engines[1].generate(prompts[:1], 8)
    del engines[1]
    gc.collect()
    assert torch.equal(engines[0].generate(prompts[:1], 8), want[:1])  # another batch size needs new caches
    assert torch.equal(engines[0].generate(prompts, 8), want)


@pytest.mark.parametrize('engine, kv', [(Pages, 'float32'), (Pages, 'bfloat16'), (Pages, 'int8'),
                                        (LlamaCpp, 'float32'), (LlamaCpp, 'float16'), (LlamaCpp, 'q8_0')],
                         ids=lambda x: getattr(x, 'name', x))
def test_a_text_goes_on_from_an_earlier_position(engine, kv):
    """After a prompt: the same tokens when it goes back, in caches that read keys and values in any number of bits."""
    model = tiny(n_embd=64)
    prompts = torch.randint(50, (3, 6))
    engine = built(engine, model, kv=kv)
    first = engine.begin(prompts)
    tokens = engine.go_on(first, 6, 12)
    assert torch.equal(engine.go_on(first, 6, 12), tokens)
    assert torch.equal(engine.go_on(tokens[:, 3], 10, 8), tokens[:, 4:])
    want = ours(model, prompts, 13)
    assert torch.equal(first, want[:, 0]) and torch.equal(engine.begin(prompts[:1]), want[:1, 0])
    if kv == 'float32' and engine.same_tokens:
        assert torch.equal(tokens, want[:, 1:])


def test_a_missing_package_is_named():
    class Missing(Engine):
        name, packages = 'Missing', {'os': 'python', 'no_such_module': 'no-such-package'}
    assert Missing.missing() == 'pip install no-such-package'
    with pytest.raises(ValueError, match='Missing cannot be used: pip install no-such-package'):
        Missing(tiny())


def test_prompts_and_weights_that_do_not_fit_are_errors():
    engine = built(HuggingFace, tiny())
    with pytest.raises(ValueError, match='do not fit into block_size 24'):
        engine.generate(torch.zeros(1, 5, dtype=torch.long), 21)
    with pytest.raises(ValueError, match='at least one token each'):
        engine.generate(torch.zeros(1, 0, dtype=torch.long), 3)
    with pytest.raises(ValueError, match='n_new must be at least 1, not 0'):
        engine.generate(torch.zeros(1, 5, dtype=torch.long), 0)
    with pytest.raises(ValueError, match="float32 here, not in 'int4'"):
        HuggingFace(tiny(), 'int4')
    if not OnnxRuntime.missing():
        with pytest.raises(ValueError, match='a multiple of 8'):
            OnnxRuntime(tiny(n_head=8))


def test_torch_threads_are_given_back():
    before = torch.get_num_threads()
    with torch_threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before

"""Other engines compute the same model: those with our arithmetic give our tokens, with bias and without."""
import json
import math
import os

import pytest
import torch
from conftest import ROOT, run, sizes

import decode
from benchmarks import loss
from benchmarks.peers import race
from benchmarks.peers.engine import Engine
from benchmarks.peers.llamacpp import LlamaCpp
from benchmarks.peers.onnx import in_4_bits
from benchmarks.peers.ours import Pages
from benchmarks.peers.race import PEERS
from benchmarks.shapes import LLAMA, LLAMAS
from model import GPT, GPTConfig


def tiny(bias=True, n_head=2, n_embd=32, noise=0.1, **kind):
    """A small model. At its initial weights, noise=0, a GPT repeats its last token; with noise its text varies."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=24, vocab_size=50, n_layer=2, n_head=n_head, n_embd=n_embd, bias=bias,
                          **kind)).eval()
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
            assert torch.equal(engine.generate(prompts, n_new), want)  # again, on the caches of the first call
        turned = torch.randint(50, (5, 3)).t()  # not contiguous
        assert torch.equal(engine.generate(turned, 4), ours(model, turned, 4))


@pytest.mark.parametrize('weights', ['float32', 'int8'])
@pytest.mark.parametrize('name', LLAMAS)
@pytest.mark.parametrize('peer', PEERS, ids=lambda peer: peer.name)
def test_llamas(peer, name, weights):
    """Small ones with the fields of the shapes that are measured. An engine runs them, or says that it cannot."""
    c = LLAMAS[name]
    model = tiny(False, 4, 64, n_kv_head=2, n_inner=96, qkv_bias=c.qkv_bias, norm_eps=c.norm_eps,
                 rope_theta=c.rope_theta, **LLAMA)
    if why := peer.refuses(model.config):
        assert 'gpt2' in why and peer.name in ('CTranslate2', 'ONNX Runtime')
        return
    if weights not in peer.ways:
        pytest.skip(f"{peer.name} has no {weights} weights")
    prompts = torch.randint(50, (40, 6))
    got = built(peer, model, weights).generate(prompts, 10)
    if peer.same_tokens:
        assert (race.compare(model, prompts, got)['gap'] or 0) < 1e-6, "no more than rounding"
    else:
        assert (got[:, :1] == ours(model, prompts, 1)).float().mean() > 0.8


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
    assert torch.equal(first, want[:, 0])
    more = torch.randint(50, (3, 5))
    second = ours(model, torch.cat([prompts, more], 1), 1)[:, 0]
    assert torch.equal(engine.read(more, 6), second) and torch.equal(engine.read(more, 6), second)
    assert torch.equal(engine.begin(prompts[:1]), want[:1, 0])
    if kv == 'float32' and engine.same_tokens:
        assert torch.equal(tokens, want[:, 1:])


@pytest.mark.parametrize('engine, exact', [(Pages, 1e-4), (LlamaCpp, 0.02)], ids=lambda x: getattr(x, 'name', ''))
def test_logits_of_a_whole_text(engine, exact):
    """Also after a longer text, and after several rows; llama.cpp has another GELU."""
    model = tiny(n_embd=64)
    engine = built(engine, model, kv='float32')
    engine.begin(torch.randint(50, (3, 6)))
    for T in (24, 1, 11):
        tokens = torch.randint(50, (T,))
        with torch.inference_mode():
            want = model(tokens[None], tokens[None])[0][0]
        assert (engine.all_logits(tokens) - want).abs().max() < exact


def test_four_bits_are_rounded_as_in_q4_0():
    """Beside gguf's own Q4_0, whose scales are float16."""
    gguf = pytest.importorskip('gguf')
    w = torch.randn(6, 256, generator=torch.Generator().manual_seed(0)).numpy()
    w[0], w[1, 0] = 0, 9
    whole, scale = in_4_bits(w)
    assert whole.shape == (6, 8, 32) and scale.shape == (6, 8) and whole.min() == -8 and whole.max() <= 7
    q4_0 = gguf.GGMLQuantizationType.Q4_0
    theirs = gguf.dequantize(gguf.quantize(w, q4_0), q4_0)
    assert abs((whole * scale[..., None]).reshape(w.shape) - theirs).max() < 0.01


def test_loss_of_weights_in_fewer_bits():
    """The same rows in every engine; the loss of our float32 is that of the model, whose weights decide the others'."""
    model, text = tiny(n_embd=64, noise=0.3), torch.randint(50, (24 * 30 + 5,))
    rows = loss.compare_weights(model, text)
    want = loss.nats(model, text[:24 * 30 + 1].unfold(0, 25, 24)).double().mean().item()
    assert [(row['engine'], row['weights']) for row in rows][:4] == [('ours', w) for w in decode.WEIGHTS]
    assert len(rows) == 4 + 3 * (not LlamaCpp.missing()) and {row['tokens'] for row in rows} == {24 * 30}
    assert rows[0]['difference'] == rows[0]['percent'] == 0 and abs(rows[0]['nll'] - want) < 1e-5
    for row in rows:
        bound = 0.01 if row['weights'] != 'int4' else 0.2
        assert abs(row['nll'] - want - row['difference']) < 1e-5 and abs(row['difference']) < bound
        assert abs(row['percent'] - 100 * row['difference'] / want) < 1e-3


def test_a_missing_package_is_named():
    class Missing(Engine):
        name, packages = 'Missing', {'os': 'python', 'no_such_module': 'no-such-package'}
    assert Missing.missing() == 'pip install no-such-package'


def test_peers_mode(tmp_path):
    # not a copy of the script: the compiled decode step is on disk beside the original
    batches = sizes([3], [1, 3])
    done = run(tmp_path, os.path.join(ROOT, 'bench.py'), '--mode=peers', '--shape=S',
               '--batches=' + ','.join(map(str, batches)), '--lengths=8',
               '--repeats=2', '--max_seconds=0.02', '--json=b.json', '--png=b.png')
    assert done.returncode == 0, done.stderr
    parts = json.loads((tmp_path / 'b.json').read_text())
    figures, rows = parts['decoding'], parts['decoding']['rows']
    assert {'torch', 'python'} <= set(figures['versions']) and {row['repeats'] for row in rows} == {2}
    named = {(row['batch'], row['engine'], row['weights']) for row in rows}
    assert len(named) == len(rows)
    for engine in race.OURS + race.PEERS:
        why = engine.missing()
        assert figures['missing'].get(engine.name, '') == why and engine.name in done.stdout
        assert all(((B, engine.name, weights) in named) == (not why) for B in batches for weights in engine.ways)
    for row in rows:
        assert row['tok_per_s'] > 0 and row['of_floor'] > 0 and len(row['runs_s']) == 2 and 1 <= row['new_tokens'] <= 8
        near = row['first_difference'] is None or abs(row['gap']) < race.NEAR_TIE
        assert near or not row['should_be_ours'], row
    prefills = parts['prefill']['rows']
    assert {(row['batch'], row['engine'], row['weights']) for row in prefills} == {
        (B, engine, weights) for B, engine, weights in named if engine != 'no cache'}
    assert all(row['new_tokens'] == 1 and row['prompt'] == 8 for row in prefills)
    caches = {(row['engine'], row['type_kv']) for row in parts['long_context']['rows']}
    assert caches == {(engine.name, kind) for engine, kind in race.KEYS if not engine.missing()}
    turns = {(row['engine'], row['weights'], row['kept'], row['new']) for row in parts['second_turn']['rows']}
    assert turns == {(engine.name, weights, 8, race.N_SAID) for engine in (Pages, LlamaCpp) if not engine.missing()
                     for weights in ('float32', 'int8', 'int4')}
    steps = parts['per_weight']['rows']
    assert [(row['batch'], row['weights']) for row in steps] == [
        (B, weights) for B in batches for weights in Pages.ways]
    assert all(row['own_step_s'] > 0 and row['llama_over_own'] > 0 for row in steps)
    assert (tmp_path / 'b.png').read_bytes().startswith(b'\x89PNG')


def test_the_llamas_have_the_weights_of_their_models():
    """As Hugging Face counts SmolLM2-135M and Qwen2.5-0.5B."""
    with torch.device('meta'):
        counts = {name: GPT(config).get_num_params() for name, config in LLAMAS.items()}
    assert counts == {'smollm2': 134_515_008, 'qwen0.5b': 494_032_768}


def test_a_llama_is_of_peers_mode_only(tmp_path):
    done = run(tmp_path, os.path.join(ROOT, 'bench.py'), '--mode=generate', '--shape=smollm2')
    assert done.returncode != 0 and 'any of S, M, L in generate mode' in done.stderr


def test_the_floor_of_a_prefill_has_one_row_of_logits():
    model = GPT(GPTConfig(block_size=16, vocab_size=11, n_layer=1, n_head=2, n_embd=16, bias=False)).eval()
    matrices, head = 12 * 16 * 16 + 3 * 16, 11 * 16  # with the weights of the layer norms
    assert race.floor(model, 'float32', 5, 1, math.inf, 1.0) == 2 * (5 * matrices + head)
    assert race.floor(model, 'bfloat16', 5, 1, 1.0, math.inf) == 2 * (matrices + head)


def test_the_slower_way_to_run_an_engine_is_left_out(monkeypatch):
    now, asked = 0.0, []
    monkeypatch.setattr(race.time, 'perf_counter', lambda: now)
    monkeypatch.setattr(race.time, 'sleep', lambda seconds: None)
    monkeypatch.setattr(race.torch, 'get_num_threads', lambda: 3)

    class Ways:
        ways = {'float32': [dict(by='row'), dict(by='block')]}

        def __init__(self, model, weights, threads, by):
            self.cost = {(1, 'row'): 9.0, (3, 'row'): 1.2, (1, 'block'): 1.0, (3, 'block'): 2.0}[threads, by]

        def generate(self, prompts, n):
            nonlocal now
            now += self.cost * n
            asked.append(self.cost)
    engine, how = race.fastest_way(Ways, 'float32', None, torch.zeros(1, 40), 4, 1.0)
    assert engine.cost == 1.0 and how == '1 thread, by block'
    assert asked.count(1.0) > 5 and asked.count(1.2) > 5 and asked.count(2.0) == asked.count(9.0) < 5


def test_a_difference_is_found_and_judged():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=11, n_layer=1, n_head=2, n_embd=16)).eval()
    prompts = torch.randint(11, (3, 4))
    ours = model.generate(prompts, 12, temperature=0)[:, 4:]
    assert race.compare(model, prompts, ours) == dict(compared=12, first_difference=None, gap=None)
    theirs = ours.clone()
    theirs[0, 6], theirs[2, 3] = (ours[0, 6] + 1) % 11, (ours[2, 3] + 1) % 11
    found = race.compare(model, prompts, theirs)
    logits = model(torch.cat([prompts[2], ours[2, :3]])[None])[0][0, -1]
    assert (found['compared'], found['first_difference']) == (12, 3)
    assert abs(found['gap'] - (logits[ours[2, 3]] - logits[theirs[2, 3]]).item()) < 1e-6 and found['gap'] > 0
    verdict = lambda **row: race.verdict(found | dict(should_be_ours=True) | row)  # noqa: E731
    assert verdict(first_difference=None) == 'the same 12'
    assert verdict(should_be_ours=False) == 'the same 3, then others'
    assert verdict(gap=3e-6).startswith('near tie at 3') and verdict(gap=0.1).startswith('DIFFERENT at 3')

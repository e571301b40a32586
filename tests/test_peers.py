"""Other engines compute the same model: those with our arithmetic give our tokens, with bias and without."""
import json
import os
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run, sizes

import decode
from benchmarks import loss
from benchmarks.ours import Ours
from benchmarks.peers import race
from benchmarks.peers.llamacpp import LlamaCpp
from benchmarks.peers.onnx import rounded
from benchmarks.peers.peer import Peer
from benchmarks.peers.race import PEERS
from benchmarks.shapes import LLAMA, LLAMAS, label, model_of, model_with_varied_text
from formats import to_huggingface
from model import GPT, GPTConfig
from tokenizer import CharTokenizer


def tiny(make=model_with_varied_text, **how):
    torch.manual_seed(0)
    return make(GPTConfig(**dict(block_size=24, vocab_size=50, n_layer=2, n_head=2, n_embd=32) | how))


def expected(model, prompts, n_new):
    return model.generate(prompts, n_new, temperature=0)[:, prompts.size(1):]


def built(engine, *args, **way):
    if engine.missing():
        pytest.skip(f"{engine.name}: {engine.missing()}")
    return engine(*args, **way)


@pytest.mark.parametrize('bias, n_head, n_embd, threads', [  # heads of 16, 32 and 128 channels
    (True, 2, 32, 1), (False, 1, 128, 1), *sizes([], [(False, 2, 64, 1), (True, 1, 128, 1)]), (True, 2, 32, 2)])
@pytest.mark.parametrize('engine', [kind for kind in race.ENGINES if kind is not LlamaCpp], ids=lambda kind: kind.name)
def test_the_same_tokens(engine, bias, n_head, n_embd, threads):
    model = tiny(bias=bias, n_head=n_head, n_embd=n_embd)
    made = built(engine, model, threads=threads)
    for shape in ((1, 5), (3, 5), (2, 1), (1, 24)) if threads == 1 else ((3, 20),):  # two threads wait for each other
        prompts = torch.randint(50, shape)
        n_new = 25 - prompts.size(1)  # up to the last position of the window
        want = expected(model, prompts, n_new)
        assert torch.equal(made.generate(prompts, n_new), want)
        assert torch.equal(made.generate(prompts, n_new), want)  # again, on the caches of the first call
    turned = torch.randint(50, (5, 3)).t()  # not contiguous
    assert torch.equal(made.generate(turned, 4), expected(model, turned, 4))


@pytest.mark.parametrize('name', ['gpt2', *LLAMAS])
@pytest.mark.parametrize('peer, weights, way', [
    (peer, weights, way) for peer in (Ours, *PEERS) for weights in peer.ways for way in peer.ways[weights]],
    ids=lambda x: getattr(x, 'name', None) or str(x))
def test_the_same_model_but_for_rounding(peer, weights, way, name):
    """Most first tokens are ours; with a wrong weight few are. An engine runs a llama, or says that it cannot."""
    c = LLAMAS.get(name)
    model = tiny(bias=False, n_head=4, n_embd=64, n_kv_head=2, n_inner=96, qkv_bias=c.qkv_bias, norm_eps=c.norm_eps,
                 rope_theta=c.rope_theta, **LLAMA) if c else tiny()
    if why := peer.refuses(model.config):
        assert 'gpt2' in why and name != 'gpt2' and peer.name in ('CTranslate2', 'ONNX Runtime')
        return
    prompts = torch.randint(50, (40, 6))
    want = expected(model, prompts, 1)
    got = built(peer, model, weights, **way).generate(prompts, 3)
    assert got.shape == (40, 3) and got.dtype == torch.int64
    assert (got[:, :1] == want).float().mean() > (0.8 if weights != 'int4' else 0.5)
    if peer is not LlamaCpp and weights == 'float32':
        assert torch.equal(got, expected(model, prompts, 3)), "no more than rounding"
    assert torch.equal(expected(model, prompts, 1), want)  # our weights have not changed


@pytest.mark.parametrize('peer', PEERS, ids=lambda peer: peer.name)
def test_no_token_ends_a_row(peer):
    """The tokens here include the one that an engine takes for the end of a text. Rows go on after it."""
    model, prompts = tiny(GPT).eval(), torch.arange(50)[:, None]  # at its initial weights it repeats its last token
    want = expected(model, prompts, 20)
    assert len(want[:, 0].unique()) > 45
    assert torch.equal(built(peer, model).generate(prompts, 20), want)


def test_logits_of_a_whole_text_in_llama_cpp():
    """Also after a longer text, and after several rows. It has another GELU."""
    model = tiny(n_embd=64)
    made = built(LlamaCpp, model, kv='float32')
    made.generate(torch.randint(50, (3, 6)), 2)
    for T in (24, 1, 11):
        tokens = torch.randint(50, (T,))
        with torch.inference_mode():
            want = model(tokens[None], tokens[None])[0][0]
        assert (made.all_logits(tokens) - want).abs().max() < 0.02


def test_no_weight_is_rounded_by_more_than_half_a_step():
    w = torch.randn(6, 256, generator=torch.Generator().manual_seed(0)).numpy()
    w[0], w[1, 0] = 0, 9
    for size, bits, most in ((32, 4, 7), (128, 8, 127), (256, 8, 127)):
        whole, scale = rounded(w, size, bits)
        assert whole.shape == (6, 256 // size, size) and abs(whole).max() == most and not whole[0].any()
        steps = abs((whole * scale[..., None]).reshape(w.shape) - w).reshape(whole.shape) / scale[..., None]
        assert steps.max() < 0.501 and (abs(whole[1:]).max(axis=-1) == most).all()


def test_loss_of_fewer_bits():
    """The same pieces in every engine; the loss of our float32 is that of the model, whose weights decide the rest."""
    model, text = tiny(n_embd=64), torch.randint(50, (24 * 30 + 5,))
    rows = loss.compare_bits(model, text)
    pieces = text[:24 * 30 + 1].unfold(0, 25, 24)
    want = model(pieces[:, :-1], pieces[:, 1:])[1].item()
    assert [(row['engine'], row['weights'], row['kv']) for row in rows][:5] == [
        *(('ours', weights, 'float32') for weights in decode.WEIGHTS), ('ours', 'float32', 'int8')]
    assert len(rows) == 5 + 3 * (not LlamaCpp.missing()) and {row['tokens'] for row in rows} == {24 * 30}
    assert rows[0]['difference'] == rows[0]['percent'] == 0 and abs(rows[0]['nll'] - want) < 1e-5
    for row in rows:
        bound = 0.01 if row['weights'] != 'int4' else 0.2
        assert abs(row['nll'] - want - row['difference']) < 1e-5 and abs(row['difference']) < bound
        assert abs(row['percent'] - 100 * row['difference'] / want) < 1e-3
    assert all(row['difference'] for row in rows[1:]), "each of them rounds"


def test_a_trained_model_takes_the_place_of_shapes(tmp_path, monkeypatch):
    """Its weights and its tokens of the given text; rows call it by its folder."""
    model, text = tiny(), 'bcd\nxyz' * 9
    to_huggingface(model, str(tmp_path / 'own'), CharTokenizer([*sorted({*text}), *map(chr, range(200, 200 + 43))]))
    (tmp_path / 'a.txt').write_text(text[:5])
    (tmp_path / 'b.txt').write_text(text[5:])
    asked = SimpleNamespace(init_from=str(tmp_path / 'own'), text=f"{tmp_path / 'a.txt'},{tmp_path / 'b.txt'}")
    monkeypatch.setattr(loss, 'compare_bits', lambda model, tokens: [dict(found=(model, tokens))])
    (row,), = loss.bits(asked)
    assert row['model'] == 'own' and label(asked.init_from) == 'own' and label('S') == 'S'
    same, tokens = row['found']
    joined = text[:5] + '\n' + text[5:]
    assert [sorted({*text})[token] for token in tokens.tolist()] == [*joined]
    for each in model_of(asked.init_from, False), same:
        weights = each.state_dict()
        assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())


def test_peers_mode(tmp_path, monkeypatch):
    # not a copy of the script: the compiled decode step is on disk beside the original
    batches = sizes([3], [1, 3])
    done = run(tmp_path, os.path.join(ROOT, 'bench.py'), '--mode=peers', '--shape=S',
               '--batches=' + ','.join(map(str, batches)), '--lengths=8', '--repeats=2', '--json=b.json',
               *sizes(['--only=decoding'], []), code=0)
    figures = json.loads((tmp_path / 'b.json').read_text())['decoding']
    rows = figures['rows']
    named = {(row['batch'], row['engine'], row['weights']) for row in rows}
    assert len(named) == len(rows) and {row['repeats'] for row in rows} == {2}
    for engine in race.ENGINES:
        why = engine.missing()
        assert figures['missing'].get(engine.name, '') == why and engine.name in done.stdout
        assert all(((B, engine.name, weights) in named) == (not why) for B in batches for weights in engine.ways)
        assert why or all(package in figures['versions'] for package in engine.packages.values())
    for row in rows:
        assert row['tok_per_s'] > 0 and row['gb_per_s'] > 0 and len(row['runs_s']) == 2 and row['new_tokens'] == 8
        rounds = row['weights'] != 'float32' or row['engine'] == 'llama.cpp'
        assert 0 <= row['n_same'] <= 8 and (rounds or row['n_same'] == 8), row
        others = [other['tok_per_s'] for other in rows if other['engine'] != 'ours' and all(
            other[key] == row[key] for key in ('batch', 'weights'))]
        assert row.get('over_others') == (
            row['tok_per_s'] / max(others) if others and row['engine'] == 'ours' else None)
    monkeypatch.setattr(race, 'ENGINES', (race.NoCache, race.Cache, Ours))
    prefills, = race.prefill(SimpleNamespace(shapes=['S'], batches=[3], lengths=[8], repeats=1, bias=False))
    assert [(row['engine'], row['weights']) for row in prefills] == [
        ('cache', 'float32'), *(('ours', weights) for weights in Ours.ways)]
    assert all((row['new_tokens'], row['prompt'], row['batch']) == (1, 8, 3) for row in prefills)


def test_the_llamas_have_the_weights_of_their_models():
    """As Hugging Face counts SmolLM2-135M and Qwen2.5-0.5B."""
    with torch.device('meta'):
        counts = {name: GPT(config).get_num_params() for name, config in LLAMAS.items()}
    assert counts == {'smollm2': 134_515_008, 'qwen0.5b': 494_032_768}


def test_a_missing_package_is_named_and_the_slower_ways_to_run_an_engine_are_left_out(monkeypatch):
    now = 0.0
    monkeypatch.setattr(race.time, 'perf_counter', lambda: now)
    monkeypatch.setattr(race.torch, 'get_num_threads', lambda: 3)

    class Ways(Peer):
        packages = {'os': 'python', 'no_such_module': 'no-such-package'}
        ways = {'float32': [dict(by='row'), dict(by='block')]}

        def __init__(self, model, weights, threads, by):
            self.cost = {(1, 'row'): 9.0, (3, 'row'): 1.2, (1, 'block'): 1.0, (3, 'block'): 2.0, (None, 'row'): 3.0,
                         (None, 'block'): 4.0}[threads, by]

        def generate(self, prompts, n):
            nonlocal now
            now += self.cost
    assert Ways.missing() == 'pip install no-such-package'
    engine, how = race.fastest_way(Ways, 'float32', None, torch.zeros(1, 40), 4)
    assert engine.cost == 1.0 and how == 'threads 1, by block'
    Ways.chooses_threads = True
    assert race.fastest_way(Ways, 'float32', None, torch.zeros(1, 40), 4)[1] == 'by row'


def test_the_first_difference_of_all_rows_counts():
    expected = torch.arange(36).view(3, 12)
    assert race.n_same(expected, expected) == 12
    theirs = expected.clone()
    theirs[0, 6] = theirs[2, 3] = theirs[2, 9] = 99
    assert race.n_same(theirs, expected) == 3

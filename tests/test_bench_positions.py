"""The experiments with positions, endless streams and recall measure what they say. The speeds are not tested."""
import json
import os
import pydoc_data.topics
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import run, sizes

from benchmarks import harness, shapes, trained
from benchmarks.experiments import endless, positions, recall
from benchmarks.shapes import cache_bytes
from model import GPT, GPTConfig

BLOCK = 16
KINDS = [*positions.MODELS]


def tiny(kind, **more):
    """A small model of a kind of `positions.MODELS`, with a window of 5 instead of 32."""
    torch.manual_seed(3)
    found = {name: 5 if value == 32 else value for name, value in positions.MODELS[kind].items()}
    args = dict(block_size=BLOCK, vocab_size=11, n_layer=2, n_head=4, n_embd=16, bias=False)
    return GPT(GPTConfig(**args | found | more)).double().eval()


@pytest.mark.parametrize('window, n_sink', [(0, 0), (5, 0), (5, 3)])
@pytest.mark.parametrize('position, n_kv_head', product(('learned', 'rope', 'alibi', 'none'), (1, 2, 4)))
def test_the_memory_formula_is_what_is_allocated(position, n_kv_head, window, n_sink):
    model = GPT(GPTConfig(block_size=BLOCK, vocab_size=11, n_layer=3, n_head=4, n_embd=24, position=position,
                          n_kv_head=n_kv_head, window=window, n_sink=n_sink))
    n_slots = n_sink + 2 * window if window else BLOCK
    for B, dtype in product((1, 3), (torch.float32, torch.bfloat16)):
        model.to(dtype)
        held = sum(t.untyped_storage().nbytes() for layer in model.empty_cache(B) for t in layer[:2])
        size = dtype.itemsize
        assert held == cache_bytes(model.config, B, size) == 2 * 3 * B * n_kv_head * 6 * n_slots * size


def losses_of_one_pass(model, rows):
    x, y = rows[:, :-1], rows[:, 1:]
    return F.cross_entropy(model(x, y)[0].transpose(1, 2), y, reduction='none')


@pytest.mark.parametrize('kind', KINDS)
def test_nats_are_those_of_one_pass(kind):
    model, rows = tiny(kind), torch.randint(11, (3, 101 if 'window' in kind else BLOCK + 1))
    with torch.no_grad():
        assert torch.allclose(positions.nats(model, rows), losses_of_one_pass(model, rows), atol=1e-10)


@pytest.mark.parametrize('kind', ['learned', 'rope', 'rope, window 32'])
def test_cropped_nats_are_those_of_windows_computed_one_by_one(kind):
    model, rows = tiny(kind), torch.randint(11, (2, 61))
    found, stride = positions.cropped_nats(model, rows, 3), 3
    assert found.shape == (2, 15)
    for row, k in product(range(2), range(15)):
        t = BLOCK + k * stride
        logits = model(rows[row:row + 1, t - BLOCK:t])[0][0, -1]
        assert abs(found[row, k] + logits.log_softmax(-1)[rows[row, t]]) < 1e-10
    text = rows[0]
    assert torch.equal(positions.stream_nats(model, text, 3, crop=True), found[0])
    if model.config.window:
        whole = losses_of_one_pass(model, text[None])[0]
        assert torch.allclose(positions.stream_nats(model, text, 3), whole[BLOCK - 1::3], atol=1e-10)


def test_bins_hold_the_contexts_between_their_edges(monkeypatch):
    monkeypatch.setattr(positions, 'EDGES', (0, 1, 2, 4, 8))
    losses = torch.tensor([[1.0, 2.0, 3.0, 5.0, 7.0], [3.0, 2.0, 3.0, 5.0, 9.0]])
    assert positions.binned(losses, torch.arange(1, 6)) == [2.0, 2.0, 4.0, 8.0]
    assert positions.binned(losses[:, :2], torch.tensor([4, 5])) == [None, None, 2.0, 2.0]
    assert positions.mean([[1.0, None, 3.0], [2.0, None, 5.0]]) == [1.5, None, 4.0]


def test_attention_to_the_first_key():
    """Scores of zero share the attention evenly: token t sees t + 1 keys."""
    model, rows = tiny('rope, 2 kv heads'), torch.randint(11, (3, 8))
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight.zero_()
    first, second = positions.attention_to_the_first(model, rows)
    assert first == pytest.approx([sum(1 / (t + 1) for t in range(4, 8)) / 4] * 4)
    assert len(second) == 4 and second != pytest.approx(first) and all(0 < share < 1 for share in second)
    before = model(rows, rows)[1]
    positions.attention_to_the_first(model, rows)
    assert torch.equal(model(rows, rows)[1], before) and not model.transformer.h[0].attn._forward_pre_hooks


def test_a_stream_token_by_token_is_the_whole_text_under_the_band():
    torch.manual_seed(0)
    text = torch.randint(11, (250,))
    models = {kind: tiny(kind) for kind in ('learned', 'rope, window 32', 'rope, window 32, 4 sinks')}
    ways = {kind: endless.rolling(model.step, model) for kind, model in models.items() if model.config.window}
    ways['crop'] = endless.cropping(models['learned'].step, models['learned'])
    measured, resident = endless.stream(ways, text)
    del ways['crop']
    for kind in ways:
        losses, seconds = measured[kind]
        with torch.no_grad():
            assert torch.allclose(losses.double(), losses_of_one_pass(models[kind], text[None])[0], atol=1e-5)
        assert (seconds > 0).all() and len(seconds) == 249
    cropped = positions.cropped_nats(models['learned'], text[None], 1)[0]
    assert torch.allclose(measured['crop'][0][BLOCK - 1:].double(), cropped, atol=1e-5)
    assert len(resident) == 1


def test_tokens_at_two_places_are_timed_as_often_and_at_their_places():
    model, text, seen = tiny('rope, window 32, 4 sinks'), torch.randint(11, (200,)), []

    def step(idx, kv_cache):
        seen.append((kv_cache[0].cache_pos, idx.item()))
        return model.step(idx, kv_cache)
    near, far = endless.time_at(step, model, text, (7, 150), repeats=2)
    assert len(near.runs) == len(far.runs) == 2
    of_near, of_far = ([(t, text[t].item()) for t in range(place, place + 12)] for place in (7, 150))
    assert seen == of_far + of_near + of_near + of_far + of_far + of_near


def asked(**options):
    return harness.Asked('cpu', 'float32', None, None, None, None, dict(json='', repeats=1) | options)


@pytest.fixture
def small(monkeypatch):
    """positions and endless with tiny random models and a short text."""
    torch.manual_seed(1)
    text, trained = torch.randint(11, (700,)), []
    monkeypatch.setattr(positions, 'EDGES', (0, 1, 4, BLOCK, 64))
    monkeypatch.setattr(positions, 'train', lambda name, seed, iterations: trained.append((name, seed, iterations)))
    monkeypatch.setattr(positions, 'load', lambda name, seed: tiny(name).float())
    monkeypatch.setattr(positions, 'validation_text', lambda least: text)
    monkeypatch.setattr(positions, 'CUTS', [(8, 0), (6, 1)])
    monkeypatch.setattr(endless, 'PLACES', (20, 300))
    monkeypatch.setattr(endless, 'SPAN', 100)
    return trained


def test_the_comparison_of_positions(small, capsys, monkeypatch):
    monkeypatch.setattr(positions, 'STRIDE', 2)
    figures = harness.run_parts(asked(seed=5, seeds=2, iterations=7), positions.PARTS)
    every = figures['losses']['rows']
    rows, streams = ([row for row in every if key in row] for key in ('val', 'stream'))
    assert small == [(name, seed, 7) for seed in (5, 6) for name in positions.MODELS]
    assert [row['model'] for row in rows] == list(positions.MODELS) == list(KINDS)
    assert [row['cache_bytes'] for row in rows] == [2 * 2 * heads * 4 * slots * 4 for heads, slots in (
        (4, 16), (4, 16), (4, 16), (4, 16), (2, 16), (1, 16), (4, 10), (4, 14))]
    assert rows[0]['parameters'] - rows[1]['parameters'] == BLOCK * 16  # wpe
    assert all(len(row['val']) == 2 and row['val'][0] == row['val'][1] for row in rows)  # the same model twice
    ways = [(stream['model'], stream['how']) for stream in streams]
    assert ways == [('learned', 'crop'), ('rope', 'crop'), ('rope', 'window 8, 0 sinks'), ('rope', 'window 6, 1 sink'),
                    ('rope, window 32', 'the window rolls'), ('rope, window 32, 4 sinks', 'the window rolls')]
    by_name = {(line['model'], line['how']): line['far_past'] for line in every if 'far_past' in line}
    assert [n is None for n in by_name['learned', '']] == [False] * 3 + [True]
    assert [n is None for n in by_name['learned', 'crop']] == [True, True, True, False]
    assert len(by_name) == 8 + 1 + 2
    assert None not in by_name['alibi', ''] + by_name['rope', 'window 8, 0 sinks']
    left, right = positions.picture(figures, '')['panels']
    assert len(left.lines) == 8 + 1 and len(right.lines) == 2 + 2 and 'the window rolls' in capsys.readouterr().out


def test_the_endless_stream_of_a_trained_model(small, monkeypatch):
    for name, size in (('S', 32), ('M', 48)):
        monkeypatch.setitem(shapes.SHAPES, name, replace(shapes.SHAPES[name], block_size=size, n_layer=1))
    parts = {part: rows for part, rows in endless.PARTS.items() if part != 'training'}
    figures = harness.run_parts(asked(seed=5, seeds=3, iterations=7), parts)
    assert small == [(name, 5, 7) for name in ('learned', *endless.WINDOWS, *endless.WINDOWS)]
    stream, places, sizes = (figures[part]['rows'] for part in parts)
    rows = {row['way']: row for row in stream}
    assert set(rows) == {name + way for name in ('learned, crop', *endless.WINDOWS) for way in ('', endless.DECODER)}
    for name in endless.WINDOWS:
        plain, decoded = rows[name], rows[name + endless.DECODER]
        assert plain['by_span'] == pytest.approx(decoded['by_span'], abs=1e-5) and len(plain['by_span']) == 6
        assert plain['cache_bytes'] == 2 * 2 * 4 * 4 * (10 if name == endless.WINDOWS[0] else 14) * 4
    assert [(row['way'], row['place']) for row in places[:2]] == [(endless.WINDOWS[0], 20), (endless.WINDOWS[0], 300)]
    assert len(stream[0]['resident_bytes']) == 7
    assert [(row['shape'], row['block_size']) for row in sizes] == [('S', 32), ('M', 48)]
    assert all(row['roll'] > 0 and row['crop'] > 0 for row in sizes)
    assert [len(panel.lines) for panel in endless.picture(json.loads(json.dumps(figures)), '')['panels']] == [3, 6, 3]


def test_a_text_of_the_recall_task_asks_for_its_marked_token():
    place = torch.tensor([0, 3, 9])
    tokens, targets = recall.texts(3, 10, place, torch.Generator().manual_seed(0))
    assert (tokens < recall.MARKED).sum(dim=1).tolist() == [1, 1, 1]
    for row, p in enumerate(place):
        assert targets[row].tolist() == [-1] * p + [tokens[row, p].item()] * (10 - p)


def test_accuracy_is_by_distance():
    """Of a model that knows the marked token, at position 4, for 5 positions more."""
    def knowing(tokens, targets, kv_cache):
        known = (torch.arange(tokens.size(1)) <= 4 + 5) & (targets >= 0)
        return F.one_hot(torch.where(known, targets, recall.MARKED)), None, kv_cache
    knowing.config = GPTConfig()
    assert recall.accuracy(knowing, 4, 9, 20, 0) == [1.0] * 6 + [0.0] * 4


@pytest.mark.parametrize('n_layer, window', [(1, 4), (3, 4), (2, 6)])
def test_no_token_beyond_the_layers_times_the_window_is_seen(n_layer, window):
    """And the last one within is: a trained model can recall it, as the figure shows, and nothing further back."""
    model, reach = tiny('rope', window=window, n_layer=n_layer), n_layer * (window - 1)
    idx = torch.randint(11, (1, 40))
    logits, changes = model(idx, use_cache=False)[0], []
    for distance in range(1, 30):
        changed = idx.clone()
        changed[0, -1 - distance] = (idx[0, -1 - distance] + 1) % 11
        changes.append(not torch.equal(model(changed, use_cache=False)[0], logits))
    assert changes == [distance <= reach for distance in range(1, 30)]


def test_the_recall_task_is_trained_and_drawn(monkeypatch):
    for name, value in dict(WINDOW=4, BLOCK_SIZE=256, FARTHEST=20).items():
        monkeypatch.setattr(recall, name, value)
    monkeypatch.setattr(recall, 'MODELS', {'window': dict(window=4, n_sink=2), 'none': {}})
    figures = harness.run_parts(asked(seed=0, iterations=3), recall.PARTS)
    rows = figures['recalled']['rows']
    assert [(row['model'], row['place'], len(row['accuracy'])) for row in rows] == [
        ('window', 16, 21), ('window', 600, 21), ('window', 1, 21), ('none', 16, 21)]
    assert all(row['beyond'] == pytest.approx(sum(row['accuracy'][13:]) / 8) for row in rows)  # 4 layers reach 12
    panel, = recall.picture(figures, '')['panels']
    assert len(panel.image) == 4


def test_models_are_trained_once_by_train_py(repo, monkeypatch):
    monkeypatch.chdir(repo)
    monkeypatch.setattr(trained, 'subprocess', SimpleNamespace(run=lambda command, **how: run(repo, *command[1:])))
    name = 'rope, window 32, 4 sinks'
    folder = positions.train(name, 4, 1)
    written = os.path.getmtime(os.path.join(folder, 'ckpt.pt'))
    assert positions.train(name, 4, 1) == folder and os.path.getmtime(os.path.join(folder, 'ckpt.pt')) == written
    c = positions.load(name, 4).config
    assert (c.position, c.window, c.n_sink, c.block_size, c.n_embd, c.n_layer) == ('rope', 32, 4, 64, 128, 4)
    n = len(positions.validation_text(1000))
    with pytest.raises(ValueError, match=f'has {n:,} characters, and {n + 1:,} are needed: prepare tinyshakespeare'):
        positions.validation_text(n + 1)
    monkeypatch.setitem(positions.MODELS, 'wrong', dict(window=64))
    with pytest.raises(ValueError, match='failed: train.py: error: window 64 and n_sink 0 must be less than'):
        positions.train('wrong', 4, 1)


@pytest.mark.skipif(sizes(True, False), reason="trains eight models: in make test-all")
def test_positions_mode(repo):
    text = '\n'.join(pydoc_data.topics.topics[topic] for topic in sorted(pydoc_data.topics.topics))
    (repo / 'data' / 'shakespeare_char' / 'input.txt').write_text(text[:60000], encoding='utf-8')
    assert run(repo, 'data/shakespeare_char/prepare.py').returncode == 0
    done = run(repo, 'bench.py', '--mode=positions', '--iterations=1', '--seeds=1', '--json=p.json', '--png=p.png')
    assert done.returncode == 0, done.stderr
    figures = json.loads((repo / 'p.json').read_text())
    assert [row['model'] for row in figures['losses']['rows'] if not row['how']] == list(positions.MODELS)
    assert (repo / 'p.png').read_bytes().startswith(b'\x89PNG')
    short = run(repo, 'bench.py', '--mode=endless', '--iterations=1', '--json=e.json')
    assert short.returncode == 2 and 'prepare tinyshakespeare' in short.stderr

"""What the page of the cache has (KV_DEBUG=page), against plain_gpt.py in float64 and counts by hand."""
import base64
import copy
import itertools
import json
import os
import re

import numpy as np
import plain_gpt
import pytest
import torch
from conftest import run

import debug_kv_model
import debug_kv_page

SIZES = dict(vocab_size=29, n_layer=2, n_head=4, n_embd=16, block_size=12)
KINDS = {
    'learned': dict(n_layer=3, bias=False), 'uncached': dict(), 'long prompt': dict(block_size=7),
    'ring': dict(position='rope', window=3, n_sink=1, n_kv_head=2, mlp='swiglu', n_inner=20),
    'alibi': dict(position='alibi', n_kv_head=1), 'many': dict(n_layer=9, n_head=8, n_kv_head=4, n_embd=8, head_dim=36)}


def model_of(kind):
    torch.manual_seed(0)
    model = debug_kv_model.GPT(debug_kv_model.GPTConfig(**(SIZES | KINDS[kind]))).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def written(kind, folder, n=12, tokenizer=None):
    """(the model, what its page has, its tokens) of a run of n tokens after 7, the first of two rows."""
    model, debug_kv_page.PAGE = model_of(kind), str(folder / 'page.html')
    idx = torch.arange(14).view(2, 7) % 29
    with debug_kv_page.recorded(model, tokenizer):
        tokens = model.generate(idx, n, use_cache=kind != 'uncached')[0].tolist()
        model.generate(idx, 2)  # another one, which the page does not have
    return model, data_of(folder / 'page.html'), tokens


def data_of(page):
    """The data: rows are (rows, layers, heads, 2, channels), and numbers of a frame (layers, heads, 2, n)."""
    data = json.loads(re.search('id="run">(.*?)</script>', page.read_text(encoding='utf-8'))[1])
    n_layers, n_heads = len(data['layers']), len(data['kv_head'])
    rows, numbers = (np.frombuffer(base64.b64decode(data[name]), '<f2').astype(float) for name in ('rows', 'numbers'))
    data['rows'] = rows.reshape(-1, n_layers, max(data['kv_head']) + 1, 2, data['n_channels'])
    for f in data['frames']:
        n = len(f['rows'])
        f['numbers'] = numbers[f['at']:f['at'] + n_layers * n_heads * 2 * n].reshape(n_layers, n_heads, 2, n)
    return data


def reference(model, tokens, monkeypatch):
    """Of each layer in float64: scores (n_head, T, T), keys as they leave c_attn, values (n_kv_head, T, head_dim)."""
    c, scores, heads, real = model.config, [], [], plain_gpt.scores
    plain = copy.deepcopy(model).double()
    for block in plain.transformer.h:
        block.attn.c_attn.register_forward_hook(lambda module, inputs, y: heads.append(
            y[0].view(len(tokens), -1, c.head_dim).transpose(0, 1)))
    with monkeypatch.context() as patch:
        patch.setattr(plain_gpt, 'scores', lambda *args: scores.append(real(*args)) or scores[-1])
        plain_gpt.plain(model, torch.tensor([tokens]))
    with torch.no_grad():
        plain(torch.tensor([tokens]), use_cache=False)
    n = c.n_kv_head
    return [(s[0].numpy(), y[c.n_head:c.n_head + n].numpy(), y[c.n_head + n:].numpy()) for s, y in zip(scores, heads)]


def sees(config, query, key):
    return key <= query and (not config.window or query - key < config.window or key < config.n_sink)


def products(config, start, end, n_rows):
    """Multiplications, by hand: of positions, whose last query alone the last layer needs, and rows of logits."""
    c, queries, total = config, range(start, end), n_rows * config.n_embd * config.vocab_size
    for layer in range(c.n_layer):
        total += len(queries) * c.n_embd * (c.n_head + 2 * c.n_kv_head) * c.head_dim
        for query in queries if layer < c.n_layer - 1 else queries[-1:]:
            n_seen = sum(sees(c, query, key) for key in range(query + 1))
            total += 2 * n_seen * c.n_head * c.head_dim + c.n_head * c.head_dim * c.n_embd
            total += (3 if c.mlp == 'swiglu' else 2) * c.n_embd * c.n_inner
    return total


def passes(kind, config):
    """What `written` computes: (first position, tokens, tokens dropped, does a step end?, is it with the cache?)."""
    most = 100 if config.window else config.block_size
    for n in range(7, 19):
        if kind == 'uncached' or n > most or n == most == 7:
            yield 0, min(n, most), n - min(n, most), True, False
        elif n > 7:
            yield n - 1, 1, 0, True, True
        else:
            yield from [(0, 4, 0, False, True), (4, 3, 0, True, True)] if config.window else [(0, 7, 0, True, True)]


@pytest.mark.parametrize('kind', KINDS)
def test_what_the_page_has_is_what_the_model_computes(kind, tmp_path, monkeypatch):
    model, data, tokens = written(kind, tmp_path)
    c, stored, expected = model.config, {}, list(passes(kind, model.config))
    assert data['tokens'] == list(map(str, tokens)) and data['cut'] == '' and len(data['frames']) == len(expected)
    for f, (start, n, first, is_end, cached) in zip(data['frames'], expected):
        end = start + n
        assert (f['start'], f['n'], f['first']) == (start, n, first)
        assert f['products'] == products(c, start, end, is_end)
        if is_end:
            assert f['without'] == products(c, 0, end, 1) and float(f['apart']) < 1e-4
        shown = dict(enumerate(range(n)))
        if cached:  # slots by the rule that KV_CACHE.md has
            def slot(position):
                return 1 + (position - 1) % 6 if c.window and position else position
            stored |= {slot(position): position for position in range(start, end)}
            assert f['cache'] == [start, end, slot(end)]
            shown = stored
        assert ('cache' in f) == cached and f['positions'] == [shown[slot] for slot in range(len(shown))]
        check_numbers(f, data, c, reference(model, tokens[first:first + end], monkeypatch))
        for layer, mask in zip(data['layers'], f['masks']):
            assert data['masks'][mask].split(' ') == [
                ''.join(str(int(sees(c, query, key))) for key in f['positions'])
                for query in range(start if layer < c.n_layer - 1 else end - 1, end)]


def check_numbers(f, data, c, expected):
    shown, last = f['positions'], f['start'] + f['n'] - 1
    for (l, layer), (h, kv_head) in itertools.product(enumerate(data['layers']), enumerate(data['kv_head'])):
        scores, k, v = expected[layer]
        assert kv_head == h * c.n_kv_head // c.n_head
        row = np.array([scores[h, last, p] if sees(c, last, p) else -np.inf for p in shown])
        weights = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        np.testing.assert_allclose(f['numbers'][l, h, 0], row, rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(f['numbers'][l, h, 1], weights, rtol=2e-3, atol=2e-4)
        kept = data['rows'][f['rows'], l, kv_head]
        np.testing.assert_allclose(kept[:, 1], v[kv_head, shown, :data['n_channels']], rtol=2e-3, atol=2e-3)
        if c.position != 'rope':
            np.testing.assert_allclose(kept[:, 0], k[kv_head, shown, :data['n_channels']], rtol=2e-3, atol=2e-3)


def test_only_some_of_a_large_model_and_of_a_long_run(tmp_path, monkeypatch, capsys):
    data = written('many', tmp_path)[1]
    assert data['layers'] == [0, 1, 3, 4, 6, 8] and data['kv_head'] == [0, 0, 1, 1, 2, 2] and data['n_channels'] == 32
    monkeypatch.setenv('KV_DEBUG_LAYER', '5')
    assert written('many', tmp_path)[1]['layers'] == [5]
    for name, most, n in (('MOST_STEPS', 4, 4), ('MOST_POSITIONS', 9, 3), ('MOST_NUMBERS', 2000, 3)):
        with monkeypatch.context() as patch:
            patch.setattr(debug_kv_page, name, most)
            data = written('many', tmp_path)[1]
        said = f'The run went on; the page has its first {n} steps.'
        assert len(data['frames']) == n and data['cut'] == said and len(data['tokens']) == 7 + n
        assert f'({n} steps, ' in (err := capsys.readouterr().err) and said in err
    os.remove(tmp_path / 'page.html')
    monkeypatch.setattr(debug_kv_page, 'MOST_POSITIONS', 6)
    with pytest.raises(ValueError, match='up to 6 positions, and 7 are computed at once: give a shorter prompt'):
        written('many', tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_tokens_text_is_no_html(tmp_path):
    class Tags:
        def decode(self, tokens):
            return '</script><b>'
    _, data, tokens = written('learned', tmp_path, tokenizer=Tags())
    text = (tmp_path / 'page.html').read_text(encoding='utf-8')
    assert data['tokens'] == ['</script><b>'] * len(tokens)
    assert text.count('</script>') == 2 and '<' not in text.split('id="run">')[1].split('</script>')[0]


def test_the_script_writes_it(trained, tmp_path):
    """The same samples, no trace, and what it cannot show is an error."""
    script, settings = os.path.join(trained, 'sample.py'), ('--start=The ', '--max_new_tokens=14', '--num_samples=2')
    how = '--out_dir=' + os.path.join(trained, 'out'), *settings
    plain, done = run(tmp_path, script, *how), run(tmp_path, script, *how, KV_DEBUG='page')
    assert done.stdout == plain.stdout and 'KVDBG' not in done.stderr
    assert re.search(r'page: kv_cache.html \(14 steps, \d+ kB\).$', done.stderr, re.M)
    data = data_of(tmp_path / 'kv_cache.html')
    assert ''.join(data['tokens']) + '\n---------------\n' == done.stdout[:len(''.join(data['tokens'])) + 17]
    assert sum('cache' not in f for f in data['frames']) == 1  # 17 tokens, with block_size 16
    for wrong in ('--kv_cache=streams', '--when_full=shift', '--chat', '--decoder=cpu'):
        done = run(tmp_path, script, *how, wrong, KV_DEBUG='page')
        assert done.returncode == 2 and 'KV_DEBUG=page shows the steps of the model itself' in done.stderr, done.stderr

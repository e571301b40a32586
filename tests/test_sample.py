"""sample.py and test_kv_cache.py as scripts, on the small trained run."""
import shutil

import pytest
from conftest import run

import tokenizer as tokenizers


def sample(folder, *settings, **env):
    done = run(folder, 'sample.py', '--device=cpu', *settings, **env)
    assert done.returncode == 0, done.stderr
    return done


def test_the_newest_checkpoint_and_the_same_seed_the_same_samples(trained):
    settings = ('--num_samples=3', '--max_new_tokens=40')
    with_cache, without = sample(trained, *settings), sample(trained, *settings, '--use_cache=False')
    assert with_cache.stdout == without.stdout
    assert with_cache.stdout.count('---------------') == 3 and len(set(with_cache.stdout.split('---------------\n'))) == 4
    assert 'out/ckpt.pt: iteration 20' in with_cache.stderr and 'tok/s (with the cache' in with_cache.stderr
    assert '120 tokens in' in with_cache.stderr
    assert sample(trained, *settings, '--seed=2').stdout != with_cache.stdout


def test_one_sample_streams_the_same_text_with_its_prompt(trained):
    out = sample(trained, '--num_samples=1', '--max_new_tokens=30', '--start=The ').stdout
    assert out.startswith('The ') and len(out) == 4 + 30 + 1


def test_a_prompt_from_a_file_longer_than_the_window(trained, tmp_path):
    (tmp_path / 'prompt.txt').write_text('statement ' * 10)
    out = sample(trained, '--num_samples=1', '--max_new_tokens=5', f'--start=FILE:{tmp_path}/prompt.txt').stdout
    assert out.startswith('statement ' * 10) and len(out) == 106


def test_stop_ends_each_sample_there(trained):
    free = sample(trained, '--num_samples=4', '--max_new_tokens=60', '--start=a').stdout.split('---------------\n')[:4]
    stop = free[0][20:22]
    cut = sample(trained, '--num_samples=4', '--max_new_tokens=60', '--start=a', f'--stop={stop}').stdout.split('---------------\n')[:4]
    assert cut == ['a' + text[1:-1].partition(stop)[0] + '\n' for text in free]


def test_batch_size_caps_the_batch_and_all_samples_come(trained):
    assert sample(trained, '--num_samples=5', '--batch_size=2', '--max_new_tokens=5').stdout.count('---------------') == 5


def test_greedy_and_nucleus(trained):
    greedy = sample(trained, '--num_samples=2', '--max_new_tokens=20', '--temperature=0').stdout.split('---------------\n')
    assert greedy[0] == greedy[1]
    assert sample(trained, '--num_samples=2', '--max_new_tokens=20', '--top_p=0.000001').stdout.split('---------------\n')[:2] == greedy[:2]


def test_bfloat16_runs(trained):
    sample(trained, '--num_samples=1', '--max_new_tokens=5', '--dtype=bfloat16')


def test_every_decoder_and_both_policies_say_who_serves(trained):
    settings = ('--num_samples=3', '--max_new_tokens=300')
    texts = {decoder: sample(trained, *settings, f'--decoder={decoder}') for decoder in ('auto', 'eager', 'cpu')}
    assert 'decoder: numba on the CPU, float32 weights, 1 thread' in texts['auto'].stderr and 'decoder: PyTorch, eager' in texts['eager'].stderr
    assert texts['auto'].stdout == texts['eager'].stdout == texts['cpu'].stdout
    shifted = [sample(trained, *settings, '--when_full=shift', *more).stdout for more in ([], ['--use_cache=False'], ['--keep=3', '--n_keep=1'])]
    assert shifted[0] == shifted[1] != texts['auto'].stdout and shifted[2] != shifted[0]
    assert 'int8 weights' in sample(trained, *settings, '--weights=int8', '--threads=1').stderr


def test_cache_systems_draw_the_same(trained):
    settings = ('--num_samples=3', '--max_new_tokens=40', '--start=The ')
    plain = sample(trained, *settings).stdout
    for kind in ('streams', 'unified', 'paged'):
        done = sample(trained, *settings, f'--kv_cache={kind}')
        assert done.stdout == plain and f'on a cache that is {kind}, float32' in done.stderr
    eight = [sample(trained, *settings, f'--kv_cache={kind}', '--kv_bits=8').stdout for kind in ('tuple', 'paged')]
    assert eight[0] == eight[1]
    traced = sample(trained, *settings, '--kv_cache=paged', KV_DEBUG='1')
    assert traced.stdout == plain and 'T_k=' in traced.stderr and '!!!' not in traced.stderr


def test_a_sample_is_the_same_however_many_there_are(trained):
    ten = sample(trained, '--num_samples=5', '--max_new_tokens=30').stdout.split('---------------\n')
    assert sample(trained, '--num_samples=2', '--max_new_tokens=30').stdout.split('---------------\n')[:2] == ten[:2]
    assert sample(trained, '--num_samples=1', '--max_new_tokens=30').stdout == ten[0]
    assert sample(trained, '--num_samples=1', '--max_new_tokens=30', '--seed=1341').stdout == ten[4]  # the fifth is 1337 + 4


def test_every_line_of_a_file_is_a_prompt(trained, tmp_path):
    (tmp_path / 'prompts.txt').write_text('The \n\nA statement that is longer than the window\nif\n')
    settings = ('--max_new_tokens=30', '--num_samples=2')
    out = sample(trained, f'--start=FILE:{tmp_path}/prompts.txt', '--split=lines', *settings).stdout.split('---------------\n')[:-1]
    assert [text[:2] for text in out] == ['Th', 'Th', 'A ', 'A ', 'if', 'if'] and all(len(text) > 30 for text in out)
    assert out[:2] == sample(trained, '--start=The ', *settings).stdout.split('---------------\n')[:2]  # as alone


@pytest.mark.skipif(not shutil.which('g++'), reason="torch.compile on a CPU needs a C++ compiler")
def test_compiled_draws_the_same(trained):
    settings = ('--num_samples=1', '--max_new_tokens=30', '--temperature=0')
    assert sample(trained, *settings, '--compile=True').stdout == sample(trained, *settings).stdout


def test_kv_debug_traces_to_stderr_and_leaves_the_text_alone(trained):
    settings = ('--num_samples=2', '--max_new_tokens=20')
    traced = sample(trained, *settings, KV_DEBUG='1', KV_DEBUG_LAYER='1')
    assert traced.stdout == sample(trained, *settings).stdout
    assert '[KVDBG][Attn L1] cache_pos=1 T=1 new_cache_pos=2 max_ctx=16' in traced.stderr
    assert '[Attn L0]' not in traced.stderr and '!!!' not in traced.stderr


def test_the_tokenizer_comes_from_the_checkpoint_even_if_the_data_is_gone(repo, trained):
    shutil.copytree(trained / 'out', repo / 'out')
    shutil.rmtree(repo / 'data')
    assert sample(repo, '--num_samples=1', '--max_new_tokens=5', '--start=The').stdout.startswith('The')


@pytest.mark.parametrize('start, text', [('x', 'xa'), ('', None)])
def test_text_stream_flush(start, text):
    stream = tokenizers.TextStream(tokenizers.CharTokenizer('ax'), stop='xx')
    shown = ''.join(stream.push(t) for t in stream.tokenizer.encode(start + 'a')) + stream.flush()
    assert shown == (text or 'a')


@pytest.mark.parametrize('where', ['trained', 'untrained'])
def test_the_identity_script(trained, repo, where):
    done = run(trained if where == 'trained' else repo, 'test_kv_cache.py', '--repeats=1', '--device=cpu')
    assert done.returncode == 0, done.stderr
    assert 'SUCCESS: outputs are identical (206 tokens)' in done.stdout and 'speedup' in done.stdout and 'tok/s' in done.stdout
    assert ('model: out/ckpt.pt' if where == 'trained' else 'random weights') in done.stdout


def test_the_identity_script_finds_a_broken_cache(repo):
    source = (repo / 'model.py').read_text()
    broken = source.replace('wpe.weight[cache_pos:cache_pos + idx.size(1)]', 'wpe.weight[:idx.size(1)]')
    assert broken != source
    (repo / 'model.py').write_text(broken)
    done = run(repo, 'test_kv_cache.py', '--repeats=1', '--device=cpu', PYTHONIOENCODING='ascii')
    assert done.returncode == 1 and 'FAILURE: outputs differ from position' in done.stdout
    assert 'KV_DEBUG=1' in done.stdout and 'with cache' in done.stdout and 'apart' in done.stdout and done.stdout.isascii()


def test_the_identity_script_traced(trained):
    done = run(trained, 'test_kv_cache.py', '--repeats=1', '--new_tokens=12', '--device=cpu', KV_DEBUG='1')
    assert 'SUCCESS' in done.stdout and '[KVDBG][Attn L1] using cache T_k=7' in done.stderr and '!!!' not in done.stderr

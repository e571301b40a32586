"""sample.py and test_kv_cache.py as scripts, on the small trained run."""
import os
import shutil
import signal
import subprocess
import time

import pytest
from conftest import ENVIRONMENT, ROOT, TIMEOUT, run, sizes, start
from example_models import LLAMA, chat_tokenizer, gpt

import test_kv_cache
import tokenizer as tokenizers
from formats.huggingface import to_huggingface


def sample(folder, *settings, **env):
    done = run(folder, 'sample.py', '--device=cpu', *settings, **env)
    assert done.returncode == 0, done.stderr
    return done


def samples(folder, *settings):
    """The texts of several samples."""
    *texts, rest = sample(folder, *settings).stdout.split('---------------\n')
    assert not rest
    return texts


def test_the_newest_checkpoint_and_the_same_seed_the_same_samples(trained):
    settings = ('--num_samples=3', '--max_new_tokens=40')
    with_cache, without = sample(trained, *settings), sample(trained, *settings, '--use_cache=False')
    assert with_cache.stdout == without.stdout
    texts = with_cache.stdout.split('---------------\n')
    assert len(texts) == 4 and len(set(texts)) == 4
    assert 'out/ckpt.pt: iteration 20' in with_cache.stderr and 'tok/s (with the cache' in with_cache.stderr
    assert '120 tokens in' in with_cache.stderr
    assert sample(trained, *settings, '--seed=2').stdout != with_cache.stdout


def test_one_sample_streams_the_same_text_with_its_prompt(trained):
    out = sample(trained, '--num_samples=1', '--max_new_tokens=30', '--start=The ').stdout
    assert out.startswith('The ') and len(out) == 4 + 30 + 1


def test_a_prompt_from_a_file_longer_than_the_window(trained, tmp_path):
    (tmp_path / 'prompt.txt').write_text('statement ' * 10)
    done = sample(trained, '--num_samples=1', '--max_new_tokens=5', f'--start=FILE:{tmp_path}/prompt.txt')
    assert done.stdout.startswith('...' + ('statement ' * 10)[-16:]) and len(done.stdout) == 3 + 16 + 5 + 1
    assert 'the prompt has 100 tokens, more than block_size: the model sees the last 16 of them' in done.stderr


def test_a_long_prompt_is_not_printed_whole_for_each_sample(trained, tmp_path):
    (tmp_path / 'prompt.txt').write_text('statement ' * 10000 + '\nThe')
    settings = ('--num_samples=3', '--max_new_tokens=5', f'--start=FILE:{tmp_path}/prompt.txt')
    done = sample(trained, *settings)
    assert len(done.stdout) < 3 * 100 and done.stderr.count('100,004 tokens') == 1
    lines = sample(trained, *settings, '--split=lines')
    assert '1 of 2 prompts have up to 100,000 tokens' in lines.stderr
    assert lines.stdout.count('---------------\nThe') == 3
    kept = sample(trained, *settings, '--when_full=shift', '--n_keep=3', '--keep=4')
    assert 'sees the first 3 and last 13 of them' in kept.stderr and kept.stdout.startswith('sta...')


def test_stop_ends_each_sample_there(trained):
    settings = ('--num_samples=4', '--max_new_tokens=60', '--start=a')
    free = samples(trained, *settings)
    stop = free[0][20:22]
    cut = samples(trained, *settings, f'--stop={stop}')
    assert cut == ['a' + text[1:-1].partition(stop)[0] + '\n' for text in free]


def test_stop_typed_in_a_shell(trained):
    """A backslash and an n are a newline, as in the default of --start, and stderr says so."""
    settings = ('--num_samples=4', '--max_new_tokens=60', '--start=a')
    typed, meant = sample(trained, *settings, r'--stop=\n'), sample(trained, *settings, '--stop=\n')
    assert typed.stdout == meant.stdout != sample(trained, *settings).stdout
    assert r"stop: '\n' (\n is a newline" in typed.stderr and 'is a newline' not in meant.stderr


@pytest.mark.parametrize('typed, meant', [(r'\n\n', '\n\n'), (r'a\tb', 'a\tb'), (r'\\n', r'\n'), (r'\d', r'\d'),
                                          ('', '')])
def test_what_stop_is_read_as(typed, meant, monkeypatch):
    import sample
    monkeypatch.setattr(sample, 'stop', typed)
    assert sample.unescaped_stop(tokenizers.CharTokenizer(map(chr, range(128)))) == meant


def test_top_k_0_draws_from_all_tokens(trained):
    settings = ('--num_samples=3', '--max_new_tokens=40', '--temperature=5.0')
    free = sample(trained, *settings, '--top_k=0').stdout
    assert free == sample(trained, *settings, '--top_k=100000').stdout != sample(trained, *settings, '--top_k=1').stdout


def test_torch_has_one_thread_while_the_kernel_decodes(trained):
    script = (
        "import sys, torch, configurator, sample; torch.set_num_threads(2); "
        "sys.argv = ['sample.py', '--max_new_tokens=2', '--device=cpu', *sys.argv[1:]]; "
        "configurator.run(sample.main); print('torch has', torch.get_num_threads())"
    )
    assert 'torch has 1' in run(trained, '-c', script).stdout
    assert 'torch has 2' in run(trained, '-c', script, '--decoder=eager').stdout


def test_greedy_and_nucleus(trained):
    greedy = samples(trained, '--num_samples=2', '--max_new_tokens=20', '--temperature=0')
    assert greedy[0] == greedy[1] and greedy == samples(trained, '--num_samples=2', '--max_new_tokens=20',
                                                        '--top_p=0.000001')


def test_bfloat16_runs(trained):
    sample(trained, '--num_samples=1', '--max_new_tokens=5', '--dtype=bfloat16')


def test_every_decoder_and_both_policies_say_who_serves(trained):
    settings = ('--num_samples=3', '--max_new_tokens=300')
    texts = {decoder: sample(trained, *settings, f'--decoder={decoder}') for decoder in ('auto', 'eager', 'cpu')}
    assert 'decoder: numba on the CPU, float32 weights, 1 thread' in texts['auto'].stderr
    assert 'decoder: PyTorch, eager' in texts['eager'].stderr
    assert texts['auto'].stdout == texts['eager'].stdout == texts['cpu'].stdout
    shifted = [
        sample(trained, *settings, '--when_full=shift', *more).stdout
        for more in ([], ['--use_cache=False'], ['--keep=3', '--n_keep=1'])
    ]
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
    five = samples(trained, '--num_samples=5', '--max_new_tokens=30')
    for more in ('--num_samples=2', '--batch_size=2'):
        some = samples(trained, '--num_samples=5', '--max_new_tokens=30', more)
        assert some == five[:len(some)] and len(some) == (2 if 'num' in more else 5)
    assert sample(trained, '--num_samples=1', '--max_new_tokens=30').stdout == five[0]
    # the fifth is 1337 + 4
    assert sample(trained, '--num_samples=1', '--max_new_tokens=30', '--seed=1341').stdout == five[4]


def test_every_line_of_a_file_is_a_prompt(trained, tmp_path):
    text = '\ufeffThe \n\nA statement that is longer than the window\nif\n'  # with a byte order mark, as from an editor
    (tmp_path / 'prompts.txt').write_text(text, encoding='utf-8')
    settings = ('--max_new_tokens=30', '--num_samples=2')
    out = samples(trained, f'--start=FILE:{tmp_path}/prompts.txt', '--split=lines', *settings)
    end = '...' + 'A statement that is longer than the window'[-16:]
    begins = ['The ', 'The ', end, end, 'if', 'if']
    assert [text[:len(begin)] for text, begin in zip(out, begins, strict=True)] == begins
    assert all(len(text) > 30 for text in out)
    assert out[:2] == samples(trained, '--start=The ', *settings)  # as alone


@pytest.mark.skipif(not shutil.which('g++'), reason="torch.compile on a CPU needs a C++ compiler")
@pytest.mark.skipif(sizes(True, False), reason="in the full run: compiling takes 20 s")
def test_compiled_draws_the_same(trained):
    settings = ('--num_samples=1', '--max_new_tokens=30', '--temperature=0')
    assert sample(trained, *settings, '--compile=True').stdout == sample(trained, *settings).stdout


def test_kv_debug_traces_to_stderr_and_leaves_the_text_alone(trained):
    settings = ('--num_samples=2', '--max_new_tokens=20')
    traced = sample(trained, *settings, KV_DEBUG='1', KV_DEBUG_LAYER='1')
    assert traced.stdout == sample(trained, *settings).stdout
    assert '[KVDBG][Attn L1] cache_pos=1 T=1 new_cache_pos=2 max_ctx=16' in traced.stderr
    assert '[Attn L0]' not in traced.stderr and '!!!' not in traced.stderr


def test_a_trace_and_a_sample_on_one_terminal_share_no_line(trained, monkeypatch):
    settings = ('--device=cpu', '--num_samples=1', '--max_new_tokens=20', '--start=The ')
    alone = sample(trained, *settings).stdout
    monkeypatch.setitem(ENVIRONMENT, 'KV_DEBUG', '1')
    process = start(trained, 'sample.py', *settings, stderr=subprocess.STDOUT)
    both, _ = process.communicate(timeout=TIMEOUT)
    lines = both.splitlines(keepends=True)
    assert process.returncode == 0 and sum(line.startswith('[KVDBG]') for line in lines) > 20
    assert not any('[KVDBG]' in line[1:] for line in lines) and alone in both


def test_the_tokenizer_comes_from_the_checkpoint_even_if_the_data_is_gone(repo, trained):
    shutil.copytree(trained / 'out', repo / 'out')
    shutil.rmtree(repo / 'data')
    assert sample(repo, '--num_samples=1', '--max_new_tokens=5', '--start=The').stdout.startswith('The')


@pytest.mark.parametrize('where', ['trained', 'untrained'])
def test_the_identity_script(trained, repo, where):
    done = run(trained if where == 'trained' else repo, 'test_kv_cache.py', '--repeats=1', '--device=cpu')
    assert done.returncode == 0, done.stderr
    for said in ('SUCCESS: outputs are identical (206 tokens', 'speedup', 'tok/s', 'with cache and decoder'):
        assert said in done.stdout
    assert ('model: out/ckpt.pt' in done.stdout) == (where == 'trained')
    assert ('RANDOM WEIGHTS' in done.stdout.splitlines()[0]) == (where != 'trained')
    assert ('!! no checkpoint trained on Shakespeare' in done.stderr) == (where != 'trained')


def test_the_identity_script_takes_the_checkpoint_of_the_current_folder(trained, tmp_path):
    shutil.copytree(trained / 'out', tmp_path / 'out')
    done = run(tmp_path, os.path.join(ROOT, 'test_kv_cache.py'), '--repeats=1', '--new_tokens=20', '--device=cpu')
    assert done.returncode == 0 and done.stdout.startswith('model: out/ckpt.pt')
    assert 'RANDOM' not in done.stdout + done.stderr


def test_the_identity_script_finds_a_broken_cache(repo):
    source = (repo / 'model.py').read_text()
    broken = source.replace('t.wpe(positions)', 't.wpe(positions - positions[0])')
    assert broken != source
    (repo / 'model.py').write_text(broken)
    done = run(repo, 'test_kv_cache.py', '--repeats=1', '--device=cpu', PYTHONIOENCODING='ascii')
    assert done.returncode == 1 and 'FAILURE: outputs differ from position' in done.stdout
    for said in ('KV_DEBUG=1', 'with cache', 'apart'):
        assert said in done.stdout
    assert done.stdout.isascii()


def test_the_identity_script_finds_a_broken_decoder(tmp_path, monkeypatch, capsys):
    class BrokenDecoder:
        name = 'broken'

        def __init__(self, model):
            self.model = model

        def __call__(self, idx, kv_cache):
            logits, kv_cache = self.model.step(idx, kv_cache)
            return logits.roll(1, -1), kv_cache

    monkeypatch.chdir(tmp_path)  # without a checkpoint
    monkeypatch.setattr(test_kv_cache.decode, 'best', lambda model, *_, **how: BrokenDecoder(model))
    for setting, value in dict(repeats=1, new_tokens=8, device='cpu').items():
        monkeypatch.setattr(test_kv_cache, setting, value)
    with pytest.raises(SystemExit) as end:
        test_kv_cache.main({})
    out = capsys.readouterr().out
    assert end.value.code == 1 and out.count('FAILURE') == 1 and 'with cache and decoder  ' in out


def test_the_identity_script_traced(trained):
    done = run(trained, 'test_kv_cache.py', '--repeats=1', '--new_tokens=12', '--device=cpu', KV_DEBUG='1')
    assert 'SUCCESS' in done.stdout and '[KVDBG][Attn L1] using cache T_k=7' in done.stderr and '!!!' not in done.stderr


def test_drafts_change_no_sample(trained):
    settings = ('--num_samples=2', '--max_new_tokens=60', '--weights=bfloat16')
    plain = sample(trained, *settings, '--speculate=off')
    assert 'drafts' not in plain.stderr and sample(trained, *settings).stdout == plain.stdout
    for draft, name in (('--speculate=int4', 'int4 weights'), ('--speculate=ngram', 'n-grams of the text'),
                        ('--draft=out', 'out')):
        done = sample(trained, *settings, draft, *['--kv_cache=paged'] * (name == 'out'))
        assert done.stdout == plain.stdout and f'drafts by {name}' in done.stderr


MEASURED = """
import importlib, resource, sys
import configurator, sample
common, *runs = sys.argv[1:]
for settings in runs:
    sys.argv = ['sample.py', *common.split(), *settings.split()]
    importlib.reload(sample)
    configurator.run(sample.main)
    print('MB:', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr)
"""


@pytest.fixture(scope='module')
def long_context(tmp_path_factory):
    """A chat model in Hugging Face format, with a context that takes 512 MiB of keys and values."""
    path = tmp_path_factory.mktemp('long') / 'model'
    to_huggingface(gpt(**LLAMA | dict(block_size=2**16, n_layer=4, n_kv_head=4, head_dim=64)), path, chat_tokenizer())
    return path


def test_memory_follows_the_request_and_any_terminal_takes_the_samples(long_context):
    runs = ['--num_samples=1', '--num_samples=64', '--decoder=eager', '--kv_cache=paged', '--kv_cache=streams',
            '--kv_cache=unified', '--speculate=int8', f'--draft={long_context} --num_samples=2', '--chat --start=Hello',
            '--num_samples=4 --temperature=3.0 --max_new_tokens=60']
    done = run(ROOT, '-c', MEASURED, f'--init_from={long_context} --max_new_tokens=5 --device=cpu', *runs,
               PYTHONIOENCODING='ascii')
    peaks = [int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith('MB:')]
    assert len(peaks) == len(runs), done.stderr
    assert peaks[-1] - peaks[0] < 250, peaks
    # half of the tokens are bytes of characters that the terminal lacks: no sample is lost for them
    last = done.stdout.split('---------------\n')[-5:]
    assert len(last) == 5 and all(text.count('?') > 10 for text in last[:4]) and done.stdout.isascii()


def test_what_does_not_fit_says_how_much_it_is(long_context):
    """64 samples that fill the context take 34 GB; where there is so much memory, more of them do."""
    n = max(64, os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') >> 29)
    done = run(ROOT, 'sample.py', f'--init_from={long_context}', f'--num_samples={n}', f'--batch_size={n}',
               '--max_new_tokens=100000', '--device=cpu')
    assert done.returncode == 2 and 'Traceback' not in done.stderr, done.stderr
    assert f'of {n:,} sequences of 65,536 tokens take {n * 0.536871:,.1f} GB, and ' in done.stderr, done.stderr
    assert 'smaller batch_size' in done.stderr.splitlines()[-1]


def test_what_is_drawn_is_printed_when_a_run_is_ended(trained):
    process = start(trained, 'sample.py', '--device=cpu', '--num_samples=2', '--max_new_tokens=100000000',
                    '--start=The ')
    while 'decoder:' not in process.stderr.readline():
        pass
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=TIMEOUT)
    texts = out.split('\n---------------\n')
    assert process.returncode == 130 and len(texts) == 3 and all(len(text) > 20 for text in texts[:2])


def test_lines_end_where_files_end_them(trained, tmp_path):
    (tmp_path / 'prompts.txt').write_bytes('a:\fz:\r\nb\vc\x85d\u2028e\rf\n\ng'.encode())
    import sample
    texts, before = [], sample.start
    try:
        sample.start, sample.split = f'FILE:{tmp_path}/prompts.txt', 'lines'
        texts = sample.read_prompts()
    finally:
        sample.start, sample.split = before, ''
    assert texts == ['a:\fz:', 'b\vc\x85d\u2028e\rf', 'g']

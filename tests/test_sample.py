"""sample.py and test_kv_cache.py, as scripts on the small trained run; and sample.py beside the server."""
import os
import random
import re
import shutil
import signal
import subprocess
import time

import pytest
import torch
from conftest import ENVIRONMENT, ROOT, SERVING, TIMEOUT, needs, run, sizes, start
from example_models import LLAMA, chat_tokenizer, gpt

import debug_kv_model
import sample as script
import test_kv_cache
from formats.huggingface import to_huggingface
from tokenizer import CharTokenizer

LINE = '\n---------------\n'
LETTERS = CharTokenizer('abcdefghijklmnopqrstuvwxyz .€😀\n')


def sample(folder, *settings, **env):
    return run(folder, 'sample.py', '--device=cpu', *settings, code=0, **env)


def samples(folder, *settings):
    """The texts of several samples."""
    *texts, rest = sample(folder, *settings).stdout.split(LINE)
    assert not rest
    return texts


def test_the_newest_checkpoint_and_the_same_seed_the_same_samples(trained):
    done = sample(trained, '--num_samples=5', '--max_new_tokens=30')
    *five, _ = done.stdout.split(LINE)
    assert len(set(five)) == 5 and 'out/ckpt.pt: iteration 20' in done.stderr
    assert '150 tokens in' in done.stderr and 'tok/s (with the cache' in done.stderr
    assert samples(trained, '--num_samples=2', '--max_new_tokens=30', '--batch_size=1') == five[:2]
    # the fifth is 1337 + 4
    assert sample(trained, '--num_samples=1', '--max_new_tokens=30', '--seed=1341').stdout == five[4] + '\n'


def test_every_decoder_and_every_pool_prints_the_same(trained):
    settings = ('--num_samples=3', '--max_new_tokens=40', '--start=The ')
    kernel, model = 'decoder: numba on the CPU, float32 weights, 1 thread', 'decoder: the model itself'
    plain = sample(trained, *settings)
    assert kernel in plain.stderr and 'drafts' not in plain.stderr
    for setting, name in {
            '--decoder=eager': 'decoder: PyTorch, eager', '--use_cache=False': model,
            '--kv_cache=streams': kernel, '--kv_cache=unified': kernel, '--speculate=int4': 'drafts by int4 weights',
            '--draft=out': 'drafts by out',
            '--speculate=ngram': 'drafts by n-grams of the text', '--batch_size=2': kernel}.items():
        done = sample(trained, *settings, setting)
        assert done.stdout == plain.stdout and name in done.stderr, (setting, done.stderr)
    for more, who in ((), model), (('--use_cache=False', '--batch_size=2'), model), (('--kv_cache=streams',), 'eager'):
        done = sample(trained, *settings, *more, KV_DEBUG='1')
        assert done.stdout == plain.stdout and who in done.stderr and '!!!' not in done.stderr
    rounded = [sample(trained, *settings, '--kv_bits=8', *more) for more in ([], ['--kv_cache=streams'])]
    assert rounded[0].stdout == rounded[1].stdout and 'decoder: PyTorch, eager' in rounded[0].stderr
    assert 'int8 weights' in sample(trained, *settings, '--weights=int8', '--threads=1').stderr
    assert 'PyTorch, eager' in sample(trained, *settings, '--dtype=bfloat16').stderr


# ways of sample.py whose tokens have the server's bits, and those that PyTorch computes, which rounds in other places
OF_THE_KERNEL = (dict(), dict(kv_cache='streams'), dict(kv_cache='unified'), dict(batch_size=2), dict(threads=1),
                 dict(speculate='ngram'), dict(when_full='shift'))
OF_PYTORCH = dict(use_cache=False), dict(decoder='eager'), dict(decoder='eager', kv_cache='streams'), dict(traced=True)


@pytest.fixture(scope='module')
def server():
    """(a model, a client of a server of it)"""
    needs(*SERVING)
    from serving_process import serving
    from small_engine import served_by, thread_of

    from decode.cpu import CPUExecutor
    model = gpt(**LLAMA | dict(vocab_size=LETTERS.vocab_size, block_size=64))
    thread = thread_of(model, CPUExecutor(model, threads=1), LETTERS.bytes_of_tokens(), n_pages=96)
    thread.start()
    with serving(thread, served_by(thread, tokenizer=LETTERS)) as client:
        yield model, client


def printed_by_script(model, texts, monkeypatch, capsys, traced=False, tokenizer=LETTERS, **settings):
    """What sample.py prints with these settings."""
    with monkeypatch.context() as patch:
        for name, value in settings.items():
            patch.setattr(script, name, value)
        if traced:
            patch.setenv('KV_DEBUG', '1')
            of_model, model = model.state_dict(), debug_kv_model.GPT(model.config).eval()
            model.load_state_dict(of_model)
        script.check_settings('cpu')
        capsys.readouterr()
        script.print_samples(model, tokenizer, texts, 'cpu')
        return capsys.readouterr().out


def test_the_server_gives_the_text_that_the_script_prints(server, monkeypatch, capsys):
    (model, client), differing, n = server, [], sizes(20, 200)
    for case in range(n):
        rng = random.Random(case)
        how = dict(temperature=rng.choice([0.0, 0.3, 0.8, 1.0, 1.6]), top_k=rng.choice([0, 1, 5, 31, 200]),
                   top_p=rng.choice([0.1, 0.5, 0.9, 1.0]))
        texts = [''.join(rng.choices(LETTERS.chars, k=rng.randint(1, 20))) for _ in range(rng.randint(1, 3))]
        n_samples, seed, n_new = rng.randint(1, 4), rng.randrange(2**40), rng.randint(1, 40)
        stop, expected = rng.choice(['', '', 'a', 'be']), []
        settings = dict(num_samples=n_samples, seed=seed, max_new_tokens=n_new, stop=stop)
        for i, text in enumerate(texts):
            body = dict(prompt=text, n=n_samples, seed=seed + i * n_samples, max_tokens=n_new, stop=[stop] * bool(stop))
            answer = client.post('/v1/completions', json=body | how)
            assert answer.status_code == 200, answer.text
            expected += [text + choice['text'] for choice in answer.json()['choices']]
        expected = ''.join(text + LINE for text in expected) if len(expected) > 1 else expected[0] + '\n'
        of_kernel, of_pytorch = rng.choice(OF_THE_KERNEL), rng.choice(OF_PYTORCH)
        assert printed_by_script(model, texts, monkeypatch, capsys, **how, **settings, **of_kernel) == expected, (
            case, of_kernel)
        found = printed_by_script(model, texts, monkeypatch, capsys, **how, **settings, **of_pytorch)
        differing += [(case, of_pytorch)] * (found != expected)
    assert len(differing) <= n // 100, differing


def test_what_becomes_of_a_full_context(monkeypatch, capsys):
    """Each setting has its text, in any decoder and pool, and in a trace."""
    model, texts = gpt(**LLAMA | dict(vocab_size=LETTERS.vocab_size, block_size=16)), []
    hows = sizes((*OF_THE_KERNEL[:3], *OF_PYTORCH), (*OF_THE_KERNEL[:-1], *OF_PYTORCH))
    for full in (dict(when_full='crop'), dict(when_full='shift'), dict(when_full='shift', keep=3, n_keep=1),
                 dict(when_full='roll'), dict(when_full='roll', keep=5, n_keep=2)):
        found = {printed_by_script(model, ['be', 'cat'], monkeypatch, capsys, num_samples=2, max_new_tokens=60, **full,
                                   **how) for how in hows if full['when_full'] != 'shift' or 'use_cache' not in how}
        assert len(found) == 1, full
        texts += found
    assert len(set(texts)) == 5
    # with when_full=roll a prompt may have any length, and sample.py prints all of it
    assert printed_by_script(model, ['be' * 10], monkeypatch, capsys, num_samples=1, when_full='roll', max_new_tokens=5
                             ).startswith('be' * 10)


def test_samples_are_printed_in_order_as_they_end(monkeypatch, capsys):
    monkeypatch.setattr(script, 'num_samples', 6)  # the last two have not begun when it ends
    said, events = [], ((2, [3, 4], True), (0, [1], False), (1, [2], True), (0, [5], True), (3, [6], False))
    with pytest.raises(KeyboardInterrupt), script.Printed(gpt(**LLAMA), LETTERS, [[0]]) as printed:
        for number, tokens, ended in events:
            printed.add(number, tokens, ended)
            said.append(capsys.readouterr().out)
        raise KeyboardInterrupt
    assert said == ['', '', '', f'abf{LINE}ac{LINE}ade{LINE}', '']
    assert capsys.readouterr().out == f'ag{LINE}'


def test_a_prompt_longer_than_the_window_is_said_to_be_seen_in_part(trained, tmp_path):
    prompt = 'statement ' * 10000 + '\nThe'
    (tmp_path / 'prompt.txt').write_text(prompt)
    settings = ('--num_samples=3', '--max_new_tokens=5', f'--start=FILE:{tmp_path}/prompt.txt')
    done = sample(trained, *settings)
    assert all(text.startswith(prompt) for text in done.stdout.split(LINE)[:3])
    assert len(done.stdout) == 3 * (len(prompt) + 5 + len(LINE)) and done.stderr.count('100,004 tokens, more than') == 1
    lines = sample(trained, *settings, '--split=lines')
    assert '1 of 2 prompts have up to 100,000 tokens' in lines.stderr and lines.stdout.count(LINE + 'The') == 3
    kept = sample(trained, *settings, '--when_full=shift', '--n_keep=3', '--keep=4')
    assert 'sees the first 3 and last 13 of them' in kept.stderr and kept.stdout.startswith(prompt)


def test_every_line_of_a_file_is_a_prompt(trained, tmp_path):
    text = '\ufeffThe \n\nA statement that is longer than the window\nif\n'  # with a byte order mark, as from an editor
    (tmp_path / 'prompts.txt').write_text(text, encoding='utf-8')
    settings = ('--max_new_tokens=30', '--num_samples=3', '--batch_size=2')
    out = samples(trained, f'--start=FILE:{tmp_path}/prompts.txt', '--split=lines', *settings)
    begins = ['The '] * 3 + ['A statement that is longer than the window'] * 3 + ['if'] * 3
    assert [text[:len(begin)] for text, begin in zip(out, begins, strict=True)] == begins
    assert all(len(text) > 30 for text in out)
    assert out[:3] == samples(trained, '--start=The ', *settings)  # as alone
    traced = sample(trained, f'--start=FILE:{tmp_path}/prompts.txt', '--split=lines', *settings, KV_DEBUG='1')
    assert traced.stdout == ''.join(text + LINE for text in out)


def test_lines_end_where_files_end_them(tmp_path, monkeypatch):
    (tmp_path / 'prompts.txt').write_bytes('a:\fz:\r\nb\vc\x85d\u2028e\rf\n\ng'.encode())
    monkeypatch.setattr(script, 'start', f'FILE:{tmp_path}/prompts.txt')
    monkeypatch.setattr(script, 'split', 'lines')
    assert script.read_prompts() == ['a:\fz:', 'b\vc\x85d\u2028e\rf', 'g']


def test_stop_ends_each_sample_there(trained):
    settings = ('--num_samples=4', '--max_new_tokens=60', '--start=a')
    free = samples(trained, *settings)
    stop = free[0][20:22]
    assert samples(trained, *settings, f'--stop={stop}') == ['a' + text[1:].partition(stop)[0] for text in free]
    # a backslash and an n are a newline, as in the default of --start, and stderr says so
    typed, meant = sample(trained, *settings, r'--stop=\n'), sample(trained, *settings, '--stop=\n')
    assert typed.stdout == meant.stdout != ''.join(text + LINE for text in free)
    assert r"stop: '\n' (\n is a newline" in typed.stderr and 'is a newline' not in meant.stderr
    traced, uncached = sample(trained, *settings, '--stop=\n', KV_DEBUG='1'), sample(
        trained, *settings, '--stop=\n', '--use_cache=False')
    assert traced.stdout == uncached.stdout == meant.stdout
    assert len({re.search('([0-9]+) tokens in', done.stderr)[1] for done in (meant, traced, uncached)}) == 1


def test_no_step_without_a_cache_follows_the_last_stop(server, monkeypatch, capsys):
    model, how = server[0], dict(num_samples=1, max_new_tokens=60, temperature=1.6, use_cache=False)
    text, steps = printed_by_script(model, ['a'], monkeypatch, capsys, **how), []
    monkeypatch.setattr(type(model), 'step', lambda self, *args, step=model.step: steps.append(1) or step(*args))
    short = printed_by_script(model, ['a'], monkeypatch, capsys, stop=text[20:22], **how)
    assert short == text[:text.find(text[20:22], 1)] + '\n' and len(steps) == len(short)


def test_what_stop_is_read_as(monkeypatch):
    for typed, meant in {r'\n\n': '\n\n', r'a\tb': 'a\tb', r'\\n': r'\n', r'\d': r'\d', '': ''}.items():
        monkeypatch.setattr(script, 'stop', typed)
        assert script.unescaped_stop(CharTokenizer(map(chr, range(128)))) == meant


@pytest.mark.parametrize('decoder, n', [('auto', 1), ('eager', 2)])
def test_torch_has_one_thread_while_the_kernel_decodes(monkeypatch, capsys, decoder, n):
    found = []

    class Printed(script.Printed):
        def __enter__(self):
            found.append(torch.get_num_threads())
            return super().__enter__()
    model, before = gpt(**LLAMA | dict(vocab_size=LETTERS.vocab_size)), torch.get_num_threads()
    monkeypatch.setattr(script, 'Printed', Printed)
    torch.set_num_threads(2)
    try:
        printed_by_script(model, ['a'], monkeypatch, capsys, decoder=decoder, max_new_tokens=2)
        assert found == [n] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_trace_and_a_sample_on_one_terminal_share_no_line(trained, monkeypatch):
    settings = ('--device=cpu', '--num_samples=1', '--max_new_tokens=20', '--start=The ')
    alone = sample(trained, *settings).stdout
    assert alone.startswith('The ') and len(alone) == 4 + 20 + 1
    monkeypatch.setitem(ENVIRONMENT, 'KV_DEBUG', '1')
    monkeypatch.setitem(ENVIRONMENT, 'KV_DEBUG_LAYER', '1')
    process = start(trained, 'sample.py', *settings, stderr=subprocess.STDOUT)
    both, _ = process.communicate(timeout=TIMEOUT)
    lines = both.splitlines(keepends=True)
    assert process.returncode == 0 and sum(line.startswith('[KVDBG]') for line in lines) > 20
    assert not any('[KVDBG]' in line[1:] for line in lines) and alone in both
    assert '[KVDBG][Attn L1] cache_pos=4 T=1 new_cache_pos=5 max_ctx=16' in both and '[Attn L0]' not in both


@pytest.mark.parametrize('signum', [signal.SIGINT, signal.SIGTERM])
def test_what_is_drawn_is_printed_when_a_run_is_ended(trained, signum):
    process = start(trained, 'sample.py', '--device=cpu', '--num_samples=2', '--max_new_tokens=100000000',
                    '--start=The ')
    while 'decoder:' not in process.stderr.readline():
        pass
    time.sleep(.5)
    process.send_signal(signum)
    out, err = process.communicate(timeout=TIMEOUT)
    texts = out.split(LINE)
    assert process.returncode == 128 + signum and len(texts) == 3 and all(len(text) > 20 for text in texts[:2])
    assert 'Traceback' not in err and 'tok/s' not in err


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
    runs = ['--num_samples=1', '--num_samples=64', '--decoder=eager', '--kv_cache=streams', '--kv_cache=unified',
            '--speculate=int8', f'--draft={long_context} --num_samples=2', '--chat --start=Hello',
            '--num_samples=4 --temperature=3.0 --max_new_tokens=60']
    done = run(ROOT, '-c', MEASURED, f'--init_from={long_context} --max_new_tokens=5 --device=cpu', *runs,
               PYTHONIOENCODING='ascii')
    peaks = [int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith('MB:')]
    assert len(peaks) == len(runs), done.stderr
    assert peaks[-1] - peaks[0] < 250, peaks
    # half of the tokens are bytes of characters that the terminal lacks: no sample is lost for them
    last = done.stdout.split(LINE)[-5:]
    assert len(last) == 5 and all(text.count('?') > 10 for text in last[:4]) and done.stdout.isascii()


def test_what_does_not_fit_says_how_much_it_is(long_context):
    """64 samples that fill the context take 34 GB; where there is so much memory, more of them do."""
    n = max(64, os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') >> 29)
    done = run(ROOT, 'sample.py', f'--init_from={long_context}', f'--num_samples={n}', f'--batch_size={n}',
               '--max_new_tokens=100000', '--device=cpu')
    assert done.returncode == 2 and 'Traceback' not in done.stderr, done.stderr
    assert f'of {n * 2**16:,} tokens take {n * 0.536871:,.1f} GB, and ' in done.stderr, done.stderr
    assert 'smaller batch_size' in done.stderr.splitlines()[-1]


# test_kv_cache.py

@pytest.mark.parametrize('where', ['trained', 'untrained', 'traced', 'named'])
def test_the_identity_script(trained, tmp_path, where):
    """It takes the checkpoint of the current folder, or of a run that is named."""
    if where in ('trained', 'traced'):
        shutil.copytree(trained / 'out', tmp_path / 'out')
    n = sizes(60, 200)
    named = [f'--out_dir={trained}/out'] if where == 'named' else []
    done = run(tmp_path, os.path.join(ROOT, 'test_kv_cache.py'), '--repeats=1', '--device=cpu', f'--new_tokens={n}',
               f'--block_size={sizes(32, 128)}', *named, **dict(KV_DEBUG='1') if where == 'traced' else {}, code=0)
    for said in (f'SUCCESS: outputs are identical ({6 + n} tokens', 'speedup', 'tok/s', 'with cache'):
        assert said in done.stdout
    assert ('model: out/ckpt.pt' in done.stdout) == (where not in ('untrained', 'named'))
    assert (f'{trained}/out/ckpt.pt' in done.stderr) == (where == 'named')
    assert ('RANDOM WEIGHTS' in done.stdout.splitlines()[0]) == (where == 'untrained')
    assert ('!! no checkpoint trained on Shakespeare' in done.stderr) == (where == 'untrained')
    assert ('[KVDBG][Attn L1] using cache T_k=7' in done.stderr) == (where == 'traced') != ('the engine' in done.stdout)
    assert '!!!' not in done.stderr


def test_the_identity_script_finds_a_broken_cache(repo):
    source = (repo / 'model.py').read_text()
    broken = source.replace('t.wpe(q_pos)', 't.wpe(q_pos - q_pos[0])')
    assert broken != source
    (repo / 'model.py').write_text(broken)
    done = run(repo, 'test_kv_cache.py', '--repeats=1', '--device=cpu', '--block_size=32', '--new_tokens=60',
               PYTHONIOENCODING='ascii')
    assert done.returncode == 1 and 'FAILURE: outputs differ from position' in done.stdout
    for said in ('KV_DEBUG=1', 'with cache', 'apart'):
        assert said in done.stdout
    assert done.stdout.isascii()


def test_the_identity_script_finds_a_broken_executor(tmp_path, monkeypatch, capsys):
    class BrokenExecutor(test_kv_cache.decode.EagerExecutor):
        name = 'broken'

        def logits_of(self, batch, rows):
            return super().logits_of(batch, rows).roll(1, -1)

    monkeypatch.chdir(tmp_path)  # without a checkpoint
    monkeypatch.setattr(test_kv_cache.decode, 'best', lambda model, *_, **how: BrokenExecutor(model))
    for setting, value in dict(repeats=1, new_tokens=8, device='cpu').items():
        monkeypatch.setattr(test_kv_cache, setting, value)
    with pytest.raises(SystemExit) as end:
        test_kv_cache.main({})
    out = capsys.readouterr().out
    assert end.value.code == 1 and out.count('FAILURE') == 1 and 'the engine     ' in out

"""A cache that threads share, Ctrl-C at any line, forks of the process, and generations that the collector ends."""
import gc
import os
import signal
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cache_machine import VOCAB, cache_of, check, model_of
from conftest import sizes
from interrupts import interrupted

import decode
import kvcache
from decode.cpu import CPUDecoder
from decode.kernel.threads import n_cores
from decode.process import uninterrupted
from generation import generate, stream

KINDS = sorted(kvcache.KINDS)
PROMPTS = [[1, 2, 3], [4, 5], [6] * 9, [7, 8, 9, 10]]


def generators():
    return [torch.Generator().manual_seed(i) for i in range(len(PROMPTS))]


@pytest.mark.parametrize('kind', [*KINDS, None])
@pytest.mark.parametrize('compiled', [False, True])
def test_threads_share_a_cache_or_a_decoder(kind, compiled):
    """Each gets the texts that it would get alone."""
    m = model_of('rope', 1)
    expected = generate(m, PROMPTS, 30, generator=generators())
    decoder, n = CPUDecoder(m, threads=min(2, n_cores())) if compiled else None, sizes(3, 20)
    cache = kind and cache_of(kind, m, decoder=decoder)
    shared = dict(cache=cache) if kind else dict(decoder=decoder)
    def texts(number):
        return [generate(m, PROMPTS[i:i + 1], 30, use_cache=True, generator=generators()[i], **shared)[0]
                for i in n * (number, 3 - number)]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(texts, range(4))]
    assert found == [n * [expected[number], expected[3 - number]] for number in range(4)]
    if kind:
        check(cache, {})


def of_caches(code):
    return os.sep + 'kvcache' + os.sep in code.co_filename or code.co_filename.endswith(('cpu.py', 'eager.py'))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('operation', ['new', 'fork', 'free', 'truncate', 'shift', 'step', 'decode'])
def test_ctrl_c_at_any_line_of_an_operation_comes_when_it_has_ended(kind, operation):
    m, text = model_of('rope', 2), [3, 1, 4, 1, 5, 9, 2, 6]
    alone = {n: m(torch.tensor([text[:n]]), use_cache=False)[0][0, -1] for n in range(1, 9)}
    decoder, n, was_interrupted = CPUDecoder(m, threads=1), sizes(3, 1), True
    while was_interrupted:
        cache = cache_of(kind, m, decoder=decoder)
        a, b = cache.new(), cache.new()
        cache.step([a, b], [0, 0], torch.tensor([text[:6], text[:6]]))
        cache.step([a, b], [6, 6], torch.tensor([text[6:7]] * 2))
        was_interrupted, result = interrupted({
            'new': lambda: cache.new(), 'fork': lambda: cache.fork(a), 'free': lambda: cache.free(b),  # noqa: B023
            'truncate': lambda: cache.truncate(b, 3), 'shift': lambda: cache.shift(b, 1, 2),  # noqa: B023
            'step': lambda: cache.step([a, b], [2, 7], [torch.tensor(text[2:5]), torch.tensor(text[7:])]),  # noqa: B023
            'decode': lambda: cache.step([a, b], [7, 7], torch.tensor([text[7:]] * 2))}[operation],  # noqa: B023
            n, of_caches)
        lengths = {a: 7, b: 7}
        if operation in ('new', 'fork') and not was_interrupted:
            lengths[result] = 7 * (operation == 'fork')  # after an interrupt nobody has its handle
        done = {'free': {a: 7}, 'truncate': {a: 7, b: 3}, 'shift': {a: 7, b: 5}, 'step': {a: 5, b: 8},
                'decode': {a: 8, b: 8}}.get(operation, lengths)
        before = was_interrupted and {h: r.length for h, r in cache.records.items()} == lengths
        check(cache, lengths if before else done)  # an interrupt before the first line has done nothing
        for seq, record in cache.records.items():
            if operation == 'shift' and seq == b:
                continue
            start = min(record.length, 7)
            assert torch.allclose(cache.step([seq], [start], torch.tensor([text[start:start + 1]]))[0],
                                  alone[start + 1], atol=1e-4)
        n += sizes(17, 1)
    assert n > 20


@pytest.mark.parametrize('kind', KINDS)
def test_ctrl_c_at_any_line_of_a_generation_leaves_nothing_in_its_cache(kind):
    m, n, was_interrupted = model_of('rope', 2), 1, True
    cache, expected = cache_of(kind, m), generate(m, PROMPTS[:2], 4, temperature=0)

    def in_generation(code):
        return code.co_filename.endswith('generation.py') or of_caches(code)
    while was_interrupted:
        was_interrupted, result = interrupted(
            lambda: generate(m, PROMPTS[:2], 4, temperature=0, use_cache=True, cache=cache), n, in_generation)
        check(cache, {})
        assert not m.training and result in (None, expected)
        n += sizes(61, 7)
    assert result == expected and n > 200


def test_an_operation_that_calls_another_of_the_same_cache_is_refused():
    m = model_of('learned')
    cache = cache_of('paged', m)
    seq = cache.new()
    m.transformer.ln_f.register_forward_hook(lambda *args: cache.new())
    cache.executor.refresh()
    with pytest.raises(ValueError, match='inside an operation'):
        cache.step([seq], [0], torch.tensor([[1]]))
    check(cache, {seq: 0})


@pytest.mark.parametrize('kind', KINDS)
def test_a_stream_that_the_garbage_collector_ends_in_a_step_gives_its_room_back(kind):
    m = model_of('learned')
    cache = cache_of(kind, m)
    seq, streams = cache.new(), [stream(m, PROMPTS[:1], 5, use_cache=True, cache=cache)]
    next(streams[0])

    def collect(*args):
        streams.clear()
        gc.collect()
    m.transformer.ln_f.register_forward_hook(collect)
    cache.executor.refresh()
    cache.step([seq], [0], torch.tensor([[1]]))
    cache.truncate(seq, 1)
    check(cache, {seq: 1})


def needs_fork(test):
    test = pytest.mark.skipif(not hasattr(os, 'fork'), reason='the system has no fork')(test)
    return pytest.mark.filterwarnings('ignore:.*fork.*')(test)


@needs_fork
def test_the_child_of_a_fork_generates():
    """
    While other threads of the parent are in the middle of steps, as in a server that loads a model and then forks.
    """
    m, stop, results = model_of('rope'), [], []
    decoders = [CPUDecoder(m, threads=min(2, n_cores())), decode.EagerDecoder(m)]
    caches = [cache_of(kind, m, decoder=decoder) for kind in KINDS for decoder in decoders]
    expected = generate(m, PROMPTS, 20, temperature=0)

    def work(cache):
        while not stop:
            results.append(generate(m, PROMPTS, 20, temperature=0, use_cache=True, cache=cache) == expected)

    def in_child():
        for cache in (cache_of('paged', m, decoder=decoders[0]), caches[-1]):
            assert generate(m, PROMPTS, 20, temperature=0, use_cache=True, cache=cache) == expected
        assert generate(m, PROMPTS, 20, temperature=0, use_cache=True, decoder=CPUDecoder(m)) == expected
    threads = [threading.Thread(target=work, args=(cache,)) for cache in caches[:4]]
    for thread in threads:
        thread.start()
    try:
        for _ in range(sizes(2, 10)):
            assert exit_code_of_child(in_child) == 0
    finally:
        stop.append(True)
        for thread in threads:
            thread.join()
    assert results and all(results)
    assert VOCAB == m.config.vocab_size


@pytest.mark.parametrize('kind', KINDS)
def test_freeing_never_waits_for_an_operation(kind):
    """The garbage collector may end a stream in any thread, wherever it is: to wait there could be a deadlock."""
    m = model_of('learned')
    cache, begun, goes_on = cache_of(kind, m), threading.Event(), threading.Event()
    seq, others = cache.new(), [cache.new(), cache.new()]
    cache.lock.acquire()  # an operation that has just begun, of this thread or another one
    cache.free(others[0])
    cache.lock.release()

    def wait(*args):
        begun.set()
        goes_on.wait(60)
    m.transformer.ln_f.register_forward_hook(wait)
    cache.executor.refresh()
    thread = threading.Thread(target=lambda: cache.step([seq], [0], torch.tensor([[1]])))
    thread.start()
    assert begun.wait(60)
    cache.free(others[1])
    assert thread.is_alive()
    goes_on.set()
    thread.join()
    check(cache, {seq: 1})


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('compiled', [False, True])
def test_after_a_first_step_that_failed_changed_weights_are_noticed(kind, compiled, monkeypatch):
    m, text = model_of('rope', 3), torch.tensor([[1, 2, 3]])
    cache = cache_of(kind, m, decoder=CPUDecoder(m) if compiled else None)
    seq = cache.new()

    def fail(*args):
        raise MemoryError
    monkeypatch.setattr(cache.executor, 'execute_model', fail)
    with pytest.raises(MemoryError):
        cache.step([seq], [0], text)
    monkeypatch.undo()
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(1.5)
    torch.testing.assert_close(cache.step([seq], [0], text), m(text, use_cache=False)[0][:, 0], atol=1e-4, rtol=1e-4)


def test_undo_is_for_a_handler_that_raises():
    undone, handled = [], []
    before = signal.signal(signal.SIGINT, lambda *args: handled.append(args))
    try:
        with uninterrupted() as block:
            block.undo = lambda: undone.append('wrongly')
            signal.raise_signal(signal.SIGINT)
        assert handled and not undone
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt), uninterrupted() as block:
            block.undo = lambda: undone.append('rightly')
            signal.raise_signal(signal.SIGINT)
        assert undone == ['rightly'] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, lambda *args: signal.signal(signal.SIGINT, signal.SIG_IGN))
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "what the handler has installed stays"
    finally:
        signal.signal(signal.SIGINT, before)


def exit_code_of_child(work):
    """The exit code of the child of a fork that runs work(): 0 if it returns, 2 if it raises, -14 if it hangs."""
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@needs_fork
@pytest.mark.parametrize('kind', ['tuple', 'paged'])
def test_a_child_that_is_forked_in_the_middle_of_a_shift_has_no_mixed_keys(kind):
    m, text = model_of('rope', 3), torch.arange(12)[None]
    cache, begun, goes_on = cache_of(kind, m), threading.Event(), threading.Event()
    seq, move = cache.new(), cache.layers[1].move
    cache.step([seq], [0], text)

    def wait(*args):
        begun.set()
        goes_on.wait(60)
        move(*args)
    cache.layers[1].move = wait
    thread = threading.Thread(target=lambda: cache.shift(seq, 2, 4))
    thread.start()
    assert begun.wait(60)

    def work():
        check(cache, {seq: 0})
        torch.testing.assert_close(cache.step([seq], [0], text)[0], m(text, use_cache=False)[0][0, 0], atol=1e-4,
                                   rtol=1e-4)
    try:
        assert exit_code_of_child(work) == 0
    finally:
        goes_on.set()
        thread.join()
    check(cache, {seq: 8})


@needs_fork
def test_a_child_of_another_thread_hears_ctrl_c():
    """While the main thread is in an operation."""
    codes = []

    def interrupted_child():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
            time.sleep(1)
    with uninterrupted():
        thread = threading.Thread(target=lambda: codes.append(exit_code_of_child(interrupted_child)))
        thread.start()
        thread.join()
    assert codes == [0]

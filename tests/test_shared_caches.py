"""
Caches that several threads share, that a fork copies, and that an interrupt stops at any place: the tokens are the
uncached model's.
"""
import gc
import sys
import threading

import pytest
import torch
from conftest import ROOT, run, sizes
from interrupts import interrupted
from test_cache_systems import empty

from decode.cpu import CPUDecoder
from generation import generate, stream
from kvcache import KINDS, make_cache
from kvcache.exclusive import Exclusive, evaluating, exclusive
from model import GPT, GPTConfig

BLOCK = 20


def model(**how):
    torch.manual_seed(0)
    m = GPT(GPTConfig(**(dict(block_size=BLOCK, vocab_size=13, n_layer=1, n_head=2, n_embd=16) | how))).eval()
    with torch.no_grad():
        for p in m.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return m


CASES = [([[1, 2, 3]], dict(temperature=0)), ([[4], [5, 6, 7, 8]], dict(temperature=0)),
         ([[1, 2, 3], [1, 2, 3], [9]], dict(temperature=1.0)),
         ([[11] * 17], dict(temperature=1.0, when_full='shift', n_keep=2)),
         ([[1, 2, 3, 4, 5, 6]], dict(temperature=1.0, num_samples=3))]


def tokens(m, case, **how):
    prompts, settings = CASES[case]
    n_rows = len(prompts) * settings.get('num_samples', 1)
    generators = [torch.Generator().manual_seed(row) for row in range(n_rows)]
    return generate(m, prompts, 6, generator=generators, **settings, **how)


def on_threads(n_threads, work):
    """
    Run work(number) on n_threads threads at once, with as many thread switches as Python can do. Raises what they
    raise.
    """
    errors, interval = [], sys.getswitchinterval()

    def guarded(number):
        try:
            work(number)
        except BaseException as e:
            errors.append(e)
    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(n_threads)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


@pytest.mark.parametrize('n_threads', [2, 4])
@pytest.mark.parametrize('compiled', [False, True])
@pytest.mark.parametrize('kind', KINDS)
def test_threads_share_a_cache(kind, compiled, n_threads):
    m = model()
    cache = make_cache(m, kind, 3 * n_threads, decoder=CPUDecoder(m) if compiled else None)
    expected = [tokens(m, case) for case in range(len(CASES))]

    def work(number):
        for i in range(sizes(80, 200) // n_threads):
            case = (number + i) % len(CASES)
            assert tokens(m, case, use_cache=True, cache=cache) == expected[case]
    on_threads(n_threads, work)
    assert empty(cache)


@pytest.mark.parametrize('kind', [None, *KINDS])
def test_threads_generate_with_a_model_in_training_mode(kind):
    """
    It is in eval mode in each step of each thread, and each module is in its own mode at the end.
    """
    m = model(dropout=0.5, n_layer=2)
    expected = [tokens(m, case) for case in range(len(CASES))]
    m.train()
    m.transformer.h[1].eval()
    modes = [module.training for module in m.modules()]
    cache = kind and make_cache(m, kind, n_seq=12)

    def work(number):
        for i in range(15):
            case = (number + i) % len(CASES)
            assert tokens(m, case, use_cache=True, cache=cache) == expected[case]
    on_threads(4, work)
    assert [module.training for module in m.modules()] == modes


def test_an_interrupt_leaves_no_model_in_eval_mode_for_good():
    m = model().train()
    use = evaluating(m)
    use.__enter__()  # as after an interrupt before the block begins: __exit__ is never called
    assert not m.training
    del use
    with evaluating(m):
        assert not m.training
    assert m.training


def test_an_operation_that_calls_another_of_the_same_object_is_refused():
    class Counter(Exclusive):
        def recover(self):
            pass

        @exclusive
        def outer(self):
            self.inner()

        @exclusive
        def inner(self):
            return 1
    counter = Counter()
    with pytest.raises(ValueError, match='not finished'):
        counter.outer()
    assert counter.inner() == 1


PROGRAM = """
import sys
sys.path[:0] = [{root!r}, {root!r} + '/tests']
import os, random, signal, threading, time
import torch
import test_shared_caches as t
from decode.cpu import CPUDecoder
from kvcache import make_cache
torch.set_num_threads(1)
m = t.model()
decoder = CPUDecoder(m)
expected = [t.tokens(m, case) for case in range(len(t.CASES))]
"""

FORK = PROGRAM + """
def work():
    while True:
        for case in range(len(t.CASES)):
            for cache in caches:
                t.tokens(m, case, use_cache=True, cache=cache)
torch.set_num_threads(2)
big = t.model(n_embd=256, block_size=128)
idx = torch.arange(512).view(4, 128) % 13
big(idx)  # starts the second thread of torch's pool, which the children do not have
caches = [make_cache(m, kind, 9, decoder=d) for kind in t.KINDS for d in (None, decoder)]
threading.Thread(target=work, daemon=True).start()
for i in range({forks}):
    time.sleep(0.036 * i / {forks})
    pid = os.fork()
    if pid == 0:  # the other thread was anywhere in a step
        signal.alarm(60)
        big(idx)
        same = all(t.tokens(m, case, use_cache=True, cache=cache) == expected[case]
                   for case in range(len(t.CASES)) for cache in caches)
        os._exit(0 if same else 3)
    assert os.waitpid(pid, 0)[1] == 0, i
os._exit(0)
"""


def test_the_child_of_a_fork_generates():
    done = run(ROOT, '-c', FORK.format(root=ROOT, forks=sizes(4, 12)))
    assert done.returncode == 0, done.stderr


INTERRUPT = PROGRAM + """
rng = random.Random(0)
signal.signal(signal.SIGALRM, signal.default_int_handler)
for kind, d in ((kind, d) for kind in t.KINDS for d in (None, decoder)):
    cache, stopped = make_cache(m, kind, 3, decoder=d), 0
    t0 = time.perf_counter()
    for case in range(len(t.CASES)):
        t.tokens(m, case, use_cache=True, cache=cache)
    longest = (time.perf_counter() - t0) / len(t.CASES)
    for i in range({rounds}):
        case = i % len(t.CASES)
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, longest))
            got = t.tokens(m, case, use_cache=True, cache=cache)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            stopped += 1
        else:
            assert got == expected[case], (kind, i, case)
        assert not any(module.training for module in m.modules())
        if i % 5 == 0:
            assert t.empty(cache), (kind, i, cache.lengths)
        case = rng.randrange(len(t.CASES))
        assert t.tokens(m, case, use_cache=True, cache=cache) == expected[case], (kind, i, case)
        assert t.empty(cache), (kind, i, cache.lengths)
    assert stopped > {rounds} // 10, stopped
"""


def test_an_interrupt_leaves_no_sequence_and_no_block_taken():
    done = run(ROOT, '-c', INTERRUPT.format(root=ROOT, rounds=sizes(30, 120)))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('kind', KINDS)
def test_an_interrupt_at_any_line_that_makes_or_frees_a_sequence_leaves_none(kind):
    m = model()
    cache, names, traced = make_cache(m, kind, 4), {'free_all', 'free', 'remove', 'made_by', 'new', 'fork'}, set()
    (first,), (other,) = next(stream(m, [[1, 2], [3]], 1, temperature=0.0)).tolist()
    assert first != other

    def forking():  # the samples of a prompt
        list(stream(m, [[1, 2], [3]], 2, use_cache=True, cache=cache, num_samples=2))

    def stopping():  # one of two samples, after its first token
        list(stream(m, [[1, 2], [3]], 2, temperature=0.0, use_cache=True, cache=cache, stop_token=first))

    def is_traced(code):
        traced.update({code.co_name} & names)
        return code.co_name in names
    for work in (forking, stopping):
        n, ended = 0, False
        while not ended:
            n += 1
            ended = not interrupted(work, n, is_traced)
            assert empty(cache), n
        assert n > 40
    assert traced == names


@pytest.mark.parametrize('kind', KINDS)
def test_a_stream_that_the_garbage_collector_ends_in_the_middle_of_a_step_gives_its_room_back(kind):
    m = model()
    cache = make_cache(m, kind, 2)
    steps = stream(m, [[1]], 9, use_cache=True, cache=cache)
    next(steps)
    cycle = [steps]
    cycle.append(cycle)
    del steps, cycle
    hook = m.transformer.ln_f.register_forward_hook(lambda *_: (gc.collect(), None)[1])
    list(stream(m, [[2]], 3, use_cache=True, cache=cache))
    hook.remove()
    for _ in range(3):  # each needs the room of both
        list(stream(m, [[3], [4]], 3, use_cache=True, cache=cache))
    assert empty(cache)

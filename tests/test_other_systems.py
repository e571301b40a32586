"""macOS and Windows without a machine: threads wait by calls made of futexes, and calls that they lack are hidden."""
import platform
import signal
import sys
from importlib.util import find_spec

import pytest
from conftest import ROOT, SERVING, TIMEOUT, TINY, run, sizes

FUTEXES = {'x86_64': 202, 'aarch64': 98}
needs_futexes = pytest.mark.skipif(sys.platform != 'linux' or platform.machine() not in FUTEXES,
                                   reason="the calls of other systems are made of Linux's futexes")

# This program gives compiled code the system calls of another system. Then two threads wait for each other by them.
MEET = f'''
import ctypes, sys, threading, time
from collections import Counter
import llvmlite.binding as llvm, numba, numpy as np, torch
sys.path.insert(0, {ROOT!r})
import decode.batch
libc, calls, kept = ctypes.CDLL(None), Counter(), []
INT, LONG, AT = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


def given(name, *types):
    def add(function):
        def counted(*args):
            calls[name] += 1
            return function(*args)
        kept.append(ctypes.CFUNCTYPE(*types)(counted))
        llvm.add_symbol(name, ctypes.cast(kept[-1], AT).value)
    return add


def wait(address, value, seconds):
    limit = (LONG * 2)(0, int(1e9 * seconds))
    libc.syscall(LONG({FUTEXES.get(platform.machine(), 0)}), AT(address), 128, INT(value), limit, None, 0)


def wake(address):
    libc.syscall(LONG({FUTEXES.get(platform.machine(), 0)}), AT(address), 129, 2**31 - 1, None, None, 0)


@given('clock_gettime', INT, INT, AT)  # https://www.manpagez.com/man/3/clock_gettime/
def clock_gettime(number, at):
    assert str(number) == sys.argv[2]  # 8 on macOS: CLOCK_UPTIME_RAW, which time.perf_counter_ns reads there
    (LONG * 2).from_address(at)[:] = divmod(time.perf_counter_ns(), 10**9)
    return 0


@given('__ulock_wait', INT, INT, AT, ctypes.c_uint64, INT)  # bsd/sys/ulock.h of xnu
def ulock_wait(operation, address, value, microseconds):
    assert operation == 1 and value < 2**32  # UL_COMPARE_AND_WAIT compares 32 bits with all of value
    wait(address, value, microseconds / 1e6)
    return 0


@given('__ulock_wake', INT, INT, AT, ctypes.c_uint64)
def ulock_wake(operation, address, value):
    assert operation == 0x101  # UL_COMPARE_AND_WAIT | ULF_WAKE_ALL
    wake(address)
    return 0


# https://learn.microsoft.com/windows/win32/api/synchapi/nf-synchapi-waitonaddress
@given('WaitOnAddress', INT, AT, AT, ctypes.c_size_t, INT)
def wait_on_address(address, compared, size, milliseconds):
    assert size == 8
    wait(address, LONG.from_address(compared).value & 0xffffffff, milliseconds / 1e3)
    return 1


@given('WakeByAddressAll', None, AT)
def wake_by_address_all(address):
    wake(address)


@given('QueryPerformanceCounter', INT, AT)
def counter(at):
    LONG.from_address(at).value = time.perf_counter_ns() // 100
    return 1


@given('QueryPerformanceFrequency', INT, AT)
def frequency(at):
    LONG.from_address(at).value = 10**7
    return 1


llvm.load_library_permanently = lambda name: calls.update([name])
sys.platform, system = sys.argv[1], sys.platform
from decode.kernel import threads
sys.platform = system
from decode.kernel.threads import barrier, clock, observe, publish
from decode.kernel.pointers import longs_at
threads.SPIN = 0


@numba.njit(nogil=True)
def meet(at, thread, times):
    """Two threads write how far they are, meet, and read how far the other is: how often is it elsewhere?"""
    shared, wrong = longs_at(at), 0
    for i in range(times):
        publish(shared, 8 + thread, i)
        barrier(shared, np.int64(2))
        wrong += observe(shared, 9 - thread) != i
        barrier(shared, np.int64(2))
    return wrong


@numba.njit
def now():
    return clock()


def late():
    time.sleep(0.3)
    wrong.append(meet(shared.ctypes.data, 1, 30))


before, found, after = time.perf_counter_ns() - 100, now(), decode.batch.now()
shared, wrong = threads.aligned(16, np.int64), []
thread = threading.Thread(target=late)
meet.compile((numba.int64,) * 3)
thread.start()
wrong.append(meet(shared.ctypes.data, 0, 30))
thread.join()
print(before <= found <= after, *wrong, *(name for name, n in calls.items() if n))
'''


@needs_futexes
@pytest.mark.parametrize('system, clock, called', [
    ('darwin', 8, {'clock_gettime', '__ulock_wait', '__ulock_wake'}),
    ('win32', None, {'kernelbase.dll', 'QueryPerformanceCounter', 'QueryPerformanceFrequency', 'WaitOnAddress',
                     'WakeByAddressAll'}),
    *sizes([], [('freebsd14', 1, {'clock_gettime'})])])
def test_threads_wait_by_the_calls_of_the_system(tmp_path, system, clock, called):
    done = run(tmp_path, '-c', MEET, system, clock)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.split()[:3] == ['True', '0', '0'] and {*done.stdout.split()[3:]} == called


HIDING = """
import asyncio, builtins, ctypes, io, os, platform, runpy, signal, subprocess, sys, time
import filelock, numba, torch  # before fcntl is hidden, because filelock has a lock for each system
try:
    import uvicorn.main
except ImportError:
    pass
MISSING = {
    os: 'sched_getaffinity sched_setaffinity fork forkpty register_at_fork sysconf uname nice getuid geteuid getpgid '
        'setpgid setsid killpg getloadavg statvfs mkfifo posix_fadvise sendfile RTLD_NOLOAD',
    signal: 'setitimer getitimer alarm pause pthread_sigmask pthread_kill sigwait ITIMER_REAL ITIMER_PROF SIGALRM '
            'SIGHUP SIGPIPE SIGPROF SIGQUIT SIGUSR1 SIGUSR2',
    time: 'clock_gettime clock_gettime_ns clock_getres tzset'}
for module, names in MISSING.items():
    for name in names.split():
        vars(module).pop(name, None)
sys.modules.update(dict.fromkeys(('resource', 'fcntl', 'termios', 'tty', 'readline', 'pwd', 'grp', 'syslog')))
plain, before = open, ctypes.CDLL.__init__
def opened(path, *args, **how):
    if str(path).startswith(('/proc', '/sys')):
        raise FileNotFoundError(path)
    return plain(path, *args, **how)
def library(self, name, *args, **how):
    if name is None:
        raise TypeError('bad argument type for built-in operation')
    before(self, name, *args, **how)
builtins.open = io.open = opened
ctypes.CDLL.__init__, platform.libc_ver = library, lambda *args: ('', '')
sys.path[0], sys.argv = os.getcwd(), sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


@pytest.fixture
def hiding(tmp_path):
    """A script that runs another one without calls that Windows or macOS lack."""
    (tmp_path / 'hiding.py').write_text(HIDING)
    return tmp_path / 'hiding.py'


def test_train_and_sample_without_what_other_systems_lack(repo, hiding):
    run(repo, hiding, 'train.py', *TINY, '--max_iters=10', PYTHONIOENCODING='cp1252', code=0)
    settings = 'sample.py', '--device=cpu', '--num_samples=2', '--max_new_tokens=20', '--start=The '
    here, there = run(repo, *settings), run(repo, hiding, *settings, PYTHONIOENCODING='cp1252')
    assert there.returncode == 0 and there.stdout == here.stdout, there.stderr
    assert 'numba on the CPU' in there.stderr


@pytest.mark.skipif(not all(map(find_spec, SERVING)), reason="the packages of the server are not installed")
def test_serve_without_what_other_systems_lack(trained, hiding):
    import httpx
    from serving_process import started
    with started(trained, hiding, 'serve.py', '--port=0', '--device=cpu', '--n_blocks=16') as (process, _, address):
        answer = httpx.post(address + 'v1/completions', json=dict(prompt='for', max_tokens=9), timeout=60)
        assert answer.status_code == 200 and answer.json()['usage']['completion_tokens'] == 9
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 0

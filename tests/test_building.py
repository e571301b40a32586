"""Compiled code on disk that several processes write and read."""
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, run, start

from decode.kernel import building

ADDERS = f'''
import sys, time
sys.path.append({ROOT!r})
from decode.kernel.building import keep_on_disk
from numba import njit
from numba.extending import overload


def nothing():
    pass


@overload(nothing)
def compile_slowly():
    time.sleep(1)
    return lambda: None


def adder(n):
    @njit
    def add(x):
        return n if x < 2 else add(x - 1) + add(x - 2)  # is not inlined, so it is found by its name
    return add


one, two = adder(1), adder(2)


@keep_on_disk
@njit
def add_one(x):
    return one(x)


@keep_on_disk
@njit
def add_two(x):
    return two(x)


@keep_on_disk
@njit
def add_slowly(x):
    nothing()
    return x


for name in sys.argv[1:]:
    function = globals()[name]
    print(name, function(10), sum(function.stats.cache_hits.values()))
'''
FAILING = """
import runpy, sys
from numba.core.caching import IndexDataCacheFile as Files
def full(*args):
    raise OSError('No space left on device')
Files._save_data, sys.argv = full, sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / 'adders.py').write_text(ADDERS)
    return tmp_path / 'adders.py'


def run_adders(script, *names, by='', **env):
    """The lines of a process, "name name(10) is-found-on-disk", and those of its stderr. by: code that runs it."""
    (script.parent / 'by.py').write_text(by)
    env |= dict(NUMBA_CACHE_DIR='') if os.environ.get('NUMBA_CACHE_DIR') else {}
    done = run(script.parent, *['by.py'] * bool(by), script.name, *names, code=0, **env)
    return (done.stdout + done.stderr).splitlines()


def test_a_process_that_loads_the_code_of_two_others_runs_the_right_functions(script):
    """Both are compiled as the first function of a process; numba alone would give what they call the same name."""
    assert run_adders(script, 'add_one') == ['add_one 89 0', building.NOTICE]
    assert run_adders(script, 'add_two') == ['add_two 178 0', building.NOTICE]
    assert run_adders(script, 'add_one', 'add_two') == ['add_one 89 1', 'add_two 178 1']


@pytest.mark.skipif(not hasattr(os, 'fork'), reason="this system does not fork")
def test_forks_give_the_next_function_other_numbers():
    context = multiprocessing.get_context('fork')
    with context.Pool(1, maxtasksperchild=1) as forks:
        assert forks.apply(next_number) != forks.apply(next_number)


def next_number():
    return next(building.FunctionIdentity._unique_ids)


def test_of_several_processes_that_need_a_function_one_compiles_it(script):
    """Compiling takes 1 s here. Without a lock all three would be in the middle of it at the same time."""
    processes = [start(script.parent, script.name, 'add_slowly') for _ in range(3)]
    said = sorted(process.communicate()[0].strip() for process in processes)
    assert said == ['add_slowly 10 0', 'add_slowly 10 1', 'add_slowly 10 1']


def test_a_process_that_has_waited_too_long_compiles_too(script, monkeypatch):
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr('sys.argv', ['adders.py'])
    import adders
    monkeypatch.setattr(building, 'LONGEST_WAIT', 0.1)
    with adders.add_two._cache.lock(((building.types.int64,),)):
        assert adders.add_two(1) == 2


BESIDE = ADDERS.split('for name in')[0] + '''
from pathlib import Path
from decode.kernel.building import CFunction, compile_beside


def of_other(a, b, c, d, e):
    return a + e


def own(a, b, c, d, e):
    return a - e


of_other, own = CFunction(of_other), CFunction(own)
if __name__ == '__main__':
    here = sys.path[0]
    compile_beside(of_other, f'sys.path.append({here!r}); from beside import *; of_other.compiled; time.sleep(600)')
    while not list(Path(here).rglob('*of_other-*')):
        time.sleep(0.01)
    print(own.call(5, 0, 0, 0, 1), own.kept.cache_hits, of_other.call(5, 0, 0, 0, 1), of_other.kept.cache_hits)
    compile_beside(of_other, 'it is on disk')
'''


def test_another_process_compiles_beside_this_one_and_ends_with_it(script):
    started = '''
import atexit, runpy, subprocess, sys
class Process(subprocess.Popen):
    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        atexit.register(lambda: print('ended', self.wait(60) != 0))
subprocess.Popen, sys.argv = Process, sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
'''
    (script.parent / 'beside.py').write_text(BESIDE)
    assert run_adders(script.parent / 'beside.py', by=started)[:3] == ['4 0 6 1', 'ended True', building.NOTICE]


def test_a_change_in_its_own_file_or_in_the_folder_compiles_a_function_anew(script):
    shutil.copytree(Path(ROOT) / 'decode', script.parent / 'decode', ignore=shutil.ignore_patterns('__pycache__'))
    for change in (None, 'adders.py', 'decode/kernel/linears.py'):
        if change:
            with open(script.parent / change, 'a') as f:
                f.write('# changed\n')
        assert run_adders(script, 'add_one') == ['add_one 89 0', building.NOTICE]
    assert run_adders(script, 'add_one') == ['add_one 89 1']


def test_where_nothing_can_be_kept_on_disk_it_says_so_once_and_goes_on(script):
    (script.parent / '__pycache__').write_text('not a folder')
    said = run_adders(script, 'add_one', 'add_two', HOME='/dev/null', XDG_CACHE_HOME='/dev/null')
    assert said[:2] == ['add_one 89 0', 'add_two 178 0']
    assert len(said) == 3 and 'cannot be kept on disk' in said[2] and 'NUMBA_CACHE_DIR' in said[2]


def test_where_code_cannot_be_saved_it_says_so_once_and_the_next_start_compiles_it(script):
    answer, other, notice, said = run_adders(script, 'add_one', 'add_two', by=FAILING)
    assert (answer, other, notice) == ('add_one 89 0', 'add_two 178 0', building.NOTICE)
    assert 'could not be kept on disk' in said and 'No space' in said
    assert run_adders(script, 'add_one') == ['add_one 89 0', building.NOTICE]

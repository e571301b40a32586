"""Compiled code on disk that several processes write and read."""
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import ROOT, run

ADDERS = f'''
import sys
sys.path.append({ROOT!r})
from decode.kernel.disk_cache import keep_on_disk
from numba import njit


def adder(n):
    @njit
    def add(x):
        return n if x < 2 else add(x - 1) + add(x - 2)  # is not inlined, so it is found by its name
    return add


one, two = adder(1), adder(2)


@njit
def add_one(x):
    return one(x)


@njit
def add_two(x):
    return two(x)


for function in (add_one, add_two):
    keep_on_disk(function)
for name in sys.argv[1:]:
    function = globals()[name]
    print(name, function(10), sum(function.stats.cache_hits.values()))
'''


FAILING = ("import runpy, sys; from numba.core.caching import IndexDataCacheFile as Files\n"
           "def full(*args): raise OSError('No space left on device')\n"
           "Files._save_data = full; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')\n")
FORKING = ("import os, runpy, sys; import decode.kernel.disk_cache\n"
           "for name in sys.argv[2:]:\n"
           "    if os.fork() == 0:\n"
           "        sys.argv = [sys.argv[1], name]; runpy.run_path(sys.argv[0], run_name='__main__')\n"
           "        sys.stdout.flush(); os._exit(0)\n"
           "    os.wait()\n")


def run_adders(folder, *names, by=None, **env):
    """
    What a process prints that calls add_one and add_two: the name, name(10), found on disk? by: code that runs the
    script.
    """
    script = folder / 'adders.py'
    if not script.exists():
        script.write_text(ADDERS)
    if by or env or os.environ.get('NUMBA_CACHE_DIR'):
        done = subprocess.run([sys.executable, *(['-c', by] if by else []), script, *names], capture_output=True,
                              text=True, env={**os.environ, 'PYTHONPATH': ROOT, 'NUMBA_CACHE_DIR': '', **env})
    else:
        done = run(folder, script.name, *names)
    assert done.returncode == 0, done.stderr
    return (done.stdout + done.stderr).splitlines()


def test_a_process_that_loads_the_code_of_two_others_runs_the_right_functions(tmp_path):
    """Both are compiled as the first function of a process; numba alone would give what they call the same name."""
    assert run_adders(tmp_path, 'add_one') == ['add_one 89 0']
    assert run_adders(tmp_path, 'add_two') == ['add_two 178 0']
    assert run_adders(tmp_path, 'add_one', 'add_two') == ['add_one 89 1', 'add_two 178 1']


@pytest.mark.skipif(not hasattr(os, 'fork'), reason="this system does not fork")
def test_the_same_for_the_code_of_two_forks(tmp_path):
    assert run_adders(tmp_path, 'add_one', 'add_two', by=FORKING) == ['add_one 89 0', 'add_two 178 0']
    assert run_adders(tmp_path, 'add_one', 'add_two') == ['add_one 89 1', 'add_two 178 1']


def test_a_save_that_failed_leaves_no_old_code_under_a_new_name(tmp_path):
    assert run_adders(tmp_path, 'add_one') == ['add_one 89 0']
    (tmp_path / 'adders.py').write_text(ADDERS.replace('adder(1)', 'adder(3)'))
    answer, said = run_adders(tmp_path, 'add_one', by=FAILING)
    assert answer == 'add_one 267 0' and 'could not be kept on disk' in said and 'No space' in said
    assert run_adders(tmp_path, 'add_one') == ['add_one 267 0']
    assert run_adders(tmp_path, 'add_one') == ['add_one 267 1']


def test_one_process_at_a_time_saves(tmp_path, monkeypatch, capsys):
    from filelock import FileLock

    from decode.kernel import disk_cache
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / 'adders_of_this_process.py').write_text(ADDERS.partition('for name')[0])
    import adders_of_this_process as adders
    folder, lock = Path(adders.add_one.stats.cache_path), Path(adders.add_one.stats.cache_path) / 'saving.lock'
    saved = threading.Thread(target=adders.add_one, args=(1,))
    with FileLock(lock):
        saved.start()
        saved.join(3)
        assert saved.is_alive() and not list(folder.glob('*.nbc'))
    saved.join()
    assert [path.name.split('-')[0] for path in folder.glob('*.nbc')] == ['adders_of_this_process.add_one']

    monkeypatch.setattr(disk_cache, 'LONGEST_SAVE', 0.1)
    with FileLock(lock):
        assert adders.add_two(1) == 2  # it is compiled nevertheless
    assert 'could not be kept' in capsys.readouterr().err and len(list(folder.glob('*.nbc'))) == 1


def test_a_change_in_any_of_its_files_compiles_a_function_anew(tmp_path):
    (tmp_path / 'other.py').write_text('N = 1')
    script = ADDERS.replace('keep_on_disk(function)', 'import other; keep_on_disk(function, other)')
    (tmp_path / 'adders.py').write_text(script)
    assert run_adders(tmp_path, 'add_one') == ['add_one 89 0']
    assert run_adders(tmp_path, 'add_one') == ['add_one 89 1']
    (tmp_path / 'other.py').write_text('N = 2')
    assert run_adders(tmp_path, 'add_one') == ['add_one 89 0']


def test_where_nothing_can_be_kept_on_disk_it_says_so_once_and_goes_on(tmp_path):
    (tmp_path / '__pycache__').write_text('not a folder')
    said = run_adders(tmp_path, 'add_one', 'add_two', HOME='/dev/null', XDG_CACHE_HOME='/dev/null')
    assert said[:2] == ['add_one 89 0', 'add_two 178 0']
    assert len(said) == 3 and 'cannot be kept on disk' in said[2] and 'NUMBA_CACHE_DIR' in said[2]

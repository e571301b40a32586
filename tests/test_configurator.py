"""Config files and --key=value."""
import os
import signal
import subprocess
import sys

import pytest
from conftest import ROOT

import configurator

SCRIPT = '''"""What the script does."""
import math

steps = 10          # how many
rate = 1e-3         # how fast
name = 'gpt'        # what it is called
loud = False        # say so?
api_key = ''        # a secret
odd = '#'           # a hash in a string, and one in front of this
_private = 3
CONSTANT = 4
tools = math


def main(config):
    print(config)
'''


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'script.py').write_text(SCRIPT)
    namespace = {'__file__': str(tmp_path / 'script.py')}
    exec(SCRIPT, namespace)
    return namespace


@pytest.mark.parametrize('arg, name, value', [
    ('--steps=3', 'steps', 3), ('--rate=2e-4', 'rate', 2e-4), ('--rate=1', 'rate', 1.0), ('--loud=True', 'loud', True),
    ('--name=a=b=c', 'name', 'a=b=c'), ('--name=', 'name', ''), ('--name=12', 'name', '12'),
    ('--name=--x', 'name', '--x'), ('--steps=-1', 'steps', -1), ('--loud', 'loud', True),
    (f'--steps={2**63 - 1}', 'steps', 2**63 - 1), (f'--steps={-2**63}', 'steps', -2**63),
])
def test_the_command_line(script, capsys, arg, name, value):
    config = configurator.override(script, [arg])
    assert config[name] == script[name] == value and type(config[name]) is type(value)
    assert f'{name} = {value!r}' in capsys.readouterr().err


def test_a_file_and_the_command_line_wins_wherever_it_stands(script, tmp_path, capsys):
    """And what was given, and by whom, is kept: also where it is the default."""
    assert configurator.override(script, []) == dict(steps=10, rate=1e-3, name='gpt', loud=False, api_key='', odd='#')
    assert capsys.readouterr() == ('', '')
    (tmp_path / 'c.py').write_text('import time\nsteps = 2 * 21\nrate = 1\nname = "at " + str(time.time() > 0)\n'
                                   "if steps > 3:\n    loud = True\nodd = '#'\n")
    config = configurator.override(script, ['--steps=7', 'c.py'])
    assert config == dict(steps=7, rate=1.0, name='at True', loud=True, api_key='', odd='#')
    assert config.given == dict.fromkeys(('rate', 'name', 'loud', 'odd'), 'c.py') | {'steps': 'command line'}
    assert 'loud = True (default False; c.py)' in capsys.readouterr().err


@pytest.mark.parametrize('argv, message', [
    (['--step=3'], 'did you mean steps'), (['--zzz=3'], 'see --help'), (['--steps=many'], 'steps must be a whole'),
    (['--steps=1.5'], 'steps must be a whole'),
    (['--loud=1'], 'loud must be True or'), (['--rate=fast'], 'rate must be a num'), (['--steps'], '--key=value'),
    (['-steps=3'], '--key=value'), (['-loud'], '--key=value'),
    (['text.txt'], 'not a config file.*--input='), (['nothing.py'], "no config file 'nothing.py'"),
    (['typo.py'], 'typo.py.*did you mean steps'),
    (['broken.py'], 'broken.py: SyntaxError'), (['dies.py'], 'dies.py: ZeroDivisionError'),
    (['latin.py'], 'latin.py is not UTF-8 text'),
    (['exits.py'], r"exits.py calls sys.exit\('no GPU'\)"),
    (['wrong.py'], 'steps must be a whole number.*wrong.py'), (['--_private=1'], 'unknown'), (['--tools=1'], 'unknown'),
    (['--CONSTANT=1'], 'unknown'), (['--steps=True'], 'steps must be a whole'),
    (['--rate=1e999'], 'rate must be a finite number, not inf'),
    (['own.py'], "unknown setting 'width' .own.py.: see --help; own names must begin with _"),
    ([f'--steps={2**63}'], 'steps must fit in 64 bits, but it is a number of 64 bits'),
    ([f'--steps={-2**63 - 1}'], 'must fit in 64 bits'), (['--steps=' + '9' * 4000], 'must fit in 64 bits'),
    (['--steps=' + '9' * 5000], r"steps must be a whole number, not '999.*5002 characters"),
    (['--rate=1' + '0' * 400], 'rate must be a num'), (['--steps=' + '(' * 100000], 'steps must be a whole'),
    (['--steps=' + '-' * 100000 + '1'], 'steps must be a whole'), (['--' + 'x' * 5000 + '=1'], 'unknown setting'),
    (['x' * 5000], 'no config file'), (['--' + 'x' * 5000], '--key=value'),
])
def test_what_is_wrong_is_said_in_one_short_line_and_changes_nothing(script, tmp_path, argv, message):
    for name, text in {
            'typo.py': 'step = 3', 'own.py': 'width = 3\nsteps = width', 'text.txt': 'steps = 3',
            'latin.py': 'name = "\xff"', 'broken.py': 'steps = = 3', 'dies.py': 'steps = 1 / 0',
            'exits.py': 'import sys\nsys.exit("no GPU")', 'wrong.py': 'steps = "three"'}.items():
        (tmp_path / name).write_text(text, 'latin-1')
    with pytest.raises(ValueError, match=message) as error:
        configurator.override(script, ['--name=new', *argv])
    assert script['name'] == 'gpt' and len(str(error.value)) < 300


def test_help_lists_every_setting_with_its_comment_and_its_default_or_the_value_of_a_file(script, tmp_path, capsys):
    (tmp_path / 'c.py').write_text('steps = 42\n')
    with pytest.raises(SystemExit) as stop:
        configurator.override(script, ['--help', 'c.py'])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and out.startswith('What the script does.') and script['steps'] == 10
    assert [line.split() for line in out.splitlines() if line.startswith('  --')] == [
        ['--steps=42', 'how', 'many'], ['--rate=0.001', 'how', 'fast'], ["--name='gpt'", 'what', 'it', 'is', 'called'],
        ['--loud=False', 'say', 'so?'], ["--api_key=''", 'a', 'secret'],
        ["--odd='#'", 'a', 'hash', 'in', 'a', 'string,', 'and', 'one', 'in', 'front', 'of', 'this']]


@pytest.mark.parametrize('argv', [
    '--api_key=sesame', '--api_key=sesame --help', 'key.py', 'key.py --help', '--api_key sesame', '--api_key= sesame',
    '-api_key=sesame', '-api_key sesame', 'api_key=sesame', '--api-key=sesame', '--api_keysesame', '--api_keysesame=',
    '--api_key -sesame', '--api_key= -sesame', '--api_key= --sesame', '--api_key= --sesame=3', 'list.py', 'number.py',
    'bare.py', 'wrong.py', 'torn.py', '--API_KEY=sesame'])
def test_a_key_is_shown_nowhere(script, tmp_path, capsys, argv):
    for name, value in dict(key="'sesame'", list="['sesame', 'b']", number="{'sesame': 3}", bare='sesame',
                            wrong="int('sesame')", torn="'sesame").items():
        (tmp_path / f'{name}.py').write_text(f'api_key = {value}\n')
    said = ''
    try:
        configurator.override(script, argv.split())
    except (ValueError, SystemExit) as e:
        said = str(e)
    out, err = capsys.readouterr()
    assert 'sesame' not in (said + out + err) and said + out + err


@pytest.fixture
def run_and_fail(script, monkeypatch):
    """A function of an exception: `configurator.run` of a script whose main raises it."""
    monkeypatch.setattr('sys.argv', ['script.py'])

    def run(error):
        def main(config):
            raise error
        configurator.run(type(main)(main.__code__, script, 'main', None, main.__closure__))
    return run


@pytest.mark.parametrize('error, code, line', [
    (ValueError('two\nlines'), 2, 'script.py: error: two lines'),
    (FileNotFoundError(2, 'No such file', 'x'), 2, 'x: No such file'), (MemoryError(), 2, 'out of memory'),
    (RuntimeError('CUDA out of memory. Tried'), 2, 'smaller batch_size'), (KeyboardInterrupt(), 130, ''),
    (RuntimeError("can't start new thread"), 2, 'ulimit -u'),
    (FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"), 2, 'set TMPDIR'),
])
def test_errors_end_in_one_line(run_and_fail, capsys, error, code, line):
    with pytest.raises(SystemExit) as stop:
        run_and_fail(error)
    err = capsys.readouterr().err
    assert stop.value.code == code and line in err and err.count('\n') <= 1
    with pytest.raises(RuntimeError):  # a bug of ours keeps its traceback
        run_and_fail(RuntimeError('shapes cannot be multiplied'))


def ran(folder, code, redirected='', **env):
    """(exit code, stdout, stderr) of a script with this code, after `import configurator` and others."""
    (folder / 'script.py').write_text('import configurator, signal, sys\n' + code, 'utf-8')
    command = f'exec {sys.executable} script.py {redirected}' if redirected else [sys.executable, 'script.py']
    done = subprocess.run(command, shell=bool(redirected), capture_output=True, cwd=folder,
                          env=os.environ | dict(PYTHONPATH=ROOT, **env))
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(os.name != 'posix', reason="the signal ends a process of POSIX")
def test_an_interrupt_while_a_script_imports_prints_nothing(tmp_path):
    assert ran(tmp_path, 'signal.raise_signal(signal.SIGINT)') == (-signal.SIGINT, b'', b'')
    code, _, err = ran(tmp_path, "raise RuntimeError('a bug')")
    assert code == 1 and b'Traceback' in err and b'a bug' in err


def test_a_terminal_that_lacks_characters_gets_others(tmp_path):
    code = "def main(config):\n    print('5 \u20ac \\ud800')\nconfigurator.run(main)"
    for encoding, said in (('ascii', b'5 ? ?\n'), ('latin-1', b'5 ? ?\n'), ('cp1252', b'5 \x80 ?\n'),
                           ('utf-8', '5 \u20ac ?\n'.encode())):
        assert ran(tmp_path, code, PYTHONIOENCODING=encoding) == (0, said, b'')


@pytest.mark.skipif(os.name != 'posix', reason="a shell of POSIX closes them")
def test_streams_that_are_closed_are_files_that_nobody_reads(tmp_path):
    """As service managers close them; and a stderr on a full disk loses what is written there."""
    code = ("def main(config):\n    print(sys.stdin.isatty(), file=sys.stderr, flush=True)\n    print(1)\n"
            "configurator.run(main)")
    assert ran(tmp_path, code, '<&- >&-') == (0, b'', b'False\n')
    for closed in '2>&-', '2>/dev/full' if os.path.exists('/dev/full') else '2>&-':
        assert ran(tmp_path, code, closed) == (0, b'1\n', b'')

"""
Settings of a script: plain variables at its top, each with a comment, overridden from the command line.

    python train.py config/train_shakespeare_char.py --batch_size=32

A config file is Python that assigns some of the same names; it may `exec` another one. Files are applied in order, then
every --key=value, wherever it stands; of a boolean, --key is --key=True. The values of settings whose names end with
key, such as api_key, are shown nowhere. An unknown name or a value of another type is an error, and --help lists all
settings. A script ends with `configurator.run(main)`.

A script imports this module before all others, with `import configurator  # isort: skip`. If torch is not installed,
that import ends the script with a line that says what to do. From then on Ctrl-C ends the script without a traceback.
"""
import ast
import difflib
import glob
import importlib.util
import io
import math
import os
import re
import shutil
import sys
import textwrap
import threading
import tokenize
import types
from contextlib import suppress
from functools import partial

from tokenizer import read_text


class Settings(dict):
    """{name: value} of all settings of a script. given: {name: 'command line' or the config file} of those set."""

    def __init__(self, values, given):
        super().__init__(values)
        self.given = given


def run(main):
    """
    Override the settings in main's module, then call main(config), config the Settings.

    Errors that a user can cause (ValueError, a file that cannot be read or written, too little memory) end the script
    with one line on stderr and exit code 2. Ctrl-C ends it with exit code 130.
    """
    for name, mode in (('stdin', 'r'), ('stdout', 'w'), ('stderr', 'w')):
        if getattr(sys, name) is None:  # it was closed, as under some service managers
            setattr(sys, name, open(os.devnull, mode))
    ignore_write_errors(sys.stderr)
    with suppress(AttributeError, OSError):  # where it is another object, or a file of another kind
        sys.stdout.reconfigure(errors='replace')  # characters that its encoding lacks become ?
    namespace = main.__globals__
    script = os.path.basename(namespace['__file__'])
    try:
        from tqdm import tqdm  # not above: where it is missing, check_installation says so
        tqdm.set_lock(threading.RLock())  # Python 3.14 would start a process for its own, a lock of several processes
        config = override(namespace, sys.argv[1:])
        main(config)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of stdout, such as head or less, has ended
        silence(sys.stdout)
        sys.exit(141)  # the exit code of a process that SIGPIPE ended
    except Exception as e:
        message = what_a_user_can_cause(e)
        if message is None:
            raise
        sys.exit(_error(script, message))


def what_a_user_can_cause(e):
    """The text of an exception that a user can cause, as one line. None for others: a bug needs its traceback."""
    text = ' '.join(str(e).split())
    out_of_memory = 'out of memory' in text.lower() or "can't allocate memory" in text.lower()
    if isinstance(e, MemoryError) or isinstance(e, RuntimeError) and out_of_memory:
        return "out of memory: try a smaller batch_size, block_size or model"
    if isinstance(e, RuntimeError) and "can't start new thread" in text:
        return "no more threads can be started here: allow more processes (ulimit -u, --pids-limit of docker)"
    if isinstance(e, OSError) and 'No usable temporary directory' in text:
        return "there is no folder for temporary files: set TMPDIR to one that can be written"
    if isinstance(e, OSError) and e.filename and e.strerror and not e.filename2:
        return f"{e.filename}: {e.strerror}"
    return text if isinstance(e, (ValueError, OSError)) else None


def rank():
    """The number of this process among those that torchrun started, or 0 if torchrun did not start it."""
    return int(os.environ.get('RANK', 0))


def ignore_write_errors(stream):
    """From now on, writing to this stream raises nothing when its reader has ended or its disk is full."""
    def lossy(method, *args):
        with suppress(OSError, ValueError):
            return method(*args)
    stream.write, stream.flush = partial(lossy, stream.write), partial(lossy, stream.flush)


def silence(stream):
    """Send what is still written to a stream without a reader to /dev/null, so that it raises nothing at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _error(script, message):
    print(f"{script}: error: {message}", file=sys.stderr, flush=True)
    return 2


PACKAGES = 'torch', 'numpy', 'numba', 'filelock', 'tiktoken', 'tokenizers', 'tqdm', 'safetensors', 'huggingface_hub'
HERE = os.path.dirname(os.path.abspath(__file__))
# what an error calls the types of settings
KINDS = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'a text', tuple: 'a tuple'}
OF_SERVER = 'starlette', 'uvicorn', 'pydantic', 'orjson', 'prometheus_client', 'httptools'


def check_installation(packages=PACKAGES, advice=None):
    """Exit with one line if a package is missing. advice: what to do then; by default, to activate the environment."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if not missing:
        return
    if advice is None:
        activate = os.path.join(HERE, '.venv', 'bin', 'activate')
        make = "" if os.path.exists(activate) else "run `make demo`, which installs everything into .venv, then "
        advice = f"{make}run `source {os.path.relpath(activate)}`"
    sys.exit(_error(os.path.basename(sys.argv[0]), f"{sys.executable} has no {', '.join(missing)}: {advice}"))


check_installation()


def _excepthook(kind, error, trace):
    """Print an exception as Python does, but nothing for Ctrl-C while a script imports."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _excepthook


def override(namespace, argv):
    """
    Apply the config files and --key=value in argv to the settings in namespace. Returns the Settings. ValueError, and
    nothing is applied, if a file or a value is wrong.
    """
    settings = find_settings(namespace)
    files = [arg for arg in argv if not arg.startswith('-')]
    assignments = [arg for arg in argv if arg.startswith('-') and arg not in ('--help', '-h')]
    asks_help = '--help' in argv or '-h' in argv
    for arg, following in zip(argv, [*argv[1:], None]):
        name, equals, text = arg[2:].partition('=')
        is_flag = name in settings and type(namespace[name]) is bool and not equals
        may_be_key = following and re.fullmatch(r'(?i)-+[\w-]*key=?', arg)
        is_torn = may_be_key or not (  # --key= value
            text or is_flag or following is None or following.startswith('-') or os.path.exists(following))
        is_setting = arg.startswith('--') and (equals or is_flag)
        if arg in assignments and (is_torn or not is_setting and not asks_help):
            came = _short(f'{arg} {following}' if is_torn else arg)
            raise ValueError(f"a setting is written --key=value, without blanks, but {came} came: see --help")
    changes = {}  # {name: (value, 'command line' or the file)}
    for path in files:
        for name, value in _read_file(path, {k: namespace[k] for k in settings}).items():
            changes[name] = (_checked(name, value, namespace, settings, path), path)
    if asks_help:
        print(describe(namespace | {name: value for name, (value, _) in changes.items()}, settings))
        sys.exit(0)
    for arg in assignments:
        name, equals, text = arg[2:].partition('=')
        _known(name, settings, 'command line')
        value = _checked(name, _parse(text, namespace[name]) if equals else True, namespace, settings, 'command line')
        changes[name] = (value, 'command line')
    for name, (value, where) in changes.items():
        if value != namespace[name] and rank() == 0:  # process 0 prints for all
            print(f"{name} = {_shown(name, value)} (default {_shown(name, namespace[name])}; {where})", file=sys.stderr)
        namespace[name] = value
    return Settings({name: namespace[name] for name in settings}, {name: where for name, (_, where) in changes.items()})


def find_settings(namespace):
    """{name: comment} of every lower-case name without a leading _ that the script assigns a plain value, in order."""
    with open(namespace['__file__'], encoding='utf-8') as f:
        source = f.read()
    lines = source.split('\n')
    comments = {tok.start[0]: tok.string.lstrip('# ').strip()
                for tok in tokenize.generate_tokens(io.StringIO(source).readline) if tok.type == tokenize.COMMENT}
    settings = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name.islower() and name[0] != '_' and isinstance(namespace.get(name), (bool, int, float, str, tuple)):
                line = node.end_lineno
                settings[name] = comments.get(line, '')
                while (line := line + 1) in comments and lines[line - 1].startswith(' '):  # it goes on there
                    settings[name] += ' ' + comments[line]
    return settings


def describe(namespace, settings):
    """The text of --help: the script's own docstring, then each setting with its default and its comment."""
    rows = [(f"--{name}={_shown(name, namespace[name])}", comment) for name, comment in settings.items()]
    width = min(40, max(len(row[0]) for row in rows))
    room = max(40, shutil.get_terminal_size().columns - width - 5)
    lines = [f"  {left if not i else '':<{width}}  {part}".rstrip()
             for left, comment in rows for i, part in enumerate(textwrap.wrap(comment, room) or [''])]
    return (namespace.get('__doc__') or '').strip() + '\n\n' + '\n'.join(lines)


def check_range(settings, least, most, *names):
    """ValueError unless each of these settings, numbers, is from least to most (NaN never is). settings: a dict."""
    for name in names:
        if not least <= settings[name] <= most:
            limits = f"at least {least}" if most == math.inf else f"from {least} to {most:,}"
            raise ValueError(f"{name} must be {limits}, not {settings[name]}")


def _known(name, settings, where):
    if name not in settings:
        near, is_file = difflib.get_close_matches(name, settings, n=1), where.endswith('.py')
        hint = f"did you mean {near[0]}?" if near else "see --help" + "; own names must begin with _" * is_file
        raise ValueError(f"unknown setting {_short(name)} ({where}): {hint}")


def _shown(name, value, show=repr):
    """repr(value), or *** if it is a key."""
    return '***' if value and re.search('(?i)key$', name) else show(value)


class Assigned(dict):
    """The variables of a config file. names: those that it has assigned, also to the value that they had."""

    names = frozenset()

    def __setitem__(self, name, value):
        self.names |= {name}
        super().__setitem__(name, value)


def _read_file(path, defaults):
    if not os.path.isfile(path):
        near = difflib.get_close_matches(path, glob.glob(os.path.join(glob.escape(os.path.dirname(path)), '*.py')), n=1)
        advice = f"did you mean {near[0]}?" if near else "name a file that exists, or write a setting as --key=value"
        if path.endswith('.py') and os.path.isfile(os.path.join(HERE, path)):
            advice = f"it is in {HERE}: run the script there"
        raise ValueError(f"there is no config file {_short(path)}: {advice}")
    if not path.endswith('.py'):
        raise ValueError(f"{_short(path)} is not a config file, because its name does not end in .py: write a setting "
                         "as --key=value (a prepare.py takes the path of a text as --input=PATH)")
    assigned, source = Assigned(defaults, __file__=path), read_text(path)
    try:
        exec(compile(source, path, 'exec'), assigned, assigned)
    except SystemExit as e:
        raise ValueError(f"{path} calls sys.exit({e.code!r}), but a config file only assigns settings") from e
    except Exception as e:
        what = 'in a file with a key' if 'key' in source.lower() else e
        raise ValueError(f"{path}: {type(e).__name__}: {what}") from e
    return {k: v for k, v in assigned.items()
            if k in assigned.names and k[0] != '_' and not isinstance(v, (types.ModuleType, types.FunctionType, type))}


def _parse(text, default):
    """The value of a command-line text: the text if the default is one, a Python literal if it is one, or the text."""
    if isinstance(default, str):  # a shell leaves the ~ of --key=~/file to the program
        return os.path.expanduser(text) if text.startswith('~/') else text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _checked(name, value, namespace, settings, where):
    _known(name, settings, where)
    wanted = type(namespace[name])
    if wanted is float and type(value) is int and abs(value) < 2**63:
        value = float(value)
    if type(value) is not wanted:
        raise ValueError(f"{name} must be {KINDS[wanted]}, not {_shown(name, value, _short)} ({where})")
    if wanted is float and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value} ({where})")
    if wanted is int and not -2**63 <= value < 2**63:  # the range of torch and numpy
        raise ValueError(f"{name} must fit in 64 bits, but it is {_short(value)} ({where})")
    return value


def _short(value):
    """repr(value), shortened so that it fits in a line, without what may be a key in it."""
    if type(value) is int and abs(value) >= 2**63:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str):
        value = re.sub(r'(?i)(key\W*).+', r'\1***', value, flags=re.DOTALL)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:45]}... ({len(text)} characters)"

"""
Settings of a script: plain variables at its top, a comment behind each, overridden from the command line.

    python train.py config/train_shakespeare_char.py --batch_size=32

A config file is Python that assigns some of the same names. Files come first, in order, and --key=value
wins over them wherever it stands. An unknown name or a value of another type is an error, --help lists
everything. A script ends with `configurator.run(main)`.
"""
import ast
import difflib
import io
import os
import sys
import tokenize
import types


def run(main):
    """
    Override the settings in main's module, then call main(config), config a dict of every setting.

    What a user can cause (ValueError, a file that cannot be read or written, memory that runs out, Ctrl-C)
    ends in one line on stderr: exit code 2, or 130 for Ctrl-C.
    """
    namespace = main.__globals__
    script = os.path.basename(namespace['__file__'])
    try:
        config = override(namespace, sys.argv[1:])
        main(config)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader, head or less, has left
        silence_stdout()
        sys.exit(141)  # as if SIGPIPE had ended us
    except (ValueError, OSError) as e:
        sys.exit(_error(script, e))
    except (MemoryError, RuntimeError) as e:
        text = str(e).lower()
        if isinstance(e, MemoryError) or 'out of memory' in text or "can't allocate memory" in text:
            sys.exit(_error(script, "out of memory: try a smaller batch_size, block_size or model"))
        raise


def silence_stdout():
    """Nobody reads it any more: what is still written to it, at exit for one, goes nowhere instead of raising."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _error(script, message):
    print(f"{script}: error: {' '.join(str(message).split())}", file=sys.stderr)
    return 2


def override(namespace, argv):
    """Apply config files and --key=value from argv to the settings in namespace; returns all settings as a dict."""
    settings = find_settings(namespace)
    if '--help' in argv or '-h' in argv:
        print(describe(namespace, settings))
        sys.exit(0)
    changes = {}  # name: (value, where it came from)
    for arg in argv:
        if not arg.startswith('-'):
            for name, value in _read_file(arg, {k: namespace[k] for k in settings}).items():
                changes[name] = (_checked(name, value, namespace, settings, arg), arg)
    for arg in argv:
        if arg.startswith('-'):
            name, equals, text = arg.lstrip('-').partition('=')
            if not equals or not arg.startswith('--'):
                raise ValueError(f"settings are written --key=value, not {arg!r} (see --help)")
            _known(name, settings, 'command line')
            changes[name] = (_checked(name, _parse(text, namespace[name]), namespace, settings, 'command line'), 'command line')
    for name, (value, where) in changes.items():
        if value != namespace[name] and os.environ.get('RANK', '0') == '0':  # one process says it for all
            print(f"{name} = {value!r} (default {namespace[name]!r}; {where})", file=sys.stderr)
        namespace[name] = value
    return {name: namespace[name] for name in settings}


def find_settings(namespace):
    """{name: comment} of every public lower-case name that the script assigns a plain value to, in order."""
    with open(namespace['__file__'], encoding='utf-8') as f:
        source = f.read()
    comments = {tok.start[0]: tok.string.lstrip('# ').strip()
                for tok in tokenize.generate_tokens(io.StringIO(source).readline) if tok.type == tokenize.COMMENT}
    settings = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name.islower() and name[0] != '_' and isinstance(namespace.get(name), (bool, int, float, str)):
                settings[name] = comments.get(node.lineno, '')
    return settings


def describe(namespace, settings):
    """The text of --help: the script's own docstring, then each setting with its default and its comment."""
    rows = [(f"--{name}={namespace[name]!r}", comment) for name, comment in settings.items()]
    width = min(40, max(len(row[0]) for row in rows))
    return (namespace.get('__doc__') or '').strip() + '\n\n' + '\n'.join(f"  {left:<{width}}  {comment}".rstrip() for left, comment in rows)


def _known(name, settings, where):
    if name not in settings:
        near = difflib.get_close_matches(name, settings, n=1)
        hint = f"did you mean {near[0]}?" if near else "see --help"
        raise ValueError(f"unknown setting {name!r} ({where}): {hint}")


def _read_file(path, defaults):
    if not os.path.isfile(path):
        raise ValueError(f"no config file {path!r} (settings are written --key=value)")
    with open(path, encoding='utf-8') as f:
        source = f.read()
    assigned = dict(defaults, __file__=path)
    try:
        exec(compile(source, path, 'exec'), assigned)
    except Exception as e:
        raise ValueError(f"{path}: {type(e).__name__}: {e}") from e
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {k: v for k, v in assigned.items()
            if k in names and k[0] != '_' and not isinstance(v, (types.ModuleType, types.FunctionType))}


def _parse(text, default):
    """A command-line text as a value of the default's kind, where that is possible."""
    if isinstance(default, str):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _checked(name, value, namespace, settings, where):
    _known(name, settings, where)
    wanted = type(namespace[name])
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise ValueError(f"{name} must be {wanted.__name__}, not {value!r} ({where})")
    return value

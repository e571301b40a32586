"""
A server that starts scripts in a process that has torch loaded, which saves most of the time that a short script takes.

The server imports the packages that the scripts need, but none of the repository's modules, and forks for each script.
The script then runs as `python script.py ...` would run it: as __main__, in a process of its own, with its folder in
front of sys.path.
"""
import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types

PACKAGES = 'numpy', 'torch', 'torch._dynamo', 'torch.distributed', 'numba', 'matplotlib.pyplot', 'tqdm', 'requests'


class ForkServer:
    """The server's process, as seen by its clients. It starts with the environment env, and ends with `close`."""

    def __init__(self, env):
        self.folder = tempfile.TemporaryDirectory()
        self.address = os.path.join(self.folder.name, 'socket')
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen()
            self.process = subprocess.Popen([sys.executable, __file__, str(listener.fileno())], env=env,
                                            pass_fds=[listener.fileno()], stdin=subprocess.PIPE)

    def run(self, folder, script, args, env, timeout):
        """
        The subprocess.CompletedProcess of `python script args...` in folder, with stdout and stderr as text.

        env: variables to add to those of the server. timeout: seconds until a TimeoutError.
        """
        with tempfile.TemporaryFile() as request, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, \
                socket.socket(socket.AF_UNIX) as connection:
            request.write(json.dumps([str(folder), script, args, env]).encode())
            request.seek(0)
            connection.settimeout(timeout)
            connection.connect(self.address)
            socket.send_fds(connection, [b'run'], [f.fileno() for f in (request, out, err)])
            returncode = int(connection.recv(100))
            for f in (out, err):
                f.seek(0)
            return subprocess.CompletedProcess([script, *args], returncode, out.read().decode(), err.read().decode())

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.folder.cleanup()


def serve(listener):
    """Answer connections, until stdin ends. In the new process of each script, return what `run_script` needs."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _, (request, out, err), _, _ = socket.recv_fds(connection, 100, 3)
            script = os.fork()
            if script == 0:
                break
            status = os.waitpid(script, 0)[1]
            connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)
        connection.close()
    connection.close()
    with open(request, 'rb') as f:
        order = json.load(f)
    for stream, fd in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
        os.dup2(fd, stream)
        os.close(fd)
    return order


def run_script(folder, script, args, env):
    """Run a script as __main__, and return the exit code of the process."""
    os.environ.update(env)
    os.chdir(folder)
    main = types.ModuleType('__main__')
    main.__file__ = os.path.abspath(script)
    sys.modules['__main__'] = main
    sys.argv, sys.path[0] = [script, *args], os.path.dirname(main.__file__)
    try:
        with open(script, 'rb') as f:
            exec(compile(f.read(), main.__file__, 'exec'), vars(main))
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int):
            return e.code or 0
        print(e.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == '__main__':
    for package in PACKAGES:
        importlib.import_module(package)
    sys.modules['matplotlib'].use('Agg')
    gc.freeze()
    code = run_script(*serve(socket.socket(fileno=int(sys.argv[1]))))
    # what Python does at its end, except that no object is freed: that would copy memory shared with the server
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)

"""
A server that starts scripts in a process that has torch loaded, which saves most of the time that a short script takes.

The server imports the packages that the scripts need, but none of the repository's modules, and forks for each script.
The script then runs as `python script.py ...` would run it: as __main__, in a process of its own, with its folder in
front of sys.path. It ends in another way: a file that it has left open is not flushed.
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
import threading
import traceback
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

PACKAGES = ('numpy', 'torch', 'torch._dynamo', 'torch.distributed', 'numba', 'matplotlib.figure', 'tqdm', 'requests',
            'filelock', 'uvicorn', 'starlette.applications', 'pydantic.main', 'prometheus_client')
N_DIGITS = 20  # of a number that the server sends: the number of a process, an exit code
LONGEST_ORDER = 2**15  # bytes of what it is sent, which come in one piece with the files


class Script:
    """A script that has been started: what the tests use of subprocess.Popen. stdout, stderr: files."""

    def __init__(self, connection, stdout, stderr):
        self.connection, self.stdout, self.stderr, self.returncode = connection, stdout, stderr, None
        self.pid = int(connection.recv(N_DIGITS))

    def poll(self):
        ended = self.returncode is None and select.select([self.connection], [], [], 0)[0]
        return self.wait() if ended else self.returncode

    def wait(self, timeout=None):
        """Its exit code, minus the signal's number if one has ended it. TimeoutError after so many seconds."""
        if self.returncode is None:
            self.connection.settimeout(timeout)
            self.returncode = int(self.connection.recv(N_DIGITS))
            self.connection.close()
        return self.returncode

    def send_signal(self, signum):
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=None):
        """(all that it writes to stdout, to stderr), when it has ended; TimeoutError, and killed, after so long."""
        with self.stdout, self.stderr, ThreadPoolExecutor(2) as pool:
            texts = [pool.submit(f.read) for f in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            finally:
                self.kill()
            return tuple(text.result() for text in texts)


class ForkServer:
    """The server's process, as seen by its clients. It starts with the environment env, and ends with `close`."""

    def __init__(self, env):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind('')  # Linux chooses a name that is no file
            self.address = listener.getsockname()
            listener.listen()
            self.process = subprocess.Popen([sys.executable, __file__, str(listener.fileno())], env=env,
                                            pass_fds=[listener.fileno()], stdin=subprocess.PIPE)

    def start(self, folder, script, args, env):
        """A `Script`, `python script args...` in folder, with text pipes. env: variables to add to the server's."""
        connection, (out, out_end), (err, err_end) = socket.socket(socket.AF_UNIX), os.pipe(), os.pipe()
        order = json.dumps([str(folder), script, args, env]).encode()
        assert len(order) < LONGEST_ORDER
        with open(out_end, 'wb'), open(err_end, 'wb'):
            connection.connect(self.address)
            socket.send_fds(connection, [order], [out_end, err_end])
        return Script(connection, open(out, encoding='utf-8'), open(err, encoding='utf-8'))

    def run(self, folder, script, args, env, timeout):
        """The subprocess.CompletedProcess of a script, see `start`, when it has ended. timeout: see `communicate`."""
        process = self.start(folder, script, args, env)
        out, err = process.communicate(timeout)
        return subprocess.CompletedProcess([script, *args], process.returncode, out, err)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def serve(listener):
    """Answer connections, until stdin ends. In the new process of each script, return what `run_script` needs."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that wait for scripts
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            break
        connection.close()
    listener.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    order, streams, _, _ = socket.recv_fds(connection, LONGEST_ORDER, 2)
    if len(streams) < 2:  # the client was interrupted
        os._exit(0)
    if script := os.fork():
        for fd in streams:
            os.close(fd)
        with suppress(OSError):  # the client is gone
            connection.sendall(b'%*d' % (N_DIGITS, script))
            connection.sendall(b'%*d' % (N_DIGITS, os.waitstatus_to_exitcode(os.waitpid(script, 0)[1])))
        os._exit(0)
    connection.close()
    for stream, fd in enumerate((os.open(os.devnull, os.O_RDONLY), *streams)):
        os.dup2(fd, stream)
        os.close(fd)
    sys.stdout = open(1, 'w', encoding='utf-8', closefd=False)  # the server's may be that of a file, which can seek
    sys.stderr = open(2, 'w', 1, 'utf-8', 'backslashreplace', closefd=False)
    return json.loads(order)


def run_script(folder, script, args, env):
    """Run a script as __main__, and return the exit code of the process."""
    os.environ.update(env)
    sys.stdout.reconfigure(encoding=env.get('PYTHONIOENCODING', 'utf-8'))
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
        with suppress(ImportError):  # the script that needs the package reports it
            importlib.import_module(package)
    # drawing the losses takes two thirds of a short run: here the picture stays empty, and test_train.py draws one
    sys.modules['matplotlib'].figure.Figure.savefig = lambda figure, file, **how: file.write(b'a picture')
    sys.modules['numba'].njit(lambda x: x)(0)  # the first compilation loads much of numba
    for finalizer in list(weakref.finalize._registry):  # the packages' would run at the end of each script
        finalizer.atexit = False
    gc.freeze()
    code = run_script(*serve(socket.socket(fileno=int(sys.argv[1]))))
    # what Python does at its end, except that no object is freed: that would copy memory shared with the server
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)

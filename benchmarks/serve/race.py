"""Servers with the same weights, up at the same time and loaded in turns."""
import asyncio
from contextlib import ExitStack, contextmanager

from benchmarks import rounds
from benchmarks.serve.client import closed_loop
from benchmarks.serve.servers import LlamaServer, missing, weights_on_disk
from benchmarks.serve.workloads import mixed
from benchmarks.shapes import config_of, model_with_varied_text
from decode.kernel.threads import n_cores

WEIGHTS = 'float32', 'int8'
TRIALS, TRIAL_TOKENS = 3, 16  # of each number of threads; new tokens of a request
TRIAL_SEED = 10**6            # no load has these prompts


def models(names, bias):
    """Yields (shape, config, folder with its model's files, weights) for each shape and kind of weights."""
    for name in names:
        model = model_with_varied_text(config_of(name, bias))
        with weights_on_disk(model) as folder:
            for weights in WEIGHTS:
                yield name, model.config, folder, weights


@contextmanager
def beside(ours, llama_server, config, folder, weights, n_slots, longest):
    """
    [our server, llama-server with so many slots for requests of at most `longest` tokens], the latter if it is there.
    It has one thread or one for each core, whichever answers n_slots clients sooner: ours chooses as well.
    """
    if missing(llama_server):
        yield [ours]
        return
    counts = sorted({1, n_cores()})
    with ExitStack() as up:
        servers = [up.enter_context(LlamaServer(llama_server, folder, weights, n_slots, longest, n)) for n in counts]
        fastest = min(servers, key=lambda server: trial(server, config, n_slots))
        for server in servers:
            if server is not fastest:
                server.stop()
        yield [ours, fastest]


def trial(server, config, n_clients):
    """Seconds that a short closed loop takes, at best."""
    asks = [ask._replace(n_new=min(ask.n_new, TRIAL_TOKENS)) for ask in mixed(config, n_clients * TRIALS, TRIAL_SEED)]
    return min(asyncio.run(closed_loop(server, asks[i::TRIALS], n_clients)).seconds for i in range(TRIALS))


def described(name, server, weights):
    """The fields of a row that say what was loaded. name: of the shape."""
    return dict(shape=name, server=server.name, weights=weights, threads=server.threads)


def take_turns(ways, repeats, description):
    """
    {way: its `Load` of each round}. ways: {way: a function of the number of the round that returns a coroutine of a
    `Load`}. Round 0 warms up and is not counted.
    """
    return rounds.take_turns({way: lambda n, load=load: asyncio.run(load(n)) for way, load in ways.items()}, repeats,
                             description)

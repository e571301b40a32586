"""Servers with the same weights, up at the same time and loaded in turns."""
import asyncio
from contextlib import contextmanager

from benchmarks import rounds
from benchmarks.serve.servers import LlamaServer, missing, weights_on_disk
from benchmarks.shapes import config_of, model_with_varied_text

WEIGHTS = 'float32', 'int8'


def models(names, bias):
    """Yields (shape, config, folder with its model's files, weights) for each shape and kind of weights."""
    for name in names:
        model = model_with_varied_text(config_of(name, bias))
        with weights_on_disk(model) as folder:
            for weights in WEIGHTS:
                yield name, model.config, folder, weights


@contextmanager
def beside(ours, llama_server, folder, weights, n_slots, longest):
    """[ours, llama-server with so many slots for requests of at most `longest` tokens], the latter if it is there."""
    if missing(llama_server):
        yield [ours]
        return
    with LlamaServer(llama_server, folder, weights, n_slots, longest) as theirs:
        yield [ours, theirs]


def take_turns(ways, repeats, description):
    """
    {way: its `Load` of each round}. ways: {way: a function of the number of the round that returns a coroutine of a
    `Load`}. Round 0 warms up and is not counted.
    """
    return rounds.take_turns({way: lambda n, load=load: asyncio.run(load(n)) for way, load in ways.items()}, repeats,
                             description)

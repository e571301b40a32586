"""
Loads of our server and llama-server, in turns, and a soak of ours.

    clients     so many of them, each of which sends its next request when it has its answer; prompts have 16 to 48
                tokens and answers 26 to 77, all different
    soak        10,000 requests to ours: half of the prompts begin like others, half of the answers are drawn with a
                seed, and 10 % of the clients go away. Are all blocks free then, is its memory as before, and are 500
                answers, chosen at random, those of a new server that has nothing else to do?
"""
import asyncio
import random
import signal
import statistics
import subprocess
import sys
from contextlib import ExitStack

import torch

import configurator
from benchmarks.harness import Case, Part, process_bytes, take_turns
from benchmarks.serve.client import Ask, closed_loop, figures
from benchmarks.serve.servers import LlamaServer, OurServer, missing, weights_on_disk
from benchmarks.shapes import model_of

CPU_ONLY = "the servers are compared"  # gpu mode measures ours on a GPU
PROMPT, NEW = 0.25, 0.4   # of the window, the mean lengths; single lengths are 0.5 to 1.5 of these
MOST = 128                # tokens that stand for the window, if it has more: M and L take too long otherwise
CLIENTS = 1, 4, 16, 64
EACH, FEWEST = {'S': 16, 'M': 4, 'L': 2}, 4  # requests of a client, and of all at least

# the soak: many requests, clients that leave, and memory that must not grow
SOAK_CLIENTS, SOAK_REQUESTS = 32, 10_000
COMPARED, LEAVING = 0.05, 0.1  # of the requests
TURNS = 10                     # after each of which memory and blocks are looked at
PREFIXES = 8                   # beginnings that prompts share
FLAT = 1.05                    # memory at the end, over that after a fifth of the requests, at most


def check(asked):
    """Returns what is written beside the rows. ValueError for lengths."""
    configurator.check_installation(configurator.OF_SERVER, "pip install -r requirements-serve.txt")
    if asked.lengths:
        raise ValueError("each part of serve mode has lengths of its own: leave lengths at auto")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended too
    if why := missing(asked.llama_server):
        if asked.llama_server:
            raise ValueError(why)
        print(f"not compared: llama-server ({why})")
        return dict(bias=asked.bias, missing={'llama-server': why})
    said = subprocess.run([asked.llama_server, '--version'], capture_output=True, text=True, timeout=20)
    return dict(bias=asked.bias, versions={'llama-server': ' '.join((said.stdout + said.stderr).split())})


def mixed(config, n, seed):
    """n `Ask`s of different lengths, each uniform between half and one and a half times its mean."""
    rng, window = random.Random(seed), min(config.block_size, MOST)

    def length(share):
        return max(1, round(window * share * rng.uniform(0.5, 1.5)))
    return [Ask([rng.randrange(config.vocab_size) for _ in range(length(PROMPT))], length(NEW)) for _ in range(n)]


def longest(asks):
    """Tokens of the longest prompt with its answer."""
    return max(len(ask.prompt) + ask.n_new for ask in asks)


def models(asked, shapes):
    """Yields (shape, config, folder with its model's files, weights) for each shape and kind of weights."""
    for name in asked.shapes or shapes:
        model = model_of(name, asked.bias)
        with weights_on_disk(model, not missing(asked.llama_server)) as folder:
            for weights in ('float32', 'int8') if asked.device == 'cpu' else ('bfloat16', 'float32'):
                yield name, model.config, folder, weights


def clients(asked):
    """llama-server runs with one thread and with one for each core, as two servers."""
    on_cpu = asked.device == 'cpu'
    counts = [] if not on_cpu or missing(asked.llama_server) else sorted({1, torch.get_num_threads()})
    for name, config, folder, weights in models(asked, 'SML' if on_cpu else 'M'):
        most = longest(mixed(config, 1000, 0))
        for C in asked.batches or (CLIENTS if on_cpu else [32]):
            n = asked.requests or max(FEWEST, (EACH[name] if on_cpu else 64) * C)
            with ExitStack() as up:
                servers = [up.enter_context(server) for server in (
                    OurServer(folder, weights, C * most, device=asked.device),
                    *(LlamaServer(asked.llama_server, folder, weights, C, most, threads) for threads in counts))]
                yield in_turns(name, config, weights, servers, C, n, asked.repeats)


def in_turns(name, config, weights, servers, C, n, repeats):
    """
    A row for each server, with rounds of n requests of C clients. over_llama: our tokens a second divided by those of
    llama-server, the median of the rounds, with the number of threads that is better for llama-server.
    """
    def setup(round_):  # other prompts for each number of clients and round: ours would remember them
        return mixed(config, n if round_ else C, seed=1000 * C + round_)
    cases = [Case(dict(shape=name, server=server.name, weights=weights, clients=C),
                  lambda asks, server=server: asyncio.run(closed_loop(server, asks, C)), setup) for server in servers]
    ours, *others = rows = [m.case.labels | figures(m.results)
                            for m in take_turns(cases, repeats, f'{name}, {weights}: {C} clients')]
    ratios = [[a / b for a, b in zip(ours['runs_tok_per_s'], other['runs_tok_per_s'])]
              for other in others if all(other['runs_tok_per_s'])]
    ours['over_llama'] = min(map(statistics.median, ratios), default=None)
    return rows


def soaked(asked):
    for name, config, folder, weights in models(asked, 'S' if asked.device == 'cpu' else 'M'):
        yield [soak(name, config, folder, weights, max(asked.batches or [SOAK_CLIENTS]),
                    asked.requests or SOAK_REQUESTS, asked.device)]


def asks_of_all_kinds(config, n, seed):
    """n requests: with common prefixes and without, greedy and drawn, of clients that stay and that leave."""
    rng, asks = random.Random(seed), []
    prefixes = [[rng.randrange(config.vocab_size) for _ in range(rng.randrange(4, 60))] for _ in range(PREFIXES)]
    for i, ask in enumerate(mixed(config, n, seed)):
        prompt = ask.prompt
        if rng.random() < 0.5:
            prompt = (rng.choice(prefixes) + prompt)[:config.block_size - ask.n_new]
        asks.append(ask._replace(prompt=prompt, seed=i if rng.random() < 0.5 else None,
                                 leaves=rng.randrange(3) if rng.random() < LEAVING else None))
    return asks


def soak(name, config, folder, weights, n_clients, n, device='cpu'):
    """A row. different: answers that are not those of the request alone. resident: bytes after each turn."""
    asks = asks_of_all_kinds(config, n, seed=0)
    staying = [ask for ask in asks if ask.leaves is None]
    chosen = random.Random(1).sample(staying, min(len(staying), max(1, round(COMPARED * n))))
    answers, resident, used = [], [], []
    # room for two thirds of the clients' longest requests, so that some samples lose their blocks on the way
    with OurServer(folder, weights, max(1, 2 * n_clients // 3) * longest(asks), device=device) as ours:
        for turn in range(TURNS):
            some = asks[turn * n // TURNS:(turn + 1) * n // TURNS]
            answers += asyncio.run(closed_loop(ours, some, n_clients)).answers
            used.append(ours.blocks_left())
            resident.append(process_bytes(pid=ours.process.pid))
        preemptions, hits = int(ours.metric('preemptions_total')), int(ours.metric('prefix_hits_total'))
    with OurServer(folder, weights, longest(asks), device=device) as ours:
        alone = asyncio.run(closed_loop(ours, [ask._replace(salt=str(i)) for i, ask in enumerate(chosen)], 1)).answers
    answer_to, failed = {id(a.ask): a for a in answers}, [a.error for a in answers if a.error not in ('', 'left')]
    different = [a for ask, a in zip(chosen, alone) if a.error or a.token_ids != answer_to[id(ask)].token_ids]
    return dict(shape=name, weights=weights, requests=n, clients=n_clients, failed=len(failed), error=failed[:1],
                blocks_used=max(used), resident=resident, compared=len(chosen), different=len(different),
                flat=None if None in resident else resident[-1] <= FLAT * resident[TURNS // 5 - 1],
                preemptions=preemptions, prefix_hits=hits)


PARTS = dict(
    clients=Part(clients, 60, "clients that wait for their answers", 'server weights shape clients tok_per_s first_ms '
                 'per_token_ms failed error over_llama'),
    soak=Part(soaked, 6, "soak", 'shape weights requests failed error blocks_used flat compared different '
              'preemptions prefix_hits'),
)

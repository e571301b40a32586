"""
Our server for 10,000 requests of all kinds: are all blocks free then, is its memory as before, are the answers right?

    python bench.py --mode=serve --only=soak

Half of the prompts begin like others, half of the answers are drawn with a seed, and 10 % of the clients go away. The
answers to 500 requests, chosen at random, are compared with those of a new server that has nothing else to do.
"""
import asyncio
import random

from benchmarks.harness import Part, process_bytes
from benchmarks.serve.client import closed_loop
from benchmarks.serve.servers import Ours, blocks_left, models
from benchmarks.serve.workloads import longest, mixed, tokens

CLIENTS, REQUESTS = 32, 10_000
COMPARED = 0.05                  # of the requests
TURNS = 10                       # after each of which memory and blocks are looked at
PREFIXES, LEAVING = 8, 0.1
FLAT = 1.05                      # memory at the end, over that after a fifth of the requests


def rows(asked):
    for name, config, folder, weights in models(asked.shapes or 'S', asked.bias):
        yield [soak(name, config, folder, weights, max(asked.batches or [CLIENTS]), asked.requests or REQUESTS)]


def asks_of_all_kinds(config, n, seed):
    """n requests: with common prefixes and without, greedy and drawn, of clients that stay and that leave."""
    rng, asks = random.Random(seed), []
    prefixes = [tokens(rng, config, rng.randrange(4, 60)) for _ in range(PREFIXES)]
    for i, ask in enumerate(mixed(config, n, seed)):
        prompt = ask.prompt
        if rng.random() < 0.5:
            room = config.block_size - ask.n_new
            prompt = (rng.choice(prefixes) + prompt)[:room]
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
    with Ours(folder, weights, max(1, 2 * n_clients // 3) * longest(asks), device=device) as ours:
        for turn in range(TURNS):
            some = asks[turn * n // TURNS:(turn + 1) * n // TURNS]
            answers += asyncio.run(closed_loop(ours, some, n_clients)).answers
            used.append(blocks_left(ours))
            resident.append(process_bytes(pid=ours.process.pid))
        preemptions, hits = int(ours.metric('preemptions_total')), int(ours.metric('prefix_hits_total'))
    with Ours(folder, weights, longest(asks), device=device) as ours:
        alone = asyncio.run(closed_loop(ours, [ask._replace(salt=str(i)) for i, ask in enumerate(chosen)], 1)).answers
    answer_to, failed = {id(a.ask): a for a in answers}, [a.error for a in answers if a.error not in ('', 'left')]
    different = [a for ask, a in zip(chosen, alone) if a.error or a.token_ids != answer_to[id(ask)].token_ids]
    known = None not in resident
    return dict(shape=name, weights=weights, requests=n, clients=n_clients, failed=len(failed), error=failed[:1],
                blocks_used=max(used), resident=resident, compared=len(chosen), different=len(different),
                flat=resident[-1] <= FLAT * resident[TURNS // 5 - 1] if known else None, preemptions=preemptions,
                prefix_hits=hits)


PARTS = dict(soak=Part(rows, 6, "soak", (
    'shape weights requests failed error blocks_used resident flat compared different preemptions prefix_hits')))

"""
What the pages of several sequences share: memory, and the computation of a prompt that begins like an earlier one.

    python bench.py --mode=caches --only=sharing
"""
import torch

import kvcache
from benchmarks.shapes import config_of
from model import GPT

MINUTES = 0.1
NAMES = 'S', 'M'


def run(names, batches, contexts, bias, repeats):
    rows = []
    print("\nwhat pages share")
    for name in names or NAMES:
        for n_samples in batches or [10]:
            s = dict(shape=name, **sharing(GPT(config_of(name, bias)).eval(), n_samples))
            print(f"{name}: {s['samples']} samples of a prompt of {s['prompt']} tokens take {s['bytes_held']:,} bytes, "
                  f"and {s['bytes_unshared']:,} if nothing is shared; of a second prompt of {s['second_prompt']} "
                  f"tokens, which begins with the first prompt, {s['computed']} were computed")
            rows.append(s)
    return rows


def sharing(model, n_samples=10, n_prompt=100):
    """
    What a paged cache shares: memory of n_samples samples of one prompt, and computation of a prompt that begins alike.

    bytes_held: of the blocks that are used after each sample has one token of its own; bytes_unshared: if no two
    samples shared a block. computed: tokens of a second prompt, which begins with the first one's n_prompt tokens,
    that are not in blocks of the first.
    """
    cache, vocab_size = kvcache.make_cache(model, 'paged', n_samples), model.config.vocab_size
    prompt = torch.randint(vocab_size, (1, n_prompt), generator=torch.Generator().manual_seed(0))
    first = cache.new()
    cache.step([first], [0], prompt)
    samples = [first] + [cache.fork(first) for _ in range(n_samples - 1)]
    cache.step(samples, [n_prompt] * n_samples, torch.arange(n_samples)[:, None] % vocab_size)
    tables = cache.blocks.tables  # {sequence: its blocks}
    held, unshared = {block for table in tables.values() for block in table}, sum(map(len, tables.values()))
    bytes_a_block = cache.nbytes() // len(cache.blocks.references)
    second, new_tokens = cache.new(), torch.arange(1, 6)[None]
    cache.step([second], [0], torch.cat([prompt, new_tokens], dim=1))
    n_second, n_cached = n_prompt + new_tokens.size(1), len(held & set(tables[second])) * cache.blocks.block_size
    return dict(samples=n_samples, prompt=n_prompt, bytes_held=len(held) * bytes_a_block,
                bytes_unshared=unshared * bytes_a_block, second_prompt=n_second, computed=n_second - n_cached)

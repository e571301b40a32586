"""
The caches of kvcache/ on one model: the time of many sequences at once, and what the paged cache shares.

    python bench.py --mode=caches
"""
import statistics
import time

import torch
from tqdm import tqdm

import kvcache
from benchmarks.shapes import config_of, model_with_varied_text
from generation import Work


def run(names, bias, repeats):
    """Measure shapes, print a table of each, and return (rows, sharing): a dict a case, and a dict a shape."""
    rows, shared = [], []
    for name in names:
        model = model_with_varied_text(config_of(name, bias))
        mine = race(name, model, repeats)
        print(table(mine))
        rows += mine
        s = dict(shape=name, **sharing(model))
        print(f"{s['samples']} samples of a prompt of {s['prompt']} tokens take {s['bytes_held']:,} bytes, "
              f"and {s['bytes_unshared']:,} if nothing is shared; of a second prompt of {s['second_prompt']} tokens, "
              f"which begins with the first prompt, {s['computed']} were computed")
        shared.append(s)
    return rows, shared


def table(rows):
    """The rows of one shape as text."""
    first, prompts = rows[0], rows[0]['prompts']
    lines = [f"\n{first['shape']}: {len(prompts)} sequences of {prompts[0]} to {prompts[-1]} tokens, "
             f"{first['new_tokens']} more of each",
             f"{'kv_cache':<10}{'kv_bits':>8}  {'':<18}{'tok/s':>8}{'time':>8}  tokens"]
    lines += [f"{row['kv_cache']:<10}{row['kv_bits']:>8}  {'together' if row['together'] else 'one after another':<18}"
              f"{row['tok_per_s']:>8,.0f}{row['time_over_contiguous']:>7.2f}x  "
              f"{'the same' if row['same_tokens'] else 'DIFFERENT'}" for row in rows]
    return '\n'.join(lines)


def prompt_lengths(config, n_seq=8, n_new=24):
    """Prompt lengths of n_seq sequences, evenly spread; n_new tokens fit behind the longest."""
    longest = config.block_size - n_new
    return [max(1, longest * (i + 2) // (n_seq + 1)) for i in range(n_seq)]


@torch.inference_mode()
def decode_together(model, kind, bits, prompts, n_new):
    """Seconds for n_new greedy tokens of each prompt (token lists), in one batch: (seconds, tokens (n_new, B))."""
    cache = kvcache.make_cache(model, kind, len(prompts), bits)
    handles, lengths = [cache.new() for _ in prompts], [len(prompt) for prompt in prompts]
    logits = torch.cat([cache.step(Work([handle], [0], torch.tensor([prompt])))
                        for handle, prompt in zip(handles, prompts)])
    tokens = []
    t0 = time.perf_counter()
    for i in range(n_new):
        idx = logits.argmax(dim=-1, keepdim=True)
        tokens.append(idx[:, 0])
        logits = cache.step(Work(handles, [length + i for length in lengths], idx))
    return time.perf_counter() - t0, torch.stack(tokens)


def one_after_another(model, kind, bits, prompts, n_new):
    """The same as `decode_together`, with each prompt in a batch of its own."""
    parts = [decode_together(model, kind, bits, [prompt], n_new) for prompt in prompts]
    return sum(seconds for seconds, _ in parts), torch.cat([tokens for _, tokens in parts], dim=1)


def race(name, model, repeats, n_new=24):
    """
    Tokens a second of 8 sequences of different lengths, in each kind of cache, together and one after another.

    Returns a dict a case, for JSON. same_tokens: as those of the contiguous cache of the same width.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(model.config.vocab_size, (n,), generator=generator).tolist()
               for n in prompt_lengths(model.config, n_new=n_new)]
    cases = [(decode_together, kind, bits) for kind in kvcache.KINDS for bits in (0, 8, 4)]
    cases.append((one_after_another, 'paged', 0))
    seconds, tokens = {case: [] for case in cases}, {}
    for repeat in tqdm(range(1 + repeats), desc=f'{name}: caches', leave=False, disable=None):
        for case in cases:
            how, kind, bits = case
            s, tokens[case] = how(model, kind, bits, prompts, n_new)
            seconds[case] += [s] if repeat else []
    contiguous = statistics.median(seconds[decode_together, 'tuple', 0])
    return [dict(shape=name, kv_cache=kind, kv_bits=bits, together=how is decode_together,
                 prompts=[len(p) for p in prompts], new_tokens=n_new,
                 tok_per_s=len(prompts) * n_new / statistics.median(runs),
                 time_over_contiguous=statistics.median(runs) / contiguous, runs_s=runs,
                 same_tokens=torch.equal(tokens[how, kind, bits], tokens[decode_together, 'tuple', bits]))
            for (how, kind, bits), runs in seconds.items()]


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
    cache.step(Work([first], [0], prompt))
    samples = [first] + [cache.fork(first) for _ in range(n_samples - 1)]
    cache.step(Work(samples, [n_prompt] * n_samples, torch.arange(n_samples)[:, None] % vocab_size))
    tables = cache.blocks.tables  # {sequence: its blocks}
    held, unshared = {block for table in tables.values() for block in table}, sum(map(len, tables.values()))
    bytes_a_block = cache.nbytes() // len(cache.blocks.references)
    second, new_tokens = cache.new(), torch.arange(1, 6)[None]
    cache.step(Work([second], [0], torch.cat([prompt, new_tokens], dim=1)))
    n_second, n_cached = n_prompt + new_tokens.size(1), len(held & set(tables[second])) * cache.blocks.block_size
    return dict(samples=n_samples, prompt=n_prompt, bytes_held=len(held) * bytes_a_block,
                bytes_unshared=unshared * bytes_a_block, second_prompt=n_second, computed=n_second - n_cached)

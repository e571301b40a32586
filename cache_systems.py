"""What the systems of kvcache/ cost and save, measured on one model."""
import statistics
import time

import torch
from tqdm import tqdm

from kvcache import SYSTEMS, CacheDecoder


def ragged_lengths(config, n_seq=8, n_new=24):
    """Prompt lengths of n_seq sequences, spread so that n_new tokens fit behind the longest."""
    longest = config.block_size - n_new
    return [max(1, longest * (i + 2) // (n_seq + 1)) for i in range(n_seq)]


@torch.inference_mode()
def decode_together(model, kind, bits, prompts, n_new):
    """Seconds for n_new greedy tokens of each prompt (token lists), all in one batch: (seconds, tokens (n_new, B))."""
    decoder = CacheDecoder(model, kind, len(prompts), bits)
    system = decoder.system
    seqs = [system.new() for _ in prompts]
    logits = torch.cat([system.step(model, [seq], torch.tensor([prompt])) for seq, prompt in zip(seqs, prompts)])
    tokens = []
    t0 = time.perf_counter()
    for _ in range(n_new):
        idx = logits.argmax(dim=-1, keepdim=True)
        tokens.append(idx[:, 0])
        logits = system.step(model, seqs, idx)
    return time.perf_counter() - t0, torch.stack(tokens)


def one_after_another(model, kind, bits, prompts, n_new):
    """The same, prompt by prompt."""
    parts = [decode_together(model, kind, bits, [prompt], n_new) for prompt in prompts]
    return sum(seconds for seconds, _ in parts), torch.cat([tokens for _, tokens in parts], dim=1)


def race(name, model, repeats, n_new=24):
    """Tokens a second of 8 ragged sequences on each system, together and one after another; rows for JSON."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(model.config.vocab_size, (n,), generator=generator).tolist() for n in ragged_lengths(model.config, n_new=n_new)]
    cases = [(how, kind, bits) for how in (decode_together, one_after_another) for kind in SYSTEMS for bits in (0, 8, 4)
             if how is decode_together or (kind, bits) == ('paged', 0)]
    seconds, tokens = {case: [] for case in cases}, {}
    for repeat in tqdm(range(1 + repeats), desc=f'{name}: cache systems', leave=False, disable=None):
        for case in cases:
            how, kind, bits = case
            s, tokens[case] = how(model, kind, bits, prompts, n_new)
            seconds[case] += [s] if repeat else []
    contiguous = statistics.median(seconds[decode_together, 'tuple', 0])
    return [dict(shape=name, kv_cache=kind, kv_bits=bits, together=how is decode_together, prompts=[len(p) for p in prompts], new_tokens=n_new,
                 tok_per_s=len(prompts) * n_new / statistics.median(runs), time_over_contiguous=statistics.median(runs) / contiguous, runs_s=runs,
                 same_tokens=torch.equal(tokens[how, kind, bits], tokens[decode_together, 'tuple', bits]))
            for (how, kind, bits), runs in seconds.items()]


@torch.inference_mode()
def sharing(model, n_samples=10, n_prompt=100):
    """
    Of n_samples of one prompt, in a paged cache: positions of keys and values that are held, and would be without sharing; and
    of a second prompt that begins with the first one's n_prompt tokens: how many of its tokens were computed.
    """
    decoder = CacheDecoder(model, 'paged', n_samples)
    pool, vocab_size = decoder.system.pool, model.config.vocab_size
    prompt = torch.randint(vocab_size, (n_prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    _, cache = decoder(torch.tensor([prompt]), None)
    cache = [cache[0].rows(torch.zeros(n_samples, dtype=torch.long))]
    _, cache = decoder(torch.arange(n_samples)[:, None] % vocab_size, cache)
    held = {block for table in pool.blocks.tables.values() for block in table}
    bytes_a_block = pool.nbytes() // len(pool.blocks.references)
    tables = sum(len(table) for table in pool.blocks.tables.values())
    more = prompt + [1, 2, 3, 4, 5]
    n_cached = pool.add(model, 'more', more)
    pool.run(model, ['more'])
    return dict(samples=n_samples, prompt=n_prompt, bytes_held=len(held) * bytes_a_block, bytes_unshared=tables * bytes_a_block,
                second_prompt=len(more), computed=len(more) - n_cached)

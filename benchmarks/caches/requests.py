"""
Many requests at once in each cache of kvcache/, in each number of bits, over the contiguous cache.

    python bench.py --mode=caches --only=requests
"""
import statistics
import time

import torch

import decode
import kvcache
from benchmarks import rounds
from benchmarks.shapes import config_of, model_with_varied_text

MINUTES = 2
NAMES = 'S', 'M'


def run(names, batches, contexts, bias, repeats):
    rows = []
    for name in names or NAMES:
        model = model_with_varied_text(config_of(name, bias))
        for B in batches or [8]:
            mine = race(name, model, repeats, B)
            print(table(mine), flush=True)
            rows += mine
    return rows


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
def decode_together(model, decoder, kind, bits, prompts, n_new):
    """Seconds for n_new greedy tokens of each prompt (token lists), in one batch: (seconds, tokens (n_new, B))."""
    cache = kvcache.make_cache(model, kind, len(prompts), bits, decoder)
    handles, lengths = [cache.new() for _ in prompts], [len(prompt) for prompt in prompts]
    logits = torch.cat([cache.step([handle], [0], torch.tensor([prompt]))
                        for handle, prompt in zip(handles, prompts)])
    tokens = []
    t0 = time.perf_counter()
    for i in range(n_new):
        idx = logits.argmax(dim=-1, keepdim=True)
        tokens.append(idx[:, 0])
        logits = cache.step(handles, [length + i for length in lengths], idx)
    return time.perf_counter() - t0, torch.stack(tokens)


def one_after_another(model, decoder, kind, bits, prompts, n_new):
    """The same as `decode_together`, with each prompt in a batch of its own."""
    parts = [decode_together(model, decoder, kind, bits, [prompt], n_new) for prompt in prompts]
    return sum(seconds for seconds, _ in parts), torch.cat([tokens for _, tokens in parts], dim=1)


def race(name, model, repeats, n_seq=8, n_new=24):
    """
    Tokens a second of n_seq sequences of different lengths, in each kind of cache, together and one after another.

    Returns a dict a case, for JSON. same_tokens: as those of the contiguous cache of the same width.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(model.config.vocab_size, (n,), generator=generator).tolist()
               for n in prompt_lengths(model.config, n_seq, n_new)]
    cases = [(decode_together, kind, bits) for kind in kvcache.KINDS for bits in (0, 8, 4)]
    cases.append((one_after_another, 'paged', 0))
    decoder, tokens = decode.best(model, n_seq), {}

    def way(case):
        how, kind, bits = case

        def seconds(round_):
            taken, tokens[case] = how(model, decoder, kind, bits, prompts, n_new)
            return taken
        return seconds
    seconds = rounds.take_turns({case: way(case) for case in cases}, repeats, f'{name}: requests')
    contiguous = decode_together, 'tuple', 0
    return [dict(shape=name, kv_cache=kind, kv_bits=bits, together=how is decode_together,
                 prompts=[len(p) for p in prompts], new_tokens=n_new,
                 tok_per_s=n_seq * n_new / statistics.median(runs),
                 time_over_contiguous=rounds.ratio(seconds, (how, kind, bits), contiguous), runs_s=runs,
                 same_tokens=torch.equal(tokens[how, kind, bits], tokens[decode_together, 'tuple', bits]))
            for (how, kind, bits), runs in seconds.items()]

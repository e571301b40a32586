"""
The time to the first token after a long prompt, in every engine: one prefill and the choice of a token.

    python bench.py --mode=peers --only=prefill --shape=L

A row has one prompt. "cache" is PyTorch: the model itself.
"""
from benchmarks.peers import race, report
from benchmarks.peers.ours import NoCache
from benchmarks.shapes import config_of, model_with_varied_text

MINUTES = 12
LENGTHS = {'S': (64,), 'M': (256,), 'L': (512, 1000)}  # tokens of the prompts


def run(names, batches, lengths, bias, repeats, max_seconds):
    """lengths: of the prompts."""
    rows = []
    for name in names or ('M', 'L'):
        model = model_with_varied_text(config_of(name, bias))
        prompts = [race.random_prompts(model, B, T) for B in batches or [1] for T in lengths or LENGTHS[name]]
        engines = [engine for engine in race.OURS + race.PEERS if engine is not NoCache]  # that is the same work
        mine = race.race(name, model, prompts, 1, repeats, max_seconds, engines)
        print(report.prefill_table(mine), flush=True)
        rows += mine
    return rows

"""
Greedy tokens a second after a short prompt, in every engine.

    python bench.py --mode=peers --only=decoding --shape=M --batches=32
"""
from benchmarks.peers import race, report
from benchmarks.shapes import PROMPT, WITHIN_WINDOW, config_of, model_with_varied_text

MINUTES = 24
NAMES, BATCHES = ('S', 'M', 'L'), {'S': (1, 10, 32), 'M': (1, 10, 32), 'L': (1, 8)}


def run(names, batches, lengths, bias, repeats, max_seconds):
    """lengths: the number of new tokens, the largest if there are several."""
    rows = []
    for name in names or NAMES:
        model = model_with_varied_text(config_of(name, bias))
        prompts = [race.random_prompts(model, B, PROMPT) for B in batches or BATCHES[name]]
        n_new = max(lengths or [WITHIN_WINDOW[name]])
        mine = race.race(name, model, prompts, n_new, repeats, max_seconds)
        print(report.table(mine), flush=True)
        rows += mine
    return rows

"""
The same weights in other engines: Hugging Face transformers, CTranslate2, llama.cpp and ONNX Runtime.

    pip install -r requirements-peers.txt
    python bench.py --mode=peers
    python bench.py --mode=peers --only=decoding --shape=M --batches=32

    race       the parts (decoding, prefill, long_context): all engines in turns
    engine     what every engine has: weights, threads, generate
    ours       our ways to generate, as engines
    hugging_face, ctranslate, llamacpp, onnx      one engine each
"""
from benchmarks.harness import Panel
from benchmarks.peers.race import OURS, PARTS, missing, versions

__all__ = ['CPU_ONLY', 'PARTS', 'PICTURE', 'check', 'picture']

PICTURE, CPU_ONLY = 'peers.png', "the peers are compared, beginning with float32 weights,"


def check(asked):
    """Says which engines are not compared. Returns what is written beside the rows."""
    for engine, why in missing().items():
        print(f"not compared: {engine} ({why})")
    return dict(versions=versions(), missing=missing(), bias=asked.bias, max_seconds=asked.max_seconds)


def picture(figures, machine):
    """Bars of tokens a second: a line of panels for each shape, a column for each batch."""
    rows, ours = figures.get('decoding', {}).get('rows', ()), {engine.name for engine in OURS}
    shapes, batches = (list(dict.fromkeys(row[key] for row in rows)) for key in ('shape', 'batch'))
    panels = []
    for shape in shapes:
        for B in batches:
            bars = [(f"{row['engine']}, {row['weights']}", row['tok_per_s'], f"{row['tok_per_s']:,.0f}",
                     'C0' if row['engine'] in ours else '0.7')
                    for row in rows if (row['shape'], row['batch']) == (shape, B)]
            panels.append(Panel(f'{shape}, batch {B}', bars=bars) if bars else None)
    return rows and dict(panels=panels, columns=len(batches), size=(5, 3.2), title=f'greedy tokens/s, {machine}')

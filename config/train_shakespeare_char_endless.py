# a character-level GPT whose context has no end: rotary positions, and a window with sinks in place of a full context.
# train.py with this file, and then sample.py --use_cache=True --max_new_tokens=100000: each token costs the same
import pathlib

exec(pathlib.Path(__file__).with_name('train_shakespeare_char.py').read_text())  # what follows is different from it

out_dir = 'out-shakespeare-char-endless'
wandb_run_name = 'mini-gpt-endless'

position = 'rope'  # no table of positions that ends
window = block_size // 2  # noqa: F821  a training row has more than the window, so that training sees what has left it
n_sink = 4  # through the layers a token depends on n_layer * (window - 1) tokens before it, and on the sinks

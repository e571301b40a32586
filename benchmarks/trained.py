"""Models that benchmarks train by train.py, each once."""
import os
import subprocess
import sys

import checkpoint as checkpoints
from model import GPT, GPTConfig


def train_once(folder, settings):
    """
    Train by train.py with config/train_shakespeare_char.py and these settings, {name: value}, one of which is
    max_iters, unless the folder has the checkpoint of such a run. ValueError if train.py fails or is stopped.
    """
    settings = settings | dict(out_dir=folder, always_save_checkpoint=True)
    if is_trained(folder, settings):
        return
    print(f"training {folder}", flush=True)
    command = [sys.executable, 'train.py', 'config/train_shakespeare_char.py',
               *(f'--{name}={value}' for name, value in settings.items())]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not is_trained(folder, settings):
        reason = (done.stderr.strip() or 'it was stopped').splitlines()[-1]
        raise ValueError(f"{' '.join(command)} failed: {reason}")


def load_trained(folder):
    """The model that `train_once` has trained in a folder, in eval mode."""
    return checkpoints.build(checkpoints.load(os.path.join(folder, 'ckpt.pt')), GPT, GPTConfig).eval()


def is_trained(folder, settings):
    """Does a folder have the checkpoint of a finished run with these settings?"""
    path = os.path.join(folder, 'ckpt.pt')
    saved = checkpoints.load(path) if os.path.exists(path) else dict(iter_num=0, config={})
    return saved['iter_num'] == settings['max_iters'] and settings.items() <= saved['config'].items()

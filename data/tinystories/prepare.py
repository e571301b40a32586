"""
Short stories in simple English, written by GPT-4 (TinyStories, arXiv:2305.07759, licence CDLA-Sharing-1.0), as byte
pairs that are trained on them: train.bin, val.bin, meta.json and tokenizer.json in this folder.

    python data/tinystories/prepare.py                     100 MB of 2.2 GB; it continues a download
    python data/tinystories/prepare.py --megabytes=0       all
    python data/tinystories/prepare.py --tokenizer=HuggingFaceTB/SmolLM2-135M      as a model's tokens, for finetuning
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import configurator  # isort: skip

from data import prepare_text
from tokenizer import END_OF_TEXT

URL = 'https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-{}.txt'

megabytes = 100    # of the stories to train on, and at most a fifth of them to validate; 0 takes all
vocab_size = 4096  # tokens of the tokenizer
tokenizer = ''     # or that of a model: a run's out_dir, a tokenizer.json, or what init_from of train.py takes


def main(config):
    configurator.check_range(globals(), 0, 10**6, 'megabytes')
    folder = os.path.dirname(os.path.abspath(__file__))
    most = dict(train=megabytes * 10**6, val=megabytes * 10**6 // 5)
    try:
        paths = {split: prepare_text.download(URL.format(name), os.path.join(folder, f'{name}.txt'), most[split])
                 for split, name in (('val', 'valid'), ('train', 'train'))}
        source, texts = 'TinyStories', lambda split: stories(paths[split], most[split])
    except ConnectionError as e:
        found, source = prepare_text.stand_in(e, "connect to the internet and run this again")
        texts = dict(val=found[:len(found) // 10], train=found[len(found) // 10:]).get
    made = prepare_text.tokenizer_for(texts('train'), tokenizer, vocab_size)
    prepare_text.write_dataset(folder, dict(train=texts('train'), val=texts('val')), made, source, ends=True)


def stories(path, most):
    """The stories in the first `most` bytes of a file, 0 for all, without the last one, which may be cut."""
    left, rest = most or os.path.getsize(path), b''
    with open(path, 'rb') as f:
        while piece := f.read(min(left, 2**20)):
            left -= len(piece)
            *whole, rest = (rest + piece).split(END_OF_TEXT.encode())
            yield from (story.decode().strip() for story in whole)


if __name__ == '__main__':
    configurator.run(main)

"""
1.1 MB of Shakespeare's works as characters: train.bin, val.bin and meta.json in this folder.

    python data/shakespeare_char/prepare.py
    python data/shakespeare_char/prepare.py --input=my.txt     any UTF-8 text instead
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import configurator  # isort: skip

from data import prepare_text
from tokenizer import CharTokenizer

input = ''  # a text file to use; by default input.txt in this folder, downloaded if need be


def main(config):
    folder = os.path.dirname(os.path.abspath(__file__))
    text, source = prepare_text.get_text(folder, input)
    prepare_text.write_dataset(folder, prepare_text.split(text), CharTokenizer.of_text(text), source)


if __name__ == '__main__':
    configurator.run(main)

"""
The works of Shakespeare as GPT-2's byte pairs: train.bin, val.bin and meta.json in this folder, for finetuning GPT-2.

    python data/shakespeare/prepare.py
    python data/shakespeare/prepare.py --input=my.txt     any UTF-8 text instead
"""
import os
import sys

sys.path[:0] = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
                os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
import configurator  # isort: skip

import prepare_text

from tokenizer import GPT2Tokenizer

input = ''  # a text file to use; by default input.txt in this folder, downloaded if need be


def main(config):
    folder = os.path.dirname(os.path.abspath(__file__))
    text, source = prepare_text.get_text(folder, input)
    prepare_text.write_dataset(folder, text, GPT2Tokenizer(), source)


if __name__ == '__main__':
    configurator.run(main)

"""
The works of Shakespeare as byte pairs: train.bin, val.bin and meta.json in this folder.

    python data/shakespeare/prepare.py                    GPT-2's byte pairs, for finetuning GPT-2
    python data/shakespeare/prepare.py --vocab_size=4096  byte pairs that are trained on the text, for a new model
    python data/shakespeare/prepare.py --tokenizer=HuggingFaceTB/SmolLM2-135M      those of a model, for finetuning it
    python data/shakespeare/prepare.py --input=my.txt     any UTF-8 text instead
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import configurator  # isort: skip

from data import prepare_text

input = ''      # a text file to use; by default input.txt in this folder, downloaded if need be
vocab_size = 0  # tokens of a tokenizer that is trained on the first 90 % of the text; 0 takes GPT-2's
tokenizer = ''  # or that of a model: a run's out_dir, a tokenizer.json, or what init_from of train.py takes


def main(config):
    if tokenizer and vocab_size:
        raise ValueError(f"vocab_size={vocab_size} trains a new tokenizer, and tokenizer={tokenizer} loads an existing "
                         "one: leave one of the two settings out")
    folder = os.path.dirname(os.path.abspath(__file__))
    text, source = prepare_text.get_text(folder, input)
    parts = prepare_text.split(text)
    prepare_text.write_dataset(folder, parts, prepare_text.tokenizer_for(parts['train'], tokenizer, vocab_size), source)


if __name__ == '__main__':
    configurator.run(main)

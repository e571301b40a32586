"""
1.1 MB of Shakespeare's works as characters: train.bin, val.bin and meta.json in this folder.

    python data/shakespeare_char/prepare.py
    python data/shakespeare_char/prepare.py --input=my.txt     any UTF-8 text instead
"""
import os
import pydoc_data.topics
import sys

sys.path[:0] = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
                os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
import configurator  # isort: skip

import prepare_text

from tokenizer import CharTokenizer

input = ''  # a text file to use; by default input.txt in this folder, downloaded if need be


def main(config):
    folder = os.path.dirname(os.path.abspath(__file__))
    try:
        text, source = prepare_text.get_text(folder, input)
    except ConnectionError as e:
        print(f"\n!! {e}.\n!! USING A STAND-IN: the help texts of Python. A model can be trained on them.\n"
              "!! For Shakespeare, connect to the internet and run this again, or put the text into "
              "data/shakespeare_char/input.txt.\n", file=sys.stderr)
        text = '\n\n'.join(pydoc_data.topics.topics[topic] for topic in sorted(pydoc_data.topics.topics))
        source = "stand-in (pydoc_data.topics, no network)"
    prepare_text.write_dataset(folder, prepare_text.split(text), CharTokenizer.of_text(text), source)


if __name__ == '__main__':
    configurator.run(main)

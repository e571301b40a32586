"""
OpenWebText as GPT-2's byte pairs: about 9 billion tokens, 17 GB of train.bin and 8 MB of val.bin in this folder.

    pip install datasets
    python data/openwebtext/prepare.py

Takes some hours and, with the download and its cache, 60 GB of disk.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import configurator  # isort: skip

import numpy as np
from tqdm import tqdm

from data.prepare_text import write_meta
from tokenizer import GPT2Tokenizer
from whole_file import replacing

source = 'Skylion007/openwebtext'  # a data set on the Hugging Face hub with a 'text' column
num_proc = 8                       # processes to tokenize with, about half of your cores


def tokenize(example):
    """The ids of one document, and <|endoftext|> after them, from which the model learns where documents end."""
    bpe = GPT2Tokenizer().bpe  # tiktoken caches it, so this is cheap
    ids = bpe.encode_ordinary(example['text']) + [bpe.eot_token]
    return {'ids': ids, 'len': len(ids)}


def main(config):
    try:
        from datasets import load_dataset
    except ImportError as e:
        raise ValueError("OpenWebText needs the datasets package: pip install datasets") from e
    configurator.check_range(globals(), 1, 1024, 'num_proc')
    tokenizer = GPT2Tokenizer()  # an error about its byte pairs comes now, not after the download
    folder = os.path.dirname(os.path.abspath(__file__))
    try:
        documents = load_dataset(source, num_proc=num_proc)['train'].select_columns('text')
    except Exception as e:  # of the network, of the disk, of the hub, or of the files it has
        raise ValueError(f"{source} could not be downloaded ({type(e).__name__}: {' '.join(str(e).split())[:200]}): "
                         "connect to the internet, look for free disk (60 GB), and run this again") from e
    splits = documents.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    for split, name in (('test', 'val'), ('train', 'train')):
        encoded = splits[split].map(tokenize, remove_columns=['text'], desc=f'tokenizing {name}', num_proc=num_proc)
        n_tokens, n_shards = 0, min(1024, len(encoded))
        with replacing(os.path.join(folder, name + '.bin')) as f:
            for shard in tqdm(range(n_shards), desc=f'writing {name}.bin'):
                ids = np.concatenate(encoded.shard(n_shards, shard, contiguous=True).with_format('numpy')['ids'])
                f.write(ids.astype(np.uint16).tobytes())
                n_tokens += len(ids)
            if name == 'train':  # it is moved into place last
                write_meta(folder, tokenizer, source=source)
        print(f"{name}.bin: {n_tokens:,} tokens")


if __name__ == '__main__':
    configurator.run(main)

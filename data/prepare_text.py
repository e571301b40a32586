"""
A data set from one text, for both Shakespeare scripts: get the text (a file or a download), split it 90 : 10, encode
it, write train.bin, val.bin and meta.json.
"""
import hashlib
import json
import os

import numpy as np
import requests

import tokenizer as tokenizers
from whole_file import replacing

URL = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'


def get_text(folder, path):
    """
    (text, its source). The text is the file at path if there is a path, else folder/input.txt, which is downloaded if
    it is not there.

    ConnectionError if the download fails. ValueError if the file is empty or not UTF-8, or the download another text.
    """
    kept = os.path.join(folder, 'input.txt')
    if not path and not os.path.exists(kept):
        write(kept, download())
    path, source = (path, path) if path else (kept, 'input.txt')
    text = tokenizers.read_text(path)
    if not text:
        raise ValueError(f"{path} is empty")
    return text, 'tinyshakespeare' if hashlib.sha256(text.encode()).hexdigest() == SHA256 else source


def download():
    """The bytes at URL. ConnectionError if no server gives them; ValueError if they do not have the hash SHA256."""
    print(f"downloading {URL}", flush=True)
    try:
        response = requests.get(URL, timeout=10)
        response.raise_for_status()
    except Exception as e:  # requests raises others too, for settings of a proxy or of certificates
        raise ConnectionError(f"{URL} could not be downloaded ({type(e).__name__})") from e
    got = hashlib.sha256(response.content).hexdigest()
    if got != SHA256:
        raise ValueError(f"{URL} has changed or was damaged: its sha256 is {got[:12]}..., not {SHA256[:12]}...; "
                         "try again, or pass a text with --input=PATH")
    return response.content


def write_dataset(folder, text, tokenizer, source):
    """Write train.bin (the first 90 % of the characters), val.bin (the other characters) and meta.json to folder."""
    n_train = int(len(text) * 0.9)
    dtype = 'uint16' if tokenizer.vocab_size <= 1 << 16 else 'uint32'
    print(f"{len(text):,} characters from {source}; vocabulary {tokenizer.vocab_size:,}")
    parts = {'train': text[:n_train], 'val': text[n_train:]}
    ids = {split: np.array(tokenizer.encode(part), dtype=dtype) for split, part in parts.items()}
    meta = tokenizer.state() | {'vocab_size': tokenizer.vocab_size, 'dtype': dtype, 'source': source}
    write(os.path.join(folder, 'val.bin'), ids['val'].tobytes())
    write(os.path.join(folder, 'meta.json'), json.dumps(meta, ensure_ascii=False, indent=1).encode())
    write(os.path.join(folder, 'train.bin'), ids['train'].tobytes())  # last: where it exists, the others do
    for split in ids:
        print(f"{split}.bin: {len(ids[split]):,} tokens")


def write(path, content):
    with replacing(path) as f:
        f.write(content)

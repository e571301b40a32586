"""
A data set from texts, for the scripts of this folder: download a text, find or train a tokenizer, encode, and write
train.bin, val.bin and meta.json, and a tokenizer.json where the tokenizer has one.
"""
import hashlib
import json
import os
import pydoc_data.topics
import re
import signal
import sys
from contextlib import suppress

import numpy as np
import requests
from tqdm import tqdm

import checkpoint
import tokenizer as tokenizers
from formats.tokenizer_files import huggingface_tokenizer
from whole_file import replacing

URL = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'
PIECE = 2**16  # bytes of a download that are written at a time
ENCODED = 2**20  # characters of a text that are encoded at a time, or more: the library needs some 150 bytes for each
LEAST_VOCAB, MOST_VOCAB = 257, 2**18  # of byte pairs: 256 bytes and <|endoftext|>; what can be trained in minutes


def get_text(folder, path):
    """
    (text, its source). The text is the file at path if there is a path, else folder/input.txt, which is downloaded if
    it is not there. Without a network it is a stand-in.

    ValueError if the file is empty or not UTF-8, or if the download broke off or is another text.
    """
    kept = os.path.join(folder, 'input.txt')
    try:
        path, source = (path, path) if path else (download(URL, kept, sha256=SHA256), 'input.txt')
    except ConnectionError as e:
        texts, source = stand_in(e, f"connect to the internet and run this again, or put it into {kept}")
        return '\n\n'.join(texts), source
    text = tokenizers.read_text(path)
    if not text:
        raise ValueError(f"{path} is empty")
    return text, 'tinyshakespeare' if hashlib.sha256(text.encode()).hexdigest() == SHA256 else source


def download(url, path, most=0, sha256=''):
    """
    Download the file at url, or its first `most` bytes, unless they are there. Returns path for the whole file, and
    path.part for a part, which the next call continues. The hash of a whole file must be sha256. Without sha256 it must
    be the hash that the server names, as the Hugging Face hub does.

    ConnectionError if no byte could be downloaded. ValueError if the download broke off, or has another hash.
    """
    part = path + '.part'
    here = os.path.getsize(part) if os.path.exists(part) else 0
    if os.path.exists(path) or 0 < most <= here:
        return path if os.path.exists(path) else part
    print(f"downloading {url}", flush=True)
    asked = {'Range': f"bytes={here}-{most - 1 if most else ''}", 'Accept-Encoding': 'identity'}
    try:
        response = requests.get(url, timeout=10, stream=True, headers=asked)
        if response.status_code != 416:  # which says that the part is the whole file
            response.raise_for_status()
        goes_on, headers = response.status_code in (206, 416), response.headers
        n_all = int(headers['Content-Range'].rpartition('/')[2] if goes_on else headers['Content-Length'])
    except Exception as e:  # requests raises others too, for settings of a proxy or of certificates
        if not here:
            raise ConnectionError(f"{url} could not be downloaded ({type(e).__name__})") from e
        raise ValueError(f"{url} could not be reached ({type(e).__name__}), and {part} has only its first {here:,} "
                         "bytes: try again, or ask for no more bytes than these") from e
    wanted = min(most or n_all, n_all)
    with response, open(part, 'ab' if goes_on else 'wb') as f, suppress(requests.RequestException):
        pieces = iter(tqdm(response.iter_content(PIECE), unit='64 kB', disable=None))
        while f.tell() < wanted and (piece := next(pieces, b'')):
            f.write(piece)
    if (here := os.path.getsize(part)) < wanted:
        raise ValueError(f"{url} broke off after {here:,} of {wanted:,} bytes: run the same command again to go on")
    if here < n_all:
        return part
    etags = [each.headers.get('X-Linked-ETag', '').strip('"') for each in [*response.history, response]]
    sha256, digest = sha256 or next((etag for etag in etags if len(etag) == 64), ''), hashlib.sha256()
    with open(part, 'rb') as f:
        while piece := f.read(PIECE):
            digest.update(piece)
    if sha256 not in ('', digest.hexdigest()):
        os.remove(part)
        raise ValueError(f"{url} has changed or was damaged: its sha256 is {digest.hexdigest()[:12]}..., not "
                         f"{sha256[:12]}...; try again, or pass a text with --input=PATH")
    os.replace(part, path)
    return path


def stand_in(error, advice):
    """(texts, their source): the help texts of Python, where a text could not be downloaded. stderr says so loudly."""
    print(f"\n!! {error}.\n!! USING A STAND-IN: the help texts of Python. A model can be trained on them.\n"
          f"!! For the real text, {advice}.\n", file=sys.stderr)
    topics = pydoc_data.topics.topics
    return [topics[name] for name in sorted(topics)], "stand-in (pydoc_data.topics, no network)"


def tokenizer_for(texts, name, vocab_size):
    """
    The tokenizer that `name` names, see `checkpoint.tokenizer_named`. Without a name: byte-level byte pairs that are
    trained on texts, up to vocab_size tokens with <|endoftext|>, or with vocab_size=0 GPT-2's.
    """
    if name:
        return checkpoint.tokenizer_named(name)
    if vocab_size == 0:
        return tokenizers.GPT2Tokenizer()
    if not LEAST_VOCAB <= vocab_size <= MOST_VOCAB:
        raise ValueError(f"vocab_size must be from {LEAST_VOCAB} (all bytes, and the end of a text) to {MOST_VOCAB:,}, "
                         f"or 0 for GPT-2's byte pairs, not {vocab_size}")
    from tokenizers import ByteLevelBPETokenizer
    library = ByteLevelBPETokenizer()
    print(f"training a tokenizer of {vocab_size:,} tokens", file=sys.stderr)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Ctrl-C would wait for the library
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    library.train_from_iterator((piece for text in texts for piece in pieces(text)), vocab_size, min_frequency=0,
                                show_progress=False, special_tokens=[tokenizers.END_OF_TEXT])
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return tokenizers.JSONTokenizer(library.to_str())


def write_dataset(folder, parts, tokenizer, source, ends=False):
    """
    Write train.bin, val.bin, meta.json and the files of the tokenizer to a folder. parts: {'train': texts, 'val':
    texts}, iterables that are read once. ends: put the token that ends a text, if there is one, after each of them.
    """
    lengths = np.array([len(text) for text in tokenizer.bytes_of_tokens(skip_special=True)])
    end, n_bytes, n_chars = [*tokenizer.end_tokens[:1]] if ends else [], dict(val=0, train=0), 0
    with replacing(os.path.join(folder, 'train.bin')) as train, replacing(os.path.join(folder, 'val.bin')) as val:
        for split, f in (('val', val), ('train', train)):
            with tqdm(desc=split, unit=' characters', unit_scale=True, disable=None) as progress:
                for text in parts[split]:
                    for i, piece in enumerate(pieces(text)):
                        ids = np.array(tokenizer.encode(piece, add_special_tokens=not i), dtype_of(tokenizer))
                        f.write(ids.tobytes())
                        n_bytes[split] += int(lengths[ids].sum())
                        progress.update(len(piece))
                    f.write(np.array(end, dtype_of(tokenizer)).tobytes())
                    n_chars += len(text)
        for f in train, val:  # a full disk shows here, before anything is replaced
            f.flush()
            os.fsync(f.fileno())
        print(f"{n_chars:,} characters from {source}; vocabulary {tokenizer.vocab_size:,}")
        for split, f in (('train', train), ('val', val)):
            print(f"{split}.bin: {f.tell() // dtype_of(tokenizer).itemsize:,} tokens of {n_bytes[split]:,} bytes")
        write_meta(folder, tokenizer, source=source, bytes=n_bytes)
    # train.bin was moved into place last: where it exists, the others are of the same tokenizer


def pieces(text):
    """
    A text in pieces of ENCODED characters or more, cut after a line break that follows no blank and precedes a letter
    or a digit. GPT-2's byte pairs never cross such a place; other tokenizers may write one token more or less there.
    """
    start, end, cut = 0, -1, re.compile(r'(?<=\S)\n(?=\w)')
    while end < len(text):
        found = cut.search(text, start + ENCODED)
        end = found.end() if found else len(text)
        yield text[start:end]
        start = end


def dtype_of(tokenizer):
    """The dtype of token files."""
    return np.dtype('uint16' if tokenizer.vocab_size <= 1 << 16 else 'uint32')


def write_meta(folder, tokenizer, **more):
    """
    Write meta.json, and what `tokenizer.state_of_dataset` reads of a tokenizer that meta.json cannot hold. An older
    train.bin is removed, because it may be of another tokenizer: move the new one into place after this.
    """
    with suppress(FileNotFoundError):
        os.remove(os.path.join(folder, 'train.bin'))
    meta = dict(vocab_size=tokenizer.vocab_size, dtype=dtype_of(tokenizer).name, **more)
    if isinstance(tokenizer, tokenizers.JSONTokenizer):
        write(os.path.join(folder, 'tokenizer.json'), tokenizer.json.encode())
        files = {'tokenizer_config.json': huggingface_tokenizer(tokenizer)[1],
                 'generation_config.json': dict(eos_token_id=[*tokenizer.ends]), 'meta.json': meta}
    else:
        files = {'meta.json': tokenizer.state() | meta}
    for name, content in files.items():
        write(os.path.join(folder, name), json.dumps(content, ensure_ascii=False, indent=1).encode())


def write(path, content):
    with replacing(path) as f:
        f.write(content)


def split(text):
    """The parts of a data set: the first 90 % of a text for training, the rest to validate. ValueError if too short."""
    n_train = int(len(text) * 0.9)
    if n_train < 2:
        raise ValueError(f"the text has {len(text)} characters, and a data set needs at least 3: give a longer text")
    return dict(train=[text[:n_train]], val=[text[n_train:]])

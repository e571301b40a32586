"""
Text to token ids and back: the characters of a training text, or GPT-2's byte pairs, behind the same three names:
encode(text) -> list of ints, decode(ids) -> text, vocab_size.

`state()` is what a checkpoint and a data folder's meta.json hold, `from_state` turns it back.
"""
import json
import os
import pickle

GPT2 = {'kind': 'gpt2'}


class CharTokenizer:
    """One id a character, in the order of `chars`."""

    def __init__(self, chars):
        self.chars = list(chars)
        self.ids = {c: i for i, c in enumerate(self.chars)}
        self.vocab_size = len(self.chars)
        if len(self.ids) != self.vocab_size or not self.vocab_size:
            raise ValueError("a character vocabulary needs at least one character and none twice")

    @classmethod
    def of_text(cls, text):
        return cls(sorted(set(text)))

    def encode(self, text):
        """Raises ValueError naming the characters that have no id."""
        try:
            return [self.ids[c] for c in text]
        except KeyError:
            unknown = sorted(set(text) - set(self.ids))
            raise ValueError(f"characters the model never saw: {' '.join(map(repr, unknown[:20]))}"
                             f"{' ...' if len(unknown) > 20 else ''} (it knows {self.vocab_size})") from None

    def decode(self, ids):
        return ''.join(self.chars[i] if i < self.vocab_size else '\ufffd' for i in ids)

    def state(self):
        return {'kind': 'char', 'chars': ''.join(self.chars)}


class GPT2Tokenizer:
    """GPT-2's byte pairs, through tiktoken, which keeps them on disk after the first use."""

    def __init__(self):
        import tiktoken
        try:
            self.bpe = tiktoken.get_encoding('gpt2')
        except Exception as e:  # whatever its download died of, there is one thing to say
            raise ValueError(f"GPT-2's byte pairs could not be downloaded ({type(e).__name__}): "
                             "connect once, or point TIKTOKEN_CACHE_DIR at a copy") from e
        self.vocab_size = self.bpe.n_vocab

    def encode(self, text):
        """<|endoftext|> in the text becomes its one token."""
        return self.bpe.encode(text, allowed_special={'<|endoftext|>'})

    def decode(self, ids):
        # a model's vocabulary may be padded (50304 rows for 50257 tokens): such an id has no text
        return self.bpe.decode_bytes([i for i in ids if i < self.vocab_size]).decode('utf-8', errors='replace')

    def state(self):
        return GPT2


def check_state(state):
    """ValueError unless state is a dict such as `state()` of a tokenizer returns, of a kind known here or not."""
    if not isinstance(state, dict) or not isinstance(state.get('kind'), str):
        raise ValueError("a tokenizer's state must be a dict with its kind, a text")
    if state['kind'] == 'char' and not isinstance(state.get('chars'), str):
        raise ValueError("a tokenizer's state of kind 'char' must have chars, a text")


def from_state(state):
    """The tokenizer of a state; ValueError if it is damaged or of an unknown kind."""
    check_state(state)
    if state.get('kind') == 'char':
        return CharTokenizer(state['chars'])
    if state.get('kind') == 'gpt2':
        return GPT2Tokenizer()
    raise ValueError(f"unknown kind of tokenizer: {state.get('kind')!r}, so these tokens have no text")


def state_of_dataset(folder):
    """The state of the tokenizer a data folder was prepared with; GPT-2's where no meta file says otherwise."""
    meta = read_meta(folder)
    if 'kind' not in meta:
        return {'kind': 'unknown'} if 'vocab_size' in meta else GPT2
    return {k: meta[k] for k in ('kind', 'chars') if k in meta}


def read_meta(folder):
    """
    What meta.json (or nanoGPT's meta.pkl) in a data folder says, as a dict: kind and chars of the tokenizer,
    vocab_size, dtype of the token files, source of the text, all optional. {} where there is no such file,
    ValueError where it is damaged.
    """
    path = os.path.join(folder, 'meta.json')
    if os.path.exists(path):
        try:
            with open(path, encoding='utf-8') as f:
                return checked_meta(json.load(f))
        except ValueError as e:
            raise ValueError(f"{path} is damaged ({e}): prepare the data again") from e
    path = os.path.join(folder, 'meta.pkl')
    if not os.path.exists(path):
        return {}
    try:
        with open(path, 'rb') as f:
            meta = PlainUnpickler(f).load()
        if 'itos' not in meta:  # nanoGPT's train.py asks for no more than this
            return checked_meta({'vocab_size': meta['vocab_size']})
        chars = [meta['itos'][i] for i in range(len(meta['itos']))]
        if any(len(c) != 1 for c in chars):
            raise ValueError("a token of it is not one character")
        return checked_meta({'kind': 'char', 'chars': ''.join(chars), 'vocab_size': len(chars)})
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError, IndexError, ValueError) as e:
        raise ValueError(f"{path} is not nanoGPT's dict of characters ({e}): prepare the data again") from e


def checked_meta(meta):
    wanted = {'kind': ('char', 'gpt2'), 'dtype': ('uint16', 'uint32')}
    if not isinstance(meta, dict) or any(meta[k] not in wanted[k] for k in wanted if k in meta):
        raise ValueError(f"kind must be one of {wanted['kind']} and dtype one of {wanted['dtype']}")
    if (meta.get('kind') == 'char') != isinstance(meta.get('chars'), str):
        raise ValueError("chars, a text, goes with kind 'char'")
    if not isinstance(meta.get('vocab_size', 1), int) or meta.get('vocab_size', 1) < 1:
        raise ValueError("vocab_size must be a positive integer")
    return meta


def read_text(path):
    """The text of a UTF-8 file; ValueError if it is not one."""
    try:
        with open(path, encoding='utf-8') as f:
            return f.read()
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8 text ({e.reason} at byte {e.start})") from e


class PlainUnpickler(pickle.Unpickler):
    """A pickle can run any code it names. This one may name nothing, which leaves dicts, lists, strings and numbers."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid):
        raise pickle.UnpicklingError("it asks for a persistent object")


class TextStream:
    """
    The text of a token stream, piece by piece: `push(token)` returns what can be printed by now.

    A character split over several tokens is held back until it is whole, and a text that may be the
    beginning of `stop` until it is clear; from `stop` on nothing comes any more and `stopped` is True.
    """

    def __init__(self, tokenizer, stop=''):
        self.tokenizer, self.stop, self.stopped = tokenizer, stop, False
        self.tokens, self.held = [], ''

    def push(self, token):
        if self.stopped:
            return ''
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens)
        if text.endswith('\ufffd') and len(self.tokens) < 4:  # UTF-8 needs four bytes at most
            return ''
        self.tokens, text = [], self.held + text
        if self.stop and self.stop in text:
            self.stopped, self.held = True, ''
            return text[:text.index(self.stop)]
        n_held = next((n for n in range(min(len(self.stop), len(text)), 0, -1) if self.stop.startswith(text[-n:])), 0)
        self.held = text[len(text) - n_held:]
        return text[:len(text) - n_held]

    def flush(self):
        """What was still held back when the tokens ended."""
        text = '' if self.stopped else self.held + self.tokenizer.decode(self.tokens)
        self.tokens, self.held = [], ''
        return text

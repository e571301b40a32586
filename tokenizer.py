"""
Tokenizers: one id per character of a training text, GPT-2's byte pairs, or what a tokenizer.json of another model says.
All have encode(text) -> list of ints, decode(ids) -> text, and vocab_size.

`state()` is a tokenizer as a dict, which checkpoints and the meta.json of data folders hold. `from_state` makes the
tokenizer again.
"""
import json
import os
import pickle

GPT2 = {'kind': 'gpt2'}


class CharTokenizer:
    """One id per character, in the order of `chars`. ValueError if `chars` is empty or has a character twice."""

    def __init__(self, chars):
        self.chars = list(chars)
        self.ids = {c: i for i, c in enumerate(self.chars)}
        self.vocab_size = len(self.chars)
        if len(self.ids) != self.vocab_size or not self.vocab_size:
            raise ValueError("a character vocabulary must have at least one character and none twice, but this one "
                             f"has {self.vocab_size} characters, {len(self.ids)} of them different")

    @classmethod
    def of_text(cls, text):
        return cls(sorted(set(text)))

    def encode(self, text):
        """The ids of the characters. ValueError if some have no id: it names them."""
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
    """GPT-2's byte pairs, by tiktoken, which downloads them once and keeps them on disk."""

    def __init__(self):
        import tiktoken
        try:
            self.bpe = tiktoken.get_encoding('gpt2')
        except Exception as e:  # tiktoken raises whatever its download raised
            raise ValueError(f"GPT-2's byte pairs could not be downloaded ({type(e).__name__}): connect to the "
                             "internet once, or set TIKTOKEN_CACHE_DIR to a folder that has them") from e
        self.vocab_size = self.bpe.n_vocab

    def encode(self, text):
        """The ids of the text. <|endoftext|> in it becomes the one token of that name."""
        return self.bpe.encode(text, allowed_special={'<|endoftext|>'})

    def decode(self, ids):
        # a model's vocabulary may be padded (50304 rows for 50257 tokens): the ids from 50257 on have no text
        return self.bpe.decode_bytes([i for i in ids if i < self.vocab_size]).decode('utf-8', errors='replace')

    def state(self):
        return GPT2


class JSONTokenizer:
    """
    The tokenizer of a tokenizer.json, by the tokenizers library.

    json: the contents of the file, a string. ValueError if the library is not installed, if it cannot read them, and if
    the text of some tokens depends on those before them: texts are printed token by token here. This is so for all
    decoders but ByteLevel (GPT-2, StarCoder, MPT) and Fuse (one id per character).
    """

    def __init__(self, json):
        try:
            import tokenizers
        except ImportError as e:
            raise ValueError("a tokenizer.json needs the tokenizers library: pip install tokenizers") from e
        try:
            self.library = tokenizers.Tokenizer.from_str(json)
        except Exception as e:  # the library raises plain Exceptions
            raise ValueError(f"the tokenizer.json cannot be read ({e}): is the download complete?") from e
        if type(self.library.decoder).__name__ not in ('ByteLevel', 'Fuse'):
            raise ValueError(f"the decoder of the tokenizer.json is {type(self.library.decoder).__name__}, but only "
                             "ByteLevel and Fuse give each token a text of its own")
        self.library.no_truncation()  # a file may ask for both, for training
        self.library.no_padding()
        self.json = json
        self.vocab_size = max(self.library.get_vocab(with_added_tokens=True).values()) + 1  # some ids may be unused

    def encode(self, text):
        """The ids of the text. The name of a special token, such as <|endoftext|>, becomes that token."""
        return self.library.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        # a model's vocabulary may be padded: ids without a token have no text
        return self.library.decode([i for i in ids if i < self.vocab_size], skip_special_tokens=False)

    def state(self):
        return {'kind': 'json', 'json': self.json}


def check_state(state):
    """ValueError unless state has the form of a tokenizer's `state()`. Its kind may be an unknown one."""
    if not isinstance(state, dict) or not isinstance(state.get('kind'), str):
        raise ValueError(f"a tokenizer's state must be a dict with its kind, a string, not {str(state)[:50]!r}")
    for kind, key in (('char', 'chars'), ('json', 'json')):
        if state['kind'] == kind and not isinstance(state.get(key), str):
            raise ValueError(f"a tokenizer's state of kind {kind!r} must have {key}, a string, not "
                             f"{str(state.get(key))[:50]!r}")


def from_state(state):
    """The tokenizer of a state. ValueError if the state is damaged or of an unknown kind."""
    check_state(state)
    if state['kind'] == 'char':
        return CharTokenizer(state['chars'])
    if state['kind'] == 'gpt2':
        return GPT2Tokenizer()
    if state['kind'] == 'json':
        return JSONTokenizer(state['json'])
    raise ValueError(f"the kind of a tokenizer must be char, gpt2 or json, not {state['kind']!r}: these tokens have no "
                     "text")


def state_of_dataset(folder):
    """
    The state of the tokenizer of a data folder, or of a model's folder in Hugging Face format: the one that its meta
    file names; otherwise its tokenizer.json; otherwise GPT-2's, where the folder does not say that it is another.
    """
    meta, path = read_meta(folder), os.path.join(folder, 'tokenizer.json')
    if 'kind' in meta:
        return {k: meta[k] for k in ('kind', 'chars') if k in meta}
    if os.path.exists(path):
        return {'kind': 'json', 'json': read_text(path)}
    return {'kind': 'unknown'} if 'vocab_size' in meta or not is_gpt2(folder) else GPT2


def is_gpt2(folder):
    """False for the folder of a model of another family: it has a config.json with another model_type."""
    try:
        return read_json(os.path.join(folder, 'config.json')).get('model_type', 'gpt2') == 'gpt2'
    except (OSError, ValueError):  # a data folder has none; what is damaged is read elsewhere
        return True


def read_meta(folder):
    """
    The contents of meta.json (or nanoGPT's meta.pkl) in a data folder, as a dict: kind and chars of the tokenizer,
    vocab_size, dtype of the token files, source of the text, all optional. {} if there is no such file, ValueError if
    it is damaged.
    """
    path = os.path.join(folder, 'meta.json')
    if os.path.exists(path):
        try:
            return checked_meta(read_json(path))
        except ValueError as e:
            raise ValueError(f"{path} is damaged ({e}): prepare the data again") from e
    path = os.path.join(folder, 'meta.pkl')
    if not os.path.exists(path):
        return {}
    with open(path, 'rb') as f:
        try:
            meta = PlainUnpickler(f).load()
            if 'itos' not in meta:  # nanoGPT's train.py needs vocab_size only
                return checked_meta({'vocab_size': meta['vocab_size']})
            chars = [meta['itos'][i] for i in range(len(meta['itos']))]
            if any(len(c) != 1 for c in chars):
                raise ValueError("a token in it is not a single character")
            return checked_meta({'kind': 'char', 'chars': ''.join(chars), 'vocab_size': len(chars)})
        except Exception as e:  # what a damaged pickle raises may be anything
            raise ValueError(f"{path} is not nanoGPT's dict of characters ({e}): prepare the data again") from e


def checked_meta(meta):
    """meta, a dict, itself. ValueError unless its values are allowed."""
    wanted = {'kind': ('char', 'gpt2'), 'dtype': ('uint16', 'uint32')}
    if any(meta[k] not in wanted[k] for k in wanted if k in meta):
        raise ValueError(f"kind must be one of {wanted['kind']} and dtype one of {wanted['dtype']}")
    if (meta.get('kind') == 'char') != isinstance(meta.get('chars'), str):
        raise ValueError("chars, a string, is needed with kind 'char' and with no other")
    if type(meta.get('vocab_size', 1)) is not int or not 1 <= meta.get('vocab_size', 1) <= 2**32:
        raise ValueError(f"vocab_size must be an integer from 1 to 2**32, not {str(meta['vocab_size'])[:50]}")
    return meta


def read_json(path):
    """The dict in a JSON file. ValueError if it holds something else, or is damaged."""
    try:
        content = json.loads(read_text(path))
    except RecursionError as e:
        raise ValueError("its brackets are nested too deeply") from e
    if not isinstance(content, dict):
        raise ValueError(f"it must hold a dict, but it holds a {type(content).__name__}")
    return content


def read_text(path):
    """The text of a UTF-8 file, without a byte order mark. ValueError if its bytes are not UTF-8."""
    try:
        with open(path, encoding='utf-8-sig') as f:
            return f.read()
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8 text ({e.reason} at byte {e.start})") from e


class PlainUnpickler(pickle.Unpickler):
    """
    Reads pickles of dicts, lists, strings and numbers only. A pickle runs code by naming a class or a function; here
    every name is an error.
    """

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it names {module}.{name}, but only plain values are read")

    def persistent_load(self, pid):
        raise pickle.UnpicklingError("it names a persistent object, but only plain values are read")


class TextStream:
    """
    The text of a token stream, piece by piece: `push(token)` returns the text that can be printed now.

    A character that consists of several tokens is held back until it is complete. Text that may be the beginning of
    `stop` is held back until it is known whether it is. After `stop` every piece is '' and `stopped` is True.
    """

    def __init__(self, tokenizer, stop=''):
        self.tokenizer, self.stop, self.stopped = tokenizer, stop, False
        self.tokens, self.held = [], ''

    def push(self, token):
        if self.stopped:
            return ''
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens)
        if text.endswith('\ufffd') and len(self.tokens) < 4:  # a character has at most four bytes in UTF-8
            return ''
        self.tokens, text = [], self.held + text
        if self.stop and self.stop in text:
            self.stopped, self.held = True, ''
            return text[:text.index(self.stop)]
        n_held = next((n for n in range(min(len(self.stop), len(text)), 0, -1) if self.stop.startswith(text[-n:])), 0)
        self.held = text[len(text) - n_held:]
        return text[:len(text) - n_held]

    def flush(self):
        """The text that is still held back after the last token."""
        text = '' if self.stopped else self.held + self.tokenizer.decode(self.tokens)
        self.tokens, self.held = [], ''
        return text

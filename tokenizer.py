"""
Tokenizers: one id per character of a training text, GPT-2's byte pairs, or what a tokenizer.json of another model says.
All have encode(text) -> list of ints, vocab_size, end_of_text, the id of the token that ends a document, or None, and
end_tokens, the ids with which a model ends what it writes. Those of chat models have conversation(messages) -> ints.

`state()` is a tokenizer as a dict, which checkpoints and the meta.json of data folders hold; `from_state` reads it.
"""
import codecs
import json
import os
import pickle
import re
import sys
from bisect import bisect_left
from functools import cached_property

from chat.template import ChatTemplate

GPT2 = {'kind': 'gpt2'}
THOUGHT_TAGS = '<think>', '</think>'  # around what a model thinks: they are always a part of the text
END_OF_TEXT = '<|endoftext|>'  # in GPT-2 and those that follow it: gpt_bigcode, starcoder2, mpt
ROLES = 'bos_token', 'eos_token', 'unk_token', 'pad_token'
PAIRS = 'vocab.json', 'merges.txt'
MOST_TOKENS = 2**20  # of a tokenizer.json; the largest that are known have some 2**18
SENTENCEPIECE = [  # the decoders of its tokenizer.json; the last one is there if a blank is put before each text
    dict(type='Replace', pattern=dict(String='\u2581'), content=' '), dict(type='ByteFallback'), dict(type='Fuse'),
    dict(type='Strip', content=' ', start=1, stop=0)]
FIELDS = dict(chars=str, json=str, end_tokens=list, special_tokens=dict, chat_template=str, file_ids=dict,
              added_tokens=list)


class Tokenizer:
    """
    What all tokenizers share: the text of ids. token_bytes: the bytes of each id, a list. A model may have more ids
    than its tokenizer; beyond: the bytes of each of those. special_ids: ids whose text is not a part of an answer, such
    as those of the tokens that begin and end a turn. added_ids: of all tokens that a file adds to its vocabulary.
    strips: does a text begin without the blank of its first token?
    """
    end_of_text, beyond, chat_template, strips = None, b'', None, False
    special_ids = added_ids = frozenset()

    @property
    def end_tokens(self):
        return () if self.end_of_text is None else (self.end_of_text,)

    def bytes_of_tokens(self, n=0, skip_special=False):
        """The bytes of each id, a list of at least n, for a `TextStream`. skip_special: none for special_ids."""
        table = self.token_bytes + [self.beyond] * (n - self.vocab_size)
        for i in self.special_ids if skip_special else ():
            table[i] = b''
        return table

    def decode(self, ids):
        """The text of ids."""
        table = self.token_bytes
        text = b''.join([table[i] if i < self.vocab_size else self.beyond for i in ids]).decode('utf-8', 'replace')
        return text.removeprefix(' ') if self.strips else text


class CharTokenizer(Tokenizer):
    """One id per character, in the order of `chars`. ValueError if `chars` is empty or has a character twice."""
    beyond = '\ufffd'.encode()

    def __init__(self, chars):
        self.chars = list(chars)
        self.ids = {c: i for i, c in enumerate(self.chars)}
        self.vocab_size = len(self.chars)
        if len(self.ids) != self.vocab_size or not self.vocab_size:
            raise ValueError("a character vocabulary must have at least one character and none twice, but this one "
                             f"has {self.vocab_size} characters, {len(self.ids)} of them different")
        self.token_bytes = [c.encode('utf-8', 'replace') for c in self.chars]

    @classmethod
    def of_text(cls, text):
        return cls(sorted(set(text)))

    def encode(self, text, add_special_tokens=True):
        """The ids of the characters. ValueError if some have no id: it names them."""
        try:
            return [self.ids[c] for c in text]
        except KeyError:
            unknown = sorted(set(text) - set(self.ids))
            raise ValueError(f"characters the model never saw: {' '.join(map(repr, unknown[:20]))}"
                             f"{' ...' if len(unknown) > 20 else ''} (it knows {self.vocab_size})") from None

    def state(self):
        return {'kind': 'char', 'chars': ''.join(self.chars)}


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte pairs, by tiktoken, which downloads them once and keeps them on disk."""

    def __init__(self):
        import tiktoken
        try:
            self.bpe = tiktoken.get_encoding('gpt2')
        except Exception as e:  # tiktoken raises whatever its download raised
            raise ValueError(f"GPT-2's byte pairs could not be downloaded ({type(e).__name__}): connect to the "
                             "internet once, or set TIKTOKEN_CACHE_DIR to a folder that has them") from e
        self.vocab_size, self.end_of_text = self.bpe.n_vocab, self.bpe.eot_token
        self.special_ids = frozenset([self.end_of_text])

    def encode(self, text, add_special_tokens=True):
        """The ids of the text. <|endoftext|> in it becomes the one token of that name."""
        return self.bpe.encode(text, allowed_special={END_OF_TEXT})

    @cached_property
    def token_bytes(self):
        return [self.bpe.decode_single_token_bytes(i) for i in range(self.vocab_size)]

    def state(self):
        return GPT2


class JSONTokenizer(Tokenizer):
    """
    The tokenizer of a tokenizer.json, by the tokenizers library.

    json: the contents of the file, a string. end_tokens: ids, by default that of <|endoftext|>. The eos_token and the
    token with which the chat template ends an answer are end tokens in any case. special_tokens:
    {'bos_token': text, ...}. chat_template: a template's source, see `chat.template.ChatTemplate`. file_ids: {name of a
    file: {'bos_token_id': id, ...}}, for an export. added_tokens: those that other files add, as transformers adds
    them: dicts as in tokenizer.json, or texts of special tokens; they become a part of `json`. n_rows: of the model.

    ValueError if the library cannot read json, and if its decoder is none of ByteLevel (GPT-2, StarCoder, MPT, Llama 3,
    Qwen), Fuse (one id per character) and SentencePiece's with bytes (Llama 2, Mistral): texts are printed token by
    token here, and with others the text of a token depends on those before it.
    """

    def __init__(self, json, end_tokens=None, special_tokens=None, chat_template=None, file_ids=None, added_tokens=()):
        import tokenizers
        os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')  # of several texts; it warns at each fork
        try:
            self.library = tokenizers.Tokenizer.from_str(json)
            new = {token.content: {} for token in self.library.get_added_tokens_decoder().values()}
            for token in added_tokens:
                fields = token if isinstance(token, dict) else dict(content=token)
                text = fields['content']
                if text not in new or len(fields) > 1:
                    new[text] = fields | dict(special=fields.get('special', False) or text in added_tokens)
            n_new = self.library.add_tokens([tokenizers.AddedToken(**token) for token in new.values() if token])
            self.library.no_truncation()  # a file may ask for both, for training
            self.library.no_padding()
            self.begins = self.library.encode('').ids  # what stands before each text: a BOS token, or nothing
        except BaseException as e:  # the library raises plain Exceptions, and a PanicException, which is none
            if not isinstance(e, Exception) and type(e).__name__ != 'PanicException':
                raise
            raise ValueError("the tokenizer.json cannot be read, or a token that the files beside it add "
                             f"({' '.join(str(e).split())}): is the download complete?") from e
        self.decoder, self.strips = decoder_of(json)
        self.json = self.library.to_str() if n_new else json
        if not self.library.get_vocab(with_added_tokens=False):
            raise ValueError("the tokenizer.json has no tokens: is the download complete?")
        self.vocab_size = max(self.library.get_vocab(with_added_tokens=True).values()) + 1  # some ids may be unused
        if self.vocab_size > MOST_TOKENS:
            raise ValueError(f"the tokenizer.json has a token with the id {self.vocab_size - 1:,}, and ids must be "
                             f"below {MOST_TOKENS:,}: is the file damaged?")
        self.n_rows = self.vocab_size
        self.end_of_text = self.library.token_to_id(END_OF_TEXT)
        self.special_tokens, self.file_ids = special_tokens or {}, file_ids or {}
        self.ends = super().end_tokens if end_tokens is None else tuple(end_tokens)
        self.added_ids = frozenset(added := self.library.get_added_tokens_decoder())
        self.special_ids = frozenset(i for i, token in added.items()
                                     if token.special and token.content not in THOUGHT_TAGS)
        if chat_template is not None:
            self.chat_template = ChatTemplate(chat_template, self.special_tokens)

    @cached_property
    def end_tokens(self):
        """The ids that end a text. Those that the model has no row for are left out, and stderr names them."""
        eos = self.library.token_to_id(self.special_tokens.get('eos_token', ''))
        ends = dict.fromkeys([*self.ends, eos, self.end_of_a_turn() if self.chat_template else None])
        ends.pop(None, None)
        known = tuple(i for i in ends if 0 <= i < self.n_rows)
        if beyond := [str(i) for i in ends if i not in known]:
            print(f"end tokens are left out that the model does not have: {', '.join(beyond)} of {self.n_rows:,}",
                  file=sys.stderr)
        return known

    def end_of_a_turn(self):
        """The added token, such as <|im_end|>, that the chat template writes after an answer, or None."""
        question = dict(role='user', content='?')
        try:
            text = self.chat_template.render([question, dict(role='assistant', content='Kx7q.'), question])
        except ValueError as e:
            print(f"how an answer ends is not known from the chat template: {e}", file=sys.stderr)
            return None
        ids = self.library.encode(text.rpartition('Kx7q.')[2], add_special_tokens=False).ids
        first = next((i for i in ids if self.token_bytes[i].strip()), None)
        return first if first in self.added_ids else None

    def conversation(self, messages, /, **variables):
        """The ids of the text that `ChatTemplate.render` returns. ValueError if it has no word of the messages."""
        text, contents = self.chat_template.render(messages, **variables), [m.get('content') or '' for m in messages]
        if ''.join(contents).strip() and not any(word in text for each in contents for word in each.split()):
            raise ValueError("the chat template leaves out the text of every message, perhaps because it reads lists "
                             "of parts: use a template that reads texts")
        return self.encode(text, add_special_tokens=False)

    def encode(self, text, add_special_tokens=True):
        """
        The ids of the text, after a BOS token if the tokenizer adds one. The name of a special token, such as
        <|endoftext|>, becomes that token. Other threads run meanwhile. ValueError if the model has no row for one.
        """
        return self.encoding(text, add_special_tokens, self.library.encode_batch_fast).ids

    def encoding(self, text, add_special_tokens=True, encode=None):
        """The same as an Encoding of the library, which has ids, and offsets: the characters of each."""
        try:  # encode of the library holds Python's lock, encode_batch does not; encode_batch_fast leaves out offsets
            encoding, = (encode or self.library.encode_batch)([text], add_special_tokens=add_special_tokens)
        except TypeError:  # of the library, which takes no lone surrogates
            raise ValueError("characters that are no Unicode (lone surrogates): leave them out") from None
        if self.vocab_size > self.n_rows and (last := max(encoding.ids, default=0)) >= self.n_rows:
            raise ValueError(f"the token {self.library.id_to_token(last)!r} (id {last}), but the model has "
                             f"{self.n_rows:,} tokens: leave it out")
        return encoding

    @cached_property
    def token_bytes(self):
        names = [self.library.id_to_token(i) or '' for i in range(self.vocab_size)]
        for i in {*self.begins} - {*self.ends}:  # <s>, for example, but not <|endoftext|>
            names[i] = ''
        return list(map(BYTES_OF[self.decoder], names))

    def state(self):
        more = dict(special_tokens=self.special_tokens, file_ids=self.file_ids,
                    chat_template=self.chat_template and self.chat_template.source)
        given = {name: value for name, value in more.items() if value}
        return dict(kind='json', json=self.json, end_tokens=[*self.ends]) | given


def decoder_of(tokenizer_json):
    """
    How the tokens of a tokenizer.json become text, a key of BYTES_OF, and whether a text then loses the blank with
    which it begins. ValueError if the decoder is none of these.
    """
    decoder = json.loads(tokenizer_json).get('decoder') or {}  # the library has read it
    parts = decoder.get('decoders', [])
    if parts in (SENTENCEPIECE, SENTENCEPIECE[:3]):
        return 'SentencePiece', parts == SENTENCEPIECE
    if decoder.get('type') not in ('ByteLevel', 'Fuse'):
        raise ValueError(f"the decoder of the tokenizer.json is {json.dumps(decoder):.300}: only ByteLevel, Fuse and "
                         "SentencePiece's (Replace, ByteFallback, Fuse, Strip) give each token a text of its own")
    return decoder['type'], False


def bytes_of_byte_level(name):
    """Each character of a token's name is a byte; but special tokens are named as they are."""
    return bytes(map(BYTE_LEVEL.get, name)) if BYTE_LEVEL.keys() >= set(name) else name.encode()


def bytes_of_sentencepiece(name):
    """A token is the byte that it names, <0x41>, or its name, with U+2581 for a blank."""
    if re.fullmatch('<0x[0-9A-F]{2}>', name):
        return bytes([int(name[3:5], 16)])
    return name.replace('\u2581', ' ').encode()


BYTES_OF = {'ByteLevel': bytes_of_byte_level, 'SentencePiece': bytes_of_sentencepiece, 'Fuse': str.encode}


def byte_level_alphabet():
    """The character that stands for each byte in the names of byte-level tokens: `bytes_to_unicode` of GPT-2."""
    printable = {*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


BYTE_LEVEL = {c: byte for byte, c in enumerate(byte_level_alphabet())}


def same_ids(a, b):
    """Do two tokenizers give the same texts to the same ids? Tokens that were added to one of them do not count."""
    added = a.added_ids | a.special_ids | b.added_ids | b.special_ids
    of_a, of_b = ({i: text for i, text in enumerate(t.token_bytes) if text and i not in added} for t in (a, b))
    return of_a == of_b


def check_state(state):
    """ValueError unless state has the form of a tokenizer's `state()`, see FIELDS. Its kind may be an unknown one."""
    if not isinstance(state, dict) or not isinstance(state.get('kind'), str):
        raise ValueError(f"a tokenizer's state must be a dict with its kind, a string, not {str(state)[:50]!r}")
    needed = dict(char='chars', json='json').get(state['kind'])
    if needed and needed not in state:
        raise ValueError(f"a tokenizer's state of kind {state['kind']!r} must have {needed}, a string")
    for key, kind in FIELDS.items():
        if not isinstance(state.get(key, kind()), kind):
            raise ValueError(f"{key} of a tokenizer must be a {kind.__name__}, not {str(state[key])[:50]}")
    ends, named = state.get('end_tokens', []), state.get('special_tokens', {})
    if not are_ids(ends) or not all(isinstance(text, str) for text in named.values()):
        raise ValueError("end_tokens of a tokenizer must be token ids, and special_tokens texts, not "
                         f"{str(ends)[:50]} and {str(named)[:50]}")


def are_ids(ids):
    """Is this a list of integers? Some files have -1 for no token."""
    return isinstance(ids, list) and all(type(i) is int for i in ids)


def from_state(state):
    """The tokenizer of a state. ValueError if the state is damaged or of an unknown kind."""
    check_state(state)
    if state['kind'] == 'char':
        return CharTokenizer(state['chars'])
    if state['kind'] == 'gpt2':
        return GPT2Tokenizer()
    if state['kind'] == 'json':
        return JSONTokenizer(**{name: state[name] for name in FIELDS if name in state and name != 'chars'})
    raise ValueError(f"a tokenizer's kind must be char, gpt2 or json, not {state['kind']!r}: these tokens have no text")


def state_of_dataset(folder):
    """
    The state of the tokenizer of a data folder, or of a model's folder in Hugging Face format: the one that its meta
    file names; otherwise its tokenizer.json, or for a model of the kind gpt2 its vocab.json and merges.txt; otherwise
    GPT-2's, where the folder does not say that it is another.
    """
    meta, path = read_meta(folder), os.path.join(folder, 'tokenizer.json')
    if 'kind' in meta:
        return {k: meta[k] for k in ('kind', 'chars') if k in meta}
    if os.path.exists(path):
        return {'kind': 'json', 'json': read_text(path)} | state_beside(folder)
    if 'vocab_size' in meta:
        return {'kind': 'unknown'}
    family = read_downloaded(os.path.join(folder, 'config.json')).get('model_type', 'gpt2')
    if family == 'gpt2' and all(os.path.exists(os.path.join(folder, name)) for name in PAIRS):
        return {'kind': 'json', 'json': json_of_pairs(folder)} | state_beside(folder)
    return GPT2 if family == 'gpt2' else {'kind': 'unknown'}


def state_beside(folder):
    """
    What the files beside a tokenizer.json say of a tokenizer, as in a state. All of them may be absent. ValueError if
    one of them is damaged.
    """
    def read(name):
        return read_downloaded(os.path.join(folder, name))
    config, special_tokens_map, state = read('tokenizer_config.json'), read('special_tokens_map.json'), {}
    # without added_tokens_decoder transformers prefers special_tokens_map.json, and also reads added_tokens.json
    is_older = 'added_tokens_decoder' not in config
    config = config | special_tokens_map if is_older else special_tokens_map | config
    named = {name: text_of(token) for name, token in config.items()}
    named = {name: text for name, text in named.items() if name in ROLES and isinstance(text, str)}
    added = config.get('added_tokens_decoder') or {}
    if not isinstance(added, dict) or not all(i.isdecimal() for i in added):
        raise ValueError(f"{folder}/tokenizer_config.json: added_tokens_decoder must name ids, not {added!r:.50}")
    others = [config.get(name) for name in ('sep_token', 'cls_token', 'mask_token')]
    for more in (config.get(name) or [] for name in ('additional_special_tokens', 'extra_special_tokens')):
        others += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
    others = [text for text in map(text_of, others) if text and isinstance(text, str)]
    older = [dict(content=text) for text in (added_ids(folder) if is_older else ())]
    if added := [*(added[i] for i in sorted(added, key=int)), *older, *named.values(), *others]:
        state['added_tokens'] = added
    if named:
        state['special_tokens'] = named
    template, path = config.get('chat_template'), os.path.join(folder, 'chat_template.jinja')
    if os.path.exists(path):
        template = read_text(path)
    if isinstance(template, list):  # several by name
        template = {str(each.get('name')): each.get('template') for each in template if isinstance(each, dict)}
    if isinstance(template, dict):
        template = template_of(template.get('default'), template.get('tool_use'))
    if isinstance(template, str):
        state['chat_template'] = template
    elif template is not None:
        print(f"{folder}: the chat template must be a text, not {template!r:.40}: it is left out", file=sys.stderr)
    for file in ('generation_config.json', 'config.json'):
        if ids := {name: i for name, i in read(file).items() if name[:-3] in ROLES}:
            state.setdefault('file_ids', {})[file] = ids
        if (ends := ids.get('eos_token_id')) is not None:
            if not are_ids(several := ends if isinstance(ends, list) else [ends]):
                raise ValueError(f"{folder}/{file}: eos_token_id must be a token id or a list of them, not "
                                 f"{ends!r:.50}")
            state['end_tokens'] = list(dict.fromkeys(state.get('end_tokens', []) + several))
    return state


def text_of(token):
    """The text of a token in these files, which is a text or a dict."""
    return token.get('content') if isinstance(token, dict) else token


def template_of(default, tool_use):
    """One chat template of default and, for conversations with tools, tool_use; default alone if one is no text."""
    if not isinstance(tool_use, str) or not isinstance(default, str):
        return default
    default, tool_use = default.removesuffix('\n'), tool_use.removesuffix('\n')  # Jinja drops what ends a block's line
    return f'{{% if tools %}}\n{tool_use}{{% else %}}\n{default}{{% endif %}}'


def added_ids(folder):
    """{text: id} of a folder's added_tokens.json, by id; {} without one. ValueError if it is damaged."""
    added = read_downloaded(os.path.join(folder, 'added_tokens.json'))
    if not are_ids([*added.values()]):
        raise ValueError(f"{folder}/added_tokens.json must give each token its id, an integer, but it is "
                         f"{str(added)[:50]}: is the download complete?")
    return dict(sorted(added.items(), key=lambda item: item[1]))


def json_of_pairs(folder):
    """The tokenizer.json of byte pairs in the files PAIRS, as GPT-2's were. ValueError if one is damaged."""
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.models import BPE
    try:
        vocab, merges = BPE.read_file(*[os.path.join(folder, name) for name in PAIRS])
    except Exception as e:  # the library raises nothing more special
        raise ValueError(f"{' and '.join(PAIRS)} in {folder} cannot be read ({e}): is the download complete?") from e
    added, config, named = added_ids(folder), *(read_downloaded(os.path.join(folder, name + '.json')) for name in (
        'tokenizer_config', 'special_tokens_map'))
    library = ByteLevelBPETokenizer(vocab, merges, add_prefix_space=bool(config.get('add_prefix_space')))
    special = [text_of(token) for token in named.get('additional_special_tokens') or []]
    library.add_tokens([*added])
    library.add_special_tokens([END_OF_TEXT] * (END_OF_TEXT in vocab) + [text for text in added if text in special])
    for text, i in added.items():
        if library.token_to_id(text) != i:
            raise ValueError(f"{folder}/added_tokens.json: the id of {text!r} must be {library.token_to_id(text)}, the "
                             f"next one of the vocabulary, not {i!r}: use a folder with a tokenizer.json")
    return library.to_str()


def read_meta(folder):
    """
    The contents of meta.json (or nanoGPT's meta.pkl) in a data folder, as a dict: kind and chars of the tokenizer,
    vocab_size, dtype of the token files, source of the text, bytes of the text of each split, all optional. {} if there
    is no such file, ValueError if it is damaged.
    """
    for name, read in (('meta.json', read_json), ('meta.pkl', meta_of_nanogpt)):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            try:
                return checked_meta(read(path))
            except Exception as e:  # what a damaged pickle raises may be anything
                raise ValueError(f"{path} cannot be read ({type(e).__name__}: {e}): prepare the data again") from e
    return {}


def meta_of_nanogpt(path):
    """What a meta.pkl of nanoGPT, a dict of characters, is as a meta.json."""
    with open(path, 'rb') as f:
        meta = PlainUnpickler(f).load()
    if 'itos' not in meta:  # nanoGPT's train.py needs vocab_size only
        return {'vocab_size': meta['vocab_size']}
    chars = [meta['itos'][i] for i in range(len(meta['itos']))]
    if any(len(c) != 1 for c in chars):
        raise ValueError("a token in it is not a single character")
    return {'kind': 'char', 'chars': ''.join(chars), 'vocab_size': len(chars)}


def checked_meta(meta):
    """meta, a dict, itself. ValueError unless its values are allowed."""
    wanted = {'kind': ('char', 'gpt2'), 'dtype': ('uint16', 'uint32')}
    if any(meta[k] not in wanted[k] for k in wanted if k in meta):
        raise ValueError(f"kind must be one of {wanted['kind']} and dtype one of {wanted['dtype']}")
    if (meta.get('kind') == 'char') != isinstance(meta.get('chars'), str):
        raise ValueError("chars, a string, is needed with kind 'char' and with no other")
    if type(meta.get('vocab_size', 1)) is not int or not 1 <= meta.get('vocab_size', 1) <= 2**32:
        raise ValueError(f"vocab_size must be an integer from 1 to 2**32, not {str(meta['vocab_size'])[:50]}")
    n_bytes = meta.get('bytes', {})
    if not isinstance(n_bytes, dict) or not all(type(n) is int and n >= 0 for n in n_bytes.values()):
        raise ValueError(f"bytes must be a dict of numbers, not {str(n_bytes)[:50]}")
    return meta


def read_json(path):
    """The dict in a JSON file. ValueError if it holds something else, or is damaged."""
    content = json.loads(read_text(path))
    if not isinstance(content, dict):
        raise ValueError(f"it must hold a dict, but it holds a {type(content).__name__}")
    return content


def read_downloaded(path):
    """The dict in a JSON file that may be downloaded in part, {} without one. ValueError if it cannot be read."""
    try:
        return read_json(path) if os.path.exists(path) else {}
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"{path} cannot be read ({type(e).__name__}: {e}): is the download complete?") from e


def read_json_lines(path, form, is_good):
    """
    Yields (the line's place in words, its dict) for each line of a JSONL file that is not blank. ValueError if a line
    is not JSON, or is_good(its content) is false or raises. form: what a line must be, in words.
    """
    for number, text in enumerate(read_text(path).split('\n'), 1):
        if not text.strip():
            continue
        try:
            good, why = is_good(line := json.loads(text)), ''
        except KeyError as e:
            good, why = False, f" ({e} is missing)"
        except json.JSONDecodeError as e:
            good, why = False, f" ({e})"
        except ValueError as e:
            raise ValueError(f"{path}, line {number}: {e}") from e
        except (LookupError, TypeError, AttributeError, RecursionError):
            good, why = False, ''
        if not good:
            raise ValueError(f"{path}, line {number} must be {form}, not {text[:60]!r}{why}")
        yield f"{path}, line {number}", line


def read_text(path, newline=None):
    """The text of a UTF-8 file, without a byte order mark. newline: as of `open`. ValueError if it is not UTF-8."""
    try:
        with open(path, encoding='utf-8-sig', newline=newline) as f:
            return f.read()
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8 text ({e.reason} at byte {e.start})") from e


class PlainUnpickler(pickle.Unpickler):
    """Reads plain values only: a pickle runs code by naming a class or a function, and here every name is an error."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it names {module}.{name}, but only plain values are read")


class WholeTexts(dict):
    """{token id: its text, None if its bytes are no whole characters}. token_bytes: the bytes of an id, a function."""

    def __init__(self, token_bytes):
        self.token_bytes = token_bytes

    def __missing__(self, token):
        try:
            text = self.token_bytes(token).decode('utf-8')
        except UnicodeDecodeError:
            text = None
        self[token] = text
        return text


class TextStream:
    """
    The text of one sample. `push(*tokens)` returns the piece that may be sent now. The joined pieces, with `finish()`
    at the end, are what decoding all bytes at once gives (errors='replace'), up to the stop string.

    token_bytes: the bytes of each token id, a list, or `WholeTexts`, to share them.
    stop: strings that end the text. The one that is complete first ends it. If two are complete at the same character,
    the longer one ends it. So the text does not depend on where one token ends and the next begins. A character of the
    first min_tokens tokens ends no text. include_stop: the stop string stays in the text. strip: the text begins
    without the first blank, if it has one there.

    stopped: has a stop string come? Then every later piece is ''. n_pushed: if there are stop strings, how many tokens
    have come, up to the one that ends the text.
    """

    def __init__(self, token_bytes, stop=(), min_tokens=0, include_stop=False, strip=False):
        if not isinstance(token_bytes, WholeTexts):
            token_bytes = WholeTexts(token_bytes.__getitem__)
        self.whole, self.bytes_of = token_bytes, token_bytes.token_bytes
        self.stop, self.stopped = tuple(sorted(filter(None, stop))), False
        self.min_tokens, self.include_stop, self.strip = min_tokens, include_stop, strip
        self.decoder, self.held = codecs.getincrementaldecoder('utf-8')('replace'), ''
        self.n_pushed, self.first = 0, {s[0] for s in self.stop}
        self.in_character = False  # are there bytes of a character that has not ended?

    def push(self, *tokens):
        if not (self.stop or self.in_character or self.strip):
            pieces = [self.whole[token] for token in tokens]
            if None not in pieces:
                return ''.join(pieces)
        return ''.join([self._push(token) for token in tokens])

    def _push(self, token):
        if self.stopped:
            return ''
        self.n_pushed += 1
        piece = None if self.in_character else self.whole[token]
        if piece is None:
            piece = self.decoder.decode(self.bytes_of(token))
            self.in_character = bool(self.decoder.getstate()[0])
        return self._up_to_stop(piece)

    def finish(self):
        """The text that was held back, after the last token. Bytes of an incomplete character become one U+FFFD."""
        if self.stopped:
            return ''
        text, self.held = self._up_to_stop(self.decoder.decode(b'', final=True)) + self.held, ''
        return text

    def _up_to_stop(self, piece):
        """What may be sent of what is held and this piece: up to a stop string. An end that may begin one is held."""
        if self.strip and piece:
            piece, self.strip = piece.removeprefix(' '), False
        if not self.held and self.first.isdisjoint(piece):
            return piece
        sent, held, searched = '', self.held, self.n_pushed > self.min_tokens
        for c in piece:
            held += c
            if searched and held.endswith(self.stop):
                n = max(len(s) for s in self.stop if held.endswith(s))
                self.stopped, self.held = True, ''
                return sent + (held if self.include_stop else held[:-n])
            while not self.begins_a_stop(held):  # each character is sent once, so that the time is linear
                sent, held = sent + held[0], held[1:]
        self.held = held
        return sent

    def begins_a_stop(self, text):
        """Does a stop string begin with this text?"""
        i = bisect_left(self.stop, text)
        return any(s.startswith(text) for s in self.stop[i:i + 1])

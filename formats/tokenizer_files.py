"""Tokenizers in the files of other projects: tokenizer.json, and the vocabulary in a GGUF file."""
import json

from formats.gguf_tokenizer import FLAGS, TO_HF, rule_of
from tokenizer import END_OF_TEXT, ROLES, CharTokenizer, JSONTokenizer, byte_level_alphabet


def check_vocabulary(model, tokenizer):
    """ValueError if a tokenizer, or None, has more tokens than the model, other than those that were added to it."""
    n = model.config.vocab_size
    beyond = [] if tokenizer is None else range(n, tokenizer.vocab_size)
    if any(i not in tokenizer.added_ids and tokenizer.token_bytes[i] for i in beyond):
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens, but the model a vocab_size of {n}: they do "
                         "not belong together")


def stand_in(tokenizer):
    """The id that other engines use for a character without a row: the space's, or 0. Here it is an error."""
    return tokenizer.ids.get(' ', 0)


def huggingface_tokenizer(tokenizer):
    """The contents of tokenizer.json and tokenizer_config.json, which transformers and tokenizers read."""
    if isinstance(tokenizer, JSONTokenizer):
        special_tokens = tokenizer.special_tokens
        if not special_tokens and not tokenizer.file_ids and tokenizer.end_of_text is not None:
            special_tokens = dict.fromkeys(ROLES, END_OF_TEXT)
        template = dict(chat_template=tokenizer.chat_template.source) if tokenizer.chat_template else {}
        return json.loads(tokenizer.json), dict(tokenizer_class='PreTrainedTokenizerFast') | special_tokens | template
    if isinstance(tokenizer, CharTokenizer):
        # Each character is a word. The model has no rows for more tokens: no row draws <|endoftext|>, and no token
        # fills up a batch (a second name of a character's id would be lost, or take its place, in copies)
        return dict(
            version='1.0', normalizer=None, post_processor=None,
            added_tokens=[dict(id=tokenizer.vocab_size, content=END_OF_TEXT, special=True, **FLAGS)],
            pre_tokenizer=dict(type='Split', pattern=dict(Regex=r'[\s\S]'), behavior='Isolated', invert=False),
            decoder=dict(type='Fuse'),
            model=dict(type='WordLevel', vocab=tokenizer.ids | {END_OF_TEXT: tokenizer.vocab_size},
                       unk_token=tokenizer.chars[stand_in(tokenizer)]),
        ), dict(tokenizer_class='PreTrainedTokenizerFast', eos_token=END_OF_TEXT, padding_side='left')
    tokens, merges = byte_pairs(tokenizer.bpe)
    end = tokens[tokenizer.end_of_text]
    byte_level = dict(type='ByteLevel', add_prefix_space=False, trim_offsets=True, use_regex=True)
    return dict(
        version='1.0', normalizer=None, pre_tokenizer=byte_level, post_processor=byte_level, decoder=byte_level,
        added_tokens=[dict(id=tokenizer.end_of_text, content=end, special=True, **FLAGS)],
        model=dict(type='BPE', vocab={text: i for i, text in enumerate(tokens)}, merges=merges),
    ), dict(tokenizer_class='GPT2Tokenizer', **dict.fromkeys(ROLES, end), add_prefix_space=False, padding_side='left')


def json_tokenizer(tokenizer, chat_template=None):
    """The same tokenizer as a JSONTokenizer, with this chat template."""
    content, config = huggingface_tokenizer(tokenizer)
    named = {role: config[role] for role in ROLES if role in config}
    return JSONTokenizer(json.dumps(content), [*tokenizer.end_tokens], named, chat_template)


def add_gguf_tokenizer(writer, tokenizer, vocab_size):
    """
    Write the tokenizer for llama.cpp. Returns its kind: 'gpt2', 'rwkv', or 'none' (token ids only) if there is none.

    A character tokenizer is written as 'rwkv', which takes the longest token at each place and needs no token for the
    end of a text: 'gpt2' always has one, and would use token 11. Each byte of an unknown character becomes a space.
    llama.cpp's 'rwkv' never returns from an unknown character that shares its first byte with a known one; if all
    known characters are ASCII, no unknown one does. ValueError for a JSONTokenizer whose rule it lacks.
    """
    from gguf import TokenType
    if tokenizer is None:
        writer.add_tokenizer_model('none')
        return 'none'
    if not isinstance(tokenizer, CharTokenizer):
        return add_byte_pairs(writer, tokenizer, vocab_size)
    tokens = [c if ord(c) > 127 else c.encode('unicode_escape').decode() for c in tokenizer.chars]
    padding = range(len(tokens), vocab_size)
    writer.add_unk_token_id(stand_in(tokenizer))  # without one, an unknown character ends llama.cpp's process
    writer.add_tokenizer_model('rwkv')
    writer.add_token_list(tokens + [rf'\xff{i}' for i in padding])  # a byte that UTF-8 does not have
    writer.add_token_types([TokenType.NORMAL] * len(tokens) + [TokenType.UNUSED] * len(padding))
    return 'rwkv'


def add_byte_pairs(writer, tokenizer, vocab_size):
    """The same for GPT-2's byte pairs, and for a JSONTokenizer with its chat template."""
    from gguf import TokenType
    tokenizer = tokenizer if isinstance(tokenizer, JSONTokenizer) else json_tokenizer(tokenizer)
    content, library = json.loads(tokenizer.json), tokenizer.library
    writer.add_tokenizer_model('gpt2')
    writer.add_tokenizer_pre(rule_of(content))
    writer.add_token_merges([pair if isinstance(pair, str) else ' '.join(pair) for pair in content['model']['merges']])
    names = [library.id_to_token(i) for i in range(vocab_size)]
    types = [TokenType.UNUSED if name is None else TokenType.CONTROL if i in tokenizer.special_ids else
             TokenType.USER_DEFINED if i in tokenizer.added_ids else TokenType.NORMAL for i, name in enumerate(names)]
    writer.add_token_list([rf'\xff{i}' if name is None else name for i, name in enumerate(names)])
    writer.add_token_types(types)
    before, behind = around(library)
    begin = before[0] if before else library.token_to_id(tokenizer.special_tokens.get('bos_token', END_OF_TEXT))
    ends = sorted(tokenizer.end_tokens, key=lambda i: [i] != behind)
    if len(before) > 1 or behind not in ([], ends[:1]):
        raise ValueError(f"this tokenizer.json puts the tokens {before} before a text and {behind} behind it; a GGUF "
                         f"file takes at most one before a text, and behind it one that ends it: {TO_HF}")
    for role, i in zip(('bos', 'eos', 'eot'), (begin, *ends[:2])):
        if i is not None:
            getattr(writer, f'add_{role}_token_id')(i)
    writer.add_add_bos_token(bool(before))
    writer.add_add_eos_token(bool(behind))
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template.source)
    return 'gpt2'


def around(library):
    """The ids that a tokenizer of the tokenizers library puts before a text and behind it: two lists."""
    added = {*library.encode('').ids}
    texts = ((text, library.encode(text, add_special_tokens=False).ids) for text in ('a', *library.get_vocab()))
    a, text = next(((a, ids) for a, ids in texts if ids and not added & {*ids}), ('', []))
    whole = library.encode(a).ids
    n = next(n for n in range(len(whole) + 1) if whole[n:n + len(text)] == text)
    return whole[:n], whole[n + len(text):]


def byte_pairs(bpe):
    """
    GPT-2's tokens and merges, spelled as in its vocab.json and merges.txt: ([text of each id], ['left right' by rank]).
    tiktoken has the tokens only. The two parts that a token was merged from are found by encoding its bytes with the
    merges of a lower rank.
    """
    alphabet = byte_level_alphabet()  # no blank is in it
    spell = lambda token: ''.join(alphabet[b] for b in token)  # noqa: E731
    ranks = {bpe.decode_single_token_bytes(i): i for i in range(bpe.eot_token)}
    merges = []
    for token, rank in ranks.items():
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            first = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], rank))
            parts[first:first + 2] = [parts[first] + parts[first + 1]]
        if len(parts) == 2:
            merges.append(f'{spell(parts[0])} {spell(parts[1])}')
    return [*map(spell, ranks), bpe.decode([bpe.eot_token])], merges

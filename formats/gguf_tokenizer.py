"""
The tokenizer in a GGUF file, as the state of one of tokenizer.py.

Sources: src/llama-vocab.cpp in https://github.com/ggml-org/llama.cpp, and generate_merges of transformers.
"""
import json
from contextlib import suppress

from formats.families import expect, typed
from tokenizer import ROLES, SENTENCEPIECE, template_of

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # types of tokens
IDS = 'bos_token_id', 'eos_token_id', 'unknown_token_id', 'padding_token_id'  # of ROLES
ENDS = 'eos_token_id', 'eot_token_id', 'eom_token_id'
# tokens with these names are special and end a text, whatever type the file gives them, as in llama.cpp
END_TEXTS = {
    '<|endoftext|>', '<|end_of_text|>', '<|eot_id|>', '<|eom_id|>', '<|im_end|>', '<|end|>', '<end_of_turn>',
    '<end_of_utterance>', '<EOT>', '_<EOT>', '[EOT]', '</s>', '<eos>', '<|fim_pad|>', '<fim_pad>', '<|fim_repo|>',
    '<|repo_name|>', '<reponame>', '<|file_sep|>'}
LONGEST = 2**10  # characters of a token
FLAGS = dict(normalized=False, single_word=False, lstrip=False, rstrip=False)  # of an added token in a tokenizer.json
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LATER_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
               r"\s+(?!\S)|\s+")
LLAMA3_RULES = 'llama-bpe', 'llama3', 'llama-v3'  # they add a BOS token, and take words that no merges lead to
LLAMA2_IDS = dict(bos_token_id=1, eos_token_id=2, unknown_token_id=0)  # of SentencePiece, where the file has none
TO_HF = "export with --to=hf, and convert that folder with its convert_hf_to_gguf.py"
RULES = {  # of tokenizer.ggml.pre: what a text is split by, one after the other, before pairs are merged
    **dict.fromkeys(('gpt-2', 'mpt', 'phi-2'), [WORDS]),
    **dict.fromkeys(('smollm', 'starcoder', 'refact', 'codeshell'), [r'\p{N}', WORDS]),
    **dict.fromkeys(('qwen2', 'deepseek-r1-qwen'), [LATER_WORDS % '']),
    **dict.fromkeys((*LLAMA3_RULES, 'smaug-bpe'), [LATER_WORDS % '{1,3}']),  # the last one only splits like them
    'default': [r'[\p{P}\$\+<=>\^~\|]+', WORDS, r'\p{N}+', '[0-9][0-9][0-9]'],
}


def gguf_tokenizer(fields):
    """
    The state of the tokenizer that the fields of a GGUF file describe: a JSONTokenizer for the kinds 'gpt2' (byte
    pairs) and 'llama' (SentencePiece), a CharTokenizer for 'rwkv' with single characters, as export.py writes it.
    ValueError, which names it, for another kind or a rule that is not known.
    """
    given = {key.removeprefix('tokenizer.ggml.'): value for key, value in fields.items() if 'tokenizer.ggml.' in key}
    kind, tokens = given.get('model', 'none'), typed(given, 'tokens', list, [])
    if kind in ('none', 'no_vocab'):
        return {'kind': 'unknown'}
    expect(given, 'tokenizer.ggml.', model=('gpt2', 'llama', 'rwkv'), remove_extra_whitespaces=(False,))
    types = typed(given, 'token_type', list, [1] * len(tokens))
    if not tokens or len(types) != len(tokens) or not all(isinstance(text, str) and len(text) <= LONGEST
                                                          for text in tokens):
        raise ValueError(f"its tokenizer.ggml.tokens must be texts of at most {LONGEST:,} characters, each with a type")
    if kind == 'rwkv':
        chars = [text if not text.isascii() else text.encode().decode('unicode_escape')
                 for text, token_type in zip(tokens, types) if token_type != UNUSED]
        if any(len(char) != 1 for char in chars):
            raise ValueError("its tokens, of the kind 'rwkv', must be single characters")
        return {'kind': 'char', 'chars': ''.join(chars)}
    types = [CONTROL if text in END_TEXTS else token_type for text, token_type in zip(tokens, types)]
    vocab = {text: i for i, (text, token_type) in enumerate(zip(tokens, types)) if token_type != UNUSED}
    if kind == 'llama':
        given = LLAMA2_IDS | given
    known = {key: i for key, i in given.items() if type(i) is int and i in range(len(tokens))}
    ids = {role: known[key] for role, key in zip(ROLES, IDS) if key in known}
    content = byte_pairs(given, vocab) if kind == 'gpt2' else sentencepiece(given, vocab, tokens, ids)
    content['added_tokens'] = [dict(id=i, content=text, special=types[i] == CONTROL, **FLAGS)
                               for text, i in vocab.items() if types[i] in (CONTROL, USER_DEFINED)]
    adds_bos = given.get('add_bos_token', kind == 'llama' or given.get('pre') in LLAMA3_RULES)
    around = [ids.get('bos_token') if adds_bos else None, ids.get('eos_token') if given.get('add_eos_token') else None]
    content['post_processor'] = template(around, tokens) if around != [None, None] else None
    ends = [known[key] for key in ENDS if key in known]
    ends += [i for text, i in vocab.items() if text in END_TEXTS]
    state = dict(kind='json', json=json.dumps(content), end_tokens=[*dict.fromkeys(ends)],
                 special_tokens={role: tokens[i] for role, i in ids.items()},
                 file_ids={'config.json': {f'{role}_id': i for role, i in ids.items()}})
    by_name = [fields.get('tokenizer.chat_template' + name) for name in ('', '.tool_use')]
    if isinstance(by_name[0], str):
        state['chat_template'] = template_of(*by_name)
    return state


def byte_pairs(given, vocab):
    """The tokenizer.json of byte pairs as those of GPT-2, with the rule that the file names."""
    rule, merges = given.get('pre', 'default'), typed(given, 'merges', list)
    if rule not in [*RULES]:
        raise ValueError(f"tokenizer.ggml.pre is {rule!r:.100}, a rule that is not known here: use its Hugging Face "
                         "folder")
    splits = [dict(type='Split', pattern=dict(Regex=regex), behavior='Isolated', invert=False) for regex in RULES[rule]]
    byte_level = dict(type='ByteLevel', add_prefix_space=False, trim_offsets=True, use_regex=False)
    return dict(
        version='1.0', decoder=byte_level,
        normalizer=normalizer_of(rule) and dict(type=normalizer_of(rule)),
        pre_tokenizer=dict(type='Sequence', pretokenizers=[*splits, byte_level]),
        model=dict(type='BPE', vocab=vocab, merges=merges, ignore_merges=rule in LLAMA3_RULES))


def normalizer_of(rule):
    """The normalizer that a rule's tokenizer.json has, or None. llama.cpp leaves out NFC."""
    return 'NFC' if rule == 'qwen2' else None


def rule_of(content):
    """The name in RULES of how a tokenizer.json, a dict, splits texts. ValueError if there is none."""
    before, model, splits = content.get('pre_tokenizer') or {}, content.get('model', {}), []
    plain = dict(Split=dict(behavior='Isolated', invert=False), Digits=dict(individual_digits=True),
                 ByteLevel=dict(add_prefix_space=False))
    for part in before.get('pretokenizers', [before]):
        expected = plain.get(part.get('type'), {})
        known = dict(Split=[part.get('pattern', {}).get('Regex')], Digits=[r'\p{N}'],
                     ByteLevel=[WORDS] * part.get('use_regex', True))
        splits += known.get(part.get('type'), [part.get('type')]) if expected.items() <= part.items() else [part]
    normalizer = (content.get('normalizer') or {}).get('type')
    names = [name for name, rule in RULES.items() if rule == splits and normalizer == normalizer_of(name)]
    if not names:
        raise ValueError(f"this tokenizer.json splits texts by {splits} (normalizer {normalizer}), and none of "
                         f"llama.cpp's rules that are known here does: {TO_HF}")
    if model.get('type') != 'BPE' or model.get('byte_fallback') or any(
            token.get(flag) for token in content.get('added_tokens', ()) for flag in FLAGS if flag != 'normalized'):
        raise ValueError("this tokenizer.json has another model than byte pairs, or an added token with lstrip, rstrip "
                         f"or single_word, and none of llama.cpp's rules has these: {TO_HF}")
    return names[0]


def is_of_qwen(content):
    """Does a tokenizer.json, a dict, split texts as Qwen's own?"""
    with suppress(ValueError):
        return rule_of(content) == 'qwen2'
    return False


def sentencepiece(given, vocab, tokens, ids):
    """The tokenizer.json of a SentencePiece vocabulary: the pair whose token has the highest score is merged first."""
    scores = typed(given, 'scores', list, [])
    if [*map(type, scores)] != [float] * len(tokens):
        raise ValueError(f"it has {len(tokens)} tokens, but {len(scores)} scores, or some that are no floats: is the "
                         "download complete?")
    merges = [(scores[i], k, [text[:k], text[k:]]) for text, i in vocab.items() for k in range(1, len(text))
              if text[:k] in vocab and text[k:] in vocab]
    merges.sort(key=lambda merge: (-merge[0], -merge[1]))
    blank, prefix = '\u2581', given.get('add_space_prefix', True)
    before = [dict(type='Prepend', prepend=blank)] if prefix else []
    return dict(
        version='1.0', pre_tokenizer=None,
        normalizer=dict(type='Sequence', normalizers=[
            *before, dict(type='Replace', pattern=dict(String=' '), content=blank)]),
        decoder=dict(type='Sequence', decoders=SENTENCEPIECE if prefix else SENTENCEPIECE[:3]),
        model=dict(type='BPE', vocab=vocab, merges=[pair for _, _, pair in merges], byte_fallback=True, fuse_unk=True,
                   unk_token=tokens[ids['unk_token']] if 'unk_token' in ids else None))


def template(around, tokens):
    """The part of a tokenizer.json that puts tokens before and after a text. around: two ids, or None."""
    before, behind = ([dict(SpecialToken=dict(id=tokens[i], type_id=0))] if i is not None else [] for i in around)
    single = [*before, dict(Sequence=dict(id='A', type_id=0)), *behind]
    return dict(type='TemplateProcessing', single=single, pair=single + [dict(Sequence=dict(id='B', type_id=0))],
                special_tokens={tokens[i]: dict(id=tokens[i], ids=[i], tokens=[tokens[i]])
                                for i in around if i is not None})

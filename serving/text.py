"""
Text of a stream of tokens, sent as it comes: no character of UTF-8 is cut in half, no part of a stop string is sent.
"""
import codecs

from tokenizer import CharTokenizer, GPT2Tokenizer

END_OF_TEXT = '<|endoftext|>'  # the name of the token that ends a document, in GPT-2 and those that follow it


class WholeTexts(dict):
    """
    {token id: its text, or None if its bytes are no whole characters}. token_bytes: the bytes of an id, a function.
    """

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
    The text of one sample. `push(*tokens)` returns what may be sent now; joined, with `finish()` at the end, this is
    what decoding all bytes at once gives (errors='replace'), up to the stop string.

    token_bytes: the bytes of each token id, a list or a function, or `WholeTexts` of such a function, to share them.
    stop: strings that end the text. The one whose last character comes first ends it, and of two that end at the same
    character the longer one, so that the text does not depend on where one token ends and the next begins. stopped: has
    a stop string come? Then every later piece is ''.
    """

    def __init__(self, token_bytes, stop=()):
        if not isinstance(token_bytes, WholeTexts):
            token_bytes = WholeTexts(token_bytes if callable(token_bytes) else token_bytes.__getitem__)
        self.whole, self.bytes_of = token_bytes, token_bytes.token_bytes
        self.stop, self.stopped = tuple(filter(None, stop)), False
        self.decoder, self.held = codecs.getincrementaldecoder('utf-8')('replace'), ''
        self.in_character = False  # are there bytes of a character that has not ended?

    def push(self, *tokens):
        """The text that may be sent now that these tokens have come."""
        if not self.stop and not self.in_character:
            pieces = [self.whole[token] for token in tokens]
            if None not in pieces:
                return ''.join(pieces)
        return ''.join([self._push(token) for token in tokens])

    def _push(self, token):
        if self.stopped:
            return ''
        piece = None if self.in_character else self.whole[token]
        if piece is None:
            piece = self.decoder.decode(self.bytes_of(token))
            self.in_character = bool(self.decoder.getstate()[0])
        if not self.stop:
            return piece
        text = self._up_to_stop(piece)
        if self.stopped:
            return text
        n_held = self._length_of_a_begun_stop(text)
        self.held = text[len(text) - n_held:]
        return text[:len(text) - n_held]

    def finish(self):
        """The text that was held back, after the last token. Bytes of an incomplete character become one U+FFFD."""
        if self.stopped:
            return ''
        text = self._up_to_stop(self.decoder.decode(b'', final=True))
        self.held = ''
        return text

    def _up_to_stop(self, piece):
        """What is held with this piece behind it, up to the first stop string in it, if there is one."""
        text, self.held = self.held + piece, ''
        ends = [(start + len(s), start) for s in self.stop if (start := text.find(s)) >= 0]
        if not ends:
            return text
        self.stopped = True
        return text[:min(ends)[1]]

    def _length_of_a_begun_stop(self, text):
        """The length of the longest end of text with which a stop string begins."""
        return max((n for s in self.stop for n in range(1, min(len(s) - 1, len(text)) + 1) if text.endswith(s[:n])),
                   default=0)


def bytes_of_tokens(tokenizer, vocab_size=0):
    """
    The bytes of each token id, a list of at least vocab_size: joined and decoded they are the tokenizer's own text. A
    model may have more ids than its tokenizer; those beyond are decoded as the tokenizer decodes them.
    """
    if isinstance(tokenizer, CharTokenizer):
        table, beyond = [char.encode('utf-8', 'replace') for char in tokenizer.chars], '\ufffd'.encode()
    elif isinstance(tokenizer, GPT2Tokenizer):
        table, beyond = [tokenizer.bpe.decode_single_token_bytes(i) for i in range(tokenizer.vocab_size)], b''
    else:  # JSONTokenizer: with ByteLevel each character of a token's name is a byte, with Fuse the name is the text
        names = [tokenizer.library.id_to_token(i) or '' for i in range(tokenizer.vocab_size)]
        if type(tokenizer.library.decoder).__name__ == 'ByteLevel':
            byte_of = {char: byte for byte, char in enumerate(byte_level_alphabet())}
            table = [bytes(map(byte_of.get, name)) if all(c in byte_of for c in name) else name.encode()
                     for name in names]
        else:
            table = [name.encode() for name in names]
        beyond = b''
    return table + [beyond] * (vocab_size - len(table))


def byte_level_alphabet():
    """The character that stands for each byte in the names of byte-level tokens: `bytes_to_unicode` of GPT-2."""
    printable = {*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def end_of_text(tokenizer):
    """The id of the token that ends a document; None where the tokenizer has none."""
    if isinstance(tokenizer, CharTokenizer):
        return None
    if isinstance(tokenizer, GPT2Tokenizer):
        return tokenizer.bpe.eot_token
    return tokenizer.library.token_to_id(END_OF_TEXT)


def name_of_token(token_bytes):
    r"""The text of a token by itself, or bytes:\xe2\x82 where its bytes are no whole characters, as in OpenAI's API."""
    try:
        return token_bytes.decode('utf-8')
    except UnicodeDecodeError:
        return 'bytes:' + ''.join(f'\\x{byte:02x}' for byte in token_bytes)

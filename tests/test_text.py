"""Text of token streams: UTF-8 is never cut in half and stop strings are never sent, however the tokens fall."""
import codecs

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serving.answer import name_of_token
from tokenizer import CharTokenizer, TextStream, byte_level_alphabet

# few letters, so that stop strings come up; characters of one to four bytes; bytes that are no UTF-8
pieces = st.lists(st.one_of(st.text('ab€😀\ufffd', min_size=1).map(str.encode),
                            st.binary(min_size=1, max_size=3),
                            st.sampled_from([b'\xe2', b'\x82\xac', b'\xf0\x9f', b'\x98\x80', b'\xff', b''])),
                  max_size=12)
stops = st.lists(st.text('ab€😀\ufffd', min_size=1, max_size=4), max_size=4)


def streamed(tokens, stop=()):
    """(the pieces sent, was it stopped, the number of the token that stopped it)"""
    text, sent = TextStream(tokens, stop), []
    for i in range(len(tokens)):
        sent.append(text.push(i))
        if text.stopped:
            return sent, True, i
    return [*sent, text.finish()], text.stopped, len(tokens)


def up_to_stop(text, stop):
    """The definition: read character by character, and end where one of the stop strings is complete."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[:end - len(max(found, key=len))], end
    return text, None


@given(pieces)
def test_utf8_split_over_tokens(tokens):
    assert ''.join(streamed(tokens)[0]) == b''.join(tokens).decode('utf-8', 'replace')


@given(pieces, stops)
@example([b'a', b'\xe2'], ['\ufffd'])
@example([b'aab', b'b'], ['abb', 'b'])
def test_stop_never_leaks(tokens, stop):
    sent, stopped, _ = streamed(tokens, stop)
    expected, end = up_to_stop(b''.join(tokens).decode('utf-8', 'replace'), stop)
    assert ''.join(sent) == expected and stopped == (end is not None)
    assert not any(s in ''.join(sent) for s in stop)


def found(text, stop, n_free):
    """(end, start) of the first stop string in a text that ends behind n_free characters: by str.find, all of them."""
    ends = []
    for s in stop:
        start = text.find(s)
        while 0 <= start <= n_free - len(s):
            start = text.find(s, start + 1)
        if start >= 0:
            ends.append((start + len(s), start))
    return min(ends, default=None)


short = st.one_of(st.text('ab ', max_size=3).map(str.encode), st.sampled_from([b'\xe2', b'\x82\xac', b'\xff']))


@given(st.lists(short, max_size=14), st.lists(st.text('ab \ufffd', min_size=1, max_size=6), max_size=5),
       st.integers(0, 9), st.booleans(), st.booleans())
@example([b'aab', b'b'], ['abb', 'b'], 0, True, False)
@example([b'ab', b'ab', b'a', b'b'], ['abab', 'ba'], 2, False, False)
@example([b'', b' ', b' a'], [' a'], 0, False, True)
def test_stop_strings_are_where_find_says(tokens, stop, min_tokens, include, strip):
    stream = TextStream(tokens, stop, min_tokens, include, strip)
    sent = ''.join([stream.push(i) for i in range(len(tokens))]) + stream.finish()
    text = b''.join(tokens).decode('utf-8', 'replace')
    decoder = codecs.getincrementaldecoder('utf-8')('replace')
    n_free = len(decoder.decode(b''.join(tokens[:min_tokens]), final=len(tokens) <= min_tokens))
    if strip and text.startswith(' '):
        text, n_free = text[1:], n_free - 1
    at = found(text, stop, n_free)
    assert stream.stopped == (at is not None)
    assert sent == (text if at is None else text[:at[0] if include else at[1]])


def test_stop_strings_of_any_length_take_a_constant_time_for_a_character():
    """Comparisons, not seconds: each character that comes is one more step, and a step back is one that was made
    before."""
    text = 'a' * 4000 + 'b'
    stop = ['a' * n + 'b' * 2 for n in (997, 998, 999)] + ['a' * 1000 + 'c']
    stream, steps = TextStream([text[i:i + 4].encode() for i in range(0, len(text), 4)], stop), []
    begins_a_stop = stream.begins_a_stop
    stream.begins_a_stop = lambda text: steps.append(text) or begins_a_stop(text)
    sent = ''.join([stream.push(i) for i in range(1001)])
    assert sent + stream.finish() == text and len(sent) == 4001 - 1000 and len(steps) < 10 * len(text)


@given(pieces, stops)
def test_what_was_sent_stays_sent(tokens, stop):
    """Each prefix of the pieces is a prefix of the whole text, and only what may begin a stop string is held back."""
    text, sent = TextStream(tokens, stop), ''
    for i in range(len(tokens)):
        sent += text.push(i)
        if text.stopped:
            break
        so_far = b''.join(tokens[:i + 1])
        whole = so_far.decode('utf-8', 'replace')
        assert whole.startswith(sent)
        assert len(whole) - len(sent) <= max([len(s) - 1 for s in stop], default=0) + 1  # 1: an incomplete character


@given(pieces, stops, st.data())
def test_several_tokens_at_once_are_the_same_as_one_by_one(tokens, stop, data):
    one, several, i = TextStream(tokens, stop), TextStream(tokens, stop), 0
    while i < len(tokens):
        n = data.draw(st.integers(1, len(tokens) - i))
        assert several.push(*range(i, i + n)) == ''.join([one.push(j) for j in range(i, i + n)])
        assert several.stopped == one.stopped
        i += n
    assert several.finish() == one.finish()


@given(st.text('ab€😀', min_size=1, max_size=8), st.data())
def test_the_step_that_completes_a_stop_stops(text, data):
    """Whole characters: `stopped` is set by the very token that has the last byte of the stop string."""
    stop = [text[data.draw(st.integers(0, len(text) - 1)):]]
    tokens = [bytes([byte]) for byte in text.encode()]
    _, end = up_to_stop(text, stop)
    assert streamed(tokens, stop)[1:] == (True, len(text[:end].encode()) - 1)


def test_after_a_stop_nothing_comes():
    text = TextStream([b'x', b'.'], ['.'])
    assert [text.push(i) for i in (0, 1, 0, 0)] == ['x', '', '', ''] and text.finish() == '' and text.stopped


def test_bytes_of_characters():
    tokenizer = CharTokenizer('a€\n')
    assert tokenizer.bytes_of_tokens(5) == [b'a', '€'.encode(), b'\n', '\ufffd'.encode(), '\ufffd'.encode()]
    assert b''.join(tokenizer.bytes_of_tokens(5)).decode() == tokenizer.decode(range(5))
    assert tokenizer.end_of_text is None


def test_bytes_of_a_tokenizer_json():
    """Against the library's own decoding, with characters of which each byte is a token of its own."""
    library = pytest.importorskip('tokenizers', reason="reads tokenizer.json")
    from tokenizer import JSONTokenizer
    names = [*byte_level_alphabet(), 'Ġthe', '<|endoftext|>']
    made = library.Tokenizer(library.models.BPE({name: i for i, name in enumerate(names)}, []))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    made.add_special_tokens(['<|endoftext|>', '<a b>'])
    tokenizer = JSONTokenizer(made.to_str())
    table = tokenizer.bytes_of_tokens(300)
    assert len(table) == 300 and table[256:260] == [b' the', b'<|endoftext|>', b'<a b>', b'']
    ids = tokenizer.encode('a €😀é\n') + [256, 257, 258, 299]
    assert tokenizer.decode(ids) == tokenizer.library.decode(ids[:-1], skip_special_tokens=False)
    assert tokenizer.end_of_text == 257


def test_names_of_tokens():
    assert [name_of_token(b) for b in (b' a', '€'.encode(), b'\xe2\x82', b'')] == [' a', '€', r'bytes:\xe2\x82', '']

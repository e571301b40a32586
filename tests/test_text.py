"""Text of token streams: UTF-8 is never cut in half and stop strings are never sent, however the tokens fall."""
import codecs

from conftest import sizes
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serving.answer import name_of_token
from tokenizer import CharTokenizer, TextStream

# few letters, so that stop strings come up; characters of one to four bytes; bytes that are no UTF-8
pieces = st.lists(st.one_of(st.one_of(st.text('ab', max_size=3), st.text('a €😀\ufffd', max_size=2)).map(str.encode),
                            st.sampled_from([b'\xe2', b'\x82\xac', b'\xf0\x9f', b'\x98\x80', b'\xff'])), max_size=14)
stops = st.lists(st.one_of(st.text('ab', min_size=1, max_size=3), st.text('ab €\ufffd', min_size=1, max_size=5)),
                 max_size=5)


def text_of(tokens, final=True):
    """The text of bytes at once. Without `final`, as far as its characters have ended."""
    return codecs.getincrementaldecoder('utf-8')('replace').decode(b''.join(tokens), final)


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


@settings(max_examples=sizes(200, 2000))
@given(pieces, stops, st.integers(0, 9), st.booleans(), st.booleans(), st.integers(1, 4))
@example([b'aa', b'b'], ['ab', 'b'], 0, False, False, 2)
@example([b'ab', b'ab', b'a', b'b'], ['abab', 'ba'], 2, False, False, 1)
@example([b'', b' ', b' a'], [' a'], 0, False, True, 3)
@example([b'a', b'\xe2'], ['\ufffd'], 0, False, False, 1)
def test_a_text_is_that_of_its_bytes_up_to_the_first_stop_string(tokens, stop, min_tokens, include, strip, n):
    """
    By str.find, token by token and n at once: the token that completes a stop string stops, nothing is sent that
    is taken back, and only what may begin a stop string is held.
    """
    one, several = (TextStream(tokens, stop, min_tokens, include, strip) for _ in range(2))

    def expected(n, final):
        """(the text that the first n tokens have, where its stop string is)"""
        text = text_of(tokens[:n], final)
        n_free = len(text_of(tokens[:min_tokens], final=final and n <= min_tokens))
        if strip and text.startswith(' '):
            text, n_free = text[1:], n_free - 1
        at = found(text, stop, n_free)
        return text if at is None else text[:at[0] if include else at[1]], at
    sent, n_pushed = '', 0
    while n_pushed < len(tokens):
        together = range(n_pushed, min(n_pushed + n, len(tokens)))
        before, n_pushed = sent, together.stop
        for i in together:
            sent += one.push(i)
            text, at = expected(i + 1, final=False)
            assert one.stopped == (at is not None) and text.startswith(sent)
            assert len(text) - len(sent) <= (0 if at else max(map(len, stop), default=0))
        assert before + several.push(*together) == sent and several.stopped == one.stopped
    text, at = expected(len(tokens), final=True)
    assert sent + one.finish() == text == sent + several.finish() and one.stopped == (at is not None)


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


def test_bytes_of_characters():
    tokenizer = CharTokenizer('a€\n')
    assert tokenizer.bytes_of_tokens(5) == [b'a', '€'.encode(), b'\n', '\ufffd'.encode(), '\ufffd'.encode()]
    assert b''.join(tokenizer.bytes_of_tokens(5)).decode() == tokenizer.decode(range(5))
    assert tokenizer.end_of_text is None


def test_names_of_tokens():
    assert [name_of_token(b) for b in (b' a', '€'.encode(), b'\xe2\x82', b'')] == [' a', '€', r'bytes:\xe2\x82', '']

"""Conversations whose cache is kept: held against the model that reads all of each conversation anew."""
import io
import json
import os
import re
import select
import signal
import sys
import time
from functools import partial

import pytest
import torch
from conftest import ENVIRONMENT, ROOT, run
from example_models import CHAT, LLAMA, TEXT, chat_tokenizer, gpt, json_tokenizer, sentencepiece_tokenizer

import decode
import kvcache
from chat.conversation import Conversation, talk
from formats.huggingface import to_huggingface
from kvcache.contiguous import cache_for
from tokenizer import JSONTokenizer

SAID = ['Héllo', 'tabs \\ and "quotes"', '', 'wörld ' * 12, '日本 🙂']


def conversation(kind, window=0):
    model, tokenizer = gpt(**LLAMA, window=window), chat_tokenizer()
    step = decode.best(model, 1)
    cache = cache_for(model, 1, step) if kind == 'tuples' else kvcache.make_cache(model, kind, 1, 0, step)
    return Conversation(model, tokenizer, cache, temperature=0)


def read_anew(c, text, n):
    """The tokens of an answer by the model without a cache."""
    prompt = c.tokenizer.conversation([*c.messages, dict(role='user', content=text)])
    drawn = c.model.generate(torch.tensor([prompt]), n, temperature=0)[0, len(prompt):].tolist()
    return prompt, drawn[:drawn.index(2)] if 2 in drawn else drawn


@pytest.mark.parametrize('window', [0, 24])
@pytest.mark.parametrize('kind', ['tuples', *kvcache.KINDS])
def test_each_turn_says_what_the_model_says_that_reads_all_anew(kind, window):
    c, before = conversation(kind, window), []
    for text in SAID:
        prompt, drawn = read_anew(c, text, 9)
        assert ''.join(c.answer(text, 9)) == c.tokenizer.decode(drawn) == c.messages[-1]['content']
        assert c.n_kept + c.n_new == len(prompt) and c.tokens == (prompt + drawn)[:c.cache.length(c.handle)]
        # what was said before is kept, up to where its text has other tokens than were drawn
        assert window or c.n_kept >= len(before)
        before = prompt
    assert [m['role'] for m in c.messages] == ['user', 'assistant'] * len(SAID)


@pytest.mark.parametrize('kind', ['tuples', *kvcache.KINDS])
@pytest.mark.parametrize('stop', ['close', KeyboardInterrupt])
def test_an_answer_that_is_ended_early_is_kept_as_far_as_it_came(kind, stop):
    c = conversation(kind)
    answer = c.answer('Héllo', 20)
    heard = ''.join(next(answer) for _ in range(4))
    if stop == 'close':
        answer.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            answer.throw(KeyboardInterrupt)
    assert c.messages[-1]['content'] == heard
    _, drawn = read_anew(c, 'and then', 6)
    assert ''.join(c.answer('and then', 6)) == c.tokenizer.decode(drawn)


def test_a_conversation_beyond_the_context_is_refused_and_stays():
    c = conversation('tuples')
    ''.join(c.answer('Héllo', 5))
    before = list(c.messages)
    with pytest.raises(ValueError, match="and the model's context 256: begin a new one"):
        ''.join(c.answer('long ' * 300, 5))
    assert c.messages == before
    c.messages.clear()
    assert len(''.join(c.answer('Héllo', 10**6))) and c.cache.length(c.handle) <= 256
    c.messages.clear()
    c.tokenizer.end_tokens = ()
    ''.join(c.answer('Héllo', 10**6))
    assert c.cut.startswith('at the end of the context of 256 tokens') and c.cache.length(c.handle) == 256


def test_a_model_without_a_template_has_no_chat():
    model = gpt(**LLAMA)
    with pytest.raises(ValueError, match='no chat template'):
        Conversation(model, json_tokenizer(TEXT), cache_for(model, 1))


@pytest.mark.parametrize('window', [0, 60])
@pytest.mark.parametrize('kind', ['cpu', 'eager', *kvcache.KINDS])
def test_the_cache_grows_with_the_conversation(kind, window):
    model, tokenizer = gpt(**LLAMA, window=window), chat_tokenizer()
    step = decode.best(model, 1, threads=1) if kind != 'eager' else decode.EagerDecoder(model)
    cache_of = partial(kvcache.make_cache, model, kind if kind in kvcache.KINDS else 'tuple', 1, 0, step)
    whole, c = cache_of(256).nbytes(), Conversation(model, tokenizer, cache_of(16), temperature=0)
    assert c.cache.nbytes() <= whole / 8 or window
    caches = {c.cache: c.cache.model.config.block_size}
    for text in SAID:
        _, drawn = read_anew(c, text, 9)
        assert ''.join(c.answer(text, 9)) == tokenizer.decode(drawn)
        caches[c.cache] = c.cache.model.config.block_size
    assert 2 <= len(caches) <= 5 and max(caches.values()) <= 512 and c.cache.nbytes() <= whole


def test_the_template_gets_the_system_message_and_its_variables():
    import jinja2
    template = CHAT.replace('assistant\n', 'assistant\n{% if not enable_thinking %}(no){% endif %}')
    tokenizer, model = JSONTokenizer(chat_tokenizer().state()['json'], [2], {}, template), gpt(**LLAMA)
    c = Conversation(model, tokenizer, cache_for(model, 1), 'Be brief.', dict(enable_thinking=False),
                     temperature=0)
    ''.join(c.answer('Héllo', 3))
    expected = jinja2.Template(template).render(
        messages=[dict(role='system', content='Be brief.'), dict(role='user', content='Héllo')],
        enable_thinking=False, add_generation_prompt=True)
    assert '(no)' in expected and tokenizer.decode(c.tokens).startswith(expected)
    assert [m['role'] for m in c.messages] == ['user', 'assistant']


def test_penalty_and_min_p_are_those_of_transformers():
    processors = pytest.importorskip('transformers.generation.logits_process')
    model = gpt(**LLAMA)
    c = Conversation(model, chat_tokenizer(), cache_for(model, 1), repetition_penalty=1.3, min_p=0.2, temperature=0.7)
    torch.manual_seed(0)
    logits, tokens = 3 * torch.randn(1, 300), [5, 7, 5, 299]
    theirs = processors.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([tokens]), logits.clone())
    theirs = processors.MinPLogitsWarper(0.2)(None, theirs / 0.7)
    torch.testing.assert_close(c.changed(logits, tokens) / 0.7, theirs)


def saying(monkeypatch, c, *answers):
    """Let a model draw these tokens, answer by answer."""
    drawn = iter([token for answer in answers for token in answer])
    feed = c.feed
    monkeypatch.setattr(c, 'feed', lambda new: torch.where(
        torch.arange(feed(new).size(1)) == next(drawn), 1.0, 0.0)[None])


def test_special_tokens_and_the_first_blank_are_no_part_of_an_answer(monkeypatch):
    state = sentencepiece_tokenizer('a small text, and a small one').state()
    tokenizer = JSONTokenizer(state['json'], [2], {}, "{% for m in messages %}{{ m.content }}{% endfor %}</s>")
    model = gpt(**LLAMA | dict(vocab_size=tokenizer.vocab_size))
    c, words = Conversation(model, tokenizer, cache_for(model, 1), temperature=0), tokenizer.encode('a small')[1:]
    saying(monkeypatch, c, [*words[:1], 1, *words[1:], 2])
    assert tokenizer.token_bytes[words[0]].startswith(b' ')
    assert ''.join(c.answer('and', 20)) == 'a small' == c.messages[-1]['content']


def test_a_pipe(monkeypatch, capsys):
    """Each line is a message, an empty one is none; those that are given come first; /exit ends it."""
    c = conversation('tuples')
    monkeypatch.setattr('sys.stdin', io.StringIO('hi\n\n  \n/system Be brief.\nthere\n/nope\n/ or /x?\n/exit\nno\n'))
    talk(c, 3, ['first', '/clear'])
    out, err = capsys.readouterr()
    assert [m['content'] for m in c.messages if m['role'] == 'user'] == ['hi', 'there', '/ or /x?']
    assert c.system == 'Be brief.' and out.count('\n') >= 4 and '> first\n' in err and 'no command /nope' in err
    assert err.count('the answer was cut after max_new_tokens=3: ask the model to go on') == 4
    monkeypatch.setattr('sys.stdin', io.StringIO('/clear\nlast'))
    talk(c, 3)
    assert [m['content'] for m in c.messages if m['role'] == 'user'] == ['last']


# a real process on a terminal, as people meet it

@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A chat model in Hugging Face format, with a context of 8,192 tokens."""
    path = tmp_path_factory.mktemp('chat') / 'model'
    to_huggingface(gpt(**LLAMA | dict(block_size=8192)), str(path), chat_tokenizer())
    return path


class Terminal:
    """A process on a pseudo terminal."""

    def __init__(self, *command):
        import pty
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, *command], ENVIRONMENT | dict(TERM='xterm'))
        self.said = ''

    def until(self, pattern):
        """What is printed up to this pattern, a match. What stands before it is forgotten."""
        while not (found := re.search(pattern, self.said)):
            assert select.select([self.fd], [], [], 120)[0], self.said
            self.said += os.read(self.fd, 2**16).decode('utf-8', 'replace')
        self.said = self.said[found.end():]
        return found

    def type(self, text):
        self.until('> ')
        self.write(text)

    def write(self, text):
        while text:  # a terminal takes some thousand bytes at once
            readable, writable, _ = select.select([self.fd], [self.fd], [], 120)
            if readable:
                self.said += os.read(self.fd, 2**16).decode('utf-8', 'replace')
            elif writable:
                text = text[os.write(self.fd, text[:512].encode()):]

    def prompt_length(self):
        """The tokens of the last prompt, as its status line says."""
        kept, computed = self.until(r'([\d,]+) tokens were in the cache and ([\d,]+) were computed').groups()
        return int(kept.replace(',', '')) + int(computed.replace(',', ''))


def test_a_terminal(folder):
    pytest.importorskip('readline', reason="this Python has no readline")
    tokenizer, system = chat_tokenizer(), dict(role='system', content='Be brief.')

    def length(text):
        return len(tokenizer.conversation([system, dict(role='user', content=text)]))
    t = Terminal(os.path.join(ROOT, 'sample.py'), f'--init_from={folder}', '--chat', '--system=Be brief.',
                 '--start=at first', '--max_new_tokens=2', '--temperature=0', '--threads=1', '--device=cpu')
    try:
        t.until('Write a message.*/help.*Ctrl-D')
        t.until('> at first')
        assert t.until('the answer was cut after max_new_tokens=2') and t.prompt_length() == length('at first')
        for keys, said in (('\x1b[200~one\r/two\rthree\x1b[201~\r', 'one\n/two\nthree'),  # pasted
                           ('x' * 5000 + '\r', 'x' * 5000), ('teh\x7f\x7fhe cat\r', 'the cat'),
                           ('\x1b[A\x1b[A\r', 'the cat')):  # behind /clear
            t.type('/clear\r')
            t.type(keys)
            assert t.prompt_length() == length(said), said[:20]
        t.type('/clear\r')
        t.type('y' * 1000 + '\r')
        t.write('\x1b[200~z\r' + 'z' * 5000 + '\x1b[201~\r')  # while it answers
        said = dict(role='user', content='y' * 1000), dict(role='assistant', content='')
        both = tokenizer.conversation([system, *said, dict(role='user', content='z\n' + 'z' * 5000)])
        assert t.prompt_length() == length('y' * 1000) and 0 <= t.prompt_length() - len(both) <= 8
        t.type('\r')
        t.type('/hepl\r')
        t.until('no command /hepl')
        t.type('/help\r')
        t.until('/system TEXT')
        t.type('/clear\r')
        t.type('/system\r')
        t.type('the cat\r')
        assert t.prompt_length() == len(tokenizer.conversation([dict(role='user', content='the cat')]))
        t.until('> ')
        time.sleep(0.5)  # a signal between the prompt and the wait for a key is noticed at the next key
        t.write('\x03')
        t.until('Ctrl-D ends')
        t.type('/exit\r')
        assert os.waitpid(t.pid, 0)[1] == 0
        t.pid = None
    finally:
        if t.pid:
            os.kill(t.pid, signal.SIGKILL)
            os.waitpid(t.pid, 0)
        os.close(t.fd)


def test_settings_of_the_draw_are_those_of_the_folder_unless_they_are_given(folder):
    path = folder / 'generation_config.json'
    before = path.read_text('utf-8')
    path.write_text(json.dumps(dict(temperature=0.5, top_k=1, top_p=0.9, repetition_penalty=1.0)), 'utf-8')
    chat = partial(run, folder, os.path.join(ROOT, 'sample.py'), f'--init_from={folder}', '--chat', '--device=cpu',
                   '--start=Hello', '--max_new_tokens=30', '--threads=1')
    try:
        of_file, greedy = chat(), chat('--generation_config=none', '--temperature=0')
        given = chat('--top_k=0', '--temperature=5.0', '--top_p=1.0')
    finally:
        path.write_text(before, 'utf-8')
    assert of_file.stdout == greedy.stdout != given.stdout
    assert 'sampling: temperature=0.5, top_k=1, top_p=0.9, repetition_penalty=1.0 (generation_config.json' in (
        of_file.stderr)
    assert 'sampling: temperature=0.0, top_k=200, top_p=1.0\n' in greedy.stderr
    assert 'sampling: temperature=5.0, top_k=0, top_p=1.0, repetition_penalty' in given.stderr

"""Conversations whose keys and values are remembered: beside the model that reads all anew, and beside the server."""
import io
import json
import os
import random
import re
import select
import signal
import sys
import time
from functools import partial

import pytest
import torch
from conftest import ENVIRONMENT, ROOT, SERVING, needs, run, sizes
from example_models import CHAT, LLAMA, chat_tokenizer, gpt, sentencepiece_tokenizer
from toy_executor import Saying, toy_model

from chat.conversation import Conversation, talk
from decode.cpu import CPUExecutor
from decode.eager import EagerExecutor
from engine import Engine
from formats.huggingface import to_huggingface
from kvcache import PagePool
from tokenizer import JSONTokenizer

SAID = ['Héllo', 'tabs \\ and "quotes"', '', 'wörld ' * 12, '日本 🙂']
PAGE = 4


def engine_of(model, executor=EagerExecutor):
    c = model.config
    return Engine(model, executor(model), PagePool(256, PAGE, c.window, c.n_sink), budget=50, most_running=1)


def conversation(executor=EagerExecutor, window=0):
    return Conversation(engine_of(gpt(**LLAMA, window=window), executor), chat_tokenizer(), temperature=0)


def read_anew(c, text, n):
    """(the prompt, the tokens of an answer, and the one that ends it) by the model without a cache."""
    prompt = c.tokenizer.conversation([*c.messages, dict(role='user', content=text)])
    drawn = c.engine.model.generate(torch.tensor([prompt]), n, temperature=0)[0, len(prompt):].tolist()
    return prompt, *((drawn[:drawn.index(2)], [2]) if 2 in drawn else (drawn, []))


@pytest.mark.parametrize('window', [0, 24])
@pytest.mark.parametrize('executor', [EagerExecutor, CPUExecutor])
def test_each_turn_says_what_the_model_says_that_reads_all_anew(executor, window):
    c, before = conversation(executor, window), []
    for text in SAID:
        prompt, drawn, end = read_anew(c, text, 9)
        assert ''.join(c.answer(text, 9)) == c.tokenizer.decode(drawn) == c.messages[-1]['content']
        assert (c.n_kept + c.n_new, c.n_drawn) == (len(prompt), len(drawn))
        # what was computed before is found, in whole pages, up to where the text of now has other tokens
        n_found = len(os.path.commonprefix([before, prompt[:-1]])) // PAGE * PAGE
        assert c.n_kept == n_found or window and c.n_kept < n_found
        before = (prompt + drawn + end)[:-1]
    assert [m['role'] for m in c.messages] == ['user', 'assistant'] * len(SAID) and c.n_kept > 50


@pytest.mark.parametrize('ending', ['close', KeyboardInterrupt, 'stop'])
def test_an_answer_that_is_ended_early_is_kept_as_far_as_it_came(ending):
    c = conversation()
    answer = c.answer('Héllo', 20)
    heard = ''.join(next(answer) for _ in range(4))
    if ending == 'close':
        answer.close()
    elif ending == 'stop':
        c.stop()
        assert not ''.join(answer)
    else:
        with pytest.raises(KeyboardInterrupt):
            answer.throw(KeyboardInterrupt)
    assert c.messages[-1]['content'] == heard and c.engine.pool.n_free == 256
    _, drawn, _ = read_anew(c, 'and then', 6)
    assert ''.join(c.answer('and then', 6)) == c.tokenizer.decode(drawn) and c.n_kept >= 8


class PressesCtrlC(EagerExecutor):
    """Ctrl-C comes inside of the 4th step."""
    n_steps = 0

    def logits_of(self, batch, rows):
        self.n_steps += 1
        if self.n_steps == 4:
            signal.raise_signal(signal.SIGINT)
        return super().logits_of(batch, rows)


def test_ctrl_c_ends_an_answer_and_nothing_is_computed_again(monkeypatch, capsys):
    c, before = conversation(PressesCtrlC), signal.getsignal(signal.SIGINT)
    c.tokenizer.end_tokens = ()
    monkeypatch.setattr('sys.stdin', io.StringIO('there\n'))
    talk(c, 20, ['first ' * 6])
    (n_first, n), (_, m) = re.findall('and ([0-9]+) were computed; ([0-9]+) new tokens', capsys.readouterr().err)
    assert (n, m) == ('3', '20') and c.n_kept >= int(n_first) // PAGE * PAGE > 20
    assert signal.getsignal(signal.SIGINT) is before


def test_the_server_and_a_conversation_say_the_same_with_the_same_seed():
    needs(*SERVING)
    from serving_process import chat_tokenizer_with, chatting
    template = CHAT.replace('assistant\n', 'assistant\n{% if not enable_thinking %}(no){% endif %}')
    model, tokenizer, n_ended = gpt(**LLAMA), chat_tokenizer_with(template), 0
    tokenizer.end_tokens = 2, *range(30, 60)  # also some that have a text
    with chatting(model, tokenizer, n_pages=256) as client:
        for case in range(sizes(5, 50)):
            rng = random.Random(case)
            how = dict(temperature=rng.choice([0.0, 0.5, 1.0, 2.0]), top_k=rng.choice([0, 5, 50]), seed=case,
                       top_p=rng.choice([0.5, 1.0]), min_p=rng.choice([0.0, 0.05]),
                       repetition_penalty=rng.choice([1.0, 1.3]))
            variables = dict(enable_thinking=rng.choice([False, True]))
            c = Conversation(engine_of(model, CPUExecutor), tokenizer, rng.choice(['', 'Be brief.']), variables, **how)
            for text in rng.sample(SAID, 2):
                system = [dict(role='system', content=c.system)] * bool(c.system)
                body = how | dict(messages=[*system, *c.messages, dict(role='user', content=text)], max_tokens=20,
                                  seed=case + c.n_answers,
                                  chat_template_kwargs=variables)
                answer = client.post('/v1/chat/completions', json=body)
                assert answer.status_code == 200, answer.text
                assert ''.join(c.answer(text, 20)) == answer.json()['choices'][0]['message']['content'], (case, how)
                n_ended += c.n_drawn < 20
    assert n_ended > 1


def test_a_conversation_beyond_the_context_is_refused_and_stays():
    c = conversation()
    ''.join(c.answer('Héllo', 5))
    before = list(c.messages)
    with pytest.raises(ValueError, match="and the model's context 256: begin a new one"):
        ''.join(c.answer('long ' * 300, 5))
    assert c.messages == before
    c.messages.clear()
    c.tokenizer.end_tokens = ()
    ''.join(c.answer('Héllo', 10**6))
    assert c.cut.startswith('at the end of the context of 256 tokens') and c.n_new + c.n_kept + c.n_drawn == 257


def test_special_tokens_and_the_first_blank_are_no_part_of_an_answer():
    state = sentencepiece_tokenizer('a small text, and a small one').state()
    tokenizer = JSONTokenizer(state['json'], [2], {}, "{% for m in messages %}{{ m.content }}{% endfor %}</s>")
    engine = engine_of(toy_model(256, tokenizer.vocab_size), Saying)
    c, words = Conversation(engine, tokenizer, temperature=0), tokenizer.encode('a small')[1:]
    engine.executor.says = [*words[:1], 0, *words[1:], 2]
    assert tokenizer.token_bytes[words[0]].startswith(b' ')
    assert ''.join(c.answer('and', 20)) == 'a small' == c.messages[-1]['content'] and c.n_drawn == len(words) + 1


def test_a_pipe(monkeypatch, capsys):
    """Each line is a message, an empty one is none; those that are given come first; /quit ends it."""
    c = conversation()
    monkeypatch.setattr('sys.stdin', io.StringIO('hi\n\n  \n/system Be brief.\nthere\n/nope\n/ or /x?\n/quit\nno\n'))
    talk(c, 3, ['first', '/clear'])
    out, err = capsys.readouterr()
    assert [m['content'] for m in c.messages if m['role'] == 'user'] == ['hi', 'there', '/ or /x?']
    assert c.system == 'Be brief.' and out.count('\n') >= 4 and '> first\n' in err and 'no command /nope' in err
    assert err.count('the answer was cut after max_new_tokens=3: ask the model to go on') == 4
    monkeypatch.setattr('sys.stdin', io.StringIO('/clear\nlast'))
    talk(c, 3)
    assert [m['content'] for m in c.messages if m['role'] == 'user'] == ['last']


# a real process on a terminal, as people meet it

@pytest.fixture
def folder(tmp_path):
    """A chat model in Hugging Face format, with a context of 8,192 tokens."""
    to_huggingface(gpt(**LLAMA | dict(block_size=8192)), str(tmp_path / 'model'), chat_tokenizer())
    return tmp_path / 'model'


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
        t.type('\r')
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
    settings = dict(temperature=0.5, top_k=1, top_p=0.9, repetition_penalty=1.0)
    (folder / 'generation_config.json').write_text(json.dumps(settings), 'utf-8')
    chat = partial(run, folder, os.path.join(ROOT, 'sample.py'), f'--init_from={folder}', '--chat', '--device=cpu',
                   '--start=Hello', '--max_new_tokens=30', '--threads=1')
    of_file, greedy = chat(), chat('--generation_config=none', '--temperature=0')
    given = chat('--top_k=0', '--temperature=5.0', '--top_p=1.0')
    assert of_file.stdout == greedy.stdout != given.stdout
    assert 'sampling: temperature=0.5, top_k=1, top_p=0.9, repetition_penalty=1.0 (generation_config.json' in (
        of_file.stderr)
    assert 'sampling: temperature=0.0, top_k=200, top_p=1.0\n' in greedy.stderr
    assert 'sampling: temperature=5.0, top_k=0, top_p=1.0, repetition_penalty' in given.stderr

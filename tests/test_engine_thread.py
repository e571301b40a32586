"""The engine's thread and its inbox; a step can be held in the middle. test_engine_machine.py has more failures."""
import random
import threading
import time

import pytest
from conftest import sizes
from drafting import AnyDraft, drafting
from small_engine import BYTES, V, assert_alone, finished, run, submit, thread_of, tiny
from tiny_models import model_of
from toy_executor import ToyExecutor, toy_model

from decode.cpu import CPUExecutor
from decode.kernel.threads import n_cores

WAIT = 60  # seconds; only a hang takes so long


class Held(ToyExecutor):
    """Each step notes that it has begun, and goes on when it may."""

    def __init__(self, model):
        super().__init__(model)
        self.began, self.may_go_on, self.free = threading.Semaphore(0), threading.Semaphore(0), False
        self.fails = self.hold_up

    def hold_up(self, texts):
        self.began.release()
        if not self.free:
            assert self.may_go_on.acquire(timeout=WAIT)

    def wait(self):
        """Wait until a step has begun."""
        assert self.began.acquire(timeout=WAIT)

    def go_on(self):
        self.free = True
        self.may_go_on.release()


def ended(got):
    """What a request was given, once all of its samples have ended."""
    deadline = time.monotonic() + WAIT
    while not all(got.reasons):
        assert time.monotonic() < deadline
        time.sleep(.002)
    return got


@pytest.fixture
def served():
    """(an `EngineThread`, its executor): the thread runs, and is stopped afterwards; then every page is free."""
    model = toy_model()
    executor = Held(model)
    thread = thread_of(model, executor, BYTES, (), n_pages=24, budget=8, max_queue=4)
    executor.pool = thread.engine.pool
    thread.start()
    yield thread, executor
    executor.go_on()
    thread.stop()
    assert not thread.thread.is_alive() and not thread.live and thread.engine.pool.n_free == 24


def ask(thread, id, max_tokens=4, **how):
    return submit(thread, id, [1, 2, 3], max_tokens, **how)


def test_a_soak_gives_each_what_it_gets_alone():
    """Requests, aborts and looks at the state while the thread runs, on a real model with two threads of its kernel."""
    chooser, model, clients, aborted = random.Random(0), model_of('rope'), [], set()
    thread = thread_of(model, CPUExecutor(model, threads=min(2, n_cores())), n_pages=24, budget=32, max_queue=10**6)
    thread.start()
    for i in range(sizes(60, 2000)):
        prompt = [1, 2, 3, 4, 5, 6, 7, 8][:chooser.randrange(9)] + [chooser.randrange(V) for _ in range(3)]
        clients.append(submit(thread, str(i), prompt, chooser.randint(1, 29), n=chooser.choice([1, 1, 3]), logprobs=5,
                              temperature=chooser.choice([0.0, 1.0])))
        if chooser.random() < 0.3:
            aborted.add(n := chooser.randrange(i + 1))
            thread.abort(str(n))
        thread.state()
    thread.drain(10 * WAIT)
    thread.stop()
    assert all({*client.reasons} == {'length'} for i, client in enumerate(clients) if i not in aborted)
    assert thread.engine.pool.n_free == 24 and not thread.live
    for client in chooser.sample(clients, sizes(20, 500)):
        assert {*client.reasons} <= {'length', 'abort'}
        assert_alone(model, client)


def test_an_abort_and_a_stop_end_steps_that_would_repeat(served, monkeypatch):
    """An id can be that of a later request. A stop aborts what has not ended."""
    monkeypatch.setattr('serving.engine_thread.chunk_interval', lambda n_requests: 1e9)
    thread, executor = served
    client = ask(thread, 'a', max_tokens=20)
    for _ in range(3):  # the prompt, and two steps of the call after it
        executor.wait()
        executor.may_go_on.release()
    executor.wait()
    thread.abort('a')
    executor.may_go_on.release()
    assert ended(client).reasons == ['abort'] and len(client.tokens[0]) == 4
    clients = [ask(thread, 'a', max_tokens=20)]
    executor.wait()
    clients.append(ask(thread, 'b', max_tokens=20, n=2))
    for _ in range(2):  # the prompt of the second one, and a step of the call after it
        executor.may_go_on.release()
        executor.wait()
    stopping = threading.Thread(target=thread.stop)
    stopping.start()
    with thread.condition:
        assert thread.condition.wait_for(lambda: thread.stopping, WAIT)
    executor.go_on()
    stopping.join()
    assert [ended(client).reasons for client in clients] == [['abort'], ['abort'] * 2]
    assert len(clients[0].tokens[0]) < 5


def test_a_defect_of_the_engine_ends_its_requests_and_not_the_thread(served, monkeypatch):
    """Each is told so, also if ending them shows another defect."""
    thread, executor = served
    clients = [ask(thread, 'a')]
    executor.wait()
    clients.append(ask(thread, 'b'))
    # it fails once: `a` goes on in the engine, and a second failure would end whoever has been asked for by then
    computed, fails = thread.engine.pool.computed, iter([True])
    with monkeypatch.context() as patch:
        patch.setattr(thread.engine.pool, 'computed', lambda s, n: 1 / 0 if next(fails, False) else computed(s, n))
        patch.setattr(thread.engine, 'end', lambda *args: 1 / 0)
        executor.go_on()
        for client in clients:
            assert ended(client).reasons == ['error'] and type(client.error) is ZeroDivisionError
    assert ended(ask(thread, 'c')).reasons == ['length']


def test_what_a_request_raises_ends_it_alone(served):
    thread, executor = served
    other = ask(thread, 'a')
    executor.wait()
    wrong = submit(thread, 'b', [1], 4, n=2, stop=(5,))  # whatever no check has found
    executor.go_on()
    assert ended(wrong).reasons == ['error'] * 2 and isinstance(wrong.error, Exception)
    assert ended(other).reasons == ['length'] and ended(ask(thread, 'b')).reasons == ['length']


class Broken(list):
    """The bytes of tokens, of which one token has none."""

    def __init__(self, token_bytes, broken):
        super().__init__(token_bytes)
        self.broken = broken

    def __getitem__(self, token):
        return super().__getitem__(token) if token != self.broken else 1 / 0


def test_what_a_text_raises_ends_its_request_alone():
    """One of its samples raises in the call in which others end; each of them has one end, in one delivery."""
    thread, model = tiny()
    first = [tokens[0] for tokens in finished(thread, 'a', [3, 1], 4, n=3).tokens]
    thread = thread_of(model, CPUExecutor(model, threads=1), Broken(BYTES, first[2]))
    got, other = submit(thread, 'a', [3, 1], 4, n=3), submit(thread, 'b', [3, 1], 1)
    run(thread)
    assert [*map(len, got.tokens)] == [4, 4, 0] and got.n_calls == 1
    assert got.reasons == ['length', 'length', 'error'] and type(got.error) is ZeroDivisionError
    assert other.reasons == ['length']


def test_the_state_shows_the_pool(served, monkeypatch):
    thread, executor = served
    monkeypatch.setattr('serving.engine_thread.chunk_interval', lambda n_requests: 0)  # a call has one step
    two = submit(thread, 'two', [*range(6)], 9, n=2)
    executor.wait()
    for n in range(3):  # the prompt but for its last token, and the first two tokens of each
        with thread.condition:  # the thread is inside of a step: what is shown is from before, and made anew after it
            before = thread.state()
        assert len(before['running']) == n
        thread.snapshot['time'], thread.looked_at = float('-inf'), float('inf')
        executor.may_go_on.release()
        executor.wait()
    state = thread.state()
    assert [(s['id'], s['index'], s['n_prompt'], s['n_tokens'], s['computed']) for s in state['running']] == [
        ('two', 0, 6, 8, 7), ('two', 1, 6, 8, 7)]
    tables = [s['blocks'] for s in state['running']]
    for page, shown in enumerate(state['blocks']):
        assert shown['samples'] == [['two', i] for i in range(2) if page in tables[i]]
    assert state['blocks'][tables[0][0]]['samples'] == [['two', 0], ['two', 1]]
    assert state['blocks'][tables[0][0]]['text'] == 'abcd' and state['blocks'][tables[0][0]]['remembered']
    assert state['blocks'][tables[0][1]]['text'][:-1] == 'ef' and not state['blocks'][tables[0][1]]['remembered']
    used = {page for table in tables for page in table}
    assert state['counters']['blocks_shared'] == 1 and state['counters']['blocks_used'] == len(used)
    executor.go_on()
    ended(two)
    thread.stop()
    state = thread.state()
    assert not any(block['samples'] for block in state['blocks']) and not state['running'] and not state['waiting']
    assert state['page_size'] == 4 and state['n_blocks'] == len(state['blocks']) == 24


def test_the_text_of_a_block_changes_with_its_tokens():
    thread, _ = tiny(n_pages=4)
    for token in (1, 2):  # the second prompt takes pages of the first
        finished(thread, 'a', [token] * 12, 1)
        assert [block['text'] for block in thread.state()['blocks']].count(BYTES[token].decode() * 4) == 3


HOWS = [dict(), dict(temperature=0.0), dict(top_k=5), dict(top_p=0.7, min_p=0.02), dict(frequency_penalty=1.5),
        dict(logit_bias={3: 2.0}), dict(min_tokens=9, stop_token_ids=[1, 2, 3]), dict(logprobs=5),
        dict(stop=('ab', 'q')), dict(logprobs=5, prompt_logprobs=True, stop=('b', 'cd', 'xyz'))]


def given(got):
    return got.tokens, got.logprobs, got.text, got.reasons, got.error, got.first.prompt_logprobs


def test_what_a_call_of_several_steps_gives_is_delivered_together(monkeypatch):
    """It is what single steps give, and what rounds with drafts give, with few pages too."""
    seen, counted, counts = [], [], []
    for length, draft, n_pages in ((0, False, 80), (1e9, False, 80), (1e9, True, 80), (1e9, False, 16)):
        monkeypatch.setattr('serving.engine_thread.chunk_interval', lambda n_requests, length=length: length)
        thread, model = tiny(n_pages=n_pages)
        if draft:
            executor, _ = drafting(model, AnyDraft())
            thread = thread_of(model, executor, n_pages=n_pages)
        all_got = [submit(thread, str(i), [3, i, 1][:1 + i % 3], 25, i, 1 + i % 2, **how) for i, how in enumerate(HOWS)]
        run(thread)
        seen.append([given(got) for got in all_got])
        counted.append((thread.engine.n_steps, thread.engine.n_computed, thread.stats.generated_tokens))
        counts.append(all_got[1].n_calls)
    for got in all_got:
        if not got.request.stop:
            assert_alone(model, got)
    assert seen[0] == seen[1] == seen[2] == seen[3] and ['stop'] in [of[3] for of in seen[0]]
    assert counted[0][2] == counted[1][2] and counts[0] == 25 and counts[1] < 20 and counts[2] <= 4
    assert thread.engine.scheduler.n_preempted


def test_rounds_of_drafts_wait_for_half_of_a_pause(monkeypatch):
    monkeypatch.setattr('serving.engine_thread.chunk_interval', lambda n_requests: 1e9)
    model = model_of('learned')
    drafted = thread_of(model, drafting(model, AnyDraft())[0])
    got = submit(drafted, 'held', [3, 1], 25)
    for _ in range(4):
        drafted.run_once()
    drafted.engine.longest_call, n_calls = 0, got.n_calls  # time has passed, and the step gave nothing: preempted
    drafted.hand_out([])
    assert got.n_calls == n_calls + 1


def test_a_stop_string_costs_few_tokens_behind_it(monkeypatch):
    monkeypatch.setattr('serving.engine_thread.chunk_interval', lambda n_requests: 1e9)
    thread, _ = tiny(n_pages=40)
    text = finished(thread, 'a', [3, 1], 60).text[0]
    for n in range(4, 40, sizes(7, 1)):
        n_before = thread.engine.n_computed
        got = finished(thread, 'b', [3, 1], 60, stop=(text[n:n + 3],))
        assert got.reasons == ['stop'] and got.text == [text[:text.index(text[n:n + 3])]]
        assert len(got.tokens[0]) <= n + 3 and thread.engine.n_computed - n_before < n + 3 + 2 + 8

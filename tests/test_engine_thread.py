"""
The engine's thread and its inbox: requests that end early at each stage, failures, a full queue, draining, stopping.

The kernel is the toy. A step can be held in the middle by an event, so that nothing depends on time.
"""
import random
import threading

import pytest
from conftest import sizes
from small_engine import Got, alone
from test_same_bits import SHAPES, model_of, threads
from toy_kernel import ToyKernel, toy_model

from decode.cpu import CPUDecoder
from serving.engine import Draining, Engine, QueueFull
from serving.request import Request, SamplingParams

V = 11
BYTES = [bytes([97 + i]) for i in range(V)]
WAIT = 60  # seconds; only a hang takes so long


class Held(ToyKernel):
    """Each call notes that it has begun, and goes on when it may."""

    def __init__(self, model):
        super().__init__(model)
        self.began, self.may_go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.free = False

    def one_step(self, *args):
        self.began.release()
        if not self.free:
            assert self.may_go_on.acquire(timeout=WAIT)
        return super().one_step(*args)

    def wait(self):
        """Wait until a call has begun."""
        assert self.began.acquire(timeout=WAIT)

    def step(self, n=1):
        """Let so many calls go on, and wait for the begin of the next one each time."""
        for _ in range(n):
            self.may_go_on.release()
            self.wait()

    def go_on(self):
        self.free = True
        self.may_go_on.release()


class Client(Got):
    def __init__(self, request):
        super().__init__(request)
        self.ended, self.raises = threading.Event(), False

    def deliver(self, outputs):
        super().deliver(outputs)
        if self.raises:
            raise ConnectionError("nobody reads this")
        if all(self.reasons):
            self.ended.set()

    def wait(self):
        assert self.ended.wait(WAIT)
        return self


@pytest.fixture
def served():
    """(engine, kernel): the thread runs, and is stopped afterwards; then every block is free."""
    model = toy_model()
    kernel = Held(model)
    engine = Engine(model, kernel, BYTES, None, n_blocks=24, page_size=4, max_num_batched_tokens=8, max_queue=4)
    kernel.cache = engine.cache
    engine.start()
    yield engine, kernel
    kernel.go_on()
    engine.stop()
    assert not engine.thread.is_alive() and not engine.live
    assert engine.cache.n_free == 24 and not engine.cache.records


def submit(engine, id, prompt=(1, 2, 3), max_tokens=4, n=1, **params):
    client = Client(Request(id, list(prompt), max_tokens, SamplingParams(**params), n=n))
    engine.submit(client.request)
    return client


def test_requests_are_answered(served):
    engine, kernel = served
    kernel.free = True
    clients = [submit(engine, str(i), n=1 + i) for i in range(3)]
    for i, client in enumerate(clients):
        assert client.wait().reasons == ['length'] * (1 + i) and all(len(t) == 4 for t in client.tokens)
    assert engine.stats.finished == {'length': 6} and engine.stats.generated_tokens == 24
    counted = [engine.stats.registry.get_sample_value(f'nanogpt_time_{of}_seconds_count')
               for of in ('to_first_token', 'per_token')]
    assert counted == [3, 6]


def test_a_soak_gives_each_what_it_gets_alone():
    """Requests, aborts and looks at the state while the thread runs, on a real model with two threads of its kernel."""
    chooser, decoder = random.Random(0), CPUDecoder(model_of(SHAPES[0]), threads=max(threads))
    vocab_size, clients = decoder.vocab_size, []
    engine = Engine(decoder.model, decoder, lambda token: bytes([97 + token % 26]), None, 24, 4, 32, 10**6)
    engine.start()
    for i in range(sizes(60, 2000)):
        prompt = [1, 2, 3, 4, 5, 6, 7, 8][:chooser.randrange(9)] + [chooser.randrange(vocab_size) for _ in range(3)]
        clients.append(submit(engine, str(i), prompt, chooser.randint(1, 30), chooser.choice([1, 1, 3]), logprobs=5,
                              temperature=chooser.choice([0.0, 1.0])))
        if chooser.random() < 0.3:
            engine.abort(str(chooser.randrange(i + 1)))
        engine.state()
    assert engine.drain(10 * WAIT)
    engine.stop()
    assert engine.cache.n_free == 24 and not engine.live
    for client in chooser.sample(clients, sizes(20, 500)):
        for tokens, logprobs, reason, expected in zip(client.tokens, client.logprobs, client.reasons,
                                                      alone(decoder, client.request)):
            assert (tokens, logprobs) == tuple(part[:len(tokens)] for part in expected)
            assert reason == 'length' and len(tokens) == client.request.max_tokens or reason == 'abort'


@pytest.mark.parametrize('when', ['queued', 'prefill', 'decode'])
def test_disconnect_frees(served, when):
    """The blocks of an aborted request are free by the next step, and another goes on as if it had not been there."""
    engine, kernel = served
    other = submit(engine, 'other', [5], max_tokens=20)
    kernel.wait()
    gone = submit(engine, 'gone', range(10), max_tokens=20)
    if when != 'queued':
        kernel.step(1 if when == 'prefill' else 5)
        sample, = engine.live['gone'].samples
        assert (sample.computed < 10) is (when == 'prefill') and sample.handle is not None
    engine.abort('gone')
    kernel.step()
    assert 'gone' not in engine.live and len(engine.cache.records) == 1
    assert gone.wait().reasons == ['abort'] and (gone.tokens == [[]]) is (when != 'decode')
    kernel.go_on()
    alone = other.wait().tokens
    again = submit(engine, 'again', [5], max_tokens=20).wait()
    assert again.tokens == alone


def test_cancel_n_frees_all(served):
    engine, kernel = served
    gone = submit(engine, 'gone', n=5, max_tokens=20)
    kernel.wait()
    kernel.step(3)
    assert len(engine.cache.records) == 5
    other = submit(engine, 'other')
    engine.abort('gone')
    kernel.step()
    assert len(engine.cache.records) == 1
    kernel.go_on()
    assert gone.wait().reasons == ['abort'] * 5 and other.wait().reasons == ['length']


def test_cancel_hits_only_its_request(served):
    engine, kernel = served
    clients = [submit(engine, id) for id in ('1', '11', '111')]
    kernel.wait()
    engine.abort('1')
    engine.abort('there is none')
    kernel.go_on()
    assert [client.wait().reasons for client in clients] == [['abort'], ['length'], ['length']]
    engine.abort('11')  # it has ended
    assert submit(engine, '11').wait().reasons == ['length']


def test_cancel_during_a_step(served):
    """What the step has computed for the aborted sample is delivered before its end, or not at all; nothing after."""
    engine, kernel = served
    client = submit(engine, 'a', max_tokens=20)
    kernel.wait()
    kernel.step(2)
    engine.abort('a')
    kernel.go_on()
    assert client.wait().reasons == ['abort'] and len(client.tokens[0]) == 3
    assert submit(engine, 'b').wait().reasons == ['length']


def test_bad_request_spares_others(served):
    """A call that has token 9 fails: the requests with it end with an error, the others get what they get alone."""
    engine, kernel = served
    kernel.free = True
    good = [submit(engine, f'alone {i}', [i], max_tokens=6, logit_bias=((9, -100),)).wait() for i in range(3)]

    def fail(texts):
        if any(9 in text for text in texts):
            raise ZeroDivisionError("a nine")
    kernel.fails, kernel.free = fail, False
    together = [submit(engine, 'good 0', [0], max_tokens=6, logit_bias=((9, -100),))]
    kernel.wait()
    bad = submit(engine, 'bad', [4, 9, 4], n=2)
    together += [submit(engine, f'good {i}', [i], max_tokens=6, logit_bias=((9, -100),)) for i in (1, 2)]
    kernel.go_on()
    assert bad.wait().reasons == ['error'] * 2 and 'ZeroDivisionError: a nine' in bad.error
    assert [client.wait().tokens for client in together] == [client.tokens for client in good]


def test_a_client_that_raises_is_alone(served):
    engine, kernel = served
    bad, good = Client(Request('bad', [1], 20, n=3)), Client(Request('good', [1], 20))
    bad.raises = True
    engine.submit(bad.request)
    kernel.wait()
    engine.submit(good.request)
    kernel.go_on()
    assert good.wait().reasons == ['length'] and bad.n_calls == 1


def test_duplicate_request_id(served):
    engine, kernel = served
    first = submit(engine, 'a')
    kernel.wait()
    with pytest.raises(ValueError, match="'a' already"):
        submit(engine, 'a')
    kernel.go_on()
    assert first.wait().reasons == ['length']
    assert submit(engine, 'a').wait().reasons == ['length']


def test_a_full_queue_refuses(served):
    engine, kernel = served
    clients = [submit(engine, 'runs')]
    kernel.wait()
    clients += [submit(engine, str(i)) for i in range(4)]
    with pytest.raises(QueueFull, match='4 requests are waiting'):
        submit(engine, 'too many')
    kernel.go_on()
    for client in clients:
        assert client.wait().reasons == ['length']
    assert submit(engine, 'later').wait().reasons == ['length']


def test_drain_finishes_what_runs_and_refuses_new(served):
    engine, kernel = served
    clients = [submit(engine, str(i), n=2) for i in range(3)]
    kernel.wait()
    drained = []
    thread = threading.Thread(target=lambda: drained.append(engine.drain(WAIT)))
    thread.start()
    with engine.condition:
        assert engine.condition.wait_for(lambda: engine.draining, WAIT)
    with pytest.raises(Draining):
        submit(engine, 'new')
    kernel.go_on()
    thread.join()
    assert drained == [True] and all(client.reasons == ['length'] * 2 for client in clients)


def test_drain_has_a_limit(served):
    engine, kernel = served
    client = submit(engine, 'a', max_tokens=20)
    kernel.wait()
    drained = []
    thread = threading.Thread(target=lambda: drained.append(engine.drain(0)))
    thread.start()
    with engine.condition:
        assert engine.condition.wait_for(lambda: engine.inbox, WAIT)
    kernel.go_on()
    thread.join()
    assert drained == [False] and client.wait().reasons == ['abort']


def test_stop_aborts_what_has_not_ended(served):
    engine, kernel = served
    clients = [submit(engine, 'runs', max_tokens=20)]
    kernel.wait()
    clients.append(submit(engine, 'waits', max_tokens=20, n=2))
    thread = threading.Thread(target=engine.stop)
    thread.start()
    with engine.condition:
        assert engine.condition.wait_for(lambda: engine.stopping, WAIT)
    kernel.go_on()
    thread.join()
    assert clients[0].wait().reasons == ['abort'] and clients[1].wait().reasons == ['abort'] * 2


def test_a_defect_of_the_engine_ends_its_requests_and_not_the_thread(served, monkeypatch):
    engine, kernel = served
    client = submit(engine, 'a')
    kernel.wait()
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, 'commit', lambda plan: 1 / 0)
        kernel.go_on()
        assert client.wait().reasons == ['error']
    assert engine.cache.n_free == 24
    assert submit(engine, 'b').wait().reasons == ['length']


def test_the_state_shows_the_pool(served, monkeypatch):
    engine, kernel = served
    monkeypatch.setattr('serving.core.pause', lambda n_streams: 0)  # a plan has one step
    two = submit(engine, 'two', range(6), max_tokens=9, n=2)
    kernel.wait()
    kernel.step(2)
    with engine.condition:  # the thread is inside a step: what is shown is from before, and is made anew after it
        before = engine.state()
    assert before['running'] == []
    engine.snapshot['time'], engine.looked_at = float('-inf'), float('inf')
    kernel.step()
    state = engine.state()
    assert [(s['id'], s['index'], s['n_prompt'], s['n_tokens'], s['computed']) for s in state['running']] == [
        ('two', 0, 6, 9, 8), ('two', 1, 6, 9, 8)]
    tables = [s['blocks'] for s in state['running']]
    for block, shown in enumerate(state['blocks']):
        assert shown['samples'] == [['two', i] for i in range(2) if block in tables[i]]
    assert state['blocks'][tables[0][0]]['samples'] == [['two', 0], ['two', 1]]
    assert state['blocks'][tables[0][0]]['text'] == 'abcd' and state['blocks'][tables[0][0]]['remembered']
    assert state['counters']['blocks_shared'] == 1 and state['counters']['blocks_used'] == 7  # two for each to go on
    kernel.go_on()
    two.wait()
    engine.stop()
    state = engine.state()
    assert not any(block['samples'] for block in state['blocks']) and not state['running'] and not state['waiting']
    assert state['page_size'] == 4 and state['n_blocks'] == len(state['blocks']) == 24

"""
The engine's thread and its inbox: requests in any order, defects, stopping. The server's tests fill the queue and drain
it, and test_engine_machine.py has failures and aborts at each stage.

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
from serving.engine import Engine
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
        self.ended = threading.Event()

    def deliver(self, outputs):
        super().deliver(outputs)
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
    engine = Engine(model, kernel, BYTES, (), n_blocks=24, page_size=4, max_num_batched_tokens=8, max_queue=4)
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


def test_a_soak_gives_each_what_it_gets_alone():
    """Requests, aborts and looks at the state while the thread runs, on a real model with two threads of its kernel."""
    chooser, decoder = random.Random(0), CPUDecoder(model_of(SHAPES[0]), threads=max(threads))
    vocab_size, clients = decoder.vocab_size, []
    engine = Engine(decoder.model, decoder, lambda token: bytes([97 + token % 26]), (), 24, 4, 32, 10**6)
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


def test_duplicate_request_id(served):
    engine, kernel = served
    first = submit(engine, 'a')
    kernel.wait()
    with pytest.raises(ValueError, match="'a' already"):
        submit(engine, 'a')
    kernel.go_on()
    assert first.wait().reasons == ['length']
    assert submit(engine, 'a').wait().reasons == ['length']


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


def test_what_a_request_raises_ends_it_alone(served):
    engine, kernel = served
    other = submit(engine, 'a')
    kernel.wait()
    wrong = Client(Request('b', [1], 4, SamplingParams(), n=2, stop=(5,)))  # whatever no check has found
    engine.submit(wrong.request)
    kernel.go_on()
    assert wrong.wait().reasons == ['error'] * 2 and 'Error' in wrong.error
    assert other.wait().reasons == ['length'] and submit(engine, 'b').wait().reasons == ['length']


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

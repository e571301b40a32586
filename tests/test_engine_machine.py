"""
Random requests, aborts, failures and new weights for the engine and its thread on the toy executor, with tiny pools.
Each token that is delivered is compared with the one that its sample draws alone, computed without a cache.
"""
import contextlib
import io
import sys

import numpy as np
import torch
from conftest import sizes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from small_engine import request_of, thread_of
from toy_executor import TOKEN, ToyConstraint, ToyExecutor, bitmap, chain_of, logits_of_chain, may_follow, toy_model

from decode.draw import DrawSettings, draw, log_probabilities
from kvcache.llamacpp.pool import CellPool
from serving import engine_thread
from serving.request import chunk_interval
from tokenizer import TextStream

V, BAD, EOS = 12, 11, 7  # BAD: a token that makes a step fail
BYTES = [bytes([byte]) for byte in b'abcdefgh'] + [b'\xe2\x82', b'\xac', b'ab', b'!']


class Toy(ToyExecutor):
    """A call with the bad token fails. events: {step: what happens in it}. n_asked: calls that the test lets fail."""

    def __init__(self, model):
        super().__init__(model)
        self.events, self.n_calls, self.fails, self.broken, self.n_asked = {}, 0, self.fail, False, 0

    def soon(self, n, event):
        """This happens in one of the next steps; n = 0 is the very next one."""
        self.events[self.n_calls + n] = event

    def interrupt(self, error):
        """Without an error, the next logits are not numbers."""
        self.broken = error is None
        if error:
            self.n_asked += 1
            raise error("this call fails because the test asks for it")

    def fail(self, texts):
        self.n_calls += 1
        self.events.pop(self.n_calls - 1, bool)()
        if any(BAD in text for text in texts):
            raise FloatingPointError("a bad token")

    def checked(self, logits):
        logits[:, BAD] = -1000
        if self.broken:
            logits, self.broken, self.n_asked = logits * np.nan, False, self.n_asked + 1
        return super().checked(logits)


def alone(executor, tokens):
    """The logits (1, V) after these tokens."""
    logits = torch.from_numpy(logits_of_chain(chain_of(tokens, executor.version), V))[None]
    logits[:, BAD] = -1000
    return logits


def score_of(logits, token, k):
    (logprob,), (top,), (values,) = log_probabilities(logits, [token], k)
    return logprob, list(zip(top, values))


class Client:
    """What a request gets, and whether that is right."""

    def __init__(self, executor, request, breaks_after):
        self.executor, self.request, self.breaks_after = executor, request, breaks_after
        self.stop_ids = {*request.stop_token_ids, *([] if request.ignore_eos else [EOS])}
        self.settings = [DrawSettings(V, request.seed + i, self.stop_ids, prompt=request.prompt, **request.draw)
                         for i in range(request.n)]
        self.tokens, self.texts = [[] for _ in range(request.n)], [''] * request.n
        self.ended, self.n_calls, self.broken = [None] * request.n, 0, False
        self.wrong, request.deliver = None, self.receive

    def receive(self, outputs):
        try:
            self.deliver(outputs)
        except AssertionError as e:  # the engine takes it for a client that has gone
            self.wrong = e
            raise

    def deliver(self, outputs):
        assert not self.broken and outputs
        first, r = self.n_calls == 0, self.request
        self.n_calls += 1
        for i, output in enumerate(outputs):
            assert self.ended[output.index] is None, "nothing comes after the end"
            mine = self.tokens[output.index]
            for token, *logprobs in zip(output.token_ids, *([output.logprobs] if output.logprobs else [])):
                logits, how = alone(self.executor, r.prompt + mine), self.settings[output.index]
                if r.constraint:
                    how.allowed = bitmap(may_follow(mine, V, r.constraint.most, self.stop_ids), V)
                how.count(mine)
                assert token == int(draw(logits, [how], [len(mine)]))
                if r.logprobs is not None:
                    assert [*logprobs] == [score_of(logits, token, r.logprobs)]
                mine.append(token)
            self.texts[output.index] += output.text
            self.ended[output.index] = output.finish_reason
            assert output.finish_reason != 'error' or BAD in r.prompt or self.executor.n_asked
            if first and i == 0 and output.finish_reason not in ('error', 'abort'):
                assert output.n_cached is not None and output.n_cached < len(r.prompt) or r.max_tokens == 0
                assert r.max_tokens == 0 or (output.prompt_logprobs is not None) == r.prompt_logprobs
                if output.prompt_logprobs is not None:
                    self.check_scores(output)
            else:
                assert i == 0 and first or output.n_cached is None is output.prompt_logprobs
            self.check_end(output.index)
        if self.n_calls == self.breaks_after:
            self.broken = True
            raise ConnectionError("the client has gone")

    def check_scores(self, output):
        prompt, k = self.request.prompt, self.request.logprobs or 0
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
        assert output.n_cached == 0
        for i in range(1, len(prompt)):
            assert output.prompt_logprobs[i] == score_of(alone(self.executor, prompt[:i]), prompt[i], k)

    def check_end(self, i):
        """The streamed text is that of all tokens at once; the sample ends for the right reason, and at once."""
        r, tokens, reason = self.request, self.tokens[i], self.ended[i]
        at_once = TextStream(BYTES, r.stop)
        pieces = [at_once.push(token) for token in tokens if token not in self.stop_ids]
        expected = 'stop' if at_once.stopped or tokens and tokens[-1] in self.stop_ids else (
            'length' if len(tokens) == r.max_tokens else None)
        if r.constraint and expected is None and reason == 'stop' and len(tokens) == r.constraint.most:
            expected = 'stop'
        assert reason == expected or reason in ('abort', 'error') and (expected is None or r.max_tokens == 0)
        if reason in ('stop', 'length'):
            assert self.texts[i] == ''.join(pieces) + at_once.finish()
        assert not any(stop in self.texts[i] for stop in r.stop)
        assert not any(token in self.stop_ids for token in tokens[:-1])


class EngineMachine(RuleBasedStateMachine):
    @initialize(n_pages=st.integers(5, 14), page_size=st.sampled_from([1, 2, 4, 8]), budget=st.integers(1, 12),
                how=st.sampled_from([dict(), dict(), dict(window=4, n_sink=2, position='rope'),
                                     dict(window=2, position='alibi')]),
                cells=st.sampled_from([None, None, 'unified', 'streams']))
    def begin(self, n_pages, page_size, budget, how, cells):
        self.model = toy_model(block_size=24, vocab_size=V, **how)
        n_pages = n_pages * 4 // page_size if not how else n_pages + 12 // page_size
        self.executor, self.clients, self.n = Toy(self.model), {}, 0
        pool = cells and CellPool(self.model.config, 3, 12 if cells == 'unified' else 24, cells == 'unified')
        if pool:
            pool.references, pool.prefix_of = [], []  # the server counts pages
        self.thread = thread_of(self.model, self.executor, BYTES, (EOS,), n_pages, page_size, budget, pool=pool)
        self.engine, self.pool = self.thread.engine, self.thread.engine.pool
        self.executor.pool = None if cells else self.pool
        engine_thread.chunk_interval = lambda n_requests: 1e9  # nothing depends on time

    @rule(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=14), max_tokens=st.integers(0, 12),
          n=st.sampled_from([1, 1, 1, 2, 3, 7]), seed=st.integers(0, 3), bad=st.sampled_from([False] * 9 + [True]),
          stop=st.sampled_from([(), (), ('ab',), ('c', 'ba'), ('\u20ac',)]), salt=st.sampled_from(['', '', 'x']),
          breaks_after=st.sampled_from([0] * 9 + [1, 3]),
          how=st.sampled_from([dict(), dict(), dict(temperature=0.0), dict(top_k=3), dict(logprobs=2),
                               dict(prompt_logprobs=True), dict(prompt_logprobs=True, logprobs=1, ignore_eos=True),
                               dict(frequency_penalty=1.0, ignore_eos=True), dict(stop_token_ids=[1, 2]),
                               dict(constraint=ToyConstraint(V)), dict(constraint=ToyConstraint(V, 9), logprobs=1),
                               dict(constraint=ToyConstraint(V, 7), ignore_eos=True)]))
    def submit(self, prompt, max_tokens, n, seed, bad, stop, salt, breaks_after, how):
        self.n += 1
        request = request_of(str(self.n), prompt + [BAD] * bad, max_tokens, seed, n, stop=stop, cache_salt=salt, **how)
        n_tokens = len(request.prompt) + max_tokens
        most = self.pool.n_pages * self.pool.page_size
        if n_tokens <= min(self.model.config.max_positions, most):  # as `served.n_new_tokens` lets in
            self.clients[request.id] = Client(self.executor, request, breaks_after)
            self.thread.submit(request)

    @rule(data=st.data(), soon=st.sampled_from([None, None, 0, 1, 3]))
    def abort(self, data, soon):
        if self.clients:
            request_id = data.draw(st.sampled_from(sorted(self.clients)))
            if soon is None:
                self.thread.abort(request_id)
            else:
                self.executor.soon(soon, lambda: self.thread.abort(request_id))

    @rule(times=st.sampled_from([1, 1, 2, 5, 20]))
    def step(self, times):
        for _ in range(times):
            before, preempted, n = self.engine.n_steps, self.engine.scheduler.n_preempted, self.n_going()
            with contextlib.redirect_stderr(io.StringIO()) as errors:
                try:
                    ran = self.thread.run_once()
                except KeyboardInterrupt:
                    ran = print('interrupted', file=sys.stderr) is None
            gave_way = self.engine.scheduler.n_preempted > preempted
            assert not ran or self.engine.n_steps > before or gave_way or errors.getvalue() or self.n_going() < n
            assert ran or not self.thread.live
            self.whole()

    def n_going(self):
        """Samples that have not ended."""
        return sum(len(live.going) for live in self.thread.live.values())

    @rule(soon=st.sampled_from([0, 0, 1, 3]), error=st.sampled_from([MemoryError, KeyboardInterrupt, None]))
    def fail_once(self, soon, error):
        self.executor.soon(soon, lambda: self.executor.interrupt(error))

    @rule()
    def other_weights(self):
        """They are noticed when a request is added, and no token of before is compared then."""
        if not self.thread.live:
            with torch.no_grad():
                next(self.model.parameters()).flatten()[0] += 0.01  # of which the toy makes its version

    @rule()
    def change_whether_steps_repeat(self):
        """A call makes as many steps as it can, or one."""
        length = 0 if engine_thread.chunk_interval(1) else 1e9
        engine_thread.chunk_interval = lambda n_requests: length

    @precondition(lambda self: hasattr(self, 'engine'))
    @invariant()
    def whole(self):
        for client in self.clients.values():
            if client.wrong:
                raise client.wrong
        scheduler, pool = self.engine.scheduler, self.pool
        if self.engine.unfinished:  # an interrupt: the next step begins with a reset
            return
        assert scheduler.running == sorted(scheduler.running) and sorted(scheduler.waiting) == [*scheduler.waiting]
        assert all(s.n_computed == 0 for s in scheduler.waiting)
        live = {s for of in self.thread.live.values() for s in of.sequences if not s.ended}
        assert {*scheduler.running, *scheduler.waiting} <= live
        slots = self.executor.slots.view(-1, pool.page_size, self.executor.slots.size(-1))
        for page, prefix in enumerate(pool.prefix_of):  # what can be found has been computed
            if prefix is not None:
                assert slots[page, :, TOKEN].tolist() == list(prefix.tokens)

    def teardown(self):
        if not hasattr(self, 'engine'):
            return
        try:
            for _ in range(20_000):  # 99 requests, some of 7 samples, took 2,008 calls of one token each
                ran = True
                with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(KeyboardInterrupt):
                    ran = self.thread.run_once()
                if not ran:
                    break
                self.whole()
            assert not ran and not self.thread.live and not self.engine.scheduler.running
            assert self.pool.n_free == self.pool.n_slots // self.pool.page_size
            assert all(client.broken or all(client.ended) for client in self.clients.values())
        finally:
            engine_thread.chunk_interval = chunk_interval


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=sizes(40, 1000), stateful_step_count=sizes(40, 100), deadline=None,
                               report_multiple_bugs=False)


def test_after_a_failure_the_first_output_has_the_whole_prompt():
    """Samples are tried alone then, and another one ended before the prompt of the first was computed again."""
    machine = EngineMachine()
    machine.begin(n_pages=5, page_size=1, budget=7, how={}, cells=None)
    machine.fail_once(error=MemoryError, soon=0)
    for prompt, n, how in ([1], 7, {}), ([0], 1, {}), ([1, 2, 0, 0, 0], 2, dict(prompt_logprobs=True)):
        machine.submit(bad=False, breaks_after=0, how=how, max_tokens=1 + (n == 7), n=n, prompt=prompt,
                       salt='', seed=int(n == 7), stop=())
    machine.step(times=5)
    machine.teardown()

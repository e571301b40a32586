"""
Random requests, samples, steps, aborts, failures and new weights against an engine on the toy kernel, with tiny pools.
Each token is compared with the one that its sample draws alone, computed without cache, when it is delivered.
"""
import contextlib
import functools
import io
import sys

import numpy as np
import pytest
from conftest import sizes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from toy_kernel import TOKEN, ToyKernel, begin_with_nan, chain_of, lengths_of, logits_of_chain, toy_model

from serving import core
from serving.engine import Engine
from serving.request import Request, SamplingParams, pause
from serving.sampler import Drawing, Sampler
from tokenizer import TextStream

V, BAD, EOS = 12, 11, 7  # BAD: a token that makes the kernel fail
BYTES = [bytes([byte]) for byte in b'abcdefgh'] + [b'\xe2\x82', b'\xac', b'ab', b'!']

@functools.cache
def sampler():
    return Sampler(V)


class Toy(ToyKernel):
    """
    Nobody draws the bad token; a call that has it fails. events: {number of a call: what happens in it}. versions,
    n_failed: which versions the weights have had, and how many calls have failed, since `begin_step`.
    """

    def __init__(self, model):
        super().__init__(model)
        self.events, self.n_calls, self.fails, self.broken = {}, 0, self.fail, False
        self.begin_step()

    def begin_step(self):
        self.versions, self.n_failed = {self.version}, 0

    def soon(self, n, event):
        """This happens in one of the next calls; n = 0 is the very next one."""
        self.events[self.n_calls + n] = event

    def reload(self):
        self.version += 1
        self.versions.add(self.version)

    def interrupt(self, error):
        """Without an error, the next logits are not numbers, those of a later call if this one fails."""
        self.broken = error is None
        if error:
            self.n_failed += 1
            raise error("this call fails because the test asks for it")

    def fail(self, texts):
        self.n_calls += 1
        self.events.pop(self.n_calls - 1, bool)()
        if any(BAD in text for text in texts):
            self.n_failed += 1
            raise FloatingPointError("a bad token")

    def one_step(self, *args):
        logits = super().one_step(*args)
        logits[:, BAD] = -1000
        if self.broken:
            logits, self.broken, self.n_failed = logits * np.nan, False, self.n_failed + 1
        return logits


def alone(kernel, tokens):
    """The logits (W, V) behind these tokens, for each of the kernel's versions."""
    logits = np.stack([logits_of_chain(chain_of(tokens, version), V) for version in kernel.versions])
    logits[:, BAD] = -1000
    return logits


class Client:
    """What a request gets, and whether that is right."""

    def __init__(self, kernel, request, breaks_after):
        self.kernel, self.request, self.breaks_after = kernel, request, breaks_after
        stop_ids = [] if request.params.ignore_eos else [EOS]
        self.stop_ids = {*request.params.stop_token_ids, *stop_ids}
        self.drawings = [Drawing(request, i, self.stop_ids, V) for i in range(request.n)]
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
                logits, drawing, drawn = alone(self.kernel, r.prompt + mine), self.drawings[output.index], []
                for row in range(len(logits)):
                    drawing.restore(mine)
                    drawn += sampler().draw(logits, [row], [drawing])
                assert token in drawn
                if r.params.logprobs is not None:
                    assert logprobs in [sampler().logprobs(row[None], [token], r.params.logprobs) for row in logits]
                mine.append(token)
            self.texts[output.index] += output.text
            self.ended[output.index] = output.finish_reason
            # after a failed call the engine runs each sample by itself; a second failure ends the request
            assert output.finish_reason != 'error' or BAD in r.prompt or self.kernel.n_failed > 1
            if first and i == 0 and output.finish_reason not in ('error', 'abort'):
                assert output.n_cached is not None and output.n_cached < len(r.prompt) or r.max_tokens == 0
                assert (output.prompt_logprobs is not None) == r.params.prompt_logprobs
                if r.params.prompt_logprobs:
                    self.check_scores(output)
            else:
                assert i == 0 and first or output.n_cached is None is output.prompt_logprobs
            self.check_end(output.index)
        if self.n_calls == self.breaks_after:
            self.broken = True
            raise ConnectionError("the client has gone")

    def check_scores(self, output):
        prompt = self.request.prompt
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
        assert output.n_cached == 0
        for i in range(1, len(prompt)):
            k = self.request.params.logprobs or 0
            assert [output.prompt_logprobs[i]] in [sampler().logprobs(logits[None], [prompt[i]], k)
                                                   for logits in alone(self.kernel, prompt[:i])]

    def check_end(self, i):
        """The streamed text is that of all tokens at once; the sample ends for the right reason, and at once."""
        r, tokens, reason = self.request, self.tokens[i], self.ended[i]
        at_once = TextStream(BYTES, r.stop)
        pieces = [at_once.push(token) for token in tokens if token not in self.stop_ids]
        expected = 'stop' if at_once.stopped or tokens and tokens[-1] in self.stop_ids else (
            'length' if len(tokens) == r.max_tokens else None)
        assert reason == expected or reason in ('abort', 'error') and (expected is None or r.max_tokens == 0)
        if reason in ('stop', 'length'):
            assert self.texts[i] == ''.join(pieces) + at_once.finish()
        assert not any(stop in self.texts[i] for stop in r.stop)
        assert not any(token in self.stop_ids for token in tokens[:-1])


class EngineMachine(RuleBasedStateMachine):
    @initialize(n_blocks=st.integers(5, 14), page_size=st.sampled_from([1, 2, 4, 8]), budget=st.integers(1, 12),
                how=st.sampled_from([dict(), dict(), dict(window=4, n_sink=2, position='rope'),
                                     dict(window=2, position='alibi')]))
    def begin(self, n_blocks, page_size, budget, how):
        model = toy_model(block_size=24, vocab_size=V, **how)
        n_blocks = n_blocks * 4 // page_size if not how else n_blocks + 12 // page_size
        self.kernel, self.clients, self.n = Toy(model), {}, 0
        self.engine = Engine(model, self.kernel, BYTES, (EOS,), n_blocks, page_size, budget)
        self.cache = self.kernel.cache = self.engine.cache
        core.pause = lambda n_streams: 1e9  # nothing depends on time
        begin_with_nan(self.cache)

    @rule(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=14), max_tokens=st.integers(0, 12),
          n=st.sampled_from([1, 1, 1, 2, 3, 7]), seed=st.integers(0, 3), bad=st.sampled_from([False] * 9 + [True]),
          stop=st.sampled_from([(), (), ('ab',), ('c', 'ba'), ('\u20ac',)]), salt=st.sampled_from(['', '', 'x']),
          breaks_after=st.sampled_from([0] * 9 + [1, 3]),
          how=st.sampled_from([dict(), dict(), dict(temperature=0.0), dict(top_k=3), dict(logprobs=2),
                               dict(prompt_logprobs=True), dict(prompt_logprobs=True, logprobs=1, ignore_eos=True),
                               dict(frequency_penalty=1.0, ignore_eos=True), dict(stop_token_ids=[1, 2])]))
    def submit(self, prompt, max_tokens, n, seed, bad, stop, salt, breaks_after, how):
        self.n += 1
        request = Request(str(self.n), prompt + [BAD] * bad, max_tokens, SamplingParams(**how), seed, n, stop, salt)
        client = Client(self.kernel, request, breaks_after)
        try:
            self.engine.submit(request)
        except ValueError as e:
            n_blocks = -(-(len(request.prompt) + max_tokens - 1) // self.cache.page_size)
            assert 'context' in str(e) or n_blocks > self.cache.n_seq
            return
        self.clients[request.id] = client

    @rule(data=st.data(), soon=st.sampled_from([None, None, 0, 1, 3]))
    def abort(self, data, soon):
        if self.clients:
            request_id = data.draw(st.sampled_from(sorted(self.clients)))
            if soon is None:
                self.engine.abort(request_id)
            else:
                self.kernel.soon(soon, lambda: self.engine.abort(request_id))

    @rule(times=st.sampled_from([1, 1, 2, 5, 20]))
    def step(self, times):
        for _ in range(times):
            before, preempted = self.engine.stats.steps, self.engine.scheduler.n_preempted
            self.kernel.begin_step()
            with contextlib.redirect_stderr(io.StringIO()) as errors:
                try:
                    ran = self.engine.run_once()
                except KeyboardInterrupt:
                    ran = print('interrupted', file=sys.stderr) is None
            gave_way = self.engine.scheduler.n_preempted > preempted
            assert not ran or self.engine.stats.steps > before or gave_way or errors.getvalue()
            assert ran or not self.engine.live
            self.whole()

    @rule(soon=st.sampled_from([0, 0, 1, 3]), error=st.sampled_from([MemoryError, KeyboardInterrupt, None]))
    def fail_once(self, soon, error):
        self.kernel.soon(soon, lambda: self.kernel.interrupt(error))

    @rule(soon=st.sampled_from([None, 0, 0, 1, 3]))
    def other_weights(self, soon):
        if soon is None:
            self.kernel.reload()
        else:
            self.kernel.soon(soon, self.kernel.reload)

    @rule()
    def change_whether_steps_repeat(self):
        """A plan is run as often as it can be, or once."""
        length = 0 if core.pause(1) else 1e9
        core.pause = lambda n_streams: length

    @precondition(lambda self: hasattr(self, 'engine'))
    @invariant()
    def whole(self):
        for client in self.clients.values():
            if client.wrong:
                raise client.wrong
        blocks, scheduler = self.cache.blocks, self.engine.scheduler
        tables = [block for record in self.cache.records.values() for block in record.table if block is not None]
        assert blocks.references == [tables.count(block) for block in range(len(blocks.references))]
        assert set(blocks.free) == {block for block, n in enumerate(blocks.references) if n == 0}
        assert {s.handle: s.computed for s in scheduler.running} == lengths_of(self.cache)
        assert scheduler.running == sorted(scheduler.running)
        assert all(s.handle is None and s.computed == 0 for s in scheduler.waiting)
        slots = self.cache.layers[0].k.data.view(len(blocks.references), self.cache.page_size, -1)
        for block, prefix in enumerate(blocks.prefix_of):  # what can be found has been computed
            if prefix is not None:
                assert slots[block, :, TOKEN].tolist() == list(prefix.tokens)
        live = {s for of in self.engine.live.values() for s in of.samples if not s.finished}
        assert {*scheduler.running, *scheduler.waiting} <= live

    def teardown(self):
        core.pause = pause
        if hasattr(self, 'engine'):
            for _ in range(2000):
                self.kernel.begin_step()
                ran = True
                with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(KeyboardInterrupt):
                    ran = self.engine.run_once()
                if not ran:
                    break
                self.whole()
            assert not ran and not self.engine.live and not self.cache.records
            assert self.cache.n_free == self.cache.n_seq
            assert all(client.broken or all(client.ended) for client in self.clients.values())


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=sizes(60, 1000), stateful_step_count=sizes(40, 100), deadline=None,
                               report_multiple_bugs=False)


@pytest.mark.parametrize('n', [1, 3])
def test_the_machine_sees_a_wrong_token(n):
    """The judge itself: a client whose samples get a token of another seed raises."""
    machine = EngineMachine()
    machine.begin(8, 4, 12, {})
    request = Request('1', [1, 2], 8, SamplingParams(ignore_eos=True), seed=5, n=n)
    client = Client(machine.kernel, request, 0)
    client.drawings = [Drawing(Request('1', [1, 2], 8, seed=77), i, [], V) for i in range(n)]
    machine.engine.submit(request)
    for _ in range(10):
        machine.engine.run_once()
    assert client.wrong


def test_an_interrupt_while_samples_are_tried_by_themselves():
    """What the machine found: a step without numbers takes all tokens from the cache, and then Ctrl-C comes."""
    machine = EngineMachine()
    machine.begin(5, 1, 1, {})
    machine.fail_once(1, None)
    machine.fail_once(3, KeyboardInterrupt)
    machine.submit([0], 2, 2, 0, False, (), '', 0, {})
    machine.teardown()

"""
What the caches for sequences have in common: records of sequences, operations on them, and a step.

    handle = cache.new()
    logits = cache.step([handle], [0], [tokens])        # tokens 0, 1, ... of the sequence; (1, vocab_size)
    logits = cache.step([handle], [len(tokens)], [next_token])
    cache.free(handle)
"""
import copy
import functools
import math
import weakref
from dataclasses import replace
from operator import add
from threading import Lock, get_ident

import numpy as np
import torch

from decode.eager import EagerDecoder
from decode.metadata import InputMetadata, KVArrays
from decode.process import after_fork, uninterrupted
from kvcache.records import Record
from positions import rotary_frequencies, turned

instances = weakref.WeakSet()


class NotNumbers(ValueError):
    """The logits of a step are not numbers. The cache has been set to zeros, and its sequences have no tokens."""

    def __init__(self):
        super().__init__("the model's logits are not numbers: its weights are broken")


class Decoding:
    """
    The sequences of a step that has fed one token to each. The next step of the cache finds them here if it feeds one
    more token to each of the same, so that it need not look at each of them again.

    positions: int64 (B,), of the newest tokens. metadata: the `InputMetadata` of each step, a new one
    when runs have changed. left: for how many more steps they are known to have room.
    """

    def __init__(self, records, max_positions):
        self.records, self.handles, self.ones = records, [record.handle for record in records], [1] * len(records)
        self.positions = np.array([record.length for record in records]) - 1
        self.max_positions, self.left = max_positions, 0

    def look(self):
        """Take the runs of the records, and find out for how many steps they have room."""
        self.metadata = InputMetadata(self.ones, [record.runs for record in self.records])
        most = self.max_positions - 1 - int(self.positions.max())
        self.left = min(most, min([record.room - record.length for record in self.records]))

    def limits(self, next_tokens):
        """(how many tokens each sequence has room for, of those that it may draw, int64 (B,); the largest of these)."""
        room = [min(record.room, self.max_positions) - record.length for record in self.records]
        limits = np.minimum(room, next_tokens.limits)
        return limits, min(int(limits.max()), next_tokens.n_left)

    def goes_on(self, handles, starts, tokens):
        """Does a step of these arguments feed one more token to each of the same sequences, where they end?"""
        return (isinstance(tokens, torch.Tensor) and tokens.dtype is torch.int64 and tokens.shape == (len(handles), 1)
                and handles == self.handles and starts == (self.positions + 1).tolist())


def exclusive(operation):
    """
    Operations of a cache run one at a time, whichever threads call them. They must not call each other. A SIGINT that
    comes meanwhile is raised at the end. If an operation raises, the cache is made consistent from its records, and set
    to zeros after `NotNumbers`.
    """
    @functools.wraps(operation)
    def locked(self, *args, **kwargs):
        if self.holder == get_ident():
            raise ValueError(f"{operation.__name__} was called inside an operation on the same cache, which has not "
                             "finished: call it afterwards")
        with uninterrupted() as block:
            try:
                with self.lock:
                    self.holder, self.last_decoding, self.decoding = get_ident(), self.decoding, None
                    try:
                        if self.to_free:
                            self.remove_freed()
                        result = operation(self, *args, **kwargs)
                    except BaseException as e:
                        self.recover()
                        if isinstance(e, NotNumbers):  # a mask does not hide such keys from later owners of their slots
                            self.reset()
                        raise
                    finally:
                        self.holder = None
            finally:
                if self.to_free:
                    free_without_waiting(self)
            if operation.__name__ in ('new', 'fork'):  # whose caller does not get the handle from an interrupt
                block.undo = lambda: self.free(result)
            return result
    return locked


def free_without_waiting(cache):
    """
    Remove the sequences in to_free, if no operation runs; the one that runs removes them at its end. The garbage
    collector ends a generation, and frees its sequences, at any place in any thread, also in an operation on this cache
    or another one. To wait there for a lock could be to wait for oneself.
    """
    with uninterrupted():
        while cache.to_free and cache.lock.acquire(blocking=False):
            cache.holder = get_ident()
            try:
                cache.remove_freed()
            finally:
                cache.holder = None
                cache.lock.release()


class BaseCache:
    """
    Sequences of one model, by handle.

    Several threads can use a cache: its operations run one at a time, and their sequences together need room. An
    operation that raises leaves all sequences usable; a step that fails leaves each of its sequences with its first
    `start` tokens, or with none if logits are not numbers. After Ctrl-C in a step its sequences have the step's tokens.
    In a child process, after a fork, the cache goes on with its own copy; if another thread was in the middle of an
    operation, its sequences have no tokens there.

    If the model has a window, the cache keeps what the next token of a sequence sees, and perhaps a few positions
    before that. A sequence can then be cut only to a length whose next token sees nothing that is gone. After a step
    that failed, a sequence for which that is not so has no tokens.

    model: a GPT, or one that is `shortened`. n_seq: the largest number of sequences. records: {handle: `Record`}.
    layers: the `storage.Layer`s. type_kv: how keys and values are stored, see `storage.Rows`.
    decoder: of the model, see `decode.best`. If it has `execute_model` and reads keys and values as they are stored
    here, it is the `executor` of the steps; if not, that is a `decode.EagerDecoder`. name: what sample.py prints.

    A subclass says where keys and values are: in `extend`, `cut`, `copy`, `remove_behind` and, for windows,
    `first_held`. keeps_shifts: are quantised keys turned for their shifts whenever they are read?
    """
    record_type, keeps_shifts = Record, False

    def __init__(self, model, n_seq, layers, kind, type_kv, decoder=None):
        if getattr(decoder, 'model', model) not in (model, getattr(model, 'whole', model)):
            raise ValueError("the decoder and the cache are for two different models: make both for one model")
        self.model, self.n_seq, self.layers, self.type_kv = model, n_seq, layers, type_kv
        self.device, self.dtype = model.lm_head.weight.device, model.lm_head.weight.dtype
        self.window, self.n_sink = model.config.window, model.config.n_sink
        self.executor, self.arrays = self.executor_for(decoder)
        self.name = f"{self.executor.name}, on a cache that is {kind}, {type_kv}"
        self.records, self.n_made = {}, 0
        self.to_free = []  # handles that were freed in the middle of an operation
        self.decoding = self.last_decoding = None  # the `Decoding` of this operation, and of the one before
        self.lock, self.holder = Lock(), None
        instances.add(self)

    def executor_for(self, decoder):
        """(the executor of the steps, the `KVArrays` that it reads)."""
        arrays = KVArrays.of_layers(self.layers)
        if hasattr(decoder, 'execute_model') and decoder.reads(arrays):
            return decoder, arrays
        return EagerDecoder(self.model), arrays

    def extend(self, record, n):
        """Slots for n more tokens of a sequence: `runs` and `room` of its record. ValueError if there is no room."""
        raise NotImplementedError

    def cut(self, record, n):
        """Keep the first n tokens of a sequence, and no slots of later ones. record.length is n already."""
        raise NotImplementedError

    def copy(self, record, new):
        """Give a new sequence all tokens of another one."""
        raise NotImplementedError

    def remove_behind(self, record, n_keep, n):
        """
        Remove the n tokens behind the first n_keep of a sequence, and move the others down, see `shift`. ValueError if
        there is no room, with nothing changed.
        """
        raise NotImplementedError

    def first_held(self, record):
        """The first position, from n_sink on, that is stored with all after it. Called if the model has a window."""
        raise NotImplementedError

    def find_prefix(self, record, tokens):
        """Called when a sequence begins: how many of its tokens (never all) are in the cache already."""
        return 0

    def make_room(self, records, counts):
        """Slots for so many more tokens of each sequence."""
        for record, n in zip(records, counts):
            if record.length + n > record.room:
                self.extend(record, n)

    def added(self, records, counts, ids):
        """The tokens ids, an int64 tensor or array (sum(counts),), are in the cache now, so many of each sequence."""
        for record, n in zip(records, counts):
            record.length += n

    def wrote(self, records, n):
        """An executor has written the keys and values of n tokens of each sequence, of which it may give up some."""

    def recover(self):
        """Make the cache agree with its records, after an operation has raised."""
        self.decoding = None
        for record in self.records.values():
            if not self.holds(record, record.length):
                record.length = 0
            self.cut(record, record.length)
            record.begun = record.length > 0

    def record(self, handle):
        """The `Record` of a sequence. ValueError if there is no such sequence."""
        if handle not in self.records:
            raise ValueError(f"there is no sequence {handle!r} in this cache: it was freed, or is of another cache")
        return self.records[handle]

    @property
    def ends_rows(self):
        """Can the sequences of a call of several steps end one by one? See `decode.metadata.NextTokens`."""
        return getattr(self.executor, 'ends_rows', False)

    def n_proposals(self, batch_size, together=False):
        """How many tokens of each sequence the next call of several steps proposes, see `decode.speculative`."""
        return getattr(self.executor, 'n_proposals', lambda *of_batch: 0)(batch_size, together)

    def length(self, handle):
        """How many tokens of a sequence are in the cache."""
        return self.record(handle).length

    def holds(self, record, n):
        """Does the cache still have all positions before n that the token at position n of a sequence sees?"""
        first = max(self.n_sink, n - self.window + 1)
        return not self.window or first >= n or self.first_held(record) <= first

    @exclusive
    def new(self, salt=''):
        """
        The handle of a new, empty sequence, to be freed by `free`. ValueError if there are n_seq sequences already.
        salt: see `PagedCache`.
        """
        return self.begin(salt).handle

    def begin(self, salt):
        if len(self.records) == self.n_seq:
            raise ValueError(f"the cache has room for {self.n_seq} sequences, and all are in use: "
                             "free one, or make a larger cache")
        self.n_made += 1
        record = self.records[self.n_made] = self.record_type(self.n_made, salt)
        return record

    @exclusive
    def fork(self, handle):
        """
        The handle of a new sequence with all tokens of another one, to be freed by `free`. ValueError if there is no
        room.
        """
        record = self.record(handle)
        new = self.begin(record.salt)
        try:
            if record.length:
                self.copy(record, new)
                new.length, new.begun = record.length, True
        except BaseException:
            self.remove(new)
            raise
        return new.handle

    @exclusive
    def truncate(self, handle, n):
        """
        Keep the first n tokens of a sequence. ValueError if it has fewer, or if some of these are gone that the next
        token would see through the window.
        """
        record = self.record(handle)
        if type(n) is not int or not 0 <= n <= record.length:
            raise ValueError(f"sequence {handle} has {record.length} tokens in the cache and cannot be cut to {n!r}")
        self.check_held(record, n)
        self.cut_to(record, n)

    def check_held(self, record, n):
        if n < record.length and not self.holds(record, n):
            raise ValueError(f"sequence {record.handle} cannot go back from {record.length} tokens to {n}: the window "
                             f"of {self.window} before position {n} is not in the cache any more; feed it from 0 on")

    def cut_to(self, record, n):
        if n < record.length:
            record.length, record.begun = n, n > 0
            self.cut(record, n)

    @exclusive
    @torch.inference_mode()
    def shift(self, handle, n_keep, n):
        """
        Remove the n tokens behind the first n_keep of a sequence; the tokens behind them move down to their positions.

        Rotary keys are turned by -n. Values, and keys without positions, stay as they are: they were computed from the
        removed tokens too, so that later tokens differ from those of a sequence that is computed anew. ValueError, with
        nothing changed, if the model has learned positions or a window, or if there is no room.
        """
        record, config = self.record(handle), self.model.config
        check_shift(config, record, n_keep, n)
        if n_keep + n == record.length or n == 0:
            self.cut_to(record, record.length - n)
            return
        if config.position == 'rope' and self.type_kv in ('int8', 'int4') and not self.keeps_shifts:
            raise ValueError(f"sequence {handle} cannot be shifted: its keys are {self.type_kv}, and would be "
                             "rounded again; use a cache of cells (streams or unified), which keeps the shifts")
        self.remove_behind(record, n_keep, n)
        record.length -= n

    def free(self, handle):
        """Remove a sequence, or have the operation that runs now remove it."""
        self.record(handle)
        with uninterrupted():
            self.to_free.append(handle)
            free_without_waiting(self)

    def remove(self, record):
        del self.records[record.handle]
        record.length = 0
        self.cut(record, 0)

    def remove_freed(self):
        self.decoding = self.last_decoding = None
        while self.to_free:
            record = self.records.get(self.to_free.pop())
            if record is not None:
                self.remove(record)

    @exclusive
    def step(self, handles, starts, tokens, wanted=None):
        """
        Feed new tokens to some sequences. Returns logits (B, vocab_size), of each sequence's last token.

        handles: the sequences, each once. starts: the position of the first new token of each; a sequence that is
        longer is first truncated to it. tokens: int64 (B, T) if all bring T of them, or a list of (T_i,).
        wanted: row numbers, ascending, of the new tokens of all sequences one after the other: then the logits of these
        are returned, (W, vocab_size). The sequences must find no remembered blocks (give each a salt of its own), and
        with a window each brings at most window + 1 new tokens.

        ValueError, with nothing changed, if tokens do not fit the model or the sequences. If the step fails later
        (there is no room, for example), each sequence has its first `start` tokens, or none if these are not all stored
        any more that the next token sees.
        """
        decoding = self.last_decoding
        if decoding and wanted is None and decoding.goes_on(handles, starts, tokens) and (
                decoding.left > 0 or max(starts) < decoding.max_positions):
            return self.decode(decoding, tokens.view(-1))
        records, starts, counts, ids = checked_step(self, handles, starts, tokens)
        if wanted is not None and self.window and max(counts) > self.window + 1:
            raise ValueError(f"the logits of other tokens than the last ones take at most window + 1 = "
                             f"{self.window + 1} new tokens of a sequence, not {max(counts)}: feed fewer at once")
        for record, start in zip(records, starts):
            self.cut_to(record, start)
        begins = [(i, record) for i, record in enumerate(records) if not record.begun]
        try:
            if begins:
                self.notice_changes()
                parts = list(ids.split(counts))
                for i, record in begins:
                    record.begun, record.length = True, self.find_prefix(record, parts[i])
                    counts[i], parts[i] = counts[i] - record.length, parts[i][record.length:]
                if wanted is not None and sum(counts) < len(ids):
                    raise ValueError("the logits of tokens that are remembered are not computed: begin the sequence "
                                     "with a salt of its own")
                ids = torch.cat(parts)
            logits = self.feed(records, counts, ids, wanted)
        except BaseException:
            for record, start in zip(records, starts):
                self.cut_to(record, start)
            raise
        if wanted is None:
            self.decoding = Decoding(records, self.model.config.max_positions)
        return logits

    def notice_changes(self):
        """A sequence begins: has the model changed?"""
        self.executor.notice_changes()

    def feed(self, records, counts, ids, wanted=None):
        """The logits of a step. Through a window at most window + 1 tokens of each sequence are fed at once."""
        most = self.window + 1
        if not self.window or max(counts) <= most:
            return self.run(records, counts, ids, wanted)
        parts, rows = ids.split(counts), {}
        for done in range(0, max(counts), most):
            group = [i for i, n in enumerate(counts) if n > done]
            chunks = [parts[i][done:done + most] for i in group]
            rows |= zip(group, self.run([records[i] for i in group], [len(chunk) for chunk in chunks],
                                        torch.cat(chunks)))
        return torch.stack([rows[i] for i in range(len(records))])

    def run(self, records, counts, ids, wanted=None):
        """One call of the executor."""
        self.make_room(records, counts)
        metadata = InputMetadata(counts, [record.runs for record in records],
                                 None if wanted is None else np.array(wanted, np.int64))
        positions = positions_of([record.length for record in records], counts)
        logits = self.executor.execute_model(ids.contiguous(), positions, self.arrays, metadata)
        if not self.arrays.finite:
            raise NotNumbers
        self.added(records, counts, ids)
        return logits

    def decode(self, decoding, ids):
        """The next step of a `Decoding`: logits (B, vocab_size) behind one more token of each sequence."""
        d = decoding
        if d.left < 1:
            self.make_room(d.records, d.ones)
            d.look()
        d.positions = d.positions + 1
        logits = self.executor.execute_model(ids.contiguous(), d.positions, self.arrays, d.metadata)
        if not self.arrays.finite:
            raise NotNumbers
        self.added(d.records, d.ones, ids)
        d.left -= 1
        self.decoding = d
        return logits

    @exclusive
    def decode_steps(self, handles, next_tokens):
        """
        Make steps of one token of each of these sequences; each must have tokens already. The first row of the
        `NextTokens` is given, and the executor draws the others, as many as there is room for (see
        `PagedCache.reserve`); one with an executor that makes one step in a call. Returns the logits (B, vocab_size) of
        the last step; after draws on a device see `decode.gpu.decoder.GPUDecoder.execute_model`.

        If a step fails, the sequences have the tokens of before this call.
        """
        d, tokens = self.last_decoding, next_tokens.tokens
        if tokens.shape[1] != len(handles) or next_tokens.n_drawn:
            raise ValueError(f"{tokens.shape[1]} tokens came for {len(handles)} sequences, in `NextTokens` of which "
                             f"{next_tokens.n_drawn} rows were drawn: make new ones with one token for each")
        if not d or handles != d.handles:
            d = Decoding(list(map(self.record, handles)), self.model.config.max_positions)
        if d.left < 1:
            check_decoding(d.records, d.max_positions)
            self.make_room(d.records, d.ones)
            d.look()
        next_tokens.n_steps = min(len(tokens) - 1, d.left)
        if self.ends_rows and next_tokens.limits is not None:
            next_tokens.limits, next_tokens.n_steps = d.limits(next_tokens)
        metadata, d.positions = InputMetadata(d.ones, d.metadata.runs, None, next_tokens), d.positions + 1
        ids = torch.from_numpy(tokens[0]).to(self.device)
        try:
            logits = self.executor.execute_model(ids, d.positions, self.arrays, metadata)
        finally:
            self.wrote(d.records, next_tokens.n_written)
        if not self.arrays.finite:
            raise NotNumbers
        if not next_tokens.n_drawn:
            next_tokens.draw_from(logits.float().cpu().contiguous())
        n, counts = next_tokens.n_drawn, next_tokens.counts
        fed = tokens[:n].T
        if min(counts) == n:
            self.added(d.records, counts, fed.ravel())
            d.positions, d.left = d.positions + n - 1, d.left - n
            self.decoding = d
        else:  # some have drawn fewer than others
            self.added(d.records, counts, fed[np.arange(n) < np.array(counts)[:, None]])
        return logits

    def reset(self):
        """Set all stored numbers to zero, and leave all sequences without tokens. A part of an operation."""
        for record in self.records.values():
            self.cut_to(record, 0)
        for layer in self.layers:
            layer.zero()

    def with_room(self, n):
        """This cache, or where n tokens are more than the `shortened` model has, a larger one without sequences."""
        room = self.model.config.max_positions
        return self.of_positions(max(n, 2 * room)) if room < n and hasattr(self.model, 'whole') else self

    def nbytes(self):
        """Bytes of the stored keys and values; the `Scratch` memory comes on top."""
        return sum(layer.nbytes() for layer in self.layers)


def shortened(model, n):
    """The same weights with a context of n positions, for a small cache; the model if n is None or saves nothing."""
    c, whole = model.config, model
    if n is None or n >= (c.n_sink + c.window if c.window else c.block_size):
        return model
    model = copy.copy(whole)
    model.config, model.__dict__['whole'] = replace(c, block_size=n, window=0, n_sink=0), whole
    return model


def checked_step(cache, handles, starts, tokens):
    """
    (records, starts, numbers of new tokens, ids int64 (n,) of all of them) of the arguments of `BaseCache.step`.
    ValueError if they do not fit the model, the sequences or each other.
    """
    model, config = cache.model, cache.model.config
    if model.lm_head.weight.dtype is not cache.dtype:
        raise ValueError(f"the model was {cache.dtype} when its cache was made, and is {model.lm_head.weight.dtype}: "
                         "make a new cache")
    if model.training:
        raise ValueError("the model is in training mode, and dropout would stay in the cache: call model.eval() first")
    handles, starts = list(handles), list(starts)
    rows, counts = checked_tokens(model, tokens)
    check_handles(handles)
    if not len(handles) == len(starts) == len(rows):
        raise ValueError(f"{len(handles)} sequences have {len(starts)} starts and {len(rows)} rows of tokens: "
                         "give one of both for each sequence")
    records = list(map(cache.record, handles))
    if {*map(type, starts)} != {int} or starts != [record.length for record in records] or (
            max(map(add, starts, counts)) > config.max_positions):
        for i, (record, start, n) in enumerate(zip(records, starts, counts)):
            starts[i] = start = int(model.checked_cache_pos(start, 1, n))
            if start > record.length:
                raise ValueError(f"sequence {record.handle} has {record.length} tokens in the cache, and new ones "
                                 f"cannot start at {start}: feed it from {record.length} on")
            cache.check_held(record, start)
    ids = torch.cat(rows) if isinstance(rows, list) else rows.flatten()
    low, high = (int(x) for x in ids.aminmax())
    if low < 0 or high >= config.vocab_size:
        raise ValueError(f"token ids are 0 to {config.vocab_size - 1}, not {low} to {high}")
    if ids.device != cache.device:
        raise ValueError(f"the cache is on {cache.device}, but the tokens are on {ids.device}: move them")
    return records, starts, counts, ids


def check_handles(handles):
    """ValueError unless these are the sequences of a step: one or more, each named once."""
    if not handles or len(set(handles)) < len(handles):
        raise ValueError(f"a step is for one sequence or more, each named once, not for {handles}")


def checked_tokens(model, tokens):
    """
    (rows, counts) of the tokens of a step: int64 (B, T), or a list of (T_i,); and how many new tokens each sequence
    brings. ValueError if they are something else, or too many for the model.
    """
    if not isinstance(tokens, (list, tuple)):
        if not isinstance(tokens, torch.Tensor) or tokens.dtype is not torch.int64 or tokens.dim() != 2:
            tokens = model.checked_input(tokens, None)[0]
        B, T = tokens.shape
        return tokens if T else model.checked_input(tokens, None)[0], [T] * B
    rows = list(tokens)
    for i, row in enumerate(rows):
        if not isinstance(row, torch.Tensor) or row.dtype is not torch.int64 or row.dim() != 1 or not row.numel():
            rows[i] = model.checked_input(row[None] if isinstance(row, torch.Tensor) else row, None)[0][0]
    return rows, [row.numel() for row in rows]


def check_decoding(records, max_positions):
    """ValueError unless each of these sequences can be given one more token."""
    handles, lengths = [record.handle for record in records], [record.length for record in records]
    check_handles(handles)
    if not 0 < min(lengths) <= max(lengths) < max_positions:
        raise ValueError(f"sequences {handles} have {lengths} tokens, and a decode step is for sequences with at least "
                         f"1 and fewer than {max_positions}: feed those without tokens by `step` first")


def check_shift(config, record, n_keep, n):
    """ValueError unless n tokens behind the first n_keep of a sequence can be removed."""
    if config.position == 'learned':
        raise ValueError(f"sequence {record.handle} cannot be shifted, the model has learned positions, which are in "
                         "its keys and values: compute the tokens again at their new positions")
    if config.window:
        raise ValueError(f"sequence {record.handle} cannot be shifted, the model has a window of {config.window} and "
                         "forgets what it has passed: go on without a shift")
    if type(n_keep) is not int or type(n) is not int or n_keep < 0 or n < 0 or n_keep + n > record.length:
        raise ValueError(f"sequence {record.handle} has {record.length} tokens: {n!r} behind the first {n_keep!r} "
                         "cannot be removed")


def turning(config, shifts):
    """A function that turns stored keys (n_head, n, head_dim) by shifts (n,), or None if keys are not rotary."""
    if config.position != 'rope':
        return None
    frequencies = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    return lambda keys: turned(keys, shifts, frequencies)


def are_numbers(logits):
    """Are there neither NaN nor +inf in logits (B, vocab_size)? -inf is allowed: such a token is never drawn."""
    return math.isfinite(logits.sum()) or not logits.softmax(dim=-1).isnan().any()


def positions_of(starts, counts):
    """The positions of all new tokens, an int64 array (sum(counts),)."""
    starts, n = np.array(starts, np.int64), sum(counts)
    if len(starts) == n:
        return starts
    counts = np.array(counts, np.int64)
    return np.arange(n) + np.repeat(starts - counts.cumsum() + counts, counts)


@after_fork
def renew_locks():
    """
    In the child process only the forking thread exists. Another thread may have held the lock of a cache. torch
    computes on one thread, since the threads of its pool are gone and waiting for them would never end.
    """
    for cache in instances:
        if cache.holder is not None:  # keys of any sequence may have been about to move
            cache.lock, cache.holder = Lock(), None
            for record in cache.records.values():
                record.length = 0
            cache.recover()
    if instances:
        torch.set_num_threads(1)

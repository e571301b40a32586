"""llama.cpp."""
import ctypes
import os
import tempfile
from functools import lru_cache

import numpy as np
import torch

from benchmarks.peers.peer import Peer
from formats import to_gguf

GGUF = 'model.gguf'


def model_params():
    """
    llama.cpp's default parameters of a model. In builds for Intel's AMX, weights are not rearranged for AMX, because
    llama.cpp crashes on such weights (https://github.com/ggml-org/llama.cpp/issues/20824).
    """
    import llama_cpp
    params = llama_cpp.llama_model_default_params()
    params.use_extra_bufts = b'AMX_INT8 = 1' not in llama_cpp.llama_print_system_info()
    return params


class LlamaCpp(Peer):
    """
    llama.cpp, by the C interface under llama-cpp-python: one llama_decode a step, with a sequence for each row.

    Its GELU is the tanh approximation, from a table of float16, and its keys and values are float16 by default (float32
    makes it slower), so its tokens need not be ours. int8 is Q8_0: blocks of 32 with a scale each, inputs likewise.
    int4 is what llama.cpp's own program makes as Q4_0: its lm_head has 6 or 8 bits.
    kv: its keys and values, float32 or float16.
    The batch is filled and read as in https://github.com/ggml-org/llama.cpp/blob/master/examples/batched/batched.cpp
    """
    name = 'llama.cpp'
    packages = {'llama_cpp': 'llama-cpp-python', 'gguf': 'gguf'}
    ways = {'float32': [{}], 'int8': [{}], 'int4': [{}]}
    model = context = log_callback = None

    def __init__(self, model, weights='float32', threads=1, kv='float16'):
        super().__init__(model, weights, threads)
        import llama_cpp
        self.lib, self.rows = llama_cpp, 0
        self.kv = {'float32': llama_cpp.GGML_TYPE_F32, 'float16': llama_cpp.GGML_TYPE_F16}[kv]
        if not LlamaCpp.log_callback:  # kept by the class: C may call it while any engine exists
            LlamaCpp.log_callback = llama_cpp.llama_log_callback(lambda level, text, data: None)
            llama_cpp.llama_log_set(LlamaCpp.log_callback, ctypes.c_void_p())
            llama_cpp.llama_backend_init()
        path = os.path.join(folder_with_gguf(model, weights).name, GGUF)
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), model_params())
        if not self.model:
            raise ValueError("llama.cpp could not load the GGUF file that was made for it")

    def __del__(self):
        if self.context:
            self.lib.llama_free(self.context)
        if self.model:
            self.lib.llama_model_free(self.model)

    def make_context(self, B):
        """A context with a cache of block_size for each of B sequences."""
        if self.context:
            self.lib.llama_free(self.context)
        params = self.lib.llama_context_default_params()
        n_tokens = B * self.config.block_size
        params.n_seq_max, params.n_ctx, params.n_batch = B, n_tokens, n_tokens
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k = params.type_v = self.kv
        self.context, self.rows = self.lib.llama_init_from_model(self.model, params), B
        if not self.context:
            raise ValueError(f"llama.cpp has no memory for {B} sequences of {self.config.block_size} tokens")

    def generate(self, prompts, n_new):
        out = np.empty((len(prompts), n_new), np.int64)
        logits = self.read(prompts)
        out[:, 0] = logits.argmax(axis=1)
        batch = Batch(self.lib, range(self.rows))
        batch.wanted[:] = 1
        for step in range(1, n_new):
            batch.token[:], batch.pos[:] = out[:, step - 1], prompts.size(1) + step - 1
            self.decode(batch)
            # the logits of each step are at the same place; asking for them waits for them
            logits = self.logits(self.rows) if step == 1 else self.lib.llama_get_logits(self.context) and logits
            out[:, step] = logits.argmax(axis=1)
        return torch.from_numpy(out)

    def all_logits(self, tokens):
        """The logits after each of tokens (T,): (T, vocab_size)."""
        return torch.from_numpy(self.read(tokens[None], all_wanted=True).copy())

    def read(self, prompts, all_wanted=False):
        """Read prompts (B, T) in place of what was read. Returns the logits after their last tokens, or after all."""
        B, T = prompts.shape
        if B != self.rows:
            self.make_context(B)
        for row in range(B):
            self.lib.llama_memory_seq_rm(self.lib.llama_get_memory(self.context), row, 0, -1)
        batch = Batch(self.lib, np.repeat(np.arange(B), T).tolist())
        batch.token[:], batch.pos[:] = prompts.numpy().ravel(), np.tile(np.arange(T), B)
        batch.wanted[:] = all_wanted | (batch.pos == T - 1)
        self.decode(batch)
        return self.logits(B * T if all_wanted else B)

    def decode(self, batch):
        if self.lib.llama_decode(self.context, batch.batch) != 0:
            raise ValueError(f"llama.cpp could not decode {batch.batch.n_tokens} tokens")

    def logits(self, n):
        """The n rows of logits that the last `decode` was asked for, (n, vocab_size)."""
        return np.ctypeslib.as_array(self.lib.llama_get_logits(self.context), (n, self.config.vocab_size))


@lru_cache(maxsize=3)
def folder_with_gguf(model, weights):
    """A temporary folder with the model as the file GGUF. The last three are kept: engines map the same file."""
    folder = tempfile.TemporaryDirectory()
    path = os.path.join(folder.name, GGUF)
    to_gguf(model, path, 'q8_0' if weights == 'int8' else 'f32')
    if weights == 'int4':
        import llama_cpp
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
        if llama_cpp.llama_model_quantize(path.encode(), f'{path}.q4_0'.encode(), ctypes.byref(params)):
            raise ValueError("llama.cpp could not quantise the GGUF file that was made for it")
        os.replace(f'{path}.q4_0', path)
    return folder


class Batch:
    """A llama_batch for tokens of these sequences. token, pos, wanted: arrays, to be filled."""

    def __init__(self, lib, sequences):
        self.lib, self.batch, n = lib, lib.llama_batch_init(len(sequences), 0, 1), len(sequences)
        fields = self.batch.token, self.batch.pos, self.batch.logits, self.batch.n_seq_id
        self.token, self.pos, self.wanted, n_seq_id = (np.ctypeslib.as_array(field, (n,)) for field in fields)
        n_seq_id[:] = 1
        for i, seq in enumerate(sequences):
            self.batch.seq_id[i][0] = seq
        self.batch.n_tokens = n

    def __del__(self):
        self.lib.llama_batch_free(self.batch)

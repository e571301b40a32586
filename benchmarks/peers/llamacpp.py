"""llama.cpp."""
import ctypes
import os
import tempfile

import numpy as np
import torch

from benchmarks.peers.engine import Engine
from formats import to_gguf


class LlamaCpp(Engine):
    """
    llama.cpp, by the C interface under llama-cpp-python: one llama_decode a step, with a sequence for each row.

    Its GELU is the tanh approximation, from a table of float16, and its keys and values are float16 by default (float32
    makes it slower), so its tokens need not be ours. int8 is Q8_0: blocks of 32 with a scale each, inputs likewise.
    The batch is filled and read as in https://github.com/ggml-org/llama.cpp/blob/master/examples/batched/batched.cpp
    """
    name = 'llama.cpp'
    packages = {'llama_cpp': 'llama-cpp-python', 'gguf': 'gguf'}
    ways = {'float32': [{}], 'int8': [{}]}
    same_tokens = False
    model = context = log_callback = None

    def __init__(self, model, weights='float32', threads=1):
        super().__init__(model, weights, threads)
        import llama_cpp
        self.lib, self.rows = llama_cpp, 0
        if not LlamaCpp.log_callback:  # kept by the class: C may call it while any engine exists
            LlamaCpp.log_callback = llama_cpp.llama_log_callback(lambda level, text, data: None)
            llama_cpp.llama_log_set(LlamaCpp.log_callback, ctypes.c_void_p())
            llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, 'model.gguf')
            to_gguf(model, path, {'float32': 'f32', 'int8': 'q8_0'}[weights])
            self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
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
        self.context, self.rows = self.lib.llama_init_from_model(self.model, params), B
        if not self.context:
            raise ValueError(f"llama.cpp has no memory for {B} sequences of {self.config.block_size} tokens")

    def generate(self, prompts, n_new):
        prompts = self.checked(prompts, n_new).numpy()
        B, T = prompts.shape
        if B != self.rows:
            self.make_context(B)
        lib, out = self.lib, np.empty((B, n_new), np.int64)
        lib.llama_memory_clear(lib.llama_get_memory(self.context), False)
        batch = lib.llama_batch_init(B * T, 0, 1)
        try:
            token, pos, n_seq_id, wanted = (np.ctypeslib.as_array(field, (B * T,))
                                            for field in (batch.token, batch.pos, batch.n_seq_id, batch.logits))
            token[:], pos[:], n_seq_id[:] = prompts.ravel(), np.tile(np.arange(T), B), 1
            wanted[:] = pos == T - 1
            for i in range(B * T):
                batch.seq_id[i][0] = i // T
            batch.n_tokens = B * T
            for step in range(n_new):
                if lib.llama_decode(self.context, batch) != 0:
                    raise ValueError(f"llama.cpp could not decode {batch.n_tokens} tokens")
                logits = lib.llama_get_logits(self.context)  # also waits for them
                if step == 0:
                    # the B rows of logits of each step are at the same place
                    rows = np.ctypeslib.as_array(logits, (B, self.config.vocab_size))
                    for i in range(B):
                        batch.seq_id[i][0] = i
                    batch.n_tokens, pos[:B], wanted[:B] = B, T - 1, 1
                pos[:B] += 1
                token[:B] = out[:, step] = rows.argmax(axis=1)
        finally:
            lib.llama_batch_free(batch)
        return torch.from_numpy(out)

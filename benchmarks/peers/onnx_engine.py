"""ONNX Runtime."""
import numpy as np
import torch

from benchmarks.peers.engine import Engine
from benchmarks.peers.onnx_graph import onnx_graph


class OnnxRuntime(Engine):
    """
    ONNX Runtime, by a graph of its own fused operators: see `onnx_graph`. One graph runs the prompt and each token.

    The caches that go in and those that come out are bound to the same memory, so GroupQueryAttention writes in place
    and nothing is copied from step to step. numpy finds the largest logit, faster than the operator ArgMax.
    int8 by='block' (up to 128 weights share a scale) is the fastest for few rows, by='row' for many; inputs are rounded
    too.
    """
    name = 'ONNX Runtime'
    packages = {'onnxruntime': 'onnxruntime', 'onnx': 'onnx'}
    ways = {'float32': [{}], 'int8': [dict(by='block'), dict(by='row')]}

    def __init__(self, model, weights='float32', threads=1, by='block'):
        super().__init__(model, weights, threads)
        import onnxruntime
        self.array_in_place = onnxruntime.OrtValue.ortvalue_from_numpy  # it shares the array's memory
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        graph = onnx_graph(model, by if weights == 'int8' else None)
        self.session = onnxruntime.InferenceSession(graph.SerializeToString(), options,
                                                    providers=['CPUExecutionProvider'])
        self.caches, self.rows = {}, 0

    def make_caches(self, B):
        """Caches for B rows, by the names of the graph's inputs. They are not cleared: unwritten rows are not read."""
        c = self.config
        shape = B, c.n_head, c.block_size, c.n_embd // c.n_head
        self.caches = {f'{kind}{layer}': self.array_in_place(np.zeros(shape, np.float32))
                       for layer in range(c.n_layer) for kind in 'kv'}
        self.rows = B

    def generate(self, prompts, n_new):
        prompts = self.checked(prompts, n_new).numpy()
        B, T = prompts.shape
        if B != self.rows:
            self.make_caches(B)
        # the arrays that a step reads and writes: bound to the graph once, then only their contents change
        ids, pos = np.empty((B, 1), np.int64), np.array([[T - 1]])
        newest, total = np.full(B, T - 1, np.int32), np.array(T, np.int32)
        logits, out = np.empty((B, 1, self.config.vocab_size), np.float32), np.empty((B, n_new), np.int64)
        binding = self.session.io_binding()
        for name, cache in self.caches.items():
            binding.bind_ortvalue_input(name, cache)
            binding.bind_ortvalue_output('new_' + name, cache)
        for name, values in dict(ids=prompts, pos=np.arange(T)[None], newest=newest, total=total).items():
            binding.bind_ortvalue_input(name, self.array_in_place(values))
        binding.bind_ortvalue_output('logits', self.array_in_place(logits))
        for step in range(n_new):
            if step == 1:
                binding.bind_ortvalue_input('ids', self.array_in_place(ids))
                binding.bind_ortvalue_input('pos', self.array_in_place(pos))
            self.session.run_with_iobinding(binding)
            np.argmax(logits, axis=-1, out=ids)
            out[:, step] = ids[:, 0]
            pos += 1
            newest += 1
            total += 1
        return torch.from_numpy(out)

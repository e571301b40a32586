"""
ONNX Runtime, by a graph of its own fused operators for a CPU.

Operators: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""
import numpy as np
import torch

from benchmarks.peers.peer import Peer

NONE = '""'  # an input or an output that is left out


class OnnxRuntime(Peer):
    """
    See `onnx_model`. One graph runs the prompt and each token.

    The caches that go in and those that come out are bound to the same memory, so GroupQueryAttention writes in place
    and nothing is copied from step to step. numpy finds the largest logit, faster than the operator ArgMax.
    int8 by='block' (up to 128 weights share a scale) is the fastest for few rows, by='row' for many; inputs are rounded
    too. int4 has 32 to a scale, as llama.cpp's Q4_0 and ours, and lm_head in 8 or in 4 bits.
    """
    name = 'ONNX Runtime'
    packages = {'onnxruntime': 'onnxruntime', 'onnx': 'onnx'}
    ways = {'float32': [{}], 'int8': [dict(by='block'), dict(by='row')], 'int4': [dict(lm_head=8), dict(lm_head=4)]}
    families = 'gpt2',

    def __init__(self, model, weights='float32', threads=1, by='block', lm_head=8):
        super().__init__(model, weights, threads)
        import onnxruntime
        self.array_in_place = onnxruntime.OrtValue.ortvalue_from_numpy  # it shares the array's memory
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        bits = {'float32': 32, 'int8': 8, 'int4': 4}[weights]
        self.session = onnxruntime.InferenceSession(
            onnx_model(model, bits, by, max(bits, lm_head)).SerializeToString(), options,
            providers=['CPUExecutionProvider'])
        self.caches, self.rows = {}, 0

    def generate(self, prompts, n_new):
        (B, T), c = prompts.shape, self.config
        if B != self.rows:  # caches are not cleared from call to call: unwritten rows are not read
            self.rows, shape = B, (B, c.n_head, c.block_size, c.head_dim)
            self.caches = {name: self.array_in_place(np.zeros(shape, np.float32)) for name in cache_names(c)}
        # the graph is bound to these arrays once; later steps change only their contents
        ids, pos = np.empty((B, 1), np.int64), np.array([[T - 1]])
        newest, total = np.full(B, T - 1, np.int32), np.array(T, np.int32)
        logits, out = np.empty((B, 1, c.vocab_size), np.float32), np.empty((B, n_new), np.int64)
        binding = self.session.io_binding()
        for name, cache in self.caches.items():
            binding.bind_ortvalue_input(name, cache)
            binding.bind_ortvalue_output('new_' + name, cache)
        for name, values in dict(ids=np.ascontiguousarray(prompts), pos=np.arange(T)[None], newest=newest,
                                 total=total).items():
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


def cache_names(c):
    return [f'{kind}{layer}' for layer in range(c.n_layer) for kind in 'kv']


class Graph:
    """The lines of a graph that is being written, `output = Operator<attribute>(input, ...)`, and its constants."""

    def __init__(self):
        self.lines, self.constants = [], []

    def constant(self, name, values):
        """The name of a new constant with these values; `NONE` for None."""
        from onnx import numpy_helper
        if values is None:
            return NONE
        if isinstance(values, torch.Tensor):
            values = values.detach().float().cpu().numpy()
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def add_and_norm(self, h, total, x, y, y_bias, norm):
        """total = x + y + y_bias, and h, its layer norm."""
        weight, bias = self.constant(h + '_weight', norm.weight), self.constant(h + '_bias', norm.bias)
        self.lines.append(f'{h}, {NONE}, {NONE}, {total} = com.microsoft.SkipLayerNormalization<epsilon: float = '
                          f'{norm.eps:f}>({x}, {y}, {weight}, {bias}, {y_bias})')

    def linear(self, y, x, module, bits, by, bias=None):
        """y = x @ weight.T + bias, in so many bits."""
        w, bias = module.weight.detach().float().cpu().numpy(), self.constant(y + '_bias', bias)  # (N, K)
        N, K = w.shape
        if bits == 32:
            product = f'MatMul({x}, {self.constant(y + "_w", w.T)})'
            self.lines += [f'{y} = {product}'] if bias == NONE else [f'{y}_0 = {product}', f'{y} = Add({y}_0, {bias})']
            return
        if bits == 8 and by == 'row':
            whole, scale = rounded(w, K, bits)
            weight = self.constant(y + '_w', whole.reshape(N, K).T.astype(np.int8))
            scale = self.constant(y + '_scale', scale.ravel())
            self.lines.append(f'{y} = com.microsoft.DynamicQuantizeMatMul({x}, {weight}, {scale}, {NONE}, {bias})')
            return
        size = 32 if bits == 4 else next(n for n in (128, 64, 32, 16) if K % n == 0)
        whole, scale = rounded(w, size, bits)
        scale = self.constant(y + '_scale', scale)
        stored = (whole + 2**(bits - 1)).astype(np.uint8)
        if bits == 4:
            stored = stored[..., ::2] | stored[..., 1::2] << 4
        how = f'K={K}, N={N}, bits={bits}, block_size={size}, accuracy_level=4'  # 4: multiply in 8 bits
        self.lines.append(f'{y} = com.microsoft.MatMulNBits<{how}>({x}, {self.constant(y + "_w", stored)}, {scale}, '
                          f'{NONE}, {NONE}, {bias})')


def rounded(w, size, bits):
    """
    w (N, K) -> (whole (N, K / size, size), scale (N, K / size)), w = whole * scale of its block. whole: in -127 ... 127
    for 8 bits, -7 ... 7 for 4.
    """
    blocks = w.reshape(len(w), -1, size)
    scale = np.abs(blocks).max(axis=-1).clip(1e-30) / (2**(bits - 1) - 1)
    return np.round(blocks / scale[..., None]), scale


def onnx_model(model, bits=32, by='block', lm_head=32):
    """
    The model as an ONNX ModelProto for ONNX Runtime on a CPU.

    In: ids (B, T), pos (1, T), newest (B,) the position of each row's last token, total () = newest + 1, and for each
    layer k<layer> and v<layer> (B, n_head, block_size, head_dim). Out: logits (B, 1, vocab_size) of the last position,
    and the caches, new_k<layer> and new_v<layer>. T > 1 on a warm cache is for B = 1 only.
    bits, lm_head: 32, 8 or 4, of the weights of the blocks and of lm_head. by: in 8 bits, a scale for each 'block' or
    'row'. The operators need heads whose size is a multiple of 8, an n_embd that is one of 16 in 8 bits, of 32 in 4.
    """
    from onnx import parser
    c, t, g = model.config, model.transformer, Graph()
    g.lines += [f"x = Gather({g.constant('wte', t.wte.weight)}, ids)",  # (B, T, C)
                f"y = Gather({g.constant('wpe', t.wpe.weight)}, pos)"]  # (1, T, C)
    x, y, y_bias = 'x', 'y', NONE
    for layer, block in enumerate(t.h):
        attn, mlp, at = block.attn, block.mlp, f'layer{layer}_'
        g.add_and_norm(at + 'h1', at + 'x1', x, y, y_bias, block.ln_1)
        g.linear(at + 'qkv', at + 'h1', attn.c_attn, bits, by, attn.c_attn.bias)
        g.lines.append(f'{at}a, new_k{layer}, new_v{layer} = com.microsoft.GroupQueryAttention<num_heads={c.n_head}, '
                       f'kv_num_heads={c.n_head}>({at}qkv, {NONE}, {NONE}, k{layer}, v{layer}, newest, total)')
        g.linear(at + 'y1', at + 'a', attn.c_proj, bits, by)  # its bias is added with the residual
        y_bias = g.constant(at + 'y1_bias', attn.c_proj.bias)
        g.add_and_norm(at + 'h2', at + 'x2', at + 'x1', at + 'y1', y_bias, block.ln_2)
        g.linear(at + 'm', at + 'h2', mlp.c_fc, bits, by)
        m_bias = g.constant(at + 'm_bias', mlp.c_fc.bias)
        gelu = f'Gelu({at}m)' if m_bias == NONE else f'BiasGelu({at}m, {m_bias})'  # both are the exact one
        g.lines.append(f'{at}g = com.microsoft.{gelu}')
        g.linear(at + 'y2', at + 'g', mlp.c_proj, bits, by)
        x, y, y_bias = at + 'x2', at + 'y2', g.constant(at + 'y2_bias', mlp.c_proj.bias)
    g.add_and_norm('h', NONE, x, y, y_bias, t.ln_f)
    g.lines.append(f"last_h = Gather<axis=1>(h, {g.constant('last', np.array([-1]))})")  # (B, 1, C)
    g.linear('logits', 'last_h', model.lm_head, lm_head, by)
    cache = f'float[B,{c.n_head},{c.block_size},{c.head_dim}] '
    inputs = ['int64[B,T] ids', 'int64[1,T] pos', 'int32[B] newest', 'int32[] total',
              *(cache + name for name in cache_names(c))]
    outputs = [f'float[B,1,{c.vocab_size}] logits', *(f'{cache}new_{name}' for name in cache_names(c))]
    proto = parser.parse_model('<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]>\n'
                               f"gpt ({', '.join(inputs)}) => ({', '.join(outputs)})\n{{ {chr(10).join(g.lines)} }}")
    proto.graph.initializer.extend(g.constants)
    return proto

"""
ONNX Runtime, by a graph of its own fused operators for a CPU.

Operators: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""
import numpy as np
import torch

from benchmarks.peers.engine import GPT2Engine, array

FUSED = 'com.microsoft'  # the domain of ONNX Runtime's own operators; '' is that of ONNX


class OnnxRuntime(GPT2Engine):
    """
    See `onnx_graph`. One graph runs the prompt and each token.

    The caches that go in and those that come out are bound to the same memory, so GroupQueryAttention writes in place
    and nothing is copied from step to step. numpy finds the largest logit, faster than the operator ArgMax.
    int8 by='block' (up to 128 weights share a scale) is the fastest for few rows, by='row' for many; inputs are rounded
    too. int4 has 32 to a scale, as llama.cpp's Q4_0 and ours, and lm_head in 8 or in 4 bits.
    """
    name = 'ONNX Runtime'
    packages = {'onnxruntime': 'onnxruntime', 'onnx': 'onnx'}
    ways = {'float32': [{}], 'int8': [dict(by='block'), dict(by='row')], 'int4': [dict(lm_head=8), dict(lm_head=4)]}

    def __init__(self, model, weights='float32', threads=1, by='block', lm_head=8):
        super().__init__(model, weights, threads)
        import onnxruntime
        self.array_in_place = onnxruntime.OrtValue.ortvalue_from_numpy  # it shares the array's memory
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        bits = {'float32': 32, 'int8': 8, 'int4': 4}[weights]
        graph = onnx_graph(model, bits, by, max(bits, lm_head))
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
        prompts = np.ascontiguousarray(prompts)
        B, T = prompts.shape
        if B != self.rows:
            self.make_caches(B)
        # the graph is bound to these arrays once; later steps change only their contents
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


class Graph:
    """The nodes and constants of a graph that is being built. Methods add to it and return names of values."""

    def __init__(self):
        self.nodes, self.constants = [], {}

    def constant(self, name, values):
        from onnx import numpy_helper
        self.constants[name] = numpy_helper.from_array(np.ascontiguousarray(values), name)
        return name

    def parameter(self, name, p):
        """A constant with the values of a parameter; '', an input that is left out, for None."""
        return '' if p is None else self.constant(name, array(p))

    def node(self, kind, inputs, outputs, domain=FUSED, **attributes):
        from onnx import helper
        self.nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **attributes))

    def op(self, kind, *inputs, n_outputs=1, domain=FUSED, **attributes):
        """A node with new names for its outputs: the name, or a list of n_outputs names."""
        outputs = [f'{kind}_{len(self.nodes)}_{i}' for i in range(n_outputs)]
        self.node(kind, inputs, outputs, domain, **attributes)
        return outputs[0] if n_outputs == 1 else outputs

    def linear(self, x, name, module, bias=None, bits=32, by='block'):
        """x @ weight.T + bias, in so many bits. bias: the module's, or None to leave it out."""
        w, bias = array(module.weight), self.parameter(name + '.bias', bias)  # (N, K)
        if bits == 32:
            y = self.op('MatMul', x, self.constant(name, w.T), domain='')
            return self.op('Add', y, bias, domain='') if bias else y
        N, K = w.shape
        if bits == 8 and by == 'row':
            whole, scale = in_8_bits(w, K)
            weight = self.constant(name, whole.reshape(N, K).T.astype(np.int8))
            return self.op('DynamicQuantizeMatMul', x, weight, self.constant(name + '.scale', scale.ravel()), '', bias)
        size = 32 if bits == 4 else next(n for n in (128, 64, 32, 16) if K % n == 0)
        whole, scale = in_4_bits(w) if bits == 4 else in_8_bits(w, size)
        stored = (whole + 2**(bits - 1)).astype(np.uint8)
        if bits == 4:
            stored = stored[..., ::2] | stored[..., 1::2] << 4
        # accuracy_level 4: multiply in 8 bits
        return self.op('MatMulNBits', x, self.constant(name, stored), self.constant(name + '.scale', scale), '', '',
                       bias, bits=bits, block_size=size, K=K, N=N, accuracy_level=4)

    def add_and_norm(self, x, y, y_bias, name, norm):
        """(x + y + y_bias, its layer norm)."""
        weight, bias = self.parameter(name + '.weight', norm.weight), self.parameter(name + '.bias', norm.bias)
        h, _, _, x = self.op('SkipLayerNormalization', x, y, weight, bias, y_bias, n_outputs=4, epsilon=norm.eps)
        return x, h

    def attention(self, qkv, layer, n_head):
        """Attention over the cache of a layer, which is written in place."""
        y = f'y{layer}'
        self.node('GroupQueryAttention', [qkv, '', '', f'k{layer}', f'v{layer}', 'newest', 'total'],
                  [y, f'new_k{layer}', f'new_v{layer}'], num_heads=n_head, kv_num_heads=n_head)
        return y


def in_8_bits(w, size):
    """w (N, K) -> (whole (N, K / size, size) in -127 ... 127, scale (N, K / size)), w = whole * scale of its block."""
    blocks = w.reshape(len(w), -1, size)
    scale = np.abs(blocks).max(axis=-1).clip(1e-30) / 127
    return np.round(blocks / scale[..., None]), scale


def in_4_bits(w):
    """As `in_8_bits` with blocks of 32, in -8 ... 7 by Q4_0's rule: a block's number of largest magnitude is -8."""
    blocks = w.reshape(len(w), -1, 32)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)
    scale = np.where(largest == 0, 1, largest / -8).astype(np.float32)
    return np.round(blocks / scale).clip(-8, 7), scale[..., 0]


def onnx_graph(model, bits=32, by='block', lm_head=32):
    """
    The model as an ONNX ModelProto for ONNX Runtime on a CPU.

    In: ids (B, T), pos (1, T), newest (B,) the position of each row's last token, total () = newest + 1, and for each
    layer k<layer> and v<layer> (B, n_head, block_size, head_dim). Out: logits (B, 1, vocab_size) of the last position,
    and the caches, new_k<layer> and new_v<layer>. T > 1 on a warm cache is for B = 1 only.
    bits, lm_head: 32, 8 or 4, of the weights of the blocks and of lm_head. by: in 8 bits, a scale for each 'block' or
    'row'. The operators need heads whose size is a multiple of 8, an n_embd that is one of 16 in 8 bits, of 32 in 4.
    """
    c, t = model.config, model.transformer
    g, how = Graph(), dict(bits=bits, by=by)
    x = g.op('Gather', g.parameter('wte', t.wte.weight), 'ids', domain='')  # (B, T, C)
    y, y_bias = g.op('Gather', g.parameter('wpe', t.wpe.weight), 'pos', domain=''), ''  # (1, T, C)
    for l, block in enumerate(t.h):
        attn, mlp = block.attn, block.mlp
        x, h = g.add_and_norm(x, y, y_bias, f'{l}.ln_1', block.ln_1)
        y = g.attention(g.linear(h, f'{l}.attn.c_attn', attn.c_attn, attn.c_attn.bias, **how), l, c.n_head)
        y = g.linear(y, f'{l}.attn.c_proj', attn.c_proj, **how)  # its bias is added with the residual
        x, h = g.add_and_norm(x, y, g.parameter(f'{l}.attn.c_proj.bias', attn.c_proj.bias), f'{l}.ln_2', block.ln_2)
        h = g.linear(h, f'{l}.mlp.c_fc', mlp.c_fc, **how)
        if mlp.c_fc.bias is None:
            h = g.op('Gelu', h)  # the exact one, as is BiasGelu
        else:
            h = g.op('BiasGelu', h, g.parameter(f'{l}.mlp.c_fc.bias', mlp.c_fc.bias))
        y = g.linear(h, f'{l}.mlp.c_proj', mlp.c_proj, **how)
        y_bias = g.parameter(f'{l}.mlp.c_proj.bias', mlp.c_proj.bias)
    _, h = g.add_and_norm(x, y, y_bias, 'ln_f', t.ln_f)
    h = g.op('Gather', h, g.constant('last', np.array([-1])), domain='', axis=1)  # (B, 1, C)
    g.node('Identity', [g.linear(h, 'lm_head', model.lm_head, bits=lm_head, by=by)], ['logits'], domain='')
    return model_proto(g, c)


def model_proto(g, c):
    """The graph g as a ModelProto, with the inputs and outputs of a GPT of configuration c."""
    from onnx import TensorProto, helper
    tensor = helper.make_tensor_value_info
    caches = [f'{kind}{l}' for l in range(c.n_layer) for kind in 'kv']
    shape = 'B', c.n_head, c.block_size, c.n_embd // c.n_head
    inputs = [tensor('ids', TensorProto.INT64, ('B', 'T')), tensor('pos', TensorProto.INT64, (1, 'T')),
              tensor('newest', TensorProto.INT32, ('B',)), tensor('total', TensorProto.INT32, ())]
    inputs += [tensor(name, TensorProto.FLOAT, shape) for name in caches]
    outputs = [tensor('logits', TensorProto.FLOAT, ('B', 1, c.vocab_size))]
    outputs += [tensor('new_' + name, TensorProto.FLOAT, shape) for name in caches]
    graph = helper.make_graph(g.nodes, 'gpt', inputs, outputs, list(g.constants.values()))
    opsets = [helper.make_opsetid('', 17), helper.make_opsetid(FUSED, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)

"""
The same GPT in other engines, to be compared with: Hugging Face transformers, CTranslate2, llama.cpp and ONNX Runtime.

    engine = OnnxRuntime(model, weights='int8', threads=2)
    engine.generate(prompts, 100)    # (B, T) token ids -> the (B, 100) that follow

Each is built from a model in memory and decodes greedily, all rows of a batch in one step, and stops for no token. They
are to be beaten at their best, so each class has the fastest way into its engine that we know, and `ways` lists what
there is to choose from besides the number of threads: bench.py tries them all. All of them end where the context is full.
"""
import ctypes
import importlib
import os
import tempfile
from contextlib import contextmanager

import numpy as np
import torch

from formats import to_gguf, to_huggingface


class Peer:
    """
    What bench.py has to know of an engine.

    packages: {module: what to pip install for it}. ways: {weights: keyword arguments, each a way to run them}.
    same_tokens: its arithmetic in float32 is ours but for rounding, so its tokens should be ours.
    """
    name, packages, ways, same_tokens = '', {}, {'float32': [{}]}, True

    @classmethod
    def missing(cls):
        """Why this engine cannot be used here, with what to do about it; '' if it can."""
        for module, package in cls.packages.items():
            try:
                importlib.import_module(module)
            except ModuleNotFoundError:
                return f"pip install {package}"
            except Exception as e:  # a wheel for another processor or libc: each has its own kind of error for it
                return f"{module} does not load: {type(e).__name__}: {e}"
        return ''

    def __init__(self, model, weights='float32', threads=1):
        if weights not in self.ways:
            raise ValueError(f"{self.name} has weights in {' or '.join(self.ways)} here, not in {weights!r}")
        if self.missing():
            raise ValueError(f"{self.name} cannot be used: {self.missing()}")
        self.config, self.threads = model.config, threads

    def checked(self, prompts, n_new):
        """prompts as a contiguous tensor (B, T); ValueError unless n_new tokens fit behind them."""
        prompts = torch.as_tensor(prompts)
        if prompts.dim() != 2 or prompts.size(1) == 0 or n_new < 1:
            raise ValueError(f"prompts must be (B, T) with at least one token, not {tuple(prompts.shape)}, and n_new {n_new} at least 1")
        if prompts.size(1) + n_new - 1 > self.config.block_size:  # the last token is drawn, but never fed
            raise ValueError(f"a prompt of {prompts.size(1)} and {n_new} new tokens do not fit into block_size {self.config.block_size}")
        return prompts.contiguous()


class HuggingFace(Peer):
    """transformers: GPT2LMHeadModel.generate with its cache that grows and torch's attention, which on a CPU are its fastest."""
    name = 'Hugging Face generate'
    packages = {'transformers': 'transformers', 'safetensors': 'safetensors'}

    def __init__(self, model, weights='float32', threads=1):
        super().__init__(model, weights, threads)
        from transformers import GPT2LMHeadModel
        from transformers.utils.logging import disable_progress_bar
        disable_progress_bar()
        with tempfile.TemporaryDirectory() as folder:
            to_huggingface(model, folder)
            self.model = GPT2LMHeadModel.from_pretrained(folder).float().eval()

    def generate(self, prompts, n_new):
        prompts = self.checked(prompts, n_new)
        with torch_threads(self.threads):
            tokens = self.model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=n_new, do_sample=False,
                                         eos_token_id=None, pad_token_id=0)
        return tokens[:, prompts.size(1):]


class CTranslate2(Peer):
    """
    CTranslate2, by its own description of a pre-norm decoder with learned positions.

    int8 is one scale a row, with inputs rounded to 8 bits as well. On small models two threads can be several times slower
    than one. Specification: https://opennmt.net/CTranslate2/python/ctranslate2.specs.TransformerDecoderModelSpec.html
    """
    name = 'CTranslate2'
    packages = {'ctranslate2': 'ctranslate2'}
    ways = {'float32': [{}], 'int8': [{}]}

    def __init__(self, model, weights='float32', threads=1):
        if torch.backends.cpu.get_cpu_capability() == 'AVX512':
            os.environ.setdefault('CT2_FORCE_CPU_ISA', 'AVX512')  # by itself it takes AVX2 on AMD; read as the library first loads
        super().__init__(model, weights, threads)
        import ctranslate2
        from ctranslate2.specs import TransformerDecoderModelSpec
        from ctranslate2.specs.common_spec import Activation
        c, t = model.config, model.transformer
        spec = TransformerDecoderModelSpec.from_config(c.n_layer, c.n_head, activation=Activation.GELU)  # the exact one
        spec.config.layer_norm_epsilon = t.ln_f.eps
        spec.register_vocabulary([str(i) for i in range(c.vocab_size)])
        decoder = spec.decoder
        decoder.scale_embeddings = False
        decoder.embeddings.weight = array(t.wte.weight)
        decoder.position_encodings.encodings = array(t.wpe.weight)
        decoder.projection.weight = array(model.lm_head.weight)
        layer_norms, linears = [(decoder.layer_norm, t.ln_f)], []
        for layer, block in zip(decoder.layer, t.h):
            layer_norms += [(layer.self_attention.layer_norm, block.ln_1), (layer.ffn.layer_norm, block.ln_2)]
            linears += [(layer.self_attention.linear[0], block.attn.c_attn), (layer.self_attention.linear[1], block.attn.c_proj),
                        (layer.ffn.linear_0, block.mlp.c_fc), (layer.ffn.linear_1, block.mlp.c_proj)]
        for theirs, ours in layer_norms:
            theirs.gamma = array(ours.weight)
            theirs.beta = np.zeros_like(theirs.gamma) if ours.bias is None else array(ours.bias)
        for theirs, ours in linears:
            theirs.weight = array(ours.weight)
            if ours.bias is not None:
                theirs.bias = array(ours.bias)
        spec.validate()
        spec.optimize(quantization=weights)
        with tempfile.TemporaryDirectory() as folder:
            spec.save(folder)
            self.generator = ctranslate2.Generator(folder, compute_type=weights, intra_threads=threads)

    def generate(self, prompts, n_new):
        prompts = self.checked(prompts, n_new)
        words = [[str(token) for token in row] for row in prompts.tolist()]
        # an end token outside the vocabulary is never drawn, so all rows go on to max_length
        results = self.generator.generate_batch(words, max_length=n_new, end_token=[self.config.vocab_size], include_prompt_in_result=False)
        return torch.tensor([result.sequences_ids[0] for result in results])


class LlamaCpp(Peer):
    """
    llama.cpp, by the C interface under llama-cpp-python: one llama_decode a step, with a sequence for each row.

    Its GELU is the tanh approximation, out of a table of float16, and its keys and values are float16 by default (float32
    makes it slower), so its tokens need not be ours. int8 is Q8_0: blocks of 32 with a scale each, inputs likewise.
    The batch is filled and read as in https://github.com/ggml-org/llama.cpp/blob/master/examples/batched/batched.cpp
    """
    name = 'llama.cpp'
    packages = {'llama_cpp': 'llama-cpp-python', 'gguf': 'gguf'}
    ways = {'float32': [{}], 'int8': [{}]}
    same_tokens = False
    model = context = silent = None

    def __init__(self, model, weights='float32', threads=1):
        super().__init__(model, weights, threads)
        import llama_cpp
        self.lib, self.rows = llama_cpp, 0
        if not LlamaCpp.silent:  # kept by the class, since C may call it as long as there is any engine
            LlamaCpp.silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
            llama_cpp.llama_log_set(LlamaCpp.silent, ctypes.c_void_p())
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

    def make_room(self, B):
        """A context with a cache of block_size for each of B sequences."""
        if self.context:
            self.lib.llama_free(self.context)
        params = self.lib.llama_context_default_params()
        params.n_seq_max, params.n_ctx, params.n_batch = B, B * self.config.block_size, B * self.config.block_size
        params.n_threads = params.n_threads_batch = self.threads
        self.context, self.rows = self.lib.llama_init_from_model(self.model, params), B
        if not self.context:
            raise ValueError(f"llama.cpp has no memory for {B} sequences of {self.config.block_size} tokens")

    def generate(self, prompts, n_new):
        prompts = self.checked(prompts, n_new).numpy()
        B, T = prompts.shape
        if B != self.rows:
            self.make_room(B)
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
                    rows = np.ctypeslib.as_array(logits, (B, self.config.vocab_size))  # B rows in each step, at the same place
                    for i in range(B):
                        batch.seq_id[i][0] = i
                    batch.n_tokens, pos[:B], wanted[:B] = B, T - 1, 1
                pos[:B] += 1
                token[:B] = out[:, step] = rows.argmax(axis=1)
        finally:
            lib.llama_batch_free(batch)
        return torch.from_numpy(out)


class OnnxRuntime(Peer):
    """
    ONNX Runtime, by a graph of its own fused operators: see `onnx_graph`. One graph serves the prompt and each token after it.

    The caches that go in and those that come out are bound to the same memory, so GroupQueryAttention writes in place and
    nothing is copied from step to step. The largest logit is found in numpy, whose argmax beats the operator of that name.
    int8 by='block' (up to 128 weights share a scale) is the fastest for few rows, by='row' for many; inputs are rounded too.
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
        self.session = onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=['CPUExecutionProvider'])
        self.caches, self.rows = {}, 0

    def make_room(self, B):
        """Caches for B rows, by the names of the graph's inputs. Like ours they are not cleared: what is not yet written is not read."""
        c = self.config
        shape = B, c.n_head, c.block_size, c.n_embd // c.n_head
        self.caches = {f'{kind}{layer}': self.array_in_place(np.zeros(shape, np.float32)) for layer in range(c.n_layer) for kind in 'kv'}
        self.rows = B

    def generate(self, prompts, n_new):
        prompts = self.checked(prompts, n_new).numpy()
        B, T = prompts.shape
        if B != self.rows:
            self.make_room(B)
        # what a step reads and writes; binding tells the graph where, once, and from then on we change the numbers
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


def onnx_graph(model, int8_by=None):
    """
    The model as an ONNX ModelProto for ONNX Runtime on a CPU.

    In: ids (B, T), pos (1, T), newest (B,) the position of each row's last token, total () = newest + 1, and for each layer
    k<layer> and v<layer> (B, n_head, block_size, head_dim). Out: logits (B, 1, vocab_size) of the last position, and the
    caches, new_k<layer> and new_v<layer>. T > 1 on a warm cache is for B = 1 only.
    int8_by: matrices in 8 bits with a scale for each 'block' or 'row'; None for float32.
    Operators: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
    """
    from onnx import TensorProto, helper, numpy_helper
    c, t = model.config, model.transformer
    if c.n_embd // c.n_head % 8 != 0 or int8_by and c.n_embd % 16 != 0:
        raise ValueError(f"ONNX Runtime needs heads of a multiple of 8 channels, and for int8 an n_embd of a multiple of 16: "
                         f"not n_embd {c.n_embd} in {c.n_head} heads")
    nodes, constants = [], {}

    def constant(name, values):
        constants[name] = numpy_helper.from_array(np.ascontiguousarray(values), name)
        return name

    def parameter(name, p):
        return '' if p is None else constant(name, array(p))

    def op(kind, *inputs, n_outputs=1, domain='com.microsoft', **attributes):
        outputs = [f'{kind}_{len(nodes)}_{i}' for i in range(n_outputs)]
        nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **attributes))
        return outputs[0] if n_outputs == 1 else outputs

    def linear(x, name, module, bias=None):
        w, bias = array(module.weight), parameter(name + '.bias', bias)  # (N, K)
        if int8_by is None:
            y = op('MatMul', x, constant(name, w.T), domain='')
            return op('Add', y, bias, domain='') if bias else y
        N, K = w.shape
        size = next(n for n in (128, 64, 32, 16) if K % n == 0) if int8_by == 'block' else K
        blocks = w.reshape(N, K // size, size)
        scale = np.abs(blocks).max(axis=-1).clip(1e-30) / 127
        rounded = np.round(blocks / scale[..., None])
        if int8_by == 'row':
            return op('DynamicQuantizeMatMul', x, constant(name, rounded.reshape(N, K).T.astype(np.int8)),
                      constant(name + '.scale', scale.ravel()), '', bias)
        # accuracy_level 4: multiply in 8 bits. Numbers are stored with 128 added
        return op('MatMulNBits', x, constant(name, (rounded + 128).astype(np.uint8)), constant(name + '.scale', scale), '', '', bias,
                  bits=8, block_size=size, K=K, N=N, accuracy_level=4)

    def add_and_norm(x, y, y_bias, name, norm):
        """x + y + y_bias, and its layer norm."""
        h, _, _, x = op('SkipLayerNormalization', x, y, parameter(name + '.weight', norm.weight), parameter(name + '.bias', norm.bias), y_bias,
                        n_outputs=4, epsilon=norm.eps)
        return x, h

    x = op('Gather', parameter('wte', t.wte.weight), 'ids', domain='')  # (B, T, C)
    y, y_bias = op('Gather', parameter('wpe', t.wpe.weight), 'pos', domain=''), ''  # (1, T, C)
    for l, block in enumerate(t.h):
        attn, mlp = block.attn, block.mlp
        x, h = add_and_norm(x, y, y_bias, f'{l}.ln_1', block.ln_1)
        qkv = linear(h, f'{l}.attn.c_attn', attn.c_attn, attn.c_attn.bias)
        y = f'y{l}'
        nodes.append(helper.make_node('GroupQueryAttention', [qkv, '', '', f'k{l}', f'v{l}', 'newest', 'total'], [y, f'new_k{l}', f'new_v{l}'],
                                      domain='com.microsoft', num_heads=c.n_head, kv_num_heads=c.n_head))
        y, y_bias = linear(y, f'{l}.attn.c_proj', attn.c_proj), parameter(f'{l}.attn.c_proj.bias', attn.c_proj.bias)
        x, h = add_and_norm(x, y, y_bias, f'{l}.ln_2', block.ln_2)
        h = linear(h, f'{l}.mlp.c_fc', mlp.c_fc)
        h = op('Gelu', h) if mlp.c_fc.bias is None else op('BiasGelu', h, parameter(f'{l}.mlp.c_fc.bias', mlp.c_fc.bias))  # both exact
        y, y_bias = linear(h, f'{l}.mlp.c_proj', mlp.c_proj), parameter(f'{l}.mlp.c_proj.bias', mlp.c_proj.bias)
    _, h = add_and_norm(x, y, y_bias, 'ln_f', t.ln_f)
    h = op('Gather', h, constant('last', np.array([-1])), domain='', axis=1)  # (B, 1, C)
    nodes.append(helper.make_node('Identity', [linear(h, 'lm_head', model.lm_head)], ['logits']))

    def tensor(name, dtype, *shape):
        return helper.make_tensor_value_info(name, dtype, shape)

    caches = [f'{kind}{l}' for l in range(c.n_layer) for kind in 'kv']
    shape = 'B', c.n_head, c.block_size, c.n_embd // c.n_head
    inputs = [tensor('ids', TensorProto.INT64, 'B', 'T'), tensor('pos', TensorProto.INT64, 1, 'T'), tensor('newest', TensorProto.INT32, 'B'),
              tensor('total', TensorProto.INT32)] + [tensor(name, TensorProto.FLOAT, *shape) for name in caches]
    outputs = [tensor('logits', TensorProto.FLOAT, 'B', 1, c.vocab_size)] + [tensor('new_' + name, TensorProto.FLOAT, *shape) for name in caches]
    graph = helper.make_graph(nodes, 'gpt', inputs, outputs, list(constants.values()))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid('', 17), helper.make_opsetid('com.microsoft', 1)], ir_version=10)


def array(p):
    """A copy of a parameter as a float32 array; a copy, because CTranslate2 quantises what it is given in place."""
    return p.detach().float().cpu().numpy().copy()


@contextmanager
def torch_threads(n):
    """PyTorch on n threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


PEERS = HuggingFace, CTranslate2, LlamaCpp, OnnxRuntime

"""Reading a folder in Hugging Face format, config.json and safetensors files, or a GGUF file."""
import ctypes
import os
import platform
import sys
from functools import cached_property, partial

import torch
from safetensors import safe_open

from device import in_parallel, meta_model
from formats.families import config_args
from formats.from_gguf import GGUFFile
from formats.gguf_files import is_gguf
from formats.hub import GPT2_NAMES, local_path
from formats.names import CONV1D, HUGGING_FACE
from formats.weights import check_weights, common_dtype, once
from tokenizer import GPT2, read_downloaded, state_of_dataset

MASKS = '.attn.bias', '.attn.masked_bias', 'rotary_emb.inv_freq'  # no weights: old versions of transformers saved them
DEFAULTS = dict(  # of a draw: its type, the smallest and the largest value
    temperature=(float, 0, 1e6), top_k=(int, -1, 2**31 - 1), top_p=(float, 1e-6, 1), min_p=(float, 0, 1),
    repetition_penalty=(float, 0.01, 100))
DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h: blocks of more bytes go back to the system when they are freed


def from_pretrained(GPT, GPTConfig, model_type, override_args, dtype=None, lazy=False):
    """
    A GPT with the weights of a folder in Hugging Face format (of a family of families.py) or of a GGUF file.

    model_type: its path, or its name on the hub, see `files_of`; or what `files_of` has returned, to read it once.
    GPT, GPTConfig: the classes of model.py, or of a model that inherits from it. override_args may set dropout. dtype:
    of the weights; None keeps that of the files, see `common_dtype`, and for a GGUF file's rounded numbers is float32.
    Weights that are the same here and in a folder are not copied: they stay memory-mapped, and are read when they are
    first used.
    lazy: matrices are on the device meta, and their `read()` reads them, so that a model that is packed is never in
    memory as a whole. Embeddings are read at once, and the rounded ones of a GGUF file become bfloat16. A rounded
    embedding that is lm_head too is not read at once, but like the other matrices, unless positions are learned.
    ValueError, in one line, if there is no such model, it cannot be read, or a GPT here cannot represent what it has.
    """
    if set(override_args) - {'dropout'}:
        raise ValueError(f"only dropout can be overridden in pretrained weights, not {', '.join(override_args)}")
    files = files_of(model_type) if isinstance(model_type, str) else model_type
    if lazy and platform.libc_ver()[0] == 'glibc':  # matrices that are read and freed shall not stay in memory
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**22)
    try:
        config = GPTConfig(**config_args(files.config) | override_args)
    except ValueError as e:
        raise ValueError(f"{files.where}: {e}") from e
    names, weights = HUGGING_FACE[files.config['model_type']], files.weights
    embedding, = names.of('transformer.wte.weight')
    if config.tied and embedding not in weights and 'lm_head.weight' in weights:  # some files name it so
        weights[embedding] = weights['lm_head.weight']
    try:
        if not config.bias and config.norm == 'layer':  # the layer norms of a starcoder2 have one in any case
            config.bias = any(files.read(name, torch.float32).any() for name in weights if name.endswith('norm.bias'))
        check_weights(config, names, weights)
        model = meta_model(GPT, config)
        dtype = dtype or common_dtype([w for name, w in weights.items() if w.dtype in DTYPES
                                       and not name.endswith(MASKS)] or [weights[embedding]])
        if lazy and dtype is not torch.bfloat16:  # these two dtypes can be packed
            dtype = torch.float32
        state_dict = state_dict_of(model, files, dtype, lazy)
        model.load_state_dict(state_dict, assign=True)
    except (ValueError, RuntimeError) as e:  # RuntimeError of torch, where shapes do not fit
        if "can't allocate memory" in str(e) or "can't start new thread" in str(e):
            raise
        raise ValueError(f"the weights do not fit {files.where}: {' '.join(str(e).split())[:300]}") from e
    for name, w in state_dict.items():
        if w.is_meta:
            model.get_parameter(name).read = w.read
    if config.tied:
        model.transformer.wte.weight = model.lm_head.weight
    return model


def state_dict_of(model, files, dtype, lazy):
    """The state dict of a model from the weights in files, which must all be used. ValueError says which do not fit."""
    family, c = files.config['model_type'], model.config
    names, state_dict, used, read = HUGGING_FACE[family], {}, {'lm_head.weight'}, {}
    for name, shape in ((name, w.shape) for name, w in model.state_dict().items()):
        theirs = names.of(name if name != 'lm_head.weight' or not c.tied else 'transformer.wte.weight')
        if (family == 'starcoder2' and name.endswith('.bias') and not files.config.get('use_bias', True)
                and '.ln_' not in name):
            state_dict[name] = torch.zeros(shape, dtype=dtype)
            continue
        used.update(theirs)
        if missing := [their_name for their_name in theirs if their_name not in files.weights]:
            raise ValueError(f"it lacks the weights {missing[0]}: is the download complete?")
        is_embedding = name.endswith(('wte.weight', 'wpe.weight')) or c.tied and name == 'lm_head.weight'
        of_head = c.tied and files.is_rounded and c.position != 'learned'
        its_dtype = torch.bfloat16 if lazy and is_embedding and files.is_rounded else dtype
        if lazy and len(shape) == 2 and (of_head or not is_embedding):
            rows, columns = zip(*(files.weights[each].shape for each in theirs))
            shape = sum(rows), *{*columns}  # parts of several widths do not fit
            state_dict[name] = torch.empty(shape, dtype=its_dtype, device='meta')
            state_dict[name].read = partial(read_joined, files, theirs, its_dtype, name, c)
        else:
            read[name] = partial(read_joined, files, theirs, its_dtype, name, c)
    others = sorted(name for name in set(files.weights) - used if not name.endswith(MASKS)
                    and not (c.bias is False and c.norm == 'layer' and name.endswith('norm.bias')))
    if others:
        raise ValueError(f"a GPT here has no place for: {', '.join(others[:3])}{' ...' * (len(others) > 3)}")
    return state_dict | dict(zip(read, in_parallel(partial.__call__, read.values())))


def read_joined(files, theirs, dtype, name, config):
    """Our weights `name`, whose rows are those of `theirs`."""
    parts = [files.read(each, dtype) for each in theirs]
    w = parts[0] if len(parts) == 1 else torch.cat(parts)
    if files.config['model_type'] == 'gpt_bigcode' and config.n_kv_head == config.n_head and '.c_attn.' in name:
        w = w.unflatten(0, (config.n_head, 3, -1)).transpose(0, 1).flatten(0, 2)  # from q, k, v of each head
    return w.contiguous()


def files_of(model_type):
    """The `Files` of a folder, or a `GGUFFile`. A model of the hub is downloaded first, see `hub.local_path`."""
    path = local_path(model_type)
    if is_gguf(path):
        return GGUFFile(path)
    return Files(path, is_gpt2=path != model_type and model_type.partition('@')[0] in GPT2_NAMES)


class Files:
    """
    The safetensors files of a folder, which are opened when `weights` is first read. is_gpt2: was the folder named as a
    GPT-2? ValueError if it has no such files, or lacks one that its index names.
    """
    is_rounded = False

    def __init__(self, folder, is_gpt2=False):
        names = sorted(f for f in os.listdir(folder) if f.endswith('.safetensors')) if os.path.isdir(folder) else []
        if not names or not os.path.exists(os.path.join(folder, 'config.json')):
            found = ("a file, but no GGUF" if os.path.isfile(folder) else "a folder with weights, but no config.json"
                     if names else "a folder without a model that can be read (pickles, *.bin, are not)"
                     if os.path.isdir(folder) else "no file and no folder here")
            fetched = "run `make real`, or " if 'data/real/' in folder else ''
            raise ValueError(f"{folder!r} is {found}: {fetched}give {', '.join(GPT2_NAMES)}, a folder with config.json "
                             "and *.safetensors, or with ckpt.pt, a GGUF file, or owner/name of a model on the hub")
        index = os.path.join(folder, 'model.safetensors.index.json')
        if 'model.safetensors' in names:  # as in transformers: an index beside it is of other files
            names = ['model.safetensors']
        elif os.path.exists(index):
            listed, there = read_downloaded(index).get('weight_map'), names
            if not isinstance(listed, dict):
                raise ValueError(f"{index} has no weight_map: is the download complete?")
            names = sorted({*map(str, listed.values())})
            if missing := [name for name in names if name not in there]:
                raise ValueError(f"{folder} lacks {missing[0]}, which its index names: is the download complete?")
        self.folder, self.names, self.where = folder, names, os.path.join(folder, 'config.json')
        self.config, self.is_gpt2 = read_downloaded(self.where), is_gpt2

    def tokenizer_state(self):
        return GPT2 if self.is_gpt2 else state_of_dataset(self.folder)

    @cached_property
    def weights(self):
        """{name without its family's base: tensor}, memory-mapped, matrices (out, in). ValueError if it is damaged."""
        pairs = []
        for path in (os.path.join(self.folder, name) for name in self.names):
            try:
                file = safe_open(path, 'pt')
                pairs += [(key, file.get_tensor(key)) for key in file.keys()]
            except Exception as e:  # errors of safetensors and of the file system all mean this
                raise ValueError(f"{path} cannot be read ({type(e).__name__}: {e}): is the download complete?") from e
        turned = CONV1D if self.config['model_type'] == 'gpt2' else ()
        return {name: w.t() if name.endswith(turned) and w.dim() == 2 else w for name, w in once(pairs).items()}

    def read(self, name, dtype):
        """A tensor. ValueError if it is not of numbers that can be used."""
        w = self.weights[name]
        if w.dtype not in DTYPES:
            raise ValueError(f"{name} is of {w.dtype}, but weights must be of float32, bfloat16, float16 or float64: "
                             "use the model before it was quantised")
        return w.to(dtype)


def generation_defaults(model_type, generation_config=''):
    """
    The settings of a draw in the generation_config.json of what `from_pretrained` reads, a dict of those in DEFAULTS;
    stderr says which cannot be used. {} without the file or with generation_config='none'. ValueError if it is damaged.
    """
    if generation_config not in ('', 'none'):
        raise ValueError(f"generation_config must be none, or left out, not {generation_config!r}")
    if generation_config == 'none':
        return {}
    path, defaults = os.path.join(local_path(model_type), 'generation_config.json'), {}
    given = read_downloaded(path)
    for name, (kind, least, most) in DEFAULTS.items():
        value = given.get(name)
        if type(value) in (int, float) and least <= value <= most and kind(value) == value:
            defaults[name] = kind(0 if 0 < value < 1e-30 else value)  # such a temperature would make infinite logits
        elif value is not None:
            print(f"{path}: {name} must be from {least} to {most}, not {value!r:.40}: it is left out", file=sys.stderr)
    return defaults

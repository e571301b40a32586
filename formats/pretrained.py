"""Reading a folder in Hugging Face format: config.json and safetensors files, one or several."""
import os
import sys
from functools import cached_property

import torch
from safetensors import safe_open

from device import meta_model
from formats.families import config_args
from formats.names import CONV1D, HUGGING_FACE
from formats.weights import check_weights, once
from tokenizer import read_json

GPT2_NAMES = 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl'
MASKS = '.attn.bias', '.attn.masked_bias', 'rotary_emb.inv_freq'  # no weights: old versions of transformers saved them
DEFAULTS = dict(  # of a draw: its type, the smallest and the largest value
    temperature=(float, 0, 1e6), top_k=(int, -1, 2**31 - 1), top_p=(float, 1e-6, 1), min_p=(float, 0, 1),
    repetition_penalty=(float, 0.01, 100))
DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64


def from_pretrained(GPT, GPTConfig, model_type, override_args, dtype=None):
    """
    A GPT with the weights of a folder in Hugging Face format (of a family of families.py), which is downloaded first
    when model_type is a GPT-2's name.

    GPT, GPTConfig: the classes of model.py, or of a model that inherits from it. override_args may set dropout. dtype:
    of the weights; None keeps that of the files. Weights that are the same here and there are not copied: they stay
    memory-mapped in the files, and are read when they are first used.
    Raises ValueError, in one line, if there is no such folder, if it cannot be read, and for all in it that a GPT here
    cannot represent.
    """
    if set(override_args) - {'dropout'}:
        raise ValueError(f"only dropout can be overridden in pretrained weights, not {', '.join(override_args)}")
    folder = download_gpt2(model_type) if model_type in GPT2_NAMES and not os.path.isdir(model_type) else model_type
    files, hf = Files(folder), read_downloaded(os.path.join(folder, 'config.json'))
    try:
        config = GPTConfig(**config_args(hf) | override_args)
    except ValueError as e:
        raise ValueError(f"{folder}/config.json: {e}") from e
    weights, (embedding,) = files.weights, HUGGING_FACE[hf['model_type']].of('transformer.wte.weight')
    if config.tied and embedding not in weights and 'lm_head.weight' in weights:  # some files have it under this name
        weights[embedding] = weights['lm_head.weight']
    try:
        if not config.bias and config.norm == 'layer':  # the layer norms of a starcoder2 have one in any case
            config.bias = any(files.read(name).any() for name in weights if name.endswith('norm.bias'))
        check_weights(config, HUGGING_FACE[hf['model_type']], weights)
        model = meta_model(GPT, config)
        model.load_state_dict(state_dict_of(model, hf, files, dtype), assign=True)
    except (ValueError, RuntimeError) as e:  # RuntimeError of torch, where shapes do not fit
        raise ValueError(f"the weights of {folder} do not fit its config.json: {' '.join(str(e).split())[:300]}") from e
    if config.tied:
        model.transformer.wte.weight = model.lm_head.weight
    return model


def state_dict_of(model, hf, files, dtype):
    """The state dict of a model from the weights in files, which must all be used. ValueError says which do not fit."""
    family, c = hf['model_type'], model.config
    names, state_dict, used = HUGGING_FACE[family], {}, {'lm_head.weight'}
    first, = names.of('transformer.wte.weight')
    dtype = dtype or files.read(first).dtype
    for name, shape in ((name, w.shape) for name, w in model.state_dict().items()):
        theirs = names.of(name if name != 'lm_head.weight' or not c.tied else 'transformer.wte.weight')
        if family == 'starcoder2' and name.endswith('.bias') and not hf.get('use_bias', True) and '.ln_' not in name:
            state_dict[name] = torch.zeros(shape, dtype=dtype)
            continue
        used.update(theirs)
        parts = [files.read(their_name).to(dtype) for their_name in theirs]
        w = parts[0] if len(parts) == 1 else torch.cat(parts)
        if family == 'gpt2' and name.endswith(CONV1D):
            w = w.t()
        if family == 'gpt_bigcode' and c.n_kv_head == c.n_head and '.c_attn.' in name:  # there q, k, v of each head
            w = w.unflatten(0, (c.n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
        state_dict[name] = w.contiguous()
    others = sorted(name for name in set(files.weights) - used if not name.endswith(MASKS)
                    and not (c.bias is False and c.norm == 'layer' and name.endswith('norm.bias')))
    if others:
        raise ValueError(f"a GPT here has no place for: {', '.join(others[:3])}{' ...' * (len(others) > 3)} "
                         f"({len(others)})")
    return state_dict


class Files:
    """
    The safetensors files of a folder, of which none is opened before `weights` are asked for. ValueError if the folder
    has none, or not all of those that its index names.
    """

    def __init__(self, folder):
        names = sorted(f for f in os.listdir(folder) if f.endswith('.safetensors')) if os.path.isdir(folder) else []
        if not names or not os.path.exists(os.path.join(folder, 'config.json')):
            raise ValueError(f"{folder!r} is neither {', '.join(GPT2_NAMES)} nor a folder with config.json and "
                             "*.safetensors")
        index = os.path.join(folder, 'model.safetensors.index.json')
        if os.path.exists(index):
            listed, there = read_downloaded(index).get('weight_map'), names
            if not isinstance(listed, dict):
                raise ValueError(f"{index} has no weight_map: is the download complete?")
            names = sorted({*map(str, listed.values())})
            if missing := [name for name in names if name not in there]:
                raise ValueError(f"{folder} lacks {', '.join(missing[:3])}{' ...' * (len(missing) > 3)}, which "
                                 f"{os.path.basename(index)} names: is the download complete?")
        elif 'model.safetensors' in names:
            names = ['model.safetensors']
        self.folder, self.names = folder, names

    @cached_property
    def weights(self):
        """
        {name of a tensor without the base of its family: the tensor}, memory-mapped. ValueError if a file cannot be
        read, or if a tensor is there twice.
        """
        pairs = []
        for path in (os.path.join(self.folder, name) for name in self.names):
            try:
                file = safe_open(path, 'pt')
                pairs += [(key, file.get_tensor(key)) for key in file.keys()]
            except Exception as e:  # errors of safetensors and of the file system all mean this
                raise unreadable(path, e) from e
        try:
            return once(pairs)
        except ValueError as e:
            raise ValueError(f"{self.folder}: {e}") from e

    def read(self, name):
        """A tensor. ValueError if there is none of this name, or not of numbers that can be used."""
        if name not in self.weights:
            raise ValueError(f"it lacks the weights {name}: is the download complete?")
        w = self.weights[name]
        if w.dtype not in DTYPES:
            raise ValueError(f"{name} is of {w.dtype}, but weights must be of float32, bfloat16, float16 or float64: "
                             "use the model before it was quantised")
        return w


def generation_defaults(folder):
    """
    The settings of a draw that the generation_config.json of a folder in Hugging Face format names, a dict of those in
    DEFAULTS; stderr says which of them cannot be used. {} without the file. ValueError if it cannot be read.
    """
    path, defaults = os.path.join(folder, 'generation_config.json'), {}
    given = read_downloaded(path) if os.path.exists(path) else {}
    for name, (kind, least, most) in DEFAULTS.items():
        value = given.get(name)
        if type(value) in (int, float) and least <= value <= most and kind(value) == value:
            defaults[name] = kind(0 if 0 < value < 1e-30 else value)  # such a temperature would make infinite logits
        elif value is not None:
            print(f"{path}: {name} must be from {least} to {most}, not {value!r:.40}: it is left out", file=sys.stderr)
    return defaults


def unreadable(path, e):
    return ValueError(f"{path} cannot be read ({type(e).__name__}: {e}): is the download complete?")


def read_downloaded(path):
    """The dict in a JSON file of a folder that may have been downloaded in part. ValueError if it cannot be read."""
    try:
        return read_json(path)
    except (OSError, ValueError) as e:
        raise unreadable(path, e) from e


def download_gpt2(name):
    """The folder of GPT-2's files, downloaded or from the cache of huggingface_hub. ValueError where neither works."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as e:
        raise ValueError(f"downloading {name} needs huggingface_hub: pip install transformers") from e
    try:
        return snapshot_download('openai-community/' + name, allow_patterns=['config.json', 'model.safetensors'])
    except Exception as e:  # it has some thirty kinds of error
        raise ValueError(f"{name} could not be downloaded ({type(e).__name__}): connect, or pass a local folder") from e

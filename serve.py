"""
Serve a trained model to many at once: the OpenAI completions API, and a page that shows the cache.

    python serve.py                                         the newest out*/ckpt.pt, at http://127.0.0.1:8000/
    python serve.py --init_from=gpt2 --weights=int8         GPT-2, with rounded weights, which is faster
    python serve.py --host=0.0.0.0 --api_key=FILE:key.txt   for other machines too

    curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "ROMEO:", "max_tokens": 100}'

Ctrl-C or SIGTERM lets the requests that run finish, a second one ends at once.
"""
import math
import signal

if __name__ == '__main__':  # until the server listens there is nothing to save: Ctrl-C needs no traceback of an import
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import configurator  # before torch: it says so in one line where torch is missing

init_from = 'resume'  # resume (from out_dir), owner/name of a model on the hub, gpt2 (-medium, -large, -xl), a folder
                      # in Hugging Face format, or a GGUF file
out_dir = ''          # where ckpt.pt is; by default wherever the newest out*/ckpt.pt is
name = ''             # of the model in the API; by default that of its folder
host = '127.0.0.1'    # the address to listen at: 0.0.0.0 for all of this machine's, :: for its IPv6 ones too
port = 8000           # 0 takes any that is free
api_key = ''          # that requests must have, or FILE:path; by default API_KEY of the environment, or anybody may ask
cors_origin = ''      # pages of these origins (a,b) may read the answers, * for all; by default the server's own page
allowed_hosts = ''    # names of this server in addresses (a,b), * for all; localhost and IP addresses always are
max_queue = 1024      # samples that wait; more are told to come back later
drain = 30.0          # seconds that running requests have to finish, once the server is told to stop
n_blocks = 0          # of the cache; 0 takes 1,024, or as many as 1 GiB holds, on CUDA what kv_memory says
page_size = 16        # tokens of a block
max_num_batched_tokens = 0  # tokens of one step: more reads prompts faster, fewer delays the others less; 0 goes by
                            # the size of the model
kv_bits = 0           # 8 rounds keys and values, which then take some 28 % of the memory, on CUDA 56 %; 0 keeps them
kv_memory = 0.5       # on CUDA: the share of the free memory that the cache takes, if n_blocks is 0
decoder = 'auto'      # what computes a step: eager, cpu, gpu; auto is the fastest there is
weights = 'float32'   # how they are read: float32, or rounded: bfloat16, int8 or int4, which is faster; on CUDA float32
                      # leaves them as they are in the file
threads = 0           # of the cpu decoder; 0 lets the decoder choose
speculate = 'auto'    # the same tokens, sooner: off; int4, int8 (fewer bits) or ngram (the text) propose tokens, which
                      # the model computes together; auto is int8, int4 or off, whichever is faster
draft = ''            # or another model proposes them: a folder with ckpt.pt, or what init_from takes
generation_config = ''  # none: requests begin with the API's defaults, not with those of generation_config.json
chat_template = ''    # a file (Jinja) instead of the model's own chat template, one with tools for example
device = 'auto'       # cpu, cuda, cuda:1, mps; auto is the best there is


def main(config):
    configurator.check_range(config, 1, math.inf, 'max_queue', 'page_size')
    configurator.check_range(config, 0, math.inf, 'drain', 'n_blocks', 'max_num_batched_tokens')
    configurator.check_range(config, 0, 65535, 'port')
    configurator.check_range(config, 0.01, 0.99, 'kv_memory')
    if kv_bits not in (0, 8):
        raise ValueError(f"kv_bits must be 0 or 8, not {kv_bits!r}")
    host_name = host.strip().removeprefix('[').removesuffix(']')  # in URLs [::1] stands for ::1
    if not host_name:
        raise ValueError("host must be an address to listen at, such as 127.0.0.1, or 0.0.0.0 for all, not empty")
    configurator.check_installation(configurator.OF_SERVER,
                                    "run `make serve`, or `pip install -r requirements-serve.txt`")
    from serving.server import Service, read_key, run  # after the settings: torch's import takes seconds
    key = read_key(api_key if 'api_key' in config.given else None)
    run(Service(load, key, cors_origin, f'{allowed_hosts},{host_name}'), host_name, port, drain)


def load():
    from serving.loading import load_engine
    return load_engine(init_from, out_dir, name, device, decoder, weights, threads, kv_bits, kv_memory, speculate,
                       draft, generation_config, chat_template, n_blocks, page_size, max_num_batched_tokens, max_queue)


if __name__ == '__main__':
    configurator.run(main)

"""
The same server as a Ray Serve deployment, with replicas on one machine or many behind Ray's router:

    serve run serving.ray_app:app num_replicas=2 out_dir=$PWD/out-shakespeare-char

The arguments are those of `loading.load_engine` and `Service`. A seed decides the whole answer, so all replicas give
the same one. /metrics, /cache and the web page show the replica that they happen to reach.
"""
import ast
import os

from ray import serve

from serving.loading import load_engine
from serving.server import Service, make_app, read_key

NUMBERS = ('num_replicas', 'num_cpus', 'threads', 'kv_bits', 'kv_memory', 'n_blocks', 'page_size',
           'max_num_batched_tokens', 'max_queue')


def app(arguments):
    """The application of Ray Serve, from a dict of arguments, whose values may be text."""
    settings = {name: value_of(name, value) for name, value in arguments.items()}
    num_replicas, num_cpus = settings.pop('num_replicas', 1), settings.pop('num_cpus', 1)
    how = read_key(settings.pop('api_key', None)), settings.pop('cors_origin', ''), settings.pop('allowed_hosts', '')

    def build():  # called in each replica
        loaded = load_engine(**settings)
        return make_app(Service(lambda: loaded, *how))

    replica = serve.deployment(name='nanogpt', num_replicas=num_replicas, ray_actor_options={'num_cpus': num_cpus},
                               max_ongoing_requests=settings.get('max_queue', 1024))
    return replica(serve.ingress(build)()).bind()


def value_of(name, value):
    """The value of a setting. Ray's YAML makes False of off, None of nothing, and numbers of digits."""
    if name in NUMBERS:
        try:
            return value if type(value) in (int, float) else ast.literal_eval(value)
        except (ValueError, SyntaxError) as e:
            raise ValueError(f"{name} must be a number, not {value!r:.40}") from e
    text = 'off' if value is False else '' if value is None else str(value)
    return os.path.expanduser(text) if name in ('init_from', 'out_dir', 'draft', 'chat_template') else text

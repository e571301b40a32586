"""Models of the Hugging Face hub by name, which huggingface_hub downloads once, into its own cache."""
import os
import re
from functools import lru_cache

GPT2_NAMES = 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl'
NAME = re.compile(r'[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.gguf)(?<!\.pt)', re.ASCII)  # no path of a file
READ = dict(allow_patterns=['*.safetensors', '*.json', '*.jinja', 'merges.txt'],
            ignore_patterns=['*/*', 'consolidated*'])
ADVICE = {  # {name of an error's class, or of one of its bases: what to do}
    'GatedRepoError': "accept its terms on its page at https://huggingface.co, then run `hf auth login`",
    'RevisionNotFoundError': "it has no such revision: leave what is after @ out, or take another one",
    'RepositoryNotFoundError': "there is no such folder here and no such model on the hub; if it is private, run `hf "
                               "auth login`",
    'LocalEntryNotFoundError': "the hub cannot be reached, and this model is not wholly in its cache: connect, and run "
                               "the same again, or pass a local folder"}


@lru_cache
def local_path(name):
    """
    The path of what init_from names. A path on this disk stays as it is, and so does what cannot be a name on the hub.
    owner/name, owner/name@revision and GPT-2's names are downloaded: weights in safetensors files, and the text files
    beside them. A process asks the hub once for a name. ValueError, which says what to do, if there is no such model.
    """
    repository, _, revision = name.partition('@')
    if os.path.exists(name) or repository not in GPT2_NAMES and not NAME.fullmatch(repository):
        return name
    from huggingface_hub import snapshot_download  # imported here: it takes half a second
    try:
        return snapshot_download('openai-community/' * (repository in GPT2_NAMES) + repository,
                                 revision=revision or None, **READ)
    except Exception as e:  # it has some thirty kinds of error, and those of its connections
        kinds = [kind.__name__ for kind in type(e).__mro__ if kind.__name__ in ADVICE]
        advice = ADVICE[kinds[0]] if kinds else (f"{' '.join(f'{type(e).__name__}: {e}'.split())[:200]}; run the same "
                                                 "again, which goes on where this ended")
        raise ValueError(f"{name} could not be downloaded: {advice}") from e

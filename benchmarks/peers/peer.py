"""What every engine has in common."""
import importlib

from formats.families import family_of


class Peer:
    """
    An engine that is built from a model in memory. Each class uses the fastest way into its engine that we know.

    generate(prompts, n): (B, T) token ids -> the (B, n) that follow, greedily, all rows of a batch in one step. Prompts
    with what follows fit into the context, and no token ends a row.

    packages: {module: the package to install for it}; `missing` says whether they are there. ways: {weights: list of
    keyword arguments}, the variants that the race tries for these weights, each with one thread and with all.
    families: of the models that its adapter here builds; () is all. chooses_threads: it chooses their number itself.
    """
    name, packages, ways, families, chooses_threads = '', {}, {'float32': [{}]}, (), False

    @classmethod
    def missing(cls):
        """Why this engine cannot be used here, and what to do about it; '' if it can."""
        for module, package in cls.packages.items():
            try:
                importlib.import_module(module)
            except ModuleNotFoundError:
                return f"pip install {package}"
            except Exception as e:  # a wheel for another processor or libc; the kinds of error differ by package
                return f"{module} does not load: {type(e).__name__}: {e}"
        return ''

    @classmethod
    def refuses(cls, config):
        """Why this engine cannot run a model of this configuration; '' if it can."""
        family = family_of(config)
        if not cls.families or family in cls.families:
            return ''
        return f"its adapter here builds {' and '.join(cls.families)}, and this is a {family}"

    def __init__(self, model, weights='float32', threads=1):
        self.gpt, self.config, self.threads = model, model.config, threads

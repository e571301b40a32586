"""
What every engine has in common.

    engine = OnnxRuntime(model, weights='int8', threads=2)
    engine.generate(prompts, 100)    # (B, T) token ids -> the (B, 100) that follow

An engine is built from a model in memory. It decodes greedily, all rows of a batch in one step, and stops for no token.
Prompts with what follows fit into the context. Each class uses the fastest way into its engine that we know.
"""
import importlib

from formats.families import family_of


class Engine:
    """
    What all engines have in common.

    packages: {module: the package to install for it}; `missing` says whether they are there. ways: {weights: list of
    keyword arguments}, the variants that the race tries for these weights, each with one thread and with all.
    same_tokens: in float32 its arithmetic differs from ours by rounding only, so that its tokens should be ours.
    families: of the models that its adapter here builds; () is all. chooses_threads: it chooses their number itself.
    """
    name, packages, ways, same_tokens, families, chooses_threads = '', {}, {'float32': [{}]}, True, (), False

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
        self.config, self.threads = model.config, threads

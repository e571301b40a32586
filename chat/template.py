"""
Chat templates: the Jinja program in the files of a tokenizer that writes a conversation as the text of a prompt.

    template = ChatTemplate(source, dict(bos_token='<s>', eos_token='</s>'))
    template.render([dict(role='user', content='Hello')])        '<s>[INST] Hello [/INST]'

A template is a program that a stranger has written. It runs in Jinja's sandbox, in a process that has no other task and
can open no file. The process starts when it is first needed, renders one template after the other, and ends when one
takes more than SECONDS. Beside their messages, templates find what transformers gives them:
https://huggingface.co/docs/transformers/chat_templating_writing.

Why a process: a single call, such as [x, x] == [y, y] of lists that are nested 64 deep, takes years and holds Python's
lock, so that nothing in the same process can end it. The process adds 0.1 ms to a rendering.
"""
import json
import signal
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from functools import lru_cache, partial
from importlib import import_module

SECONDS = 2.0           # of the processor for a rendering, at most; Windows has no such limit
MEMORY = 2**29          # bytes of the process, at most; Windows and macOS have no such limit
STACK = 2**22           # bytes of its stack: less than in a thread of the server, where a grammar is compiled again
MOST_TEXT = 2**20       # characters of a text beyond those of the question, at most: a tokenizer is slow with more
MARK = 'END_OF_THE_FINAL_MESSAGE '  # after the content of a message that is continued

waiting = []            # processes that wait for a question


class ChatTemplate:
    """source: the template. special_tokens: {'bos_token': text, ...}, variables of it. Several threads may use it."""

    def __init__(self, source, special_tokens=None):
        self.source, self.special_tokens = source, special_tokens or {}

    def render(self, messages, /, continue_final_message=False, **variables):
        """
        The text of a conversation, up to where the next answer of the assistant begins. messages: a list of dicts with
        role and content. variables: what the template finds beside them, such as add_generation_prompt (by default
        True). continue_final_message: the text ends with the last message's content. ValueError, with what Jinja or the
        template says, if the template cannot be read, or does not take this.
        """
        variables = dict(tools=None, documents=None, add_generation_prompt=True) | self.special_tokens | variables
        if not continue_final_message:
            return self.ask(variables | dict(messages=messages))
        *others, last = messages or [{}]
        if not isinstance(last.get('content'), str):
            raise ValueError("continue_final_message needs a last message whose content is a text")
        marked = self.ask(variables | dict(messages=[*others, last | dict(content=last['content'] + MARK)],
                                           add_generation_prompt=False))
        text, mark, _ = marked.rpartition(MARK.strip())
        if not mark:
            raise ValueError("the chat template leaves out the last message, so that it cannot be continued")
        return text if marked[len(text):].startswith(MARK) else text.rstrip()  # some take blanks from both ends

    def ask(self, variables):
        return answer_of(__file__, waiting, [self.source, variables], SECONDS, "the chat template",
                         "shorten the conversation, or use another template")


def answer_of(program, waiting, question, seconds, what, advice):
    """
    The text that a process answers, see `serve`. program: the file that it runs. waiting: a list of its processes that
    wait for a question. question: what JSON can hold, a list. what: the name of its work. ValueError if it answers with
    an error, or ends: the message then has `what` and `advice`.
    """
    line, kind = json.dumps([*question, seconds]), ''
    if not waiting or (process := waiting.pop()).poll() is not None:  # not None for a process that the parent started
        # -I ignores PYTHONPATH, whose modules could replace those of the standard library. The program appends the
        # folders of this sys.path to its own, since jinja2 may be in any. start_new_session keeps Ctrl-C from it
        process = subprocess.Popen([sys.executable, '-I', program, *sys.path], text=True, encoding='utf-8',
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        print(line, file=process.stdin, flush=True)
        kind, text = json.loads(process.stdout.readline())
    except (BrokenPipeError, json.JSONDecodeError):
        pass
    finally:
        if kind:
            waiting.append(process)
        else:  # it ended, or this call was interrupted: its answer must not be taken for that to another question
            process.kill()
            process.communicate()
    if not kind:
        raise ValueError(f"{what} took longer than {seconds:.0f} s of the processor, or something else ended its "
                         f"process ({process.returncode}): {advice}")
    if kind == 'error':
        raise ValueError(text)
    return text


# The functions below run in the process that renders.

# what Jinja would import when a template first needs it: by then the process can open no file
LATE = ('jinja2.ext', 'jinja2.sandbox', 'jinja2.debug', 'jinja2.constants', 'encodings.unicode_escape', 'html',
        'pprint', 'textwrap', 'unicodedata')


@lru_cache(maxsize=1)
def compiled(source):
    """The template of a source, in an environment as transformers makes it."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} is what the assistant has written, between the variables answer_begins and answer_ends."""
        tags = {'generation'}

        def parse(self, parser):
            next(parser.stream)
            body = parser.parse_statements(['name:endgeneration'], drop_needle=True)
            begin, end = (jinja2.nodes.Output([jinja2.nodes.Name(f'answer_{name}', 'load')])
                          for name in ('begins', 'ends'))
            return [begin, *body, end]

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[Generation, loopcontrols])
    environment.filters['tojson'] = tojson
    environment.globals['raise_exception'] = raise_exception
    environment.globals['strftime_now'] = lambda format: datetime.now().strftime(format)
    return environment.from_string(source)


def confine(late):
    """Import all that answers need. Then forbid this process more memory, files, connections and programs."""
    for module in late:
        import_module(module)
    with suppress(ImportError):  # Windows has no limits
        import resource
        for limit, most in {resource.RLIMIT_NPROC: 0, resource.RLIMIT_NOFILE: 3, resource.RLIMIT_STACK: STACK,
                            resource.RLIMIT_AS: MEMORY}.items():
            with suppress(ValueError, OSError):  # macOS has none of memory, and lower ones cannot be raised
                resource.setrlimit(limit, (most, most))


def answer(source, variables):
    """('text', what was rendered) or ('error', why not)."""
    refused, most = "cannot be read", MOST_TEXT + len(json.dumps([source, variables]))
    try:
        template, refused = compiled(source), "does not take this conversation"
        text = template.render(variables)
        if len(text) > most:
            raise ValueError(f"its text has {len(text):,} characters, and {most:,} are allowed")
        return 'text', text
    except Exception as e:  # a template can raise anything
        said = f"the chat template {refused}: {type(e).__name__}: {e}"[:320]
        return 'error', ''.join(letter if letter.isprintable() else ' ' for letter in said)


def serve(answer, late=LATE):
    """Answer lines of standard input, JSON [*question, seconds], by JSON of `answer(*question)`. late: its modules."""
    limit = partial(signal.setitimer, signal.ITIMER_PROF) if hasattr(signal, 'setitimer') else lambda seconds: None
    for line in sys.stdin:
        *question, seconds = json.loads(line)
        confine(late)  # the imports take long, and none of the question's time
        limit(seconds)  # then SIGPROF ends this process
        answered = answer(*question)
        limit(0)
        print(json.dumps(answered), flush=True)


if __name__ == '__main__':
    sys.path += sys.argv[1:]
    serve(answer)
